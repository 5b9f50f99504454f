"""A plan over sites: a byte crosses from one group of peers to another once, not once for each peer (design section 6).

Every root of a shard has its own group below it and one head of each other group, which sums its group's contributions
and passes results on. Shapes: `n` READYs, `s` shards.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from protocol.links import RatesArray
from protocol.messages import Roster
from protocol.names import PeerId
from protocol.plan import Plan, Shard
from protocol.weights import bits


class NoSuchPlan(Exception):
    """Not a single tree goes by heads without pairs that are apart."""


def site_plan(
    groups: Sequence[Sequence[int]],
    contributing: int,
    leading: int,
    speed: RatesArray,
    apart: npt.NDArray[np.bool_],
) -> Plan:
    """One shard, of share 1, for each contributor that may lead and whose tree needs no pair that is `apart` [n, n].

    `groups` tile the READYs. `leading`: who may be a root or a head. The fastest roots of a group have the fastest
    heads of the others (`speed` [n]), so that a shard's share suits all who have duties in it.

    Raises NoSuchPlan if there is no such tree.
    """
    may_root = contributing & leading
    ranked = [sorted(group, key=lambda index: (-speed[index], index)) for group in groups]
    shards = []
    for number, group in enumerate(ranked):
        for rank, root in enumerate(index for index in group if may_root >> index & 1):
            parents = [root] * len(speed)
            parents[root] = -1
            for other, members in enumerate(ranked):
                if other != number:
                    _put_below(root, rank, members, contributing, leading, apart, parents)
            if not any(apart[child, parent] for child, parent in enumerate(parents) if parent >= 0):
                shards.append(Shard(share=1, parents=tuple(parents)))
    if not shards:
        raise NoSuchPlan
    return Plan(shards=tuple(sorted(shards, key=lambda shard: shard.root)))


def _put_below(
    root: int,
    rank: int,
    members: Sequence[int],
    contributing: int,
    leading: int,
    apart: npt.NDArray[np.bool_],
    parents: list[int],
) -> None:
    """A group's members below a head of theirs; below the root itself if nobody can be it."""
    working = [index for index in members if contributing >> index & 1]
    heads = [index for index in working or members if leading >> index & 1]
    for turn in range(len(heads)):
        head = heads[(rank + turn) % len(heads)]
        if not apart[head, root] and not any(apart[head, member] for member in members):
            for member in members:
                parents[member] = head
            parents[head] = root
            return


def blocks(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """The groups that a plan's trees show, each ascending: READYs that stand below one head in some tree, and it.

    In a flat plan everybody is alone.
    """
    leader = list(range(len(plan.shards[0].parents)))

    def first(index: int) -> int:
        while leader[index] != index:
            index = leader[index]
        return index

    for shard in plan.shards:
        root = shard.root
        for child, parent in enumerate(shard.parents):
            if parent not in (-1, root):
                one, other = sorted((first(child), first(parent)))
                leader[other] = one
    together: dict[int, list[int]] = {}
    for index in range(len(leader)):
        together.setdefault(first(index), []).append(index)
    return tuple(tuple(block) for block in together.values())


def group_of(roster: Roster, peer: PeerId) -> tuple[PeerId, ...]:
    """The peers of a roster with which this one forms a group, itself among them; empty where there are no groups."""
    senders = tuple(ready.sender for ready in roster.readys)
    if roster.plan is None or peer not in senders or not in_groups(roster.plan):
        return ()
    index = senders.index(peer)
    return tuple(senders[other] for block in blocks(roster.plan) if index in block for other in block)


def in_groups(plan: Plan) -> bool:
    """Whether any byte goes by a head."""
    return any(parent not in (-1, shard.root) for shard in plan.shards for parent in shard.parents)


def rest_alone(groups: Sequence[Sequence[int]], peers: int) -> list[list[int]]:
    """Those groups, and one for each READY that is in none."""
    known = sum(1 << index for group in groups for index in group)
    return [*(list(group) for group in groups), *([index] for index in bits(~known & ((1 << peers) - 1)))]
