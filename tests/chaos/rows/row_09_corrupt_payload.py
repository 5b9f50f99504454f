"""One of three sends contributions of which a bit has flipped on the way.

Whoever receives one drops it, says so once in the log and in `status` (the sender's peer id, the reason, how often),
and the round commits: every part that another node reduced lacks the sender, and is the exact mean of the rest; only
the parts that the sender reduced itself may count it, from bytes that are good. Nobody is cut off for ever: once it
sends good bytes, it is counted in every part.
"""

from __future__ import annotations

from tests.chaos.lab import OUTAGE_ROUND_S, Lab
from tests.chaos.rows import Measured, Row
from tests.swarm.daemons import assert_agreed

NODES = 3
ROUNDS = 2


def run(lab: Lab) -> Measured:
    nodes = lab.swarm(NODES)
    usual_s = lab.usual_s(nodes)
    liar, *others = nodes[::-1]
    liar.bend("ups-flipped")
    first = lab.reached(nodes) + 1  # the exchange of this round may be under way
    lab.wait_round(nodes, first + ROUNDS - 1, "rounds are committed all the same", ROUNDS * OUTAGE_ROUND_S)
    longest_s = 0.0
    for number in range(first, first + ROUNDS):
        seconds = max(node.rounds[number].seconds for node in others)
        longest_s = max(longest_s, seconds)
        assert seconds < usual_s + lab.attempt_s(), f"round {number} took {seconds:.1f} s, {usual_s:.1f} s usually"
        means = lab.means(number, others[0])
        assert means.attempt == 0, f"round {number} took {means.attempt + 1} attempts"
        mixed = [part for part, who in enumerate(means.bitmaps) if liar.peer_id in who and len(who) > 1]
        own = lab.parts_of(number, liar, others[0])
        assert set(mixed) <= own, (
            f"round {number} counts what {liar.name} sent, in the parts {sorted(set(mixed) - own)}"
        )
        for node in others:
            assert node.peer_id in node.rounds[number].contributors
    for node in others:
        status = node.status()
        counted = {why: count for why, count in status.problems.items() if liar.peer_id in why}
        assert counted, f"{node.name} does not say who sent corrupt payloads: {status.problems}"
        assert node.log_lines(liar.peer_id, "dropped"), f"the log of {node.name} does not name {liar.peer_id}"
        lab.say(f"{node.name} says: {counted}")
    assert_agreed(*nodes, at_least=ROUNDS)

    liar.bend()
    honest = lab.reached(nodes) + 1
    lab.wait_round(nodes, honest, "a round with good bytes")
    whole = lab.means(honest, others[0])
    assert all(liar.peer_id in who for who in whole.bitmaps), f"round {honest} still leaves {liar.name} out"
    return Measured(
        rounds_lost=0,
        work_lost_tokens=0,
        notes={"undisturbed_round_s": round(usual_s, 1), "longest_round_s": round(longest_s, 1)},
    )


ROW = Row(
    number=9,
    fault="corrupt payload",
    must="dropped, sender named, counted; the round commits without it",
    checks=__doc__,
    run=run,
    in_ci=True,
    shares=True,
    within_s=100.0,
)
