"""A node dies in the middle of an exchange and starts again at once, before anybody can know that it was gone.

The old incarnation is fenced: the others take the new one for what it is, none speaks of two machines, and the new
one does nothing with the round that its old self may have signed for, except to take over its commit. It resumes from
its disk and is counted. Also after an orderly end, and with the engine's and the daemon's restart between.
"""

from __future__ import annotations

from tests.chaos.lab import OUTAGE_ROUND_S, Lab, Node
from tests.chaos.rows import Measured, Row
from tests.swarm.daemons import assert_agreed

NODES = 3
REPETITIONS = 3


def run(lab: Lab) -> Measured:
    nodes = lab.swarm(NODES)
    took_s = []
    for repetition in range(REPETITIONS):
        took_s.append(again(lab, nodes, coordinator=repetition % 2 == 1))
    took_s.sort()
    return Measured(
        recover_s=took_s[len(took_s) // 2],
        rounds_lost=0,
        notes={"worst_recover_s": round(took_s[-1], 1), "undisturbed_round_s": round(lab.usual_s(nodes), 1)},
    )


def again(lab: Lab, nodes: list[Node], *, coordinator: bool) -> float:
    lab.wait_counted(nodes, 1, "all are counted")
    node, struck = lab.strike(
        nodes,
        lambda status: next(node for node in nodes if (node.peer_id == status.coordinator) is coordinator),
        "up",
        after=2,
    )
    others = [other for other in nodes if other is not node]
    assert node.process is not None
    node.process.wait(10.0)
    node.begin()
    number = struck.strike.round
    lab.wait_round(others, number, f"the others commit round {number}", OUTAGE_ROUND_S)
    back, back_s = lab.wait_counted_again(node, others, struck.at_s, number + 1)
    for passed in range(number, back + 1):
        attempt = lab.means(passed, others[0]).attempt
        assert attempt <= 1, f"round {passed} took {attempt + 1} attempts"
    for seer in nodes:
        status = seer.status()
        twice = [problem for problem in status.problems if "identity" in problem or "two different" in problem]
        assert not twice, f"{seer.name} takes one node for two: {twice}"
        rows = [row for row in status.member_list if row.peer_id == node.peer_id]
        assert len(rows) == 1
        assert rows[0].alive, f"{seer.name} does not hear {node.name}"
    assert_agreed(*nodes, at_least=1)
    lab.say(f"  counted again in round {back}, {back_s:.1f} s after the kill")
    return back_s


ROW = Row(
    number=18,
    fault="same identity restarts",
    must="old incarnation fenced, resumes",
    checks=__doc__,
    run=run,
)
