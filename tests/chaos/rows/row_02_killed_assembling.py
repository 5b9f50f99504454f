"""A node is killed while the others get ready for the same round.

At four places: its trainer has handed over and nothing is encoded yet; its READY has just been handed to the network;
and both with the node that leads the attempt. The three others commit that round with all of them in it and nothing
of the dead node, in the first attempt unless it was to lead (then in the second), within the durations of the
manifest.
"""

from __future__ import annotations

from tests.chaos.lab import OUTAGE_ROUND_S, Lab, Node
from tests.chaos.rows import Measured, Note, Row
from tests.swarm.daemons import assert_agreed

NODES = 4
PLACES = ("encode", "ready")


def run(lab: Lab) -> Measured:
    nodes = lab.swarm(NODES)
    notes: dict[str, Note] = {}
    recovered = []
    for coordinator in (False, True):
        for place in PLACES:
            seconds, back_s = kill(lab, nodes, place, coordinator=coordinator)
            who = "coordinator" if coordinator else "member"
            notes[f"{who} at {place}: round_s"] = round(seconds, 1)
            recovered.append(back_s)
    notes["undisturbed_round_s"] = round(lab.usual_s(nodes), 1)
    return Measured(recover_s=sorted(recovered)[len(recovered) // 2], rounds_lost=0, notes=notes)


def kill(lab: Lab, nodes: list[Node], place: str, *, coordinator: bool) -> tuple[float, float]:
    lab.wait_counted(nodes, 1, "all four vote")
    usual_s = lab.usual_s(nodes)
    victim, struck = lab.strike(
        nodes, lambda status: next(node for node in nodes if (node.peer_id == status.coordinator) is coordinator), place
    )
    others = [node for node in nodes if node is not victim]
    number = struck.strike.round
    lab.wait_round(others, number, f"the others commit round {number}", OUTAGE_ROUND_S)
    seconds = max(node.rounds[number].seconds for node in others)
    counted = set(others[0].rounds[number].contributors)
    assert counted == {node.peer_id for node in others}, f"round {number} counts {counted}"
    assert_agreed(*others, at_least=1)
    means = lab.means(number, others[0])
    assert means.attempt <= coordinator, f"round {number} took {means.attempt + 1} attempts"
    bound_s = usual_s + lab.assembly_s() + lab.attempt_s(means.attempt + 1)
    assert seconds < bound_s, f"round {number} took {seconds:.1f} s; its deadlines allow {bound_s:.1f}"
    lab.say(f"  round {number}: {seconds:.1f} s, attempt {means.attempt}, {means.empty} EMPTY")
    victim.expect_nothing_left()
    victim.begin()
    _, back_s = lab.wait_counted_again(victim, others, struck.at_s, number + 1)
    return seconds, back_s


ROW = Row(
    number=2,
    fault="killed while assembling",
    must="the round forms without it",
    checks=__doc__,
    run=run,
)
