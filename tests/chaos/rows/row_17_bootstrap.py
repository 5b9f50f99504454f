"""Row 17: the node whose address everybody has is dead, or late.

Two nodes are started 20 s before the one whose address they have: they say that nobody answers, and join when it
comes. It is killed: the run goes on, a newcomer joins through another node and meets the rest. Two islands of two
that have only the address of a fifth in common are all connected within 30 s of its start.
"""

from __future__ import annotations

import shutil
import time

from scripts.wanlab.wan import unavailable
from tests.chaos.lab import Lab
from tests.chaos.rows import Measured, Row
from tests.chaos.wide_area import Node, WideArea, wide_area
from tests.swarm.daemons import PATIENCE, ROUND_S

MERGE_S = 30.0 * PATIENCE
"""From the start of the common peer's process until everyone is connected to everyone."""
LATE_S = 20.0
"""How much later the bootstrap node starts: the others' dials are far apart by then."""


def run(lab: Lab) -> Measured:
    notes: dict[str, str | int | float] = {}
    with wide_area(lab.directory / "bootstrap", 4, say=lab.say) as area:
        late(area, notes)
        dead(area, notes)
        area.expect_nothing_left()
    with wide_area(lab.directory / "islands", 5, say=lab.say) as area:
        merge(area, notes)
        area.expect_nothing_left()
    return Measured(recover_s=float(notes["islands: all connected after_s"]), rounds_lost=0, notes=notes)


def late(area: WideArea, notes: dict[str, str | int | float]) -> None:
    """Two nodes have only the address of a third that is not there; it comes, and they join its run."""
    bootstrap, first, second, _ = area.nodes
    area.begin([first, second])
    area.wait([first, second], lambda: all(waits_for(node, bootstrap) for node in (first, second)), "they say so")
    time.sleep(LATE_S)
    there_s = time.monotonic()
    area.begin([bootstrap])
    trio = [bootstrap, first, second]
    area.wait(trio, lambda: all_connected(trio), "all three are connected", MERGE_S)
    notes["late bootstrap: all connected after_s"] = round(time.monotonic() - there_s, 1)
    area.wait_counted(trio, 2, "all three are counted", 2 * ROUND_S)
    notes["late bootstrap: all counted after_s"] = round(time.monotonic() - there_s, 1)


def waits_for(node: Node, other: Node) -> bool:
    return node.last is not None and "No peer answers" in node.now.reason and other.host.address in node.now.reason


def dead(area: WideArea, notes: dict[str, str | int | float]) -> None:
    """The bootstrap node is killed: the run goes on, and a newcomer joins through another node."""
    bootstrap, first, second, newcomer = area.nodes
    lineage = first.now.lineage
    bootstrap.kill()
    assert not bootstrap.survivors()
    area.wait_rounds([first, second], 2, "the run goes on", 2 * ROUND_S)
    newcomer.joins = (second,)
    started_s = time.monotonic()
    newcomer.begin()
    left = [first, second, newcomer]
    area.wait_counted(left, 2, "a newcomer joins through another node", 3 * ROUND_S)
    notes["dead bootstrap: newcomer counted after_s"] = round(time.monotonic() - started_s, 1)
    assert all_connected([first, newcomer]), "the newcomer is not connected to whom it was not told of"
    assert all(node.now.lineage == lineage for node in left), "a dead bootstrap node is no reason for a new lineage"
    area.expect_agreement(left, area.reached(left) - 1, at_least=0)


def merge(area: WideArea, notes: dict[str, str | int | float]) -> None:
    """Two islands of two, each unaware of the other, were all started with the address of a fifth that is not there."""
    common, *islands = area.nodes
    west, east = islands[:2], islands[2:]
    for island in (west, east):
        give_run(area, common, island[0])
        island[0].joins, island[0].arguments = (common,), ("--run", area.run.run_id.hex())
        island[1].joins = (common, island[0])
    area.begin(islands)
    for island in (west, east):
        area.wait(island, lambda island=island: all_connected(island), "an island is connected", 2 * ROUND_S)
    time.sleep(LATE_S)
    area.look(islands)
    assert not any(connected(a, b) for a in west for b in east), "the islands know of each other already"
    assert all(node.now.round == 0 for node in islands), "two of five founders are no quorum"
    there_s = time.monotonic()
    area.begin([common])
    area.wait(area.nodes, lambda: all_connected(area.nodes), "the islands merge", MERGE_S)
    notes["islands: all connected after_s"] = round(time.monotonic() - there_s, 1)
    area.wait_counted(area.nodes, 1, "all five are counted", 3 * ROUND_S)
    notes["islands: all counted after_s"] = round(time.monotonic() - there_s, 1)
    assert len({node.now.lineage for node in area.nodes}) == 1


def give_run(area: WideArea, source: Node, target: Node) -> None:
    """What its operator had from the creator: the run's definition and its files."""
    for name in ("manifests", "runs", "run"):
        origin, copy = source.home.path / name, target.home.path / name
        if origin.is_dir():
            shutil.copytree(origin, copy, dirs_exist_ok=True)
        elif origin.exists():
            shutil.copyfile(origin, copy)


def connected(node: Node, other: Node) -> bool:
    return any(one.peer_id == other.peer_id and one.connected for one in node.now.member_list)


def all_connected(nodes: list[Node] | tuple[Node, ...]) -> bool:
    return all(node.last is not None and connected(node, other) for node in nodes for other in nodes if node != other)


ROW = Row(
    number=17,
    fault="bootstrap node dies; starts late",
    must="the run goes on; joins through any peer; islands merge within 30 s",
    checks=__doc__,
    run=run,
    within_s=300.0,
    needs=unavailable,
)
