"""The soak's own arithmetic: its schedule, its lines through samples, its verdicts."""

from __future__ import annotations

import random

import pytest

from node.status import WorkTotals
from scripts.soaking import judge, slope
from scripts.soaking.accounts import Account
from scripts.soaking.conduct import Struck
from scripts.soaking.schedule import LASTS_S, QUIET_AFTER_S, Happening, Kind, draw
from scripts.soaking.watch import SeenRound

HOUR = 3600.0
L0, L1 = bytes(32), bytes([1]) * 32


def a_schedule(seed: int, **options: object) -> tuple[Happening, ...]:
    return draw(**{"seed": seed, "length_s": HOUR, "nodes": 6, "guests": 3, "every_s": 10.0, "cuts": True, **options})  # type: ignore[arg-type]


def test_a_seed_names_one_schedule() -> None:
    assert a_schedule(1) == a_schedule(1) != a_schedule(2)


@pytest.mark.parametrize("seed", range(5))
def test_nobody_is_disturbed_twice_at_once_and_everything_happens(seed: int) -> None:
    events = a_schedule(seed)
    assert {event.kind for event in events} == set(Kind)
    assert 250 < len(events) < 400, "an hour at ten seconds, less what found nobody"
    ends: dict[int, float] = {}
    joined: set[int] = set()
    for event in events:
        least, most = LASTS_S.get(event.kind, (0.0, 0.0))
        assert least <= event.lasts_s <= most
        assert event.at_s >= ends.get(event.node, 0.0) - 0.02
        ends[event.node] = event.ends_s + QUIET_AFTER_S
        if event.kind is Kind.JOIN:
            joined.add(event.node)
        assert event.node < 6 or event.node in joined
    assert joined == {6, 7, 8}, "homes in their order, used again"


def test_without_namespaces_nothing_is_cut_and_without_guests_nobody_joins() -> None:
    kinds = {event.kind for event in a_schedule(1, cuts=False, guests=0)}
    assert kinds == set(Kind) - {Kind.CUT, Kind.JOIN}


# ---------------------------------------------------------------- growth


def test_a_line_is_found_with_its_margin() -> None:
    drawn = random.Random(1)
    times = [5.0 * step for step in range(720)]
    growing = [100 + 12 * time / HOUR + drawn.gauss(0, 0.5) for time in times]
    flat = [100 + drawn.gauss(0, 0.5) for _ in times]
    found = slope.together([(times, growing)])
    assert found is not None
    assert abs(found.per_hour - 12) < 2 * found.margin < 1
    assert not found.within_noise
    found = slope.together([(times, flat), (times, flat)])
    assert found is not None
    assert found.processes == 2
    assert abs(found.per_hour) < 1


def test_a_walk_is_not_taken_for_growth() -> None:
    """Memory that wanders: neighbouring samples say the same, so there is less to go by than it seems."""
    sure = 0
    for seed in range(20):
        drawn = random.Random(seed)
        value, values = 0.0, []
        for _ in range(720):
            value = 0.98 * value + drawn.gauss(0, 1)
            values.append(value)
        found = slope.together([([5.0 * step for step in range(720)], values)])
        assert found is not None
        sure += not found.within_noise
    assert sure <= 3


def test_processes_that_did_not_live_long_say_nothing() -> None:
    assert slope.together([([0.0, 5.0, 10.0], [1.0, 2.0, 3.0])]) is None
    with pytest.raises(ValueError, match="give three"):
        slope.fit([0.0, 1.0], [1.0, 2.0])


# ---------------------------------------------------------------- verdicts


def seen(first_s: float, *contributors: str, leader: str = "A", **excluded: str) -> SeenRound:
    return SeenRound(
        first_s=first_s,
        seconds=5.0,
        contributors=frozenset(contributors),
        excluded=excluded,
        leader=leader,
        hashes={"one": {0, 1}},
    )


def struck(peer: str, at_s: float, recovered_s: float | None, kind: Kind = Kind.KILL_ENGINE) -> Struck:
    happening = Happening(at_s=at_s, kind=kind, node=0)
    return Struck(happening=happening, peer=peer, at_s=at_s, ended_s=at_s, recovered_s=recovered_s)


def test_an_exclusion_is_explained_by_what_was_done_to_the_peer_or_the_leader() -> None:
    rounds = {
        ("L", 0): seen(10, "A", "B", "C"),
        ("L", 1): seen(20, "A", "C", B="late"),
        ("L", 2): seen(30, "A", "B", "C"),
        ("L", 3): seen(50, "A", "B", C="late"),
    }
    assert len(judge.unexplained(rounds, [])) == 2
    assert [one[:7] for one in judge.unexplained(rounds, [struck("B", 15, 30)])] == ["round 3"]
    assert not judge.unexplained(rounds, [struck("B", 15, 30), struck("C", 46, None)])
    assert not judge.unexplained(rounds, [struck("A", 12, 52)]), "both rounds were A's"
    assert len(judge.unexplained(rounds, [struck("D", 12, 52)])) == 2


def test_a_node_that_has_not_begun_needs_no_excuse() -> None:
    rounds = {("L", 0): seen(10, "A", N="its READY was not in the roster"), ("L", 1): seen(20, "A", "N")}
    assert not judge.unexplained(rounds, [])


def test_times_to_recover_are_those_of_nodes_that_were_left_alone() -> None:
    overtaken = struck("A", 10, 100)
    overtaken.overtaken = True
    found = judge.recoveries([struck("A", 10, 18), struck("A", 50, 52), overtaken, struck("B", 60, None)])
    assert found == {
        "kill engine": judge.Recovery(events=4, measured=2, median_s=5.0, worst_s=8.0, never=1),
    }


def account(peer: str, *, tip: int, commits: dict[tuple[bytes, int], set[bytes]], **more: object) -> Account:
    values: dict[str, object] = {
        "peer": peer,
        "work": WorkTotals(produced=30, counted=20, carried=6, discarded={"lost": 4}),
        "chain": {"A": 20, "B": 20},
        "commits": commits,
        "reformed": set(),
        "tip": (L0, tip),
    }
    return Account(**{**values, **more})  # type: ignore[arg-type]


def test_two_commits_of_one_round_are_a_fork_and_so_is_a_lineage_from_nowhere() -> None:
    one = account("A", tip=2, commits={(L0, 0): {b"x"}, (L0, 1): {b"y"}})
    other = account("B", tip=1, commits={(L0, 0): {b"x"}, (L0, 1): {b"z"}, (L1, 1): {b"w"}})
    assert judge.forks([one], {L0.hex()}, L0.hex()) == []
    found = judge.forks([one, other], {L0.hex()}, L0.hex())
    assert len(found) == 2
    assert "round 1 of lineage 000000000000 has 2 commits" in found
    reformed = account("C", tip=1, commits={}, reformed={L1})
    assert len(judge.forks([one, other, reformed], set(), L0.hex())) == 1


def test_work_must_add_up_and_be_what_the_longest_chain_counts() -> None:
    short = account("A", tip=1, commits={}, chain={"A": 10})
    long = account("B", tip=9, commits={})
    assert [one.balanced for one in judge.work([short, long])] == [True, True]
    wrong = account("A", tip=1, commits={}, work=WorkTotals(produced=30, counted=21, carried=5, discarded={"lost": 4}))
    assert [one.balanced for one in judge.work([wrong, long])] == [False, True]
    lacking = account("A", tip=1, commits={}, work=WorkTotals(produced=31, counted=20, carried=6))
    assert not judge.work([lacking, long])[0].balanced


def test_differing_hashes_are_named() -> None:
    differs = seen(10, "A")
    differs.hashes = {"one": {0}, "two": {1, 2}}
    assert judge.mismatches({("L", 0): seen(5, "A")}) == []
    assert judge.mismatches({("lineage", 7): differs}) == ["round 7 of lineage lineage: one at [0], two at [1, 2]"]
