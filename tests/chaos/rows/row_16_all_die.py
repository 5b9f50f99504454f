"""All of three die at once, in the middle of an exchange, and start again.

Each starts from the newest valid state on its own disk. The lineage goes on: no REFORM, no round from before is
undone, and what all held before all still hold, with the same hashes. With `min_peers` 2 and one node started alone,
that one waits and says so; the run goes on when the next one is there.
"""

from __future__ import annotations

import time

from tests.chaos.lab import Lab, Node
from tests.chaos.rows import Measured, Note, Row
from tests.swarm.daemons import LISTEN_S, PATIENCE, ROUND_S, assert_agreed

NODES = 3
WATCHED_S = 15.0


def run(lab: Lab) -> Measured:
    notes: dict[str, Note] = {}
    recovered = []
    for min_peers in (1, 2):
        with lab.apart(f"min-peers-{min_peers}") as place:
            back_s = die(place, min_peers)
        notes[f"min_peers {min_peers}: recover_s"] = round(back_s, 1)
        recovered.append(back_s)
    return Measured(recover_s=max(recovered), rounds_lost=0, notes=notes)


def die(lab: Lab, min_peers: int) -> float:
    """Seconds from the last start until all are counted."""
    nodes = lab.swarm(NODES, overrides=(f"limits.min_peers={min_peers}",))
    lineage = nodes[0].status().lineage
    victim, struck = lab.strike(nodes, lambda _: nodes[0], "up", after=2)
    for node in nodes:
        if node is not victim:
            node.power_cut()
    victim.expect_nothing_left()
    known = {number: line for node in nodes for number, line in node.rounds.items()}
    lab.say(f"min_peers {min_peers}: all died in the exchange of round {struck.strike.round}")
    first, *others = nodes
    first.joins = None
    first.begin()
    if min_peers == 2:
        waits_for_peers(lab, first)
    for node in others:
        node.begin()
    started_s = time.monotonic()
    lab.wait_counted(nodes, 1, "all are counted again", 3 * ROUND_S, since=max(known) + 1)
    back_s = time.monotonic() - started_s
    assert {node.status().lineage for node in nodes} == {lineage}, "the lineage did not go on"
    for node in nodes:
        for number, line in known.items():
            mine = node.rounds.get(number)
            assert mine is None or mine.state_hash == line.state_hash, f"round {number} was decided anew"
    assert_agreed(*nodes, at_least=1)
    lab.say(f"  all are counted {back_s:.1f} s after the last start")
    return back_s


def waits_for_peers(lab: Lab, node: Node) -> None:
    waiting = node.wait(
        lambda status: bool(status.addresses) and status.state_hash is not None, "it is there", LISTEN_S
    )
    until_s = time.monotonic() + WATCHED_S * PATIENCE
    while time.monotonic() < until_s:
        node.glance()
        assert node.last is not None
        assert node.last.round == waiting.round, "one node went on alone though min_peers is 2"
        time.sleep(0.5)
    reason = node.status().reason
    assert reason
    lab.say(f"  one alone waits: {reason}")


ROW = Row(
    number=16,
    fault="all die; restart",
    must="each from its newest valid state; lineage continues",
    checks=__doc__,
    run=run,
    within_s=400.0,
)
