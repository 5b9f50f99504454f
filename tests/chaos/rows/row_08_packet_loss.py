"""Row 8: packets are lost.

Three nodes 40 ms apart; 0, 1, 5 and 10 % of all packets are lost in each direction (0 and 10 in the short form), with
this machine's TCP congestion control and with CUBIC. Ten rounds each commit on one lineage, with equal states.
Measured: the median round beside the lossless one, and how often somebody was not counted.
"""

from __future__ import annotations

from scripts.wanlab.wan import congestion_control, unavailable
from tests.chaos.lab import Lab
from tests.chaos.rows import Measured, Row
from tests.chaos.wide_area import WideArea, wide_area
from tests.swarm.daemons import ROUND_S

ROUND_TRIP_S = 0.04
LOSSES = (0.0, 0.01, 0.05, 0.10)
ROUNDS = 10
MANY_DEVIATIONS = 6.0


def run(lab: Lab) -> Measured:
    """Once with this machine's congestion control, and in the long form with CUBIC, the usual one."""
    notes: dict[str, str | int | float] = {"round_trip_s": ROUND_TRIP_S}
    usual = congestion_control()
    for name in dict.fromkeys((usual, "cubic") if lab.thorough else (usual,)):
        with wide_area(lab.directory / name, 3, congestion_control=name, say=lab.say) as area:
            area.wan.link(delay_s=ROUND_TRIP_S / 2)
            area.begin()
            area.settle()
            for loss in LOSSES if lab.thorough else LOSSES[::3]:
                lossy(area, loss, name, notes)
            area.expect_nothing_left()
    return Measured(rounds_lost=0, notes=notes)


def lossy(area: WideArea, loss: float, name: str, notes: dict[str, str | int | float]) -> None:
    """Rounds at this loss, all of them with everybody counted in the end, and equal states."""
    area.wan.link(loss=loss)
    lineage = area.nodes[0].now.lineage
    area.wait_rounds(area.nodes, 2, "what was under way", 4 * ROUND_S)
    counts = area.wan.counts()
    since = area.reached(area.nodes)
    area.wait_rounds(area.nodes, ROUNDS, f"{ROUNDS} rounds at {loss:.0%} loss", 10 * ROUND_S)
    lines = [line for line in area.lines(since) if line.round < since + ROUNDS]
    after = area.wan.counts()
    lost, sent = after.lost - counts.lost, after.sent - counts.sent
    spread = (loss * (1 - loss) / max(1, sent)) ** 0.5
    assert abs(lost / max(1, sent) - loss) <= MANY_DEVIATIONS * spread, f"{lost} of {sent} packets lost, not {loss:.0%}"
    assert all(node.now.lineage == lineage for node in area.nodes), "lost packets are no reason for a new lineage"
    area.expect_agreement(area.nodes, since, at_least=ROUNDS - 1)
    median_s = area.median_round_s(since)
    partial = sum(len(line.contributors) < len(area.nodes) for line in lines)
    notes[f"{name}, {loss:.0%}: round_s"] = round(median_s, 2)
    notes[f"{name}, {loss:.0%}: longest round_s"] = round(max(line.seconds for line in lines), 2)
    notes[f"{name}, {loss:.0%}: rounds without someone"] = f"{partial} of {len(lines)}"
    for why, times in area.excluded(since).items():
        notes[f"{name}, {loss:.0%}: excluded, {why}"] = times
    area.say(f"{name}, {loss:.0%} loss: {median_s:.2f} s a round (median), {partial} of {len(lines)} without someone")


ROW = Row(
    number=8,
    fault="packet loss 1-10 %",
    must="rounds complete",
    checks=__doc__,
    run=run,
    within_s=900.0,
    needs=unavailable,
)
