"""One of three offers what must never be in a mean, twelve ways.

Its trainer's difference holds NaN, infinity, or is ten thousand times too large; its engine sends NaN, infinity,
values far beyond what was declared, a payload of the wrong length, a bitmap that claims everybody; its READY claims
2⁵² tokens, all that may be claimed, a norm that is no number, or units that others hold. Each time the others commit
the round in its first attempt (in the second, if the liar was to lead the first), all of them counted. Every mean is
recomputed and is exact, finite, and no larger than what honest nodes contributed. Claims of too much weight count
three times the median at most. Once it is honest again, it is counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.chaos.lab import OUTAGE_ROUND_S, Lab, Node
from tests.chaos.rows import Measured, Note, Row
from tests.swarm.daemons import assert_agreed

NODES = 3
LARGEST_GROWTH = 4.0
"""Honest contributions of one round may be larger than those of another, by this much at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lie:
    name: str
    own_parts: bool = False
    """Parts that the liar itself reduced may count it: from its own outbox, whose bytes are good."""
    says: str = ""
    """Words of the reason for which the others' `status` leaves it out."""
    refused: bool = False
    """Its READY is no READY: the logs of the others name it."""
    counted: bool = False
    """It is no lie that anybody could tell from the truth; it only must not weigh too much."""


LIES = (
    Lie(name="delta-nan", says="without work"),
    Lie(name="delta-inf"),
    Lie(name="delta-huge", says="a norm of"),
    Lie(name="ups-nan", own_parts=True),
    Lie(name="ups-inf", own_parts=True),
    Lie(name="ups-beyond", own_parts=True),
    Lie(name="ups-short", own_parts=True),
    Lie(name="ups-greedy", own_parts=True),
    Lie(name="tokens-absurd", refused=True),
    Lie(name="tokens-many", counted=True),
    Lie(name="norm-nan", refused=True),
    Lie(name="ranges-stolen", refused=True),
)


def run(lab: Lab) -> Measured:
    nodes = lab.swarm(NODES)
    usual_s = lab.usual_s(nodes)
    usual = max(lab.means(number, nodes[0]).largest for number in list(nodes[0].rounds)[-2:])
    notes: dict[str, Note] = {"undisturbed_round_s": round(usual_s, 1)}
    for lie in LIES:
        notes[f"{lie.name}: round_s"] = round(tell(lab, nodes, lie, usual_s, usual), 1)
    return Measured(rounds_lost=0, notes=notes)


def tell(lab: Lab, nodes: list[Node], lie: Lie, usual_s: float, usual: float) -> float:
    liar, *others = nodes[::-1]
    liar.bend(lie.name)
    number = lab.reached(nodes) + 1  # the exchange of this round may be under way
    lab.wait_round(others, number, f"round {number} is committed in spite of {lie.name}", 2 * OUTAGE_ROUND_S)
    seconds = max(node.rounds[number].seconds for node in others)
    counted = set(others[0].rounds[number].contributors)
    means = lab.means(number, others[0])
    lab.say(
        f"{lie.name}: round {number} took {seconds:.1f} s, {means.empty} EMPTY, the liar is "
        f"{'counted' if liar.peer_id in counted else 'left out: ' + others[0].rounds[number].excluded[liar.peer_id]}"
    )
    assert counted >= {node.peer_id for node in others}, f"{lie.name}: round {number} counts only {counted}"
    allowed = 2 if lab.leader(number, others[0]) == liar.peer_id else 1
    assert means.attempt < allowed, f"{lie.name}: round {number} took {means.attempt + 1} attempts, not {allowed}"
    bound_s = usual_s + lab.assembly_s() + lab.attempt_s(allowed)
    assert seconds < bound_s, f"{lie.name}: round {number} took {seconds:.1f} s; its deadlines allow {bound_s:.1f}"
    assert means.largest < LARGEST_GROWTH * usual, f"{lie.name}: a mean of {means.largest:g}, {usual:g} usually"
    inside = {part for part, who in enumerate(means.bitmaps) if liar.peer_id in who}
    if lie.own_parts:
        own = lab.parts_of(number, liar, others[0])
        assert inside <= own, f"{lie.name}: the parts {sorted(inside - own)} count it"
    elif not lie.counted:
        assert not inside, f"{lie.name}: the parts {sorted(inside)} count it"
        if lie.refused:
            for node in others:
                assert node.log_lines(liar.peer_id, "bad input"), f"{lie.name}: {node.name} does not say who sent it"
        reason = others[0].rounds[number].excluded.get(liar.peer_id, "")
        assert lie.says in reason, f"{lie.name}: status says {reason!r}"
    liar.bend()
    lab.wait_counted(nodes, 1, f"{liar.name} is counted again after {lie.name}")
    assert_agreed(*nodes, at_least=1)
    return seconds


ROW = Row(
    number=10,
    fault="NaN, Inf, wrong shape, absurd weight, huge norm",
    must="never in a mean",
    checks=__doc__,
    run=run,
    within_s=600.0,
)
