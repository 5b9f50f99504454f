"""All but one of three die at once, and come back later.

With `min_peers` 1 the one that is left goes on alone, openly: in a new lineage or as the sole elector. With 2 it
waits, and says for what; its round and its state stay as they are. In neither case do problems pile up without end,
nor does a process of it die. The others come back on their homes: all three end on one lineage, are counted, and hold
the same states.
"""

from __future__ import annotations

import time

from tests.chaos.lab import Lab, Node
from tests.chaos.rows import Measured, Note, Row
from tests.swarm.daemons import PATIENCE, ROUND_S, assert_agreed, assert_sensible

NODES = 3
ALONE_S = 20.0
"""How long the one that waits is watched."""
PROBLEMS_A_SECOND = 2.0


def run(lab: Lab) -> Measured:
    notes: dict[str, Note] = {}
    recovered = []
    for min_peers in (1, 2):
        with lab.apart(f"min-peers-{min_peers}") as place:
            alone_s, back_s = die(place, min_peers)
        notes[f"min_peers {min_peers}: regroup_s"] = round(back_s, 1)
        if min_peers == 1:
            notes["min_peers 1: alone_after_s"] = round(alone_s, 1)
        recovered.append(back_s)
    return Measured(recover_s=max(recovered), notes=notes)


def die(lab: Lab, min_peers: int) -> tuple[float, float]:
    """Seconds until the survivor's next commit alone (0 if it waits), and from the others' start until all count."""
    nodes = lab.swarm(NODES, overrides=(f"limits.min_peers={min_peers}",))
    survivor, *dead = nodes
    processes = {role: process.pid for role, process in survivor.whole_node().items()}
    died_s = time.monotonic()
    for node in dead:
        node.power_cut()
    survivor.glance()
    assert survivor.last is not None
    before = survivor.last
    lab.say(f"min_peers {min_peers}: two of three died in round {before.round}")
    alone_s = goes_on(lab, survivor, died_s) if min_peers == 1 else waits(lab, survivor)
    assert {role: process.pid for role, process in survivor.whole_node().items()} == processes
    status = survivor.status()
    new = sum(status.problems.values()) - sum(before.problems.values())
    assert new <= PROBLEMS_A_SECOND * (time.monotonic() - died_s), f"problems pile up: {status.problems}"

    reached, started_s = lab.reached([survivor]), time.monotonic()
    kept = dict(survivor.rounds)
    for node in dead:
        node.joins = survivor
        node.begin()
    lab.wait_counted(nodes, 1, "all three are counted again", 3 * ROUND_S, since=reached)
    back_s = time.monotonic() - started_s
    assert len({node.status().lineage for node in nodes}) == 1
    assert_agreed(*nodes, at_least=1)
    assert all(survivor.rounds[number] == line for number, line in kept.items()), "the survivor's rounds were undone"
    lab.say(f"  all three are counted {back_s:.1f} s after the others' start")
    return alone_s, back_s


def goes_on(lab: Lab, survivor: Node, died_s: float) -> float:
    began = lab.reached([survivor])
    # The round of the death may still count the dead.
    lab.wait_round([survivor], began + 2, "the survivor goes on alone", 2 * ROUND_S)
    alone_s = time.monotonic() - died_s
    status = survivor.status()
    assert_sensible(status)
    assert survivor.rounds[began + 2].contributors == (survivor.peer_id,)
    lab.say(f"  it goes on alone, three rounds {alone_s:.1f} s after the deaths")
    return alone_s


def waits(lab: Lab, survivor: Node) -> float:
    """A round under way when the others died may still commit; then nothing may, and `status` says why."""
    waiting = survivor.wait(lambda status: "min_peers" in status.reason, "the survivor says what it waits for", ROUND_S)
    until_s = time.monotonic() + ALONE_S * PATIENCE
    while time.monotonic() < until_s:
        survivor.glance()
        assert survivor.last is not None
        assert (survivor.last.round, survivor.last.state_hash) == (waiting.round, waiting.state_hash)
        time.sleep(0.5)
    assert "min_peers" in survivor.status().reason
    lab.say(f"  it waits: {waiting.reason}")
    return 0.0


ROW = Row(
    number=15,
    fault="all but one die",
    must="state kept, no endless error; goes on or waits as `min_peers` says; regroups",
    checks=__doc__,
    run=run,
    within_s=400.0,
)
