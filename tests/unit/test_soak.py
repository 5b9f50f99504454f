"""The soak's own arithmetic: its schedule, its lines through samples, its verdicts."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from node.home import Home
from node.status import WorkTotals
from scripts.sections import DOCUMENT, with_section
from scripts.soaking import judge, record, show, slope
from scripts.soaking.accounts import Account
from scripts.soaking.conduct import Struck, counted_again_s
from scripts.soaking.report import Report, Work
from scripts.soaking.said import Said
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
    found = slope.together([(times, flat), (times, [100 + drawn.gauss(0, 0.5) for _ in times])])
    assert found is not None
    assert found.processes == 2
    assert abs(found.per_hour) < 1
    assert 101 < found.highest < 103


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


def test_one_that_stands_still_does_not_outvote_those_that_grow() -> None:
    times = [5.0 * step for step in range(120)]
    still = (times, [100.0] * len(times))
    growing = [(times, [100 + 60 * time / HOUR for time in times]) for _ in range(3)]
    found = slope.together([still, *growing])
    assert found is not None
    assert found.per_hour == pytest.approx(45)
    assert found.margin > 15, "they differ, and that is said"


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


def test_the_round_under_way_tells_nothing_of_who_is_back() -> None:
    rounds = {
        ("L", 3): seen(10, "A", "B"),
        ("L", 4): seen(14, "A", "B"),
        ("L", 5): seen(18, "A"),
        ("L", 6): seen(22, "A", "B"),
    }
    assert counted_again_s(rounds, "L", "B", 11) == 22, "round 4 was under way, and promised before"
    assert counted_again_s(rounds, "L", "A", 11) == 18
    assert counted_again_s(rounds, "L", "B", 23) is None
    alone = {("own", 4): seen(12, "B"), ("own", 9): seen(13, "B")}
    assert counted_again_s(rounds | alone, "L", "B", 11) == 22, "what it committed alone tells nothing"
    reformed = {("M", 7): seen(25, "A"), ("M", 8): seen(29, "A", "B")}
    assert counted_again_s(rounds | reformed, "M", "B", 23) == 29


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
    short = account("A", tip=1, commits={}, chain={"A": 20})
    long = account("B", tip=9, commits={(L0, 1): {b"x"}}, chain={"A": 26, "B": 20})
    found = judge.work([short, long])
    assert [one.balanced for one in found] == [True, True], "what A carried when it left was counted by the others"
    assert [one.on_longest for one in found] == [True, True]
    behind = account("A", tip=1, commits={}, chain={"A": 10})
    assert [one.balanced for one in judge.work([behind, long])] == [False, True]
    wrong = account("A", tip=1, commits={}, work=WorkTotals(produced=30, counted=21, carried=5, discarded={"lost": 4}))
    assert [one.balanced for one in judge.work([wrong, long])] == [False, True]
    lacking = account("A", tip=1, commits={}, work=WorkTotals(produced=31, counted=20, carried=6))
    assert not judge.work([lacking, long])[0].balanced


def test_differing_hashes_are_named() -> None:
    differs = seen(10, "A")
    differs.hashes = {"one": {0}, "two": {1, 2}}
    assert judge.mismatches({("L", 0): seen(5, "A")}) == []
    assert judge.mismatches({("lineage", 7): differs}) == ["round 7 of lineage lineage: one at [0], two at [1, 2]"]


# ---------------------------------------------------------------- logs and reports

LOG = """\
supervisor: 2026-12-01T03:57:07 trainer ended: signal SIGKILL
daemon: 2026-12-01T03:57:07.677131 [warning] the trainer ended [node.daemon.session] code=-9 why='trainer: round 7'
daemon: 2026-12-01T03:57:08.677131 [info] round committed [node.daemon.driver] contributors=4
daemon: 2026-12-01T03:57:09.677131 [warning] the trainer ended [node.daemon.session] code=-9 why='trainer: round 9'
daemon: 2026-12-01T03:57:10.677131 [error] a request handler failed [node.daemon.link] method=data-token
daemon: Traceback (most recent call last):
daemon:   File "link.py", line 355, in _serve
supervisor: 2026-12-01T03:57:11 engine ended: signal SIGSEGV
supervisor: 2026-12-01T03:57:12 trainer ended: exit status 143
"""


def test_warnings_are_counted_and_tracebacks_and_crashes_are_named(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.log_file.write_text(LOG)
    said = Said()
    said.read(home, "node 3")
    said.read(Home(tmp_path / "never was"), "node 4")
    assert said.loud == {"warning: the trainer ended": 2, "error: a request handler failed": 1}
    assert [one.partition(" after")[0] for one in said.broken] == [
        "node 3: traceback",
        "node 3: supervisor: 2026-12-01T03:57:11 engine ended: signal SIGSEGV",
    ]


def report(**changes: object) -> Report:
    values: dict[str, object] = {
        "command": "scripts/soak --minutes 60",
        "date": "2026-12-01",
        "seed": 1,
        "nodes": 6,
        "guests": 3,
        "every_s": 10.0,
        "only": (),
        "preset": "micro",
        "planned_minutes": 60.0,
        "minutes": 60.5,
        "unfinished": None,
        "steps": 30,
        "machine": "2 cores",
        "network": "a namespace a node",
        "rounds": 900,
        "rounds_per_minute": 15.0,
        "round_s_median": 3.5,
        "round_s_worst": 20.0,
        "events": {"kill engine": 40, "cut": 38},
        "recoveries": {"cut": judge.Recovery(events=38, measured=30, median_s=10.0, worst_s=40.0, never=0)},
        "reforms": 7,
        "forks": [],
        "mismatches": [],
        "exclusions": {"voted without work to contribute": 12},
        "unexplained": [],
        "work": judge.work([account("A", tip=9, commits={})]),
        "memory_mib_per_hour": {"daemon": a_slope(2.0, 4.0)},
        "descriptors_per_hour": {"daemon": a_slope(0.0, 1.0)},
        "validation_loss": 2.75,
        "ended": [],
        "late": [],
        "left_behind": [],
        "said": {"warning: the trainer ended": 40},
        "broken": [],
        "one_lineage": True,
        "unbalanced": {},
    }
    return Report(**(values | changes))  # type: ignore[arg-type]


def a_slope(per_hour: float, margin: float) -> slope.Slope:
    return slope.Slope(per_hour=per_hour, margin=margin, processes=9, highest=120.0)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"unfinished": "interrupted after 3.0 of 60 minutes"}, "interrupted"),
        ({"broken": ["node 2: traceback after: …"]}, "in a log"),
        ({"ended": ["node 2 ended with status 3"]}, "node 2 ended"),
        ({"recoveries": {"cut": judge.Recovery(events=1, measured=0, median_s=None, worst_s=None, never=1)}}, "never"),
        ({"memory_mib_per_hour": {"engine": a_slope(60.0, 20.0)}}, "the engine grows by 40 MiB an hour at least"),
        ({"memory_mib_per_hour": {"engine": a_slope(10.0, 70.0)}}, "cannot be ruled out"),
        ({"memory_mib_per_hour": {"engine": None}}, "cannot be ruled out"),
        ({"descriptors_per_hour": {"daemon": a_slope(60.0, 5.0)}}, "the daemon opens 55 descriptors an hour more"),
        ({"one_lineage": False}, "one lineage"),
        ({"rounds": 0}, "no round"),
    ],
)
def test_what_fails_a_soak(changes: dict[str, object], why: str) -> None:
    assert report().failures == []
    (failure,) = report(**changes).failures
    assert why in failure


def test_a_short_soak_need_not_tell_a_leak_from_noise() -> None:
    assert report(minutes=8.0, memory_mib_per_hour={"engine": None}).failures == []


def test_the_page_says_what_became_of_every_token() -> None:
    parts = 2
    work = WorkTotals(parts=parts, produced=3000, counted=2000, carried=600, discarded={"lost with the trainer": 400})
    one = report(work=judge.work([account("A", tip=9, commits={}, work=work, chain={"A": 2000})]))
    words = dict(show.summary(one))
    assert words["work, tokens"] == (
        "1,500 trained = 1,000 counted + 300 carried + 200 reported as lost (200 lost with the trainer)"
    )
    assert words["silent forks"] == "0"


def test_what_is_recorded_reads_back_and_the_document_is_made_of_it() -> None:
    only = report(only=("kill engine",), planned_minutes=10.0)
    text = record.section([report(), only])
    assert "### 60 minutes, everything" in text
    assert "### 10 minutes, only kill engine" in text
    assert msgspec.json.decode(msgspec.json.encode([only]), type=list[Report]) == [only]
    document = DOCUMENT.read_text()
    if reports := record.recorded():
        made = with_section(document, record.COMMAND, record.section(reports))
        assert made == document, "run `scripts/soak --record`, which makes it anew"
    else:
        assert record.COMMAND not in document


@pytest.mark.parametrize(
    ("changes", "balanced"),
    [
        ({}, True),
        ({"counted_by_longest": 85}, True),  # what the node carried when it left was counted by the others
        ({"counted_by_longest": 95}, False),  # more than it ever handed over
        ({"counted_by_longest": 60}, False),
        ({"counted_by_longest": 0, "on_longest": False}, True),  # it left on a lineage that lost later
        ({"counted_by_own_chain": 60}, False),
        ({"produced": 101}, False),
    ],
)
def test_an_account_is_held_against_its_own_chain_and_the_longest(changes: dict[str, Any], balanced: bool) -> None:
    account: dict[str, Any] = {
        "peer": "P",
        "parts": 1,
        "produced": 100,
        "counted": 70,
        "carried": 20,
        "discarded": {"lost with the trainer": 10},
        "counted_by_own_chain": 70,
        "counted_by_longest": 70,
        "on_longest": True,
    }
    assert Work(**(account | changes)).balanced is balanced
