"""Who reduces what, and the bytes that this moves: the product's own plans, and those of the other engines."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from node.errors import OperatorError
from protocol.codecs import codec
from protocol.grouping import grouped_plan
from protocol.names import digest
from protocol.plan import Plan
from protocol.planning import flat_plan, trees
from scripts.benchmark.lab import BytesMatrix, Lab

SUM_CODEC = "sum16"
MANY_PARTS = 1 << 20
"""Parts do not limit the number of shards."""


def _flat(lab: Lab) -> Plan:
    hosts = len(lab.hosts)
    return flat_plan(hosts, (1 << hosts) - 1)


def _grouped(lab: Lab) -> Plan:
    """Two levels, as for rosters that are too large for one: groups follow the order of the lab's hosts."""
    hosts = len(lab.hosts)
    names = [host.name for host in lab.hosts]
    return grouped_plan(names, (1 << hosts) - 1, MANY_PARTS, digest(b"bench"))


PLANS: dict[str, Callable[[Lab], Plan]] = {"flat": _flat, "grouped": _grouped}


def plan_of(name: str, lab: Lab) -> Plan:
    """Raises `OperatorError`."""
    if name not in PLANS:
        raise OperatorError(f"there is no plan {name!r}: the planner makes {', '.join(PLANS)}")
    return PLANS[name](lab)


def planned_bytes(plan: Plan, elements: int, codec_name: str) -> BytesMatrix:
    """What must pass between the hosts, all of whom contribute, when shards are exactly in proportion."""
    hosts = len(plan.shards[0].parents)
    encoded = codec(codec_name).encoded_bytes(elements)
    summed = codec(SUM_CODEC).encoded_bytes(elements)
    moved = np.zeros((hosts, hosts))
    whole = sum(shard.share for shard in plan.shards)
    for shard, tree in zip(plan.shards, trees(plan, (1 << hosts) - 1), strict=True):
        part = shard.share / whole
        for parent, children in enumerate(tree.children):
            for child in children:
                moved[parent, child] += part * encoded
            for slot in tree.slots[parent]:
                moved[slot, parent] += part * (summed if tree.heights[slot] else encoded)
    return moved


def flat_bytes(hosts: int, encoded: float) -> BytesMatrix:
    """Each reduces its share and sends it back to all (hivemind's butterfly)."""
    moved = np.full((hosts, hosts), 2 * encoded / hosts)
    np.fill_diagonal(moved, 0)
    return moved


def ring_bytes(hosts: int, encoded: float) -> BytesMatrix:
    """Reduce-scatter and all-gather around a ring (gloo)."""
    moved = np.zeros((hosts, hosts))
    for index in range(hosts):
        moved[index, (index + 1) % hosts] = 2 * (hosts - 1) / hosts * encoded
    return moved


VALUE_BYTES = {"fp32": 4.0, "fp16": 2.0, "uniform8": 1.0}
"""Of the other engines' codecs."""


def bytes_to_move(engine: str, codec_name: str, plan: str, lab: Lab, elements: int) -> BytesMatrix:
    """Raises `OperatorError`."""
    if engine == "atoll":
        return planned_bytes(plan_of(plan, lab), elements, codec_name)
    encoded = VALUE_BYTES[codec_name] * elements
    return (ring_bytes if engine == "gloo" else flat_bytes)(len(lab.hosts), encoded)
