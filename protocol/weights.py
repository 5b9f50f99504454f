"""Whose work counts how much (protocol section 3). Weights are never sent: all derive them from the roster.

`w_i(p) = min(tokens_i(p), floor(ratio × median of tokens(p)))`, where the median is over the READYs that contribute to
part `p` (tokens above zero, with a slot); of an even number it is the mean of the middle two. All in exact integers and
rationals; a contributor's weight is at least 1. Bitmaps are integers: bit `i` is the roster's i-th READY.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import accumulate

import numpy as np

TokenRuns = Sequence[tuple[int, int]]
"""Run-length (parts, tokens) over all parts of the fragment, as in READY."""

ANSWERS_KEPT = 4096
"""Bitmaps of one roster whose weight is remembered; they come from peers."""

TOKENS_MAX = 2**53
"""Tokens of one READY stay below it, so that a weight is exact as float64 and rounds to float32 once."""


def tokens_of(runs: TokenRuns, part: int) -> int:
    """Tokens that a READY claims for `part`; 0 behind the last run."""
    for parts, tokens in runs:
        if part < parts:
            return tokens
        part -= parts
    return 0


def check_runs(runs: TokenRuns, part_count: int) -> str | None:
    """Why `runs` cannot stand in a READY, or None. Empty runs are fine: that peer does not contribute."""
    if any(parts < 1 or not 0 <= tokens < TOKENS_MAX for parts, tokens in runs):
        return f"a run of tokens needs at least one part and 0 … {TOKENS_MAX - 1} tokens"
    covered = sum(parts for parts, _ in runs)
    if runs and covered != part_count:
        return f"the runs of tokens cover {covered} parts; the fragment has {part_count}"
    return None


def part_weights(tokens: Sequence[int], ratio: float) -> list[int]:
    """Weights of one part's READYs, in roster order; 0 where tokens are 0 (no slot, absent, or nothing to give)."""
    contributing = sorted(value for value in tokens if value > 0)
    if not contributing:
        return [0] * len(tokens)
    count = len(contributing)
    twice_median = contributing[(count - 1) // 2] + contributing[count // 2]
    cap = max(1, int(Fraction(ratio) * twice_median / 2))
    return [min(value, cap) if value > 0 else 0 for value in tokens]


def total(weights: Sequence[int], bitmap: int) -> int:
    """`W`: the sum of the weights that `bitmap` names."""
    return sum(weights[index] for index in bits(bitmap))


def enough(weights: Sequence[int], bitmap: int) -> bool:
    """Whether `bitmap` holds at least half of the roster's weight: below it a root makes no header."""
    everything = sum(weights)
    return everything > 0 and 2 * total(weights, bitmap) >= everything


def as_float32(weight: int) -> np.float32:
    """`fp32(w)`: rounded once, half to even."""
    return np.float32(float(weight))


def bits(bitmap: int) -> Iterator[int]:
    """Indices of the set bits, ascending."""
    while bitmap:
        lowest = bitmap & -bitmap
        yield lowest.bit_length() - 1
        bitmap ^= lowest


class RosterWeights:
    """Weights of all parts of one roster, computed once a stretch of parts over which no READY's tokens change."""

    def __init__(self, tokens: Sequence[TokenRuns], contributing: int, ratio: float) -> None:
        """`tokens` [READYs]; READYs outside the bitmap `contributing` have no weight whatever they claim."""
        self._ratio = ratio
        runs = [of_ready if contributing >> index & 1 else () for index, of_ready in enumerate(tokens)]
        self._ends = [list(accumulate(parts for parts, _ in of_ready)) for of_ready in runs]
        """[READYs] One past the last part of each run."""
        self._tokens = [(*(count for _, count in of_ready), 0) for of_ready in runs]
        """[READYs] Tokens of each run, and 0 behind the last."""
        self._stretch_ends = sorted({end for of_ready in self._ends for end in of_ready})
        self._weights: dict[int, tuple[int, ...]] = {}
        """Stretch → weights [READYs]."""
        self._enough: dict[tuple[int, int], bool] = {}
        """(stretch, bitmap) → whether it is enough. Most parts of a shard have the same bitmap."""

    def at(self, part: int) -> tuple[int, ...]:
        """Weights [READYs] of `part`."""
        stretch = bisect_right(self._stretch_ends, part)
        weights = self._weights.get(stretch)
        if weights is None:
            tokens = [counts[bisect_right(ends, part)] for ends, counts in zip(self._ends, self._tokens, strict=True)]
            weights = self._weights[stretch] = tuple(part_weights(tokens, self._ratio))
        return weights

    def enough(self, part: int, bitmap: int) -> bool:
        """`enough` for the weights of `part`."""
        key = (bisect_right(self._stretch_ends, part), bitmap)
        known = self._enough.get(key)
        if known is None:
            if len(self._enough) >= ANSWERS_KEPT:
                self._enough.clear()
            known = self._enough[key] = enough(self.at(part), bitmap)
        return known
