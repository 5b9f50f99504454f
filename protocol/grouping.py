"""Which tree each shard gets (protocol section 3): flat while everyone fits below one root, else in groups.

A grouped plan cuts the roster into about √n groups of about √n READYs, so that a root has its own group's members and
one head of each other group below it, and a head has its group's: 31 + 32 children at 1,024 READYs, and two levels are
always enough. Groups follow the order of the roster, which hardly changes from round to round, so that most connections
of one round serve the next. Roots and heads are drawn anew for each attempt by `H(base, attempt, peer)`, so that nobody
depends on the same head for ever.

Shapes: `n` READYs, `g` groups, `s` shards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from protocol.messages import Roster
from protocol.names import Digest, PeerId, digest, encode_integer
from protocol.plan import Plan, Shard
from protocol.planning import MAX_FAN, MAX_GROUPED_SHARDS, flat_plan, over_limits
from protocol.rules import Rules
from protocol.weights import bits

LIMITS_TRIED = 4
"""Plans made to learn whose limits are too low for duties; then whoever has any limit is given none."""


def plan_for(draft: Roster, contributing: int, rules: Rules, spared: int = 0) -> Plan:
    """The plan of a roster that has none yet, with equal shares; `contributing`: bitmap of its READYs with a slot.

    `spared`: bitmap of READYs that get no duties as long as there are enough others.
    """

    def make(leading: int) -> Plan:
        unspared = leading & ~spared
        # Where too few are left for every group to have a head, those to be spared have duties before the limited ones.
        enough = (unspared & contributing).bit_count() >= _group_count(len(draft.readys))
        return _plan(draft, contributing, unspared if enough else leading, rules)

    return within_limits(draft, contributing, rules, make)


def within_limits(draft: Roster, contributing: int, rules: Rules, make: Callable[[int], Plan]) -> Plan:
    """A plan in which whom its limits allow no more has no shard and no group, as long as others are left to take them.

    `make`: a plan for a bitmap of READYs that may have some.
    """
    limited = sum(
        1 << index
        for index, ready in enumerate(draft.readys)
        if ready.message.upload_limit_bytes or ready.message.download_limit_bytes
    )
    leading = (1 << len(draft.readys)) - 1
    for trial in range(LIMITS_TRIED + 1):
        plan = make(leading)
        over = sum(1 << index for index in over_limits(draft, plan, contributing, rules)) & leading
        spared = leading & ~(over if trial + 1 < LIMITS_TRIED else limited)
        if not over or not spared & contributing:
            return plan
        leading = spared
    return plan


def _plan(draft: Roster, contributing: int, leading: int, rules: Rules) -> Plan:
    if len(draft.readys) <= MAX_FAN + 1:
        return flat_plan(len(draft.readys), contributing, [leading >> index & 1 for index in range(len(draft.readys))])
    draw = digest(b"atoll/turn", draft.base.digest(), encode_integer(draft.attempt))
    return grouped_plan([ready.sender for ready in draft.readys], contributing, rules.part_count, draw, leading)


def _group_count(peers: int) -> int:
    """The square root, rounded up."""
    return math.isqrt(peers - 1) + 1


def grouped_plan(
    peers: Sequence[PeerId], contributing: int, part_count: int, draw: Digest, leading: int | None = None
) -> Plan:
    """At most `MAX_GROUPED_SHARDS` trees of two levels over `peers` [n]; no more than there are parts, or contributors
    who may lead. `draw` decides whose turn it is. `leading`: who may be a root or a head; None: anyone.

    Raises ValueError without contributors, or with more READYs than two levels hold.
    """
    if not 0 < contributing < 1 << len(peers):
        raise ValueError(f"bitmap {contributing:#x} names no contributor among {len(peers)} READYs")
    count = _group_count(len(peers))
    if leading is None:
        leading = (1 << len(peers)) - 1
    if (leading & contributing).bit_count() < count:
        leading |= contributing  # else groups with contributors would be left without a head
    groups = _groups(peers, contributing, leading, count, draw)
    widest = max(len(group.order) for group in groups) - 1 + len(groups) - 1
    if widest > MAX_FAN:
        raise ValueError(f"{len(peers)} READYs in {len(groups)} groups give a root {widest} children, above {MAX_FAN}")
    # All roots first: who is one takes fewer groups on, whichever shard comes first.
    roots = _roots(groups, min(MAX_GROUPED_SHARDS, (contributing & leading).bit_count(), part_count))
    return Plan(shards=tuple(Shard(share=1, parents=_tree(len(peers), *root, groups)) for root in roots))


@dataclass(slots=True)
class _Group:
    order: list[int]
    """Its READYs, in the order in which they come to be roots and heads: contributors who may lead first."""
    roots: int
    """How many of the first may be roots: they contribute."""
    duties: list[int]
    """What each that may be the group's head carries so far: children, and partial sums, which have twice the bytes.

    Those that may be roots; or of the others, if there is nothing to sum."""

    def lead(self, place: int, partials: int) -> int:
        """The READY at `place` takes on its group's members, and so many partial sums."""
        self.duties[place] += len(self.order) + 2 * partials
        return self.order[place]

    def head(self) -> int:
        """Who carries least; its own partial sum goes to the root."""
        return self.lead(min(range(len(self.duties)), key=self.duties.__getitem__), 1)


def _groups(peers: Sequence[PeerId], contributing: int, leading: int, count: int, draw: Digest) -> list[_Group]:
    """Contributors and others, and those who may lead, are each spread evenly, so that sizes differ little."""
    everyone = (1 << len(peers)) - 1
    idle = everyone & ~contributing
    kinds = (contributing & leading, contributing & ~leading, idle & leading, idle & ~leading)
    turn = [digest(b"atoll/order", draw, peer.encode()) for peer in peers]
    groups = []
    for number in range(count):
        leaders, led, idle_leaders, idle_led = (
            sorted(_share(list(bits(kind)), number, count), key=turn.__getitem__) for kind in kinds
        )
        order = [*leaders, *led, *idle_leaders, *idle_led]
        if order:
            heads = len(leaders) or len(idle_leaders) or len(order)
            groups.append(_Group(order=order, roots=len(leaders), duties=[0] * heads))
    return groups


def _share(items: list[int], number: int, count: int) -> list[int]:
    return items[number * len(items) // count : (number + 1) * len(items) // count]


def _roots(groups: Sequence[_Group], shards: int) -> list[tuple[int, int]]:
    """(group, READY) of each shard's root: the first contributor of each group, then the second of each, and so on."""
    places = sorted((place, number) for number, group in enumerate(groups) for place in range(group.roots))
    return [(number, groups[number].lead(place, len(groups) - 1)) for place, number in places[:shards]]


def _tree(peers: int, root_group: int, root: int, groups: Sequence[_Group]) -> tuple[int, ...]:
    """Parents [n] of one shard's tree."""
    parents = [root] * peers
    for number, group in enumerate(groups):
        if number != root_group:
            head = group.head()
            for member in group.order:
                parents[member] = head
            parents[head] = root
    parents[root] = -1
    return tuple(parents)
