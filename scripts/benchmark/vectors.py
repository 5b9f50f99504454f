"""What the hosts of a benchmark average, and whether they did: inputs known to the judge, and their mean in fp64.

Shapes: `N` values of a vector, `n` hosts. Inputs are drawn from a seed: normal, with a scale that differs from one
block of `BLOCK_ELEMENTS` to the next by up to a hundredfold, as a model's tensors differ. Each round multiplies them by
its own power of two, so that a result of another round is not taken for a right one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from protocol.codecs import BLOCK_ELEMENTS, Float32Array
from scripts.benchmark.bounds import Bound

CHECK_ELEMENTS = 16 * BLOCK_ELEMENTS
"""Checked at a time: fp64 of all hosts stays within some tens of megabytes."""

SCALES = (1.0, 0.5, 2.0, 0.25)
"""Of the rounds, in turn; none like the one before. Exact in every codec here but where fp16 loses small values."""


class Shared:
    """A vector [N] of fp32 in memory that other processes map: `fd` is theirs to inherit."""

    def __init__(self, elements: int) -> None:
        self.fd = os.memfd_create("atoll-bench", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, 4 * elements)
        self.values: Float32Array = np.memmap(f"/proc/self/fd/{self.fd}", np.float32, "r+", shape=(elements,))

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Inputs:
    """One vector for each host."""

    def __init__(self, hosts: int, elements: int, *, seed: int = 1) -> None:
        self.elements = elements
        self.vectors = [Shared(elements) for _ in range(hosts)]
        for index, vector in enumerate(self.vectors):
            draw = np.random.default_rng([seed, index])
            for start in range(0, elements, BLOCK_ELEMENTS):
                block = vector.values[start : start + BLOCK_ELEMENTS]
                scale = np.float32(10.0 ** draw.uniform(-4.0, -2.0))
                np.multiply(draw.standard_normal(len(block), np.float32), scale, out=block)

    def close(self) -> None:
        for vector in self.vectors:
            vector.close()

    def block(self, start: int, stop: int, round_number: int) -> npt.NDArray[np.float64]:
        """[n, stop − start] What the hosts bring to that round."""
        scale = scale_of(round_number)
        return np.stack([vector.values[start:stop].astype(np.float64) * scale for vector in self.vectors])


def scale_of(round_number: int) -> float:
    return SCALES[round_number % len(SCALES)]


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """How far results are from the inputs' mean in fp64."""

    right: bool
    """No value of any host is off by more than its bound."""
    worst: float
    """The largest error, as a share of what is allowed there."""
    rms_error: float
    """Of all hosts' values, relative to the root mean square of the mean."""
    same_bits: bool
    """All hosts hold the same."""
    why: str = ""
    """Of a wrong result: one sentence."""


def judge(results: Sequence[Float32Array], inputs: Inputs, round_number: int, bound: Bound) -> Verdict:
    """Compare every value of every host with the mean in fp64."""
    tally = _Tally()
    for start in range(0, inputs.elements, CHECK_ELEMENTS):
        stop = min(start + CHECK_ELEMENTS, inputs.elements)
        brought = inputs.block(start, stop, round_number)
        mean = brought.mean(axis=0)
        allowed = bound.allowed(brought, mean)
        tally.mean_squares += float(np.square(mean).sum())
        seen: list[Float32Array] = []
        for result in results:
            values = result[start:stop]
            if seen and np.array_equal(values.view(np.uint32), seen[0].view(np.uint32)):
                tally.add_again()
                continue
            tally.same_bits = tally.same_bits and not seen
            seen.append(values)
            tally.add(values, mean, allowed)
    return tally.verdict(len(results), inputs.elements, bound)


@dataclass
class _Tally:
    mean_squares: float = 0.0
    error_squares: float = 0.0
    worst: float = 0.0
    same_bits: bool = True
    _last_squares: float = 0.0

    def add(self, values: Float32Array, mean: npt.NDArray[np.float64], allowed: npt.NDArray[np.float64]) -> None:
        errors = np.abs(values - mean)
        with np.errstate(divide="ignore", invalid="ignore"):
            shares = np.where(errors == 0, 0.0, errors / allowed)
        worst = float(shares.max())
        # Written so that NaN counts as wrong.
        self.worst = self.worst if worst <= self.worst else worst
        self._last_squares = float(np.square(errors).sum())
        self.error_squares += self._last_squares

    def add_again(self) -> None:
        """The first host's values, once more."""
        self.error_squares += self._last_squares

    def verdict(self, hosts: int, elements: int, bound: Bound) -> Verdict:
        rms = float(np.sqrt(self.error_squares / hosts / max(self.mean_squares, 1e-300)))
        why = ""
        if not rms <= bound.rms_limit:
            why = f"its results are off by {rms:.1%} of the mean (root mean square), above {bound.rms_limit:.1%}"
        elif bound.hard and not self.worst <= 1:
            why = f"a value is off by {self.worst:.3g} times what {bound.name} allows there"
        return Verdict(right=not why, worst=self.worst, rms_error=rms, same_bits=self.same_bits, why=why)
