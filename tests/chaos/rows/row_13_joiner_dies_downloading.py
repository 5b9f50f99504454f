"""A joiner dies in the middle of its download, again and again.

The state has some 27 MB, in chunks; each of twenty newcomers (eight in the short form) is killed when its third chunk
has come. Meanwhile the donors' rounds go on, each in its first attempt with both counted. Afterwards their engines
and daemons hold no more memory and no more descriptors than after the first four: what was under way for the dead is
cancelled. One that is left alone then joins and is counted.
"""

from __future__ import annotations

import contextlib
import time

import psutil

from tests.chaos.bent.strikes import Strike
from tests.chaos.lab import LARGER, Lab, Node
from tests.chaos.rows import Measured, Row
from tests.swarm.daemons import LISTEN_S, PATIENCE, ROUND_S, TooLate, assert_agreed

DONORS = 2
DEATHS = 20
FEW_ROUNDS_KEPT = ("limits.keep_rounds=4",)
"""Each kept round is an open file: their number is to be settled when the measuring begins."""
SHORT_DEATHS = 8
FIRST = 4
GROWTH_BYTES = 24e6
"""Of one process, over all the later deaths; one state is 27 MB."""
DESCRIPTORS_MORE = 8
SETTLE_S = 15.0 * PATIENCE


def run(lab: Lab) -> Measured:
    donors = lab.swarm(DONORS, overrides=(*LARGER, *FEW_ROUNDS_KEPT))
    usual_s = lab.usual_s(donors)
    began = lab.reached(donors)
    before: dict[str, tuple[int, int]] = {}
    deaths = DEATHS if lab.thorough else SHORT_DEATHS
    for death in range(deaths):
        if death == FIRST:
            before = level(donors, {})
        die(lab, donors, f"dying-{death}")
    after = level(donors, before)
    ended = lab.reached(donors)
    rounds = [donors[0].rounds[number] for number in range(began, ended)]
    for line in rounds:
        missing = {node.peer_id for node in donors} - set(line.contributors)
        assert not missing, f"round {line.round} did not count {missing}: {line.excluded}"
    longest_s = max(line.seconds for line in rounds)
    bound_s = usual_s + lab.attempt_s()
    assert longest_s < bound_s, f"a round took {longest_s:.1f} s while joiners died, {usual_s:.1f} s usually"

    started_s, started = time.monotonic(), lab.reached(donors)
    joiner = lab.joiner("lives", donors[0])
    joiner.wait_listening()
    lab.wait_counted([*donors, joiner], 1, "one that lives is counted", 3 * ROUND_S, since=started)
    assert_agreed(*donors, joiner, at_least=1)
    return Measured(
        rounds_lost=0,
        work_lost_tokens=0,
        notes={
            "deaths": deaths,
            "largest_growth_MB": round(max(after[name][0] - before[name][0] for name in before) / 1e6, 1),
            "joiner that lives: counted_s": round(time.monotonic() - started_s, 1),
            "undisturbed_round_s": round(usual_s, 1),
            "longest_round_s": round(longest_s, 1),
        },
    )


def die(lab: Lab, donors: list[Node], name: str) -> None:
    joiner = lab.node(name, joins=donors[0], arguments=("--no-trainer",))
    joiner.arm(Strike(point="chunk-got", round=None, after=3))
    joiner.begin()
    deadline_s = time.monotonic() + 2 * LISTEN_S
    while joiner.struck is None:
        lab.reached(donors)
        if time.monotonic() > deadline_s:
            raise TooLate(f"{name} did not come to its third chunk; it said {joiner.output[-500:]}")
        time.sleep(0.05)
    assert joiner.process is not None
    joiner.process.wait(10.0)
    lab.say(f"{name} died at its third chunk")


def level(donors: list[Node], before: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """Process → (resident bytes, descriptors); given an earlier answer, once it is not far above that one."""
    deadline_s = time.monotonic() + SETTLE_S
    while True:
        now = {}
        for donor in donors:
            processes = donor.whole_node()
            for role in ("daemon", "engine"):
                with contextlib.suppress(psutil.Error):
                    now[f"{donor.name} {role}"] = processes[role].memory_info().rss, processes[role].num_fds()
        if before:
            grown = {name: now[name][0] - held for name, (held, _) in before.items()}
            more = {name: now[name][1] - held for name, (_, held) in before.items()}
            flat = max(grown.values()) < GROWTH_BYTES and max(more.values()) < DESCRIPTORS_MORE
            assert flat or time.monotonic() < deadline_s, f"bytes more: {grown}; descriptors more: {more}"
            if not flat:
                time.sleep(0.5)
                continue
        return now


ROW = Row(
    number=13,
    fault="joiner dies downloading, again and again",
    must="donor's memory flat, transfers cancelled",
    checks=__doc__,
    run=run,
    within_s=400.0,
)
