"""How much of the vector each shard's root reduces, so that the slowest peer is done first (design section 7).

With the whole vector in shard `s`, resource `r` (a node's uplink or downlink, or one slow pair of nodes) would be busy
for `seconds[r, s]`; with shares `x` it is for `(seconds @ x)[r]`. The least of the largest is a small linear program.
Where it leaves room, duties are spread in proportion to what they cost, so that the answer is one and not many.

A flat plan without slow pairs has a closed form, in which SciPy is not needed: it takes 51 MB and 0.4 s to import.

Shapes: `n` READYs, `s` shards, `r` resources.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from protocol.codecs import codec
from protocol.links import RatesArray, Terrain
from protocol.plan import Plan
from protocol.planning import Edges
from protocol.rules import Rules

SHARE_UNITS = 10_000
"""Shares are whole parts of this many."""
LARGEST_SHARE = 0.45
"""Of one root, where there are others: half of the parts suffice for a round, so that no one root's death ends an
attempt."""
_ROUNDING = 0.5 + 1e-4
"""A hair beside the half: solutions that are simple fractions do not depend on the last bits of a solver's answer."""
_BISECTIONS = 200
_EXACT = 1e-12
_SLACK = 1e-6
"""Of the least time: what the second program may exceed it by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeVector:
    """Bytes of the whole vector."""

    encoded: int
    """In the codec of contributions and results."""
    summed: int
    """In the sum codec, for partial sums."""

    @classmethod
    def of(cls, rules: Rules) -> WholeVector:
        first, end = rules.part_range(rules.part_count - 1)
        encoded, summed = (
            (rules.part_count - 1) * one.encoded_bytes(rules.part_elements) + one.encoded_bytes(end - first)
            for one in (codec(rules.codec), codec(rules.sum_codec))
        )
        return cls(encoded=encoded, summed=summed)


def seconds_of(plan: Plan, contributing: int, terrain: Terrain, rules: Rules) -> RatesArray:
    """[r, s] What each resource would be busy for, with all of the vector in one shard."""
    whole = WholeVector.of(rules)
    edges = Edges(plan, contributing)
    slot = edges.is_slot
    up = np.where(edges.height[edges.shard, edges.child] > 0, whole.summed, whole.encoded)[slot]
    sent, received = np.zeros((2, len(plan.shards), edges.peers))
    np.add.at(sent, (edges.shard, edges.parent), whole.encoded)
    np.add.at(received, (edges.shard, edges.child), whole.encoded)
    np.add.at(sent, (edges.shard[slot], edges.child[slot]), up)
    np.add.at(received, (edges.shard[slot], edges.parent[slot]), up)
    rows = [sent.T / terrain.up_bytes_s[:, None], received.T / terrain.down_bytes_s[:, None]]
    slow = np.isfinite(terrain.pair_bytes_s)
    if slow.any():
        # One row a slow pair, and a last one for all the others: there are a million pairs among a thousand.
        row_of = np.full(slow.shape, -1)
        row_of[slow] = np.arange(slow.sum())
        between = np.zeros((int(slow.sum()) + 1, len(plan.shards)))
        np.add.at(between, (row_of[edges.parent, edges.child], edges.shard), whole.encoded)
        np.add.at(between, (row_of[edges.child[slot], edges.parent[slot]], edges.shard[slot]), up)
        rows.append(between[:-1] / terrain.pair_bytes_s[slow][:, None])
    return np.concatenate(rows)


def latency_of(plan: Plan, terrain: Terrain) -> float:
    """Seconds that the first byte takes up the longest tree and down again, as far as round trips are known."""
    below_root, deeper = 0.0, 0.0
    for shard in plan.shards:
        root = shard.root
        for child, parent in enumerate(shard.parents):
            round_trip_s = terrain.round_trip_s[child, parent] if parent >= 0 else math.nan
            if parent == root:
                below_root = max(below_root, round_trip_s) if round_trip_s == round_trip_s else below_root
            elif round_trip_s == round_trip_s:
                deeper = max(deeper, round_trip_s)
    return float(below_root + deeper)


# ---------------------------------------------------------------- flat plans


def flat_shares(peers: int, contributing: int, most: RatesArray, terrain: Terrain, rules: Rules) -> RatesArray:
    """Shares [n] of a flat plan, without regard to slow pairs. `most` [n]: the largest allowed, 0 for who is no root.

    A root with share `x` sends `V·(1 + x·(n − 2))` bytes and gets `V·(1 + x·(c − 2))`, with `c` contributors and `V`
    bytes of the vector: its contribution goes to the other roots, its own parts come from all and go to all.
    """
    count, encoded = contributing.bit_count(), WholeVector.of(rules).encoded
    sends = np.array([bool(contributing >> index & 1) for index in range(peers)])
    least_s = np.maximum(np.where(sends, encoded / terrain.up_bytes_s, 0.0), encoded / terrain.down_bytes_s)
    duty_s = np.maximum(
        encoded * max(peers - 2, 0) / terrain.up_bytes_s, encoded * max(count - 2, 0) / terrain.down_bytes_s
    )
    if not duty_s.any():
        duty_s = np.ones(peers)

    def within(time_s: float) -> RatesArray:
        with np.errstate(divide="ignore", invalid="ignore"):
            up = (time_s * terrain.up_bytes_s / encoded - 1.0) / max(peers - 2, 0)
            down = (time_s * terrain.down_bytes_s / encoded - 1.0) / max(count - 2, 0)
        # Without duties in a direction nothing bounds them there.
        room = np.minimum(up if peers > 2 else np.inf, down if count > 2 else np.inf)
        return np.asarray(np.clip(np.broadcast_to(room, (peers,)), 0.0, most))

    time_s = _smallest(lambda value: float(within(value).sum()) >= 1.0, float(least_s.max()))
    room = within(time_s)
    level = _smallest(lambda value: float(np.minimum(room, value / duty_s).sum()) >= 1.0 - _EXACT, 0.0)
    shares = np.minimum(room, level / duty_s)
    return np.asarray(shares / shares.sum())


def _smallest(enough: Callable[[float], bool], least: float) -> float:
    """The smallest value from `least` on that is enough; `enough` must hold from some value on."""
    if enough(least):
        return least
    low, high = least, max(2 * least, 1e-9)
    while not enough(high):
        low, high = high, 2 * high
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


# ---------------------------------------------------------------- any plan


class NoAnswer(Exception):
    """The solver gave up."""


def program_shares(seconds: RatesArray, most: RatesArray) -> RatesArray:
    """Shares [s] of any plan's shards. `seconds` [r, s]; `most` [s]: the largest allowed, together at least 1.

    Raises NoAnswer should the solver fail, which no such program gives it cause for.
    """
    resources, shards = seconds.shape
    duty_s = (seconds - seconds.min(axis=1, keepdims=True)).max(axis=0)
    duty_s = duty_s if duty_s.any() else np.ones(shards)
    bounds = [(0.0, float(one)) for one in most]
    one = np.append(np.ones(shards), 0.0)[None]
    # Variables: the shares, then the time. Scaled, so that the solver's tolerances mean the same for all sizes.
    scale = float(seconds.max())
    rows = np.hstack([seconds / scale, np.full((resources, 1), -1.0)])
    answer = _solve(rows, np.zeros(resources), one, bounds)
    time = float(answer[-1]) * (1 + _SLACK) + _SLACK
    even = np.hstack([np.diag(duty_s / float(duty_s.max())), np.full((shards, 1), -1.0)])
    rows = np.vstack([even, np.hstack([seconds / scale, np.zeros((resources, 1))])])
    answer = _solve(rows, np.concatenate([np.zeros(shards), np.full(resources, time)]), one, bounds)
    shares = np.clip(answer[:-1], 0.0, most)
    return np.asarray(shares / shares.sum())


def warm_up() -> None:
    """Import the solver: 0.4 s of processor time and 51 MB, better spent in a thread than in the middle of a round."""
    import scipy.optimize  # noqa: F401 - Lazy on purpose: most nodes never need it.


def _solve(
    rows: RatesArray, at_most: RatesArray, sums_to_one: RatesArray, bounds: list[tuple[float, float]]
) -> RatesArray:
    """Minimise the last variable, which has no bound above."""
    from scipy.optimize import linprog

    cost = np.zeros(rows.shape[1])
    cost[-1] = 1.0
    result = linprog(
        cost,
        A_ub=rows,
        b_ub=at_most,
        A_eq=sums_to_one,
        b_eq=[1.0],
        bounds=[*bounds, (0.0, None)],
        method="highs",
    )
    if result.x is None:
        raise NoAnswer(f"the plan's linear program has no answer: {result.message}")
    return np.asarray(result.x, np.float64)


def whole_shares(shares: RatesArray) -> tuple[int, ...]:
    """As whole numbers, without a common divisor: alike where they are alike."""
    units = [math.floor(float(share) * SHARE_UNITS + _ROUNDING) for share in shares]
    if not any(units):
        units = [int(share == shares.max()) for share in shares]
    divisor = math.gcd(*units)
    return tuple(unit // divisor for unit in units)
