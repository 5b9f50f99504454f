"""Row 7: one node's line has a tenth of the others' rate.

Four nodes on lines of 200 kB/s with a queue of one second; then one of them has 20 kB/s. Rounds go on within the
durations that a roster gives, in the same lineage, and the three others are counted in all of them; what becomes of
the slow one, and how long rounds take, is measured. With a good line it is counted again.
"""

from __future__ import annotations

from scripts.wanlab.wan import unavailable
from tests.chaos.lab import Lab
from tests.chaos.rows import Measured, Row
from tests.chaos.wide_area import wide_area
from tests.swarm.daemons import PATIENCE, ROUND_S

RATE_BYTES_S = 200_000
"""Of an ordinary line: the vectors of `micro` take half a second."""
QUEUE_S = 1.0
"""What a packet may wait for its line, as in an ordinary router; in a shorter queue TCP gets nothing through."""
ROUNDS = 8


def run(lab: Lab) -> Measured:
    notes: dict[str, str | int | float] = {"rate_bytes_s": RATE_BYTES_S, "slow rate_bytes_s": RATE_BYTES_S // 10}
    with wide_area(lab.directory, 4, say=lab.say) as area:
        area.begin()
        area.settle()
        *others, slow = area.nodes
        area.wan.queue(QUEUE_S)
        area.wan.rate(*area.wan.hosts, up_bytes_s=RATE_BYTES_S, down_bytes_s=RATE_BYTES_S)
        area.wait_rounds(area.nodes, 2, "what was under way", 2 * ROUND_S)
        before = area.reached(area.nodes)
        area.wait_rounds(area.nodes, ROUNDS, "rounds on equal lines", 3 * ROUND_S)
        notes["equal lines: round_s"] = round(area.median_round_s(before), 2)
        lineage = slow.now.lineage
        area.wan.rate(slow.host, up_bytes_s=RATE_BYTES_S / 10, down_bytes_s=RATE_BYTES_S / 10)
        area.say(f"{slow.name} has a tenth of the others' rate")
        area.wait_rounds(others, 2, "what was under way", 3 * ROUND_S)
        since = area.reached(others)
        area.wait_rounds(others, ROUNDS, "the others go on", 6 * ROUND_S)
        area.look()
        lines = [line for line in area.lines(since) if line.round < since + ROUNDS]
        notes["one slow line: round_s"] = round(area.median_round_s(since), 2)
        notes["one slow line: longest round_s"] = round(max(line.seconds for line in lines), 2)
        notes["one slow line: rounds that count it"] = (
            f"{sum(slow.peer_id in line.contributors for line in lines)} of {len(lines)}"
        )
        for why, times in area.excluded(since).items():
            notes[f"excluded, {why}"] = times
        everyone_else = {node.peer_id for node in others}
        whole = sum(everyone_else <= set(line.contributors) for line in lines)
        notes["one slow line: rounds that count all others"] = f"{whole} of {len(lines)}"
        assert whole == len(lines), f"only {whole} of {len(lines)} rounds count all whose lines are good"
        limits = area.run.manifest.limits
        bound_s = PATIENCE * (3 * limits.level_min_s + limits.attempt_timeout_max_s)
        assert max(line.seconds for line in lines) < bound_s, f"a round took longer than {bound_s:.0f} s"
        assert all(node.now.lineage == lineage for node in others), "a slow line is no reason for a new lineage"
        area.wan.rate(*area.wan.hosts)
        seconds = area.wait_one_lineage(area.nodes, "the line is good again", 3 * ROUND_S)
        notes["good again: all are counted after_s"] = round(seconds, 1)
        area.expect_agreement(area.nodes, area.reached(area.nodes) - 1, at_least=0)
        area.expect_nothing_left()
    return Measured(rounds_lost=0, notes=notes)


ROW = Row(
    number=7,
    fault="one link at a tenth of the others",
    must="its share shrinks; the round is not held hostage",
    checks=__doc__,
    run=run,
    within_s=400.0,
    needs=unavailable,
)
