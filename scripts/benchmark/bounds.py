"""How far a round's result may be from the mean in fp64, value by value, for each engine and codec.

Shapes: `n` hosts, `N` values. `u = 2⁻¹¹` is fp16's unit roundoff, `2⁻²⁵` half of its smallest step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Float64Array: TypeAlias = npt.NDArray[np.float64]
Errors: TypeAlias = Callable[[Float64Array, Float64Array], Float64Array]

_HALF = 2.0**-11
_HALF_STEP = 2.0**-25
_SINGLE = 2.0**-24
_SLACK = 1 + 2.0**-10
"""Products of roundings, which the bounds below leave out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    name: str
    of: Errors
    """Inputs [n, N] and their mean [N] → the largest error [N]."""
    rms_limit: float = math.inf
    """The error's root mean square relative to the mean's must not exceed it, in any case."""
    hard: bool = True
    """False: the codec promises nothing for a single value; only `rms_limit` counts."""

    def allowed(self, inputs: Float64Array, mean: Float64Array) -> Float64Array:
        return self.of(inputs, mean) * _SLACK


def fp32_sum(inputs: Float64Array, mean: Float64Array) -> Float64Array:
    """fp32 sums in any order, then one division or multiplication: n + 1 roundings of at most Σ|x| / n."""
    return (len(inputs) + 1) * _SINGLE * _mean(np.abs(inputs)) + 2.0**-126


def atoll_fp16(inputs: Float64Array, mean: Float64Array) -> Float64Array:
    """Each contribution is rounded once, the mean once more; between them fp32."""
    return _mean(_half(inputs)) + _half(mean) + fp32_sum(inputs, mean)


def atoll_int8(inputs: Float64Array, mean: Float64Array) -> Float64Array:
    """Half a scale of each contribution's block, and of the block of what is encoded at last: the mean with errors."""
    contributed = _mean(_half_scale(inputs))
    encoded = _largest(_half_scale((np.abs(mean) + contributed)[None]))
    return contributed + encoded + fp32_sum(inputs, mean)


def summed(of: Errors, levels: int) -> Errors:
    """The same where sums travel: each of so many levels rounds its partial sums to fp16 with a block's exponent."""

    def allowed(inputs: Float64Array, mean: Float64Array) -> Float64Array:
        before = of(inputs, mean)
        total = _mean(np.abs(inputs)) + before
        block = _largest(_by_block(total[None]))
        rounding: Float64Array = levels * (_HALF * total + 2.0**-37 * block)
        # What is encoded at last holds these errors, too.
        whole: Float64Array = before + rounding + _largest(_half_scale(rounding[None])) + fp32_sum(inputs, mean)
        return whole

    return allowed


def gloo_fp16(inputs: Float64Array, mean: Float64Array) -> Float64Array:
    """fp16 all the way: inputs, n − 1 sums and the division, each rounded to at most Σ|x| (1 + u)ⁿ."""
    hosts = len(inputs)
    total = hosts * _mean(np.abs(inputs))
    roundings = (hosts - 1) * (_HALF * total * (1 + _HALF) ** hosts + _HALF_STEP)
    return _mean(_half(inputs)) + roundings / hosts + _half(total / hosts) + fp32_sum(inputs, mean)


def hivemind_fp16(inputs: Float64Array, mean: Float64Array) -> Float64Array:
    """Contributions rounded once; what comes back is the difference to one's own, rounded; the sum is fp32."""
    contributed = _mean(_half(inputs))
    difference = _largest(np.abs(mean - inputs) + contributed)
    largest = _largest(np.abs(inputs))
    return contributed + _largest(_half(inputs)) + _half(difference) + 4 * _SINGLE * largest + fp32_sum(inputs, mean)


def _mean(values: Float64Array) -> Float64Array:
    """[n, N] → [N]"""
    mean: Float64Array = values.mean(axis=0)
    return mean


def _largest(values: Float64Array) -> Float64Array:
    """[n, N] → [N]"""
    largest: Float64Array = values.max(axis=0)
    return largest


def _half(values: Float64Array) -> Float64Array:
    return _HALF * np.abs(values) + _HALF_STEP


def _half_scale(values: Float64Array) -> Float64Array:
    """[n, N] Half of 1/127 of each block's largest magnitude; the product of code and scale is rounded, too."""
    return _by_block(values) / 254 * (1 + 2.0**-20) + np.abs(values) * _SINGLE


def _by_block(values: Float64Array, block: int = 256) -> Float64Array:
    """[n, N] The largest magnitude of each value's block."""
    elements = values.shape[1]
    largest = np.maximum.reduceat(np.abs(values), np.arange(0, elements, block), axis=1)
    spread: Float64Array = np.repeat(largest, block, axis=1)[:, :elements]
    return spread


BOUNDS: dict[tuple[str, str], Bound] = {
    ("atoll", "fp32"): Bound(name="fp32", of=fp32_sum),
    ("atoll", "fp16"): Bound(name="fp16", of=atoll_fp16),
    ("atoll", "int8"): Bound(name="int8", of=atoll_int8),
    ("gloo", "fp32"): Bound(name="fp32", of=fp32_sum),
    ("gloo", "fp16"): Bound(name="fp16", of=gloo_fp16),
    ("hivemind", "fp16"): Bound(name="fp16", of=hivemind_fp16),
    ("hivemind", "uniform8"): Bound(name="uniform8", of=atoll_int8, rms_limit=0.5, hard=False),
}
"""By engine and codec. hivemind's 8 bits clip at three standard deviations of a whole tensor part, whose values
differ in scale here: no bound of one value holds, so its error is measured, and only what is no mean is refused."""


def bound_of(engine: str, codec: str, levels: int = 1) -> Bound | None:
    """`levels` of sums, of which all but the last travel as partial sums. None: that engine has no such codec."""
    bound = BOUNDS.get((engine, codec))
    if bound is None or levels < 2:
        return bound
    return replace(bound, of=summed(bound.of, levels - 1))
