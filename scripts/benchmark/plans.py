"""Who reduces what, and the bytes that this moves: the product's own plans, and those of the other engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from node.errors import OperatorError
from protocol.clusters import Groups
from protocol.codecs import codec
from protocol.experience import Experience, Kind
from protocol.links import Link, Report, Reports
from protocol.messages import Ready, Roster, Signed
from protocol.names import Base, digest
from protocol.plan import Plan
from protocol.planner import Outlook, kind_of, make_plan
from protocol.planning import FASTEST_RATE_BYTES_S, flat_plan, trees
from protocol.rules import Rules
from scripts.benchmark.lab import BytesMatrix, Lab

SUM_CODEC = "sum16"
PARTS = 1 << 12
"""So many that dealing them rounds no share."""
RULES = Rules(
    run=digest(b"bench"),
    founders=(),
    initial_state_hash=digest(b"bench"),
    elements=PARTS * 65_536,
    part_elements=65_536,
    sum_codec=SUM_CODEC,
    epoch_units=1,
    lease_cap_units=1,
    unit_tokens=1,
)
"""Of a run in which bytes take long enough for plans to follow rates."""


def _flat(lab: Lab) -> Plan:
    """Equal shares."""
    hosts = len(lab.hosts)
    return flat_plan(hosts, (1 << hosts) - 1)


def _weighted(lab: Lab) -> Plan:
    """What the planner makes of the hosts' own rates."""
    return _planned(lab, Experience(gain=-1.0))


def _grouped(lab: Lab) -> Plan:
    """What the planner makes of them once measured rounds have shown that sites share a line."""
    made = _planned(lab, Experience(gain=1.0))
    if kind_of(made) is not Kind.GROUPED:
        raise OperatorError(
            f"the lab {lab.name!r} has no two sites of two hosts or more: there is no grouped plan for it"
        )
    return made


def _planned(lab: Lab, experience: Experience) -> Plan:
    base = Base(run=RULES.run, lineage=RULES.run, round=0, prev=RULES.run, state_hash=RULES.run)
    ready = Ready(base=base, tokens=((PARTS, 1),), norm=1.0, largest=0.1)
    # Peers are called by number: the order of a roster is that of its names.
    names = [f"{number:03}" for number in range(len(lab.hosts))]
    readys = tuple(Signed(sender=name, message=ready, body=b"", signature=b"") for name in names)
    outlook = Outlook(reports=_reports(lab, names), groups=_sites(lab, names), experience=experience)
    return make_plan(Roster(base=base, attempt=0, readys=readys), (1 << len(names)) - 1, RULES, outlook).plan


def _reports(lab: Lab, names: Sequence[str]) -> Reports:
    """What the hosts would have measured of their own lines; of those that sites share they know nothing."""
    trips_s = lab.round_trips_s
    return {
        name: Report(
            up_bytes_s=host.up_mbit_s * 125e3 or FASTEST_RATE_BYTES_S,
            down_bytes_s=host.down_mbit_s * 125e3 or FASTEST_RATE_BYTES_S,
            links={
                other: Link(round_trip_s=trips_s[frozenset((host.name, far.name))])
                for other, far in zip(names, lab.hosts, strict=True)
                if other != name
            },
        )
        for name, host in zip(names, lab.hosts, strict=True)
    }


def _sites(lab: Lab, names: Sequence[str]) -> Groups:
    inside = [
        tuple(name for name, host in zip(names, lab.hosts, strict=True) if host.site == site.name) for site in lab.sites
    ]
    return tuple(sorted(site for site in inside if site))


PLANS: dict[str, Callable[[Lab], Plan]] = {"flat": _flat, "weighted": _weighted, "grouped": _grouped}


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
