"""Plans over sites: what crosses between groups crosses once."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from roster_samples import BASE, ready, roster, rules

from protocol.experience import NEIGHBOURS, TRIAL_AFTER, Experience, Kind
from protocol.grouping import grouped_plan
from protocol.links import Link, Report, Reports
from protocol.names import digest
from protocol.plan import Plan
from protocol.planner import Outlook, kind_of, make_plan
from protocol.planning import check_plan, deal, flat_plan, level_count, trees
from protocol.shares import WholeVector, latency_of, seconds_of
from protocol.sites import NoSuchPlan, blocks, in_groups, site_plan
from protocol.weights import bits

LARGE = rules(elements=400 * 65_536, part_elements=65_536)
TWO_OF_THREE = [[0, 1, 2], [3, 4, 5]]
GROUPS = (("peer000", "peer001", "peer002"), ("peer003", "peer004", "peer005"))
ALL = 0b111111


def plan_of(groups: list[list[int]], contributing: int, leading: int | None = None, apart: tuple = ()) -> Plan:
    peers = sum(map(len, groups))
    matrix = np.zeros((peers, peers), np.bool_)
    for one, other in apart:
        matrix[one, other] = matrix[other, one] = True
    leading = (1 << peers) - 1 if leading is None else leading
    return site_plan(groups, contributing, leading, np.ones(peers), matrix)


def crossing(plan: Plan, contributing: int, groups: list[list[int]]) -> dict[tuple[int, int], float]:
    """(from group, to group) → bytes a byte of the vector that cross in that direction, with equal shares."""
    site = {index: number for number, group in enumerate(groups) for index in group}
    moved: dict[tuple[int, int], float] = {}
    for tree in trees(plan, contributing):
        for child, parent in enumerate(tree.parents):
            if parent < 0 or site[child] == site[parent]:
                continue
            for pair, size in (
                ((site[parent], site[child]), 1),
                ((site[child], site[parent]), (2 if tree.heights[child] else 1) * (contributing >> child & 1)),
            ):
                moved[pair] = moved.get(pair, 0) + size / len(plan.shards)
    return moved


def test_a_byte_crosses_once_instead_of_once_a_peer() -> None:
    """Two sites of three: 1.5 bytes a value on either line instead of 3."""
    assert list(crossing(flat_plan(6, ALL), ALL, TWO_OF_THREE).values()) == pytest.approx([3.0, 3.0])
    plan = plan_of(TWO_OF_THREE, ALL)
    assert list(crossing(plan, ALL, TWO_OF_THREE).values()) == pytest.approx([1.5, 1.5])
    assert len(plan.shards) == 6
    assert level_count(plan, ALL) == 2


@pytest.mark.parametrize(
    "groups", [[[0, 1, 2], [3, 4, 5]], [[0], [1, 2, 3, 4, 5]], [[0, 1], [2, 3], [4, 5]], [[5], [0], [1, 2, 3, 4]]]
)
@pytest.mark.parametrize("contributing", [ALL, 0b000111, 0b100001, 0b111110, 0b000001])
@pytest.mark.parametrize("leading", [ALL, 0b001001, 0b111100])
def test_every_plan_passes_the_predicate(groups: list[list[int]], contributing: int, leading: int) -> None:
    if not contributing & leading:
        with pytest.raises(NoSuchPlan):
            plan_of(groups, contributing, leading)
        return
    plan = plan_of(groups, contributing, leading)
    made = roster([ready(100 if contributing >> index & 1 else 0) for index in range(6)], plan)
    assert check_plan(made, rules()) is None
    for tree in trees(plan, contributing):
        assert leading >> tree.root & 1
        assert tree.subtrees[tree.root] == contributing
        heads = {parent for parent in tree.parents if parent not in (-1, tree.root)}
        assert all(leading >> head & 1 for head in heads)


def test_heads_take_turns_and_the_fast_serve_the_fast() -> None:
    speed = np.array([3.0, 1.0, 2.0, 1.0, 2.0, 3.0])
    plan = site_plan(TWO_OF_THREE, ALL, ALL, speed, np.zeros((6, 6), np.bool_))
    heads = {
        shard.root: next(parent for parent in shard.parents if parent not in (-1, shard.root)) for shard in plan.shards
    }
    assert heads == {0: 5, 2: 4, 1: 3, 5: 0, 4: 2, 3: 1}


def test_trees_go_around_pairs_that_are_apart() -> None:
    plan = plan_of(TWO_OF_THREE, ALL, apart=((0, 3), (0, 4)))
    for shard in plan.shards:
        assert not {(0, 3), (3, 0), (0, 4), (4, 0)} & set(enumerate(shard.parents))
    assert len(plan.shards) == 6, "another head carries them"
    with pytest.raises(NoSuchPlan):
        plan_of([[0], [1]], 0b11, apart=((0, 1),))


def test_the_groups_can_be_read_off_the_plan() -> None:
    assert blocks(plan_of(TWO_OF_THREE, ALL)) == ((0, 1, 2), (3, 4, 5))
    assert blocks(plan_of([[0, 4], [1, 2], [3], [5]], ALL)) == ((0, 4), (1, 2), (3,), (5,))
    assert blocks(flat_plan(3, 0b111)) == ((0,), (1,), (2,))
    assert not in_groups(flat_plan(4, 0b1111))
    large = grouped_plan([f"p{index:03}" for index in range(70)], (1 << 70) - 1, 10, digest(b"draw"))
    assert in_groups(large)
    assert len(blocks(large)) == 9


# ---------------------------------------------------------------- which kind


def reports(*, up_bytes_s: float = 2.5e7, across_s: float = 0.1) -> Reports:
    names = [name for group in GROUPS for name in group]
    site = {name: number for number, group in enumerate(GROUPS) for name in group}
    return {
        one: Report(
            up_bytes_s=up_bytes_s,
            down_bytes_s=up_bytes_s,
            links={
                other: Link(round_trip_s=0.001 if site[one] == site[other] else across_s)
                for other in names
                if other != one
            },
        )
        for one in names
    }


def play(experience: Experience, took_s: dict[Kind, float], rounds: int, *, first: int = 0) -> list[Kind]:
    """The kinds of so many rounds whose exchanges take what they take."""
    kinds = []
    for number in range(first, first + rounds):
        draft = replace(roster([replace(ready(), tokens=((400, 100),))] * 6, None), base=replace(BASE, round=number))
        outlook = Outlook(reports=reports(), groups=GROUPS, experience=experience)
        answer = make_plan(draft, ALL, LARGE, outlook)
        assert check_plan(replace(draft, plan=answer.plan, durations_s=answer.durations_s), LARGE) is None
        kind = kind_of(answer.plan)
        experience.saw(kind, number)
        experience.learn(kind, number, took_s[kind])
        kinds.append(kind)
    return kinds


def test_a_line_that_a_site_shares_is_found_by_trying() -> None:
    """By the nodes' own rates flat looks better; measured rounds say otherwise, and are believed."""
    kinds = play(Experience(), {Kind.FLAT: 6.0, Kind.GROUPED: 3.3}, 60)
    assert kinds[:2] == [Kind.FLAT, Kind.GROUPED], "tried as soon as there is a round to compare with"
    assert kinds[2:].count(Kind.FLAT) <= 2, "and flat again now and then"
    assert Kind.FLAT in kinds[2 : 2 + TRIAL_AFTER + 2]


def test_where_lines_are_the_nodes_own_flat_stays() -> None:
    kinds = play(Experience(), {Kind.FLAT: 3.0, Kind.GROUPED: 3.6}, 200)
    assert 2 <= kinds.count(Kind.GROUPED) <= 6
    gaps = [at for at, kind in enumerate(kinds) if kind is Kind.GROUPED]
    assert [later - before for before, later in pairwise(gaps)][:2] == [TRIAL_AFTER, 2 * TRIAL_AFTER]


def test_one_group_and_peers_that_are_each_alone_are_no_sites() -> None:
    draft = roster([replace(ready(), tokens=((400, 100),))] * 6, None)
    names = [name for group in GROUPS for name in group]
    for groups in ((tuple(names[:5]),), (tuple(names[:4]), (names[4],), (names[5],)), (tuple(names),), ()):
        outlook = Outlook(reports=reports(), groups=groups, experience=Experience(gain=1.0))
        assert kind_of(make_plan(draft, ALL, LARGE, outlook).plan) is Kind.FLAT


def test_when_the_line_changes_the_plan_follows() -> None:
    experience = Experience()
    play(experience, {Kind.FLAT: 6.0, Kind.GROUPED: 3.0}, 20)
    kinds = play(experience, {Kind.FLAT: 2.0, Kind.GROUPED: 3.0}, 150, first=20)
    assert kinds[-10:] == [Kind.FLAT] * 10


def test_a_kind_whose_rounds_fail_is_not_tried_at_once_again() -> None:
    experience = Experience()
    predicted = {Kind.FLAT: 1.0, Kind.GROUPED: 1.0}
    experience.learn(Kind.FLAT, 0, 1.0)
    experience.saw(Kind.FLAT, 0)
    assert experience.choose(predicted, 1, may_try=True) is Kind.GROUPED
    experience.saw(Kind.GROUPED, 1)
    assert experience.choose(predicted, 1, may_try=False) is Kind.FLAT
    experience.learn(Kind.FLAT, 1, 1.0)
    for number in range(2, TRIAL_AFTER):
        assert experience.choose(predicted, number, may_try=True) is Kind.FLAT
        experience.learn(Kind.FLAT, number, 1.0)
    assert experience.choose(predicted, TRIAL_AFTER + 1, may_try=True) is Kind.GROUPED


def test_a_round_whose_attempts_fail_is_tried_with_the_other_kind() -> None:
    draft = roster([replace(ready(), tokens=((400, 100),))] * 6, None)
    outlook = Outlook(reports=reports(), groups=GROUPS, experience=Experience(gain=1.0))
    kinds = [kind_of(make_plan(replace(draft, attempt=attempt), ALL, LARGE, outlook).plan) for attempt in range(6)]
    assert kinds == [Kind.GROUPED] * 2 + [Kind.FLAT] * 2 + [Kind.GROUPED] * 2


def test_who_came_back_from_the_dead_has_no_duties_and_sites_stay() -> None:
    draft = roster([replace(ready(), tokens=((400, 100),))] * 6, None)
    nils = {name: {"peer002"} for site in GROUPS for name in site if name != "peer002"}
    outlook = Outlook(reports=reports(), groups=GROUPS, experience=Experience(gain=1.0), nils=nils)
    plan = make_plan(draft, ALL, LARGE, outlook).plan
    assert kind_of(plan) is Kind.GROUPED
    assert 2 not in {parent for shard in plan.shards for parent in (*shard.parents, shard.root)}


def test_only_neighbours_are_compared_and_nothing_hopeless_is_tried() -> None:
    experience = Experience()
    experience.learn(Kind.FLAT, 0, 9.0)
    experience.learn(Kind.GROUPED, NEIGHBOURS + 1, 1.0)
    assert experience.gain is None
    experience.learn(Kind.FLAT, NEIGHBOURS + 2, None)
    assert experience.gain is None, "a round that missed somebody tells nothing"
    experience.learn(Kind.FLAT, NEIGHBOURS + 2, 2.0)
    assert experience.gain == pytest.approx(np.log(2.0))
    experience.forget()
    experience.learn(Kind.FLAT, 100, 1.0)
    assert experience.choose({Kind.FLAT: 1.0, Kind.GROUPED: 3.1}, 101, may_try=True) is Kind.FLAT
    assert experience.choose({Kind.FLAT: 1.0}, 101, may_try=True) is Kind.FLAT


def test_distance_between_sites_is_in_the_prediction() -> None:
    """Two levels wait for the far round trip once and for the near one once."""
    draft = roster([ready()] * 6, None)
    terrain = Outlook(reports=reports(across_s=0.3)).terrain(draft)
    assert latency_of(flat_plan(6, ALL), terrain) == pytest.approx(0.3)
    assert latency_of(plan_of(TWO_OF_THREE, ALL), terrain) == pytest.approx(0.301)


def test_shares_over_sites_spare_a_slow_head() -> None:
    """In a grouped plan, too, the slowest has the least to do."""
    slow = {**reports()}
    slow["peer004"] = replace(slow["peer004"], up_bytes_s=5e6)
    draft = roster([replace(ready(), tokens=((400, 100),))] * 6, None)
    experience = Experience(gain=1.0)
    plan = make_plan(draft, ALL, LARGE, Outlook(reports=slow, groups=GROUPS, experience=experience)).plan
    assert kind_of(plan) is Kind.GROUPED
    terrain = Outlook(reports=slow).terrain(draft)
    busy = seconds_of(plan, ALL, terrain, LARGE)
    parts = np.bincount(deal(BASE.digest(), 400, plan), minlength=len(plan.shards)) / 400
    least = WholeVector.of(LARGE).encoded / 5e6
    assert (busy @ parts).max() == pytest.approx(least, rel=0.05)
    assert 4 not in [shard.root for shard in plan.shards]
    assert len(list(bits(ALL))) == 6
