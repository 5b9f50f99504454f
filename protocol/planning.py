"""Making and checking plans (protocol section 3, design section 6).

A plan gives each shard a tree over all READYs of the roster. Bytes go up it (contributions, then partial sums) and the
reduced parts come down. Shapes: `n` READYs, `s` shards, `p` parts. Bitmaps are integers over the READYs.

Words for a node's place in one tree: its *slots* are its children that contribute; its *height* is 0 without slots
(a leaf, which sends codec bytes), else one more than its highest slot's (it sends partial sums in the sum codec).
Height does not depend on who turns up, so both ends of an edge know beforehand what travels on it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from protocol.codecs import LARGEST_MAGNITUDE, Codec, codec
from protocol.fields import MAX_READYS
from protocol.messages import Roster
from protocol.names import Digest, digest
from protocol.plan import Plan, Shard
from protocol.rules import Rules
from protocol.weights import bits, check_runs

MAX_DEPTH = 3
"""Edges from a tree's root to its deepest READY."""

MAX_FAN = 64
"""Children of a node."""

ROSTER_MAX = MAX_READYS
"""READYs of a roster; one with so many is full and leaves nobody out."""

MAX_GROUPED_SHARDS = 64
"""Trees of a plan over more READYs than one root can have below it: each costs the ROSTER two bytes a READY."""

SHARE_MAX = 2**32

FASTEST_RATE_BYTES_S = 1.25e9
"""10 Gbit/s: no roster may count on more, in any direction of any node."""

ASSUMED_RATE_BYTES_S = 2.5e6
"""20 Mbit/s: what a node without measured rates is taken to move in each direction."""

DURATION_MARGIN = 2.0
"""A roster gives this many times the transfer time that it predicts."""

PLANS_KEPT = 16
"""Plans whose deal and bytes are remembered: making, checking and learning from a roster asks for the same again. The
largest plan takes a megabyte."""


class Tree:
    """One shard's tree, digested: who waits for whom. `parents` must be a tree (see `check_plan`)."""

    def __init__(self, parents: Sequence[int], contributing: int) -> None:
        self.parents = tuple(parents)
        self.root = self.parents.index(-1)
        children: list[list[int]] = [[] for _ in parents]
        for index, parent in enumerate(parents):
            if parent >= 0:
                children[parent].append(index)
        self.children = tuple(tuple(of_node) for of_node in children)
        """[n] Who gets DOWN from whom, ascending."""
        self.slots = tuple(tuple(child for child in of_node if contributing >> child & 1) for of_node in children)
        """[n] Who sends UP to whom, ascending: the plan order of sums."""
        heights, subtrees = [0] * len(parents), [1 << index & contributing for index in range(len(parents))]
        for index in self._deepest_first():
            for slot in self.slots[index]:
                heights[index] = max(heights[index], heights[slot] + 1)
                subtrees[index] |= subtrees[slot]
        self.heights = tuple(heights)
        """[n] Levels of slots below each node."""
        self.subtrees = tuple(subtrees)
        """[n] Bitmap of the contributors at or below each node."""

    def _deepest_first(self) -> list[int]:
        order = [self.root]
        for index in order:
            order += self.children[index]
        return order[::-1]


def trees(plan: Plan, contributing: int) -> tuple[Tree, ...]:
    return tuple(Tree(shard.parents, contributing) for shard in plan.shards)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Payload bytes of one READY in one exchange."""

    sent: int
    received: int


def contributing_of(roster: Roster, rules: Rules) -> int:
    """Bitmap of the READYs with a slot; every voter finds the same.

    Without a slot stand READYs that offer nothing, that the roster names as absent or has evidence against, whose
    numbers are not finite or beyond any sense, and whose norm is more than `norm_limit_ratio` times the median of
    those left.
    """
    candidates = []
    culprits = {evidence.culprit for evidence in roster.evidence}
    for index, signed in enumerate(roster.readys):
        ready = signed.message
        sane = math.isfinite(ready.norm) and 0 <= ready.largest <= min(ready.norm * (1 + 1e-6), LARGEST_MAGNITUDE)
        if ready.contributes and not roster.absent >> index & 1 and sane and signed.sender not in culprits:
            candidates.append(index)
    if not candidates:
        return 0
    norms = sorted(roster.readys[index].message.norm for index in candidates)
    median = norms[(len(norms) - 1) // 2] / 2 + norms[len(norms) // 2] / 2
    limit = rules.norm_limit_ratio * median
    return sum(1 << index for index in candidates if roster.readys[index].message.norm <= limit)


def flat_plan(peers: int, contributing: int, shares: Sequence[int] | None = None) -> Plan:
    """Every contributor the root of one shard, all other READYs its children.

    `shares` [n]: how much of the vector each READY reduces, in proportion; a READY with share 0, or that does not
    contribute, is the root of nothing. None: all contributors alike. Raises ValueError when there is no such plan.
    """
    if not 0 < peers <= MAX_FAN + 1:
        raise ValueError(
            f"a flat plan has 1 … {MAX_FAN + 1} READYs, not {peers}; use a grouped plan (protocol.grouping)"
        )
    if not 0 < contributing < 1 << peers:
        raise ValueError(f"bitmap {contributing:#x} names no contributor among {peers} READYs")
    if shares is not None and len(shares) != peers:
        raise ValueError(f"{peers} READYs need {peers} shares, not {len(shares)}")
    roots = [root for root in bits(contributing) if shares is None or shares[root] > 0]
    if not roots:
        raise ValueError("every contributor has share 0; give at least one a share above it")
    return Plan(
        shards=tuple(
            Shard(
                share=1 if shares is None else shares[root],
                parents=tuple(-1 if index == root else root for index in range(peers)),
            )
            for root in roots
        )
    )


def deal(base_digest: Digest, part_count: int, plan: Plan) -> tuple[int, ...]:
    """Shard of each part [p]: exactly in proportion to the shares (largest remainder), shuffled by `H(base, part)`.

    A new base deals anew, so no part meets the same root for ever.
    """
    return _deal(base_digest, part_count, tuple(shard.share for shard in plan.shards))


@lru_cache(maxsize=PLANS_KEPT)
def _deal(base_digest: Digest, part_count: int, shares: tuple[int, ...]) -> tuple[int, ...]:
    whole = sum(shares)
    counts = [part_count * share // whole for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda shard: (-(part_count * shares[shard] % whole), shard))
    for shard in by_remainder[: part_count - sum(counts)]:
        counts[shard] += 1
    # One extendable hash gives eight bytes a part: a permutation that depends on nothing but the base.
    stream = blake3(digest(b"atoll/deal", base_digest)).digest(length=8 * part_count)
    order = np.argsort(np.frombuffer(stream, "<u8"), kind="stable")
    dealt = np.empty(part_count, np.int64)
    dealt[order] = np.repeat(np.arange(len(shares)), counts)
    return tuple(dealt.tolist())


def bytes_of(plan: Plan, contributing: int, dealt: Sequence[int], rules: Rules) -> tuple[Traffic, ...]:
    """Payload bytes of each READY [n] when all turn up, both legs together."""
    return _load(plan, contributing, tuple(dealt), rules).traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class _Load:
    """What a plan asks of its READYs."""

    traffic: tuple[Traffic, ...]
    """[n]"""
    levels: int


@lru_cache(maxsize=PLANS_KEPT)
def _load(plan: Plan, contributing: int, dealt: tuple[int, ...], rules: Rules) -> _Load:
    counts = np.bincount(np.asarray(dealt, np.int64), minlength=len(plan.shards))
    encoded, summed = (
        _bytes_of_shards(codec(name), counts, dealt[-1], rules) for name in (rules.codec, rules.sum_codec)
    )
    edges = Edges(plan, contributing)
    sent, received = np.zeros((2, edges.peers), np.int64)
    np.add.at(sent, edges.parent, encoded[edges.shard])
    np.add.at(received, edges.child, encoded[edges.shard])
    up = np.where(edges.height[edges.shard, edges.child] > 0, summed[edges.shard], encoded[edges.shard])[edges.is_slot]
    np.add.at(sent, edges.child[edges.is_slot], up)
    np.add.at(received, edges.parent[edges.is_slot], up)
    traffic = zip(sent.tolist(), received.tolist(), strict=True)
    return _Load(traffic=tuple(Traffic(sent=out, received=into) for out, into in traffic), levels=edges.levels)


def _bytes_of_shards(one: Codec, counts: npt.NDArray[np.int64], last: int, rules: Rules) -> npt.NDArray[np.int64]:
    """Bytes [s] of all parts of each shard in codec `one`. `counts` [s] parts; `last`: who has the last, shorter."""
    first, end = rules.part_range(rules.part_count - 1)
    whole = one.encoded_bytes(rules.part_elements)
    size = counts * whole
    size[last] += one.encoded_bytes(end - first) - whole
    return size


class Edges:
    """All edges [e] of all trees of a plan at once: `Tree` for arithmetic over a thousand READYs."""

    def __init__(self, plan: Plan, contributing: int) -> None:
        parents = np.array([shard.parents for shard in plan.shards], np.int64)
        shards, self.peers = parents.shape
        self.shard, self.child = np.nonzero(parents >= 0)
        """[e] Ascending."""
        self.parent = parents[self.shard, self.child]
        self.is_slot = np.array([bool(contributing >> index & 1) for index in range(self.peers)])[self.child]
        """[e] Whether the child sends UP."""
        self.height = np.zeros((shards, self.peers), np.int64)
        """[s, n] Levels of slots below each node."""
        shard, child, parent = self.shard[self.is_slot], self.child[self.is_slot], self.parent[self.is_slot]
        for _ in range(MAX_DEPTH):
            np.maximum.at(self.height, (shard, parent), self.height[shard, child] + 1)

    @property
    def levels(self) -> int:
        return int(self.height.max())


def over_limits(roster: Roster, plan: Plan, contributing: int, rules: Rules) -> dict[int, str]:
    """READYs that would move more bytes than their limits allow, ascending, and how many.

    A limit spares its READY other duties. Its own contribution, and every part once, it moves all the same: whoever
    cannot is no use to a round, and must not be able to stop it.
    """
    if not any(ready.message.upload_limit_bytes or ready.message.download_limit_bytes for ready in roster.readys):
        return {}
    dealt = deal(roster.base.digest(), rules.part_count, plan)
    first, end = rules.part_range(rules.part_count - 1)
    size_of = codec(rules.codec).encoded_bytes
    least = (rules.part_count - 1) * size_of(rules.part_elements) + size_of(end - first)
    over: dict[int, str] = {}
    for index, traffic in enumerate(bytes_of(plan, contributing, dealt, rules)):
        ready = roster.readys[index].message
        for word, moved, limit in (
            ("send", traffic.sent, ready.upload_limit_bytes),
            ("get", traffic.received, ready.download_limit_bytes),
        ):
            if limit and moved > max(limit, least):
                over.setdefault(index, f"would {word} {moved} bytes, above its limit of {limit}")
    return over


def level_count(plan: Plan, contributing: int) -> int:
    """Levels at which sums are made: 0 for a READY alone, 1 for a flat plan, up to `MAX_DEPTH`."""
    return Edges(plan, contributing).levels


def level_durations(
    plan: Plan,
    contributing: int,
    dealt: Sequence[int],
    rules: Rules,
    *,
    transfer_s: float | None = None,
    latency_s: float = 0.0,
) -> tuple[float, ...]:
    """Durations for a roster, from one's own receipt of it: when each level closes its last part, lowest level first;
    then, as the last entry, when the last part must have come down. So one more entry than levels.

    `transfer_s`: what the bytes take at measured rates (`protocol.planner`); None: at `ASSUMED_RATE_BYTES_S`.
    `latency_s`: the slowest round trip among the READYs. Parts follow one another up the levels and down again, so the
    links' time is spent once, and each level adds one step.
    """
    load = _load(plan, contributing, tuple(dealt), rules)
    if transfer_s is None:
        transfer_s = assumed_transfer(plan, contributing, dealt, rules)
    first = min(max(rules.level_min_s, DURATION_MARGIN * transfer_s + 3 * latency_s), rules.level_max_s)
    step = min(max(rules.level_min_s, 2 * latency_s), rules.level_max_s)
    wanted = (first + level * step for level in range(load.levels + 1))
    return tuple(max(pair) for pair in zip(wanted, least_durations(plan, contributing, dealt, rules), strict=True))


def assumed_transfer(plan: Plan, contributing: int, dealt: Sequence[int], rules: Rules) -> float:
    """Seconds that the busiest READY moves bytes at `ASSUMED_RATE_BYTES_S`."""
    load = _load(plan, contributing, tuple(dealt), rules)
    return max(max(one.sent, one.received) for one in load.traffic) / ASSUMED_RATE_BYTES_S


def stretched(durations_s: Sequence[float], stretch: float, rules: Rules) -> tuple[float, ...]:
    """`stretch` times these durations, as far as the manifest lets a level last."""
    longer_s: list[float] = []
    for duration_s in durations_s:
        before_s = longer_s[-1] if longer_s else 0.0
        longer_s.append(min(stretch * duration_s, before_s + rules.level_max_s))
    return tuple(longer_s)


def least_durations(plan: Plan, contributing: int, dealt: Sequence[int], rules: Rules) -> tuple[float, ...]:
    """What a roster must give at least: `level_min_s` a level, and the time that the bytes take at the fastest rate."""
    load = _load(plan, contributing, tuple(dealt), rules)
    transfer_s = max(max(one.sent, one.received) for one in load.traffic) / FASTEST_RATE_BYTES_S
    first = max(rules.level_min_s, transfer_s)
    return tuple(first + level * rules.level_min_s for level in range(load.levels + 1))


def check_plan(roster: Roster, rules: Rules) -> str | None:
    """Why the roster's plan breaks section 3, or None. A plan is checked, never believed.

    Takes the READYs themselves as valid, apart from their tokens. A roster without a plan must not have durations.
    """
    plan = roster.plan
    if plan is None:
        return "a roster without parts has no durations" if roster.durations_s else None
    contributing = contributing_of(roster, rules)
    for index in bits(contributing):
        wrong = check_runs(roster.readys[index].message.tokens, rules.part_count)
        if wrong is not None:
            return f"READY {index}: {wrong}"
    wrong = _check_shape(plan, len(roster.readys), contributing)
    if wrong is not None:
        return wrong
    dealt = deal(roster.base.digest(), rules.part_count, plan)
    for index, why in over_limits(roster, plan, contributing, rules).items():
        return f"READY {index} {why}"
    return _check_durations(roster.durations_s, least_durations(plan, contributing, dealt, rules), rules)


def _check_shape(plan: Plan, peers: int, contributing: int) -> str | None:
    most = peers if peers <= MAX_FAN + 1 else MAX_GROUPED_SHARDS
    if not 0 < len(plan.shards) <= most:
        return f"{peers} READYs need 1 … {most} shards, not {len(plan.shards)}"
    roots: set[int] = set()
    for number, shard in enumerate(plan.shards):
        if not 0 < shard.share <= SHARE_MAX:
            return f"shard {number} has share {shard.share}, outside 1 … {SHARE_MAX}"
        wrong = _check_tree(shard.parents, peers, contributing)
        if wrong is not None:
            return f"shard {number}: {wrong}"
        if shard.root in roots:
            return f"shard {number}: READY {shard.root} is already the root of another"
        roots.add(shard.root)
    return None


def _check_tree(parents: tuple[int, ...], peers: int, contributing: int) -> str | None:
    if len(parents) != peers:
        return f"its tree holds {len(parents)} of {peers} READYs"
    if parents.count(-1) != 1:
        return f"its tree has {parents.count(-1)} roots, not one"
    if any(not -1 <= parent < peers for parent in parents):
        return f"a parent is not one of the {peers} READYs"
    root = parents.index(-1)
    if not contributing >> root & 1:
        return f"its root, READY {root}, does not contribute"
    children = [0] * peers
    for index, parent in enumerate(parents):
        if index == root:
            continue
        children[parent] += 1
        if contributing >> index & 1 and not contributing >> parent & 1:
            return f"READY {index} would send UP to READY {parent}, which does not contribute"
        at, depth = parent, 1
        while depth <= MAX_DEPTH and parents[at] != -1:
            at, depth = parents[at], depth + 1
        if depth > MAX_DEPTH:
            return f"READY {index} is deeper than {MAX_DEPTH}, or in a cycle"
    if max(children) > MAX_FAN:
        return f"READY {children.index(max(children))} has {max(children)} children, above {MAX_FAN}"
    return None


def _check_durations(durations_s: tuple[float, ...], least_s: tuple[float, ...], rules: Rules) -> str | None:
    if len(durations_s) != len(least_s):
        return f"the plan has {len(least_s)} durations (one a level, and DOWN), not {len(durations_s)}"
    before = 0.0
    for level, (given, least) in enumerate(zip(durations_s, least_s, strict=True)):
        # Written so that NaN fails. Durations may have been rounded on the way.
        if not given >= least * (1 - 1e-6):
            return f"level {level} is given {given:g} s; the plan needs at least {least:g} s"
        if not given - before <= rules.level_max_s * (1 + 1e-6):
            return f"level {level} takes {given - before:g} s, above the maximum of {rules.level_max_s:g} s"
        if given <= before:
            return f"level {level} ends at {given:g} s, not after the level below it"
        before = given
    return None
