"""Groups from round trips: the right ones, stable under jitter, changed when something really changes."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from protocol.clusters import WINS_NEEDED, Grouping, Groups, best_grouping, distances, separation
from protocol.links import Link, Report, Reports

Distance = Callable[[str, str], float]


def sites(*counts: int) -> tuple[list[str], Groups]:
    groups = tuple(
        tuple(f"{chr(ord('A') + site)}{index:02}" for index in range(count)) for site, count in enumerate(counts)
    )
    return [peer for group in groups for peer in group], groups


def by_site(one: str, other: str) -> float:
    """1 ms inside a site, 100 ms between two."""
    return 0.001 if one[0] == other[0] else 0.1


def reports_of(
    peers: list[str], distance: Distance, *, jitter: float = 0.0, draw: random.Random | None = None
) -> Reports:
    draw = draw or random.Random(0)
    return {
        one: Report(
            links={
                other: Link(round_trip_s=distance(one, other) * draw.uniform(1 - jitter, 1 + jitter))
                for other in peers
                if other != one
            }
        )
        for one in peers
    }


def settle(grouping: Grouping, peers: list[str], distance: Distance, rounds: int = WINS_NEEDED) -> None:
    for _ in range(rounds):
        grouping.update(peers, reports_of(peers, distance))


@pytest.mark.parametrize("counts", [(3, 3), (2, 2, 2), (5, 1), (1, 1, 4), (8, 3, 2), (30, 30)])
def test_sites_are_found_and_taken_up_the_second_time(counts: tuple[int, ...]) -> None:
    peers, expected = sites(*counts)
    grouping = Grouping()
    settle(grouping, peers, by_site, 1)
    assert grouping.groups == ()
    settle(grouping, peers, by_site, 1)
    assert grouping.groups == expected


def test_peers_that_are_all_alike_are_not_grouped() -> None:
    peers, _ = sites(4, 4)
    for distance in (lambda one, other: 0.0002, lambda one, other: 0.1):
        grouping = Grouping()
        settle(grouping, peers, distance, 5)
        assert grouping.groups == ()


def test_two_racks_of_one_site_are_not_two_sites() -> None:
    peers, _ = sites(3, 3)
    grouping = Grouping()
    settle(grouping, peers, lambda one, other: 0.0001 if one[0] == other[0] else 0.003, 5)
    assert grouping.groups == ()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("inside_s", [0.001, 0.02])
def test_thirty_per_cent_of_jitter_change_nothing(seed: int, inside_s: float) -> None:
    peers, expected = sites(4, 3, 2)
    draw = random.Random(seed)

    def distance(one: str, other: str) -> float:
        return inside_s if one[0] == other[0] else 0.12

    grouping = Grouping()
    settle(grouping, peers, distance)
    for _ in range(100):
        grouping.update(peers, reports_of(peers, distance, jitter=0.3, draw=draw))
        assert grouping.groups == expected


@pytest.mark.parametrize("seed", range(5))
def test_jitter_makes_no_groups_of_peers_scattered_over_the_world(seed: int) -> None:
    peers, _ = sites(10)
    draw = random.Random(seed)
    place = {peer: (draw.random(), draw.random()) for peer in peers}
    grouping = Grouping()
    adopted = set()

    def distance(one: str, other: str) -> float:
        return 0.03 + 0.1 * float(np.hypot(place[one][0] - place[other][0], place[one][1] - place[other][1]))

    for _ in range(100):
        grouping.update(peers, reports_of(peers, distance, jitter=0.3, draw=draw))
        adopted.add(grouping.groups)
    assert adopted == {()}


def test_a_link_that_really_changes_regroups_within_three_rounds() -> None:
    """B2's traffic goes by A's side of the world from now on."""
    peers, before = sites(3, 3)
    draw = random.Random(7)

    def moved(one: str, other: str) -> float:
        return by_site(one.replace("B02", "A09"), other.replace("B02", "A09"))

    grouping = Grouping()
    for _ in range(10):
        grouping.update(peers, reports_of(peers, by_site, jitter=0.3, draw=draw))
    assert grouping.groups == before
    seen = []
    for _ in range(3):
        grouping.update(peers, reports_of(peers, moved, jitter=0.3, draw=draw))
        seen.append(grouping.groups)
    assert seen[0] == before, "once may be chance"
    assert seen[-1] == (("A00", "A01", "A02", "B02"), ("B00", "B01"))


def test_a_change_that_lasts_one_round_is_not_followed() -> None:
    peers, before = sites(3, 3)
    grouping = Grouping()
    settle(grouping, peers, by_site)
    for _ in range(10):
        settle(grouping, peers, lambda one, other: 0.1, 1)
        settle(grouping, peers, by_site, 1)
        assert grouping.groups == before


def test_who_comes_is_put_where_it_belongs_and_who_goes_is_missed_at_once() -> None:
    peers, before = sites(3, 3)
    grouping = Grouping()
    settle(grouping, peers, by_site)
    settle(grouping, peers[:-1], by_site, 1)
    assert grouping.groups == (before[0], before[1][:-1])
    settle(grouping, [*peers, "B03"], by_site)
    assert grouping.groups == (before[0], ("B00", "B01", "B02", "B03"))


def test_sites_that_grow_together_are_grouped_no_more() -> None:
    peers, _ = sites(3, 3)
    grouping = Grouping()
    settle(grouping, peers, by_site)
    settle(grouping, peers, lambda one, other: 0.001)
    assert grouping.groups == ()


def test_peers_that_nobody_has_measured_are_left_out() -> None:
    peers, expected = sites(3, 3)
    grouping = Grouping()
    for _ in range(2):
        grouping.update([*peers, "C00"], reports_of(peers, by_site))
    assert grouping.groups == expected
    grouping.update(peers, {})
    assert grouping.groups == ()


def test_what_one_end_says_suffices() -> None:
    peers, _ = sites(2, 1)
    known, between = distances(
        peers, {"A00": Report(links={"A01": Link(round_trip_s=0.001), "B00": Link(round_trip_s=0.1)})}
    )
    assert known == ["A00", "A01"] or known == ["A00", "B00"], "A1 and B0 know nothing of each other"
    assert between.shape == (2, 2)


def test_a_slow_pair_is_in_no_group_together() -> None:
    """Within 1 ms of each other, but this one pair moves a fiftieth of what both ends move to others."""
    peers, _ = sites(4, 3)
    slow = {"A00", "A01"}
    reports = {
        one: Report(
            links={
                other: Link(round_trip_s=by_site(one, other), sent_bytes_s=2e6 if {one, other} == slow else 1e8)
                for other in peers
                if other != one
            }
        )
        for one in peers
    }
    grouping = Grouping()
    for _ in range(WINS_NEEDED):
        grouping.update(peers, reports)
    assert sorted(map(len, grouping.groups)) == [1, 3, 3]
    assert not any(slow <= set(group) for group in grouping.groups)


def test_separation_is_that_of_the_nearest_groups_over_the_widest() -> None:
    between = np.array([[0.0, 0.004, 0.1, 0.2], [0.004, 0.0, 0.1, 0.2], [0.1, 0.1, 0.0, 0.05], [0.2, 0.2, 0.05, 0.0]])
    assert separation([[0, 1], [2], [3]], between) == pytest.approx(0.05 / 0.004)
    assert separation([[0, 1], [2, 3]], between) == pytest.approx(0.15 / 0.05)
    assert best_grouping(between) == (pytest.approx(0.05 / 0.004), [[0, 1], [2], [3]])


def test_the_vectorised_search_is_separation_of_what_it_returns() -> None:
    draw = random.Random(5)
    for _ in range(20):
        count = draw.randint(3, 12)
        between = np.array([[draw.uniform(0.003, 0.2) for _ in range(count)] for _ in range(count)])
        between = (between + between.T) / 2
        np.fill_diagonal(between, 0.0)
        found, clusters = best_grouping(between)
        assert found == pytest.approx(separation(clusters, between))
        assert sorted(index for cluster in clusters for index in cluster) == list(range(count))
