"""Row 6: every round trip takes two seconds, more or less.

The round trip between any two of three nodes becomes 2 s ± 0.5 s in the middle of a run. Six more rounds commit with
all of them counted, nobody is excluded, refused or blamed, no lineage begins; afterwards rounds are quick again. In
the long form a fourth node starts, joins and is counted over such links.
"""

from __future__ import annotations

import time

from scripts.wanlab.wan import unavailable
from tests.chaos.lab import Lab
from tests.chaos.rows import Measured, Row
from tests.chaos.wide_area import WideArea, wide_area
from tests.swarm.daemons import ROUND_S

ROUND_TRIP_S = 2.0
JITTER_S = 0.5
ROUNDS = 6
BANNED = ("shut out", "broke a rule")


def run(lab: Lab) -> Measured:
    notes: dict[str, str | int | float] = {"round_trip_s": f"{ROUND_TRIP_S} ± {JITTER_S}"}
    with wide_area(lab.directory, 4, say=lab.say) as area:
        *founders, joiner = area.nodes
        area.begin(founders)
        area.wait_counted(founders, 2, "three of four founders work", 2 * ROUND_S)
        before = area.reached(founders)
        area.wait_rounds(founders, 5, "undisturbed rounds", 2 * ROUND_S)
        notes["undisturbed round_s"] = round(area.median_round_s(before), 2)
        lineage = founders[0].now.lineage
        slow(area)
        area.wait_rounds(founders, 2, "what was under way", 2 * ROUND_S)
        since = area.reached(founders)
        area.wait_counted(founders, ROUNDS, "all are counted in slow rounds", 5 * ROUND_S)
        notes["round_s"] = round(area.median_round_s(since), 2)
        expect_patience(area, since, str(lineage))
        if lab.thorough:
            started_s = time.monotonic()
            joiner.begin()
            area.wait_counted(area.nodes, 2, "a fourth joins over slow links", 5 * ROUND_S)
            notes["a joiner is counted after_s"] = round(time.monotonic() - started_s, 1)
            expect_patience(area, since, str(lineage), but=joiner.peer_id)
        area.wan.link(delay_s=0.0)
        after = area.reached(founders)
        area.wait_rounds(founders, 5, "rounds are quick again", 2 * ROUND_S)
        notes["round afterwards_s"] = round(area.median_round_s(after + 2), 2)
        expect_patience(area, since, str(lineage), but=joiner.peer_id)
        area.expect_agreement(founders, since, at_least=ROUNDS)
        area.expect_nothing_left()
    return Measured(rounds_lost=0, work_lost_tokens=0, notes=notes)


def slow(area: WideArea) -> None:
    area.wan.link(delay_s=ROUND_TRIP_S / 2, jitter_s=JITTER_S / 2)
    area.say(f"a round trip takes {ROUND_TRIP_S} ± {JITTER_S} s")


def expect_patience(area: WideArea, since: int, lineage: str, *, but: str = "") -> None:
    """Nobody is excluded, left behind or refused, and no lineage begins. `but`: a peer that may come late to rounds."""
    for node in area.nodes:
        if node.last is None:
            continue
        assert node.now.lineage == lineage, f"{node.name} is on another lineage: slow is not gone"
        for line in (line for number, line in node.rounds.items() if number >= since):
            excluded = {peer: why for peer, why in line.excluded.items() if peer != but}
            assert not excluded, f"round {line.round} of {node.name} excluded {excluded}"
        assert not any(words in node.output for words in BANNED), f"{node.name} blames a peer: {node.output[-1500:]}"


ROW = Row(
    number=6,
    fault="latency 2 s ± 0.5 s",
    must="rounds slow down, nobody is banned",
    checks=__doc__,
    run=run,
    within_s=400.0,
    needs=unavailable,
)
