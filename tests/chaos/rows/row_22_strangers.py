"""Strangers flood every port of one node of a running swarm of three.

Garbage, half sentences, frames and records that announce gigabytes, three hundred connections in a row to each port,
and a hundred to each that say the beginning of something and stay. Meanwhile the rounds go on and count all three;
what was refused is counted. Memory and open files of the flooded node's processes are afterwards what they were after
a first flood.
"""

from __future__ import annotations

from tests.chaos.lab import Lab
from tests.chaos.rows import Measured, Note, Row
from tests.swarm.daemons import ROUND_S, assert_agreed
from tests.swarm.strangers import GROWTH_BYTES, flood, free_port, half_open, resident_and_descriptors

NODES = 3
DESCRIPTORS_MORE = 20


def run(lab: Lab) -> Measured:
    ports = {"data": free_port(), "http": free_port()}
    arguments = ("--data-port", str(ports["data"]), "--http", f"127.0.0.1:{ports['http']}")
    nodes = lab.swarm(NODES, first_arguments=arguments)
    usual_s = lab.usual_s(nodes)
    flooded, *others = nodes
    ports["control"] = int(flooded.listen.split("/")[4])
    for kind, port in ports.items():
        flood(port, kind)
    before = resident_and_descriptors(flooded)
    began = lab.reached(nodes)
    with half_open(ports):
        for kind, port in ports.items():
            flood(port, kind)
            lab.say(f"the {kind} port of {flooded.name} was flooded")
        lab.wait_round(nodes, lab.reached(nodes) + 1, "rounds go on under the flood", 2 * ROUND_S)
    ended = lab.reached(nodes)
    lab.wait_round(nodes, ended + 1, "rounds go on after it", 2 * ROUND_S)
    for number in range(began, ended + 2):
        line = others[0].rounds[number]
        missing = {node.peer_id for node in nodes} - set(line.contributors)
        assert not missing, f"round {number} did not count {missing}: {line.excluded}"
        attempt = lab.means(number, others[0]).attempt
        assert attempt == 0, f"round {number} took {attempt + 1} attempts"
    assert_agreed(*nodes, at_least=1)
    after = resident_and_descriptors(flooded)
    refused = flooded.status().problems
    assert refused, "what strangers sent is not counted"
    notes: dict[str, Note] = {
        "undisturbed_round_s": round(usual_s, 1),
        "longest_round_s": round(max(others[0].rounds[number].seconds for number in range(began, ended + 2)), 1),
        "refused": sum(refused.values()),
    }
    for role, (resident, descriptors) in after.items():
        grown = resident - before[role][0]
        notes[f"{role}: grown_MB"] = round(grown / 1e6, 1)
        assert grown < GROWTH_BYTES, f"the {role} grew by {grown / 1e6:.1f} MB"
        more = descriptors - before[role][1]
        assert more < DESCRIPTORS_MORE, f"the {role} holds {more} more descriptors"
    return Measured(rounds_lost=0, work_lost_tokens=0, notes=notes)


ROW = Row(
    number=22,
    fault="garbage, slowloris, oversized frames, connection floods on every port",
    must="nothing lost, memory bounded",
    checks=__doc__,
    run=run,
)
