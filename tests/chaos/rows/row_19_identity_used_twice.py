"""A node's key is copied to a second home and started there while the first one runs.

The run's peers refuse the second, which ends with status 2 and one sentence: who takes part under that identity
already, and what to do. The first is told, too: `status` says that another machine uses its identity, and counts it.
It is counted in every round; the second is in none. A second daemon on the same home is refused with status 2 by the
home's lock.
"""

from __future__ import annotations

import shutil

from node.home import Home
from tests.chaos.lab import PROGRAM, Lab, Node, free_port
from tests.chaos.rows import Measured, Row
from tests.swarm.daemons import PATIENCE, ROUND_S, assert_agreed, atoll, wait_all

NODES = 3
TOLD_S = 40.0 * PATIENCE


def run(lab: Lab) -> Measured:
    nodes = lab.swarm(NODES)
    twin = nodes[1]
    began = lab.reached(nodes)
    second = start_copy(lab, twin, nodes[0])
    assert second.process is not None
    wait_all(nodes, lambda: not second.running, "the second ends", TOLD_S)
    code = second.process.wait(1.0)
    assert code == 2, f"the second exited with {code}: {second.output[-500:]}"
    sentence = second.output.strip().splitlines()[-1]
    assert "already takes part as" in sentence, f"the second does not say why it ended: {sentence}"
    assert twin.last is not None
    assert "uses this node's identity" in twin.last.reason, f"the first was not told: {twin.last.reason}"
    assert any("identity used twice" in problem for problem in twin.last.problems), twin.last.problems
    lab.say(f"the first says: {twin.last.reason}")
    lab.say(f"the second exited with 2: {sentence}")
    reached = lab.reached(nodes)
    lab.wait_round(nodes, reached + 2, "rounds go on", 2 * ROUND_S)
    for number in range(began + 1, reached + 3):
        line = nodes[0].rounds[number]
        missing = {node.peer_id for node in nodes} - set(line.contributors)
        assert not missing, f"round {number} did not count {missing}: {line.excluded}"
    assert_agreed(*nodes, at_least=2)

    refused = atoll("daemon", "--home", str(twin.home.path))
    assert refused.returncode == 2, refused
    assert f"process {twin.pid}" in refused.stderr
    return Measured(rounds_lost=0, work_lost_tokens=0, notes={"undisturbed_round_s": round(lab.usual_s(nodes), 1)})


def start_copy(lab: Lab, twin: Node, joins: Node) -> Node:
    home = Home(lab.directory / "copy")
    home.path.mkdir(mode=0o700)
    shutil.copy2(twin.home.identity_file, home.identity_file)
    second = Node(
        home=home,
        program=PROGRAM,
        known_peer_id=twin.peer_id,
        listen=f"/ip4/127.0.0.1/tcp/{free_port()}",
        joins=joins,
    )
    lab.nodes.append(second)
    return second.begin()


ROW = Row(
    number=19,
    fault="duplicate identity",
    must="second refuses, says why",
    checks=__doc__,
    run=run,
)
