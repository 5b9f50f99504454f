"""The weighted sum of one part, in the stated order (protocol section 4, rule 6).

    acc = 0;  t = fp32(w)·x;  acc = acc + t;  …;  mean = acc / fp32(W)

Every operation is one rounded fp32 operation, so whoever adds the same contributions in the same order gets the same
bits. Shapes: `N` elements of the part. Memory: one part of fp32, and one block of scratch while adding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from protocol.codecs import LARGEST_MAGNITUDE, Buffer, Codec, CodecError, Float32Array
from protocol.weights import as_float32, bits


class PartSum:
    """Sums one part. An `add_…` that raises CodecError has added nothing; the sum may go on without it."""

    def __init__(self, elements: int, sum_codec: Codec) -> None:
        self._sum = np.zeros(elements, np.float32)
        self._sum_codec = sum_codec

    def add_leaf(self, weight: int, codec: Codec, data: Buffer, *, largest: float = LARGEST_MAGNITUDE) -> None:
        """Add a contribution's codec bytes. `largest` is the bound that its READY declared."""
        codec.check(data, len(self._sum), largest=min(largest, LARGEST_MAGNITUDE))
        factor = as_float32(weight)
        with np.errstate(all="ignore"):
            for start, values in codec.blocks(data, len(self._sum)):
                np.multiply(values, factor, out=values)
                block = self._sum[start : start + len(values)]
                np.add(block, values, out=block)

    def add_partial(self, data: Buffer, *, largest: float = math.inf) -> None:
        """Add an inner node's partial sum, which is weighted already. `largest`: see `partial_bound`."""
        self._sum_codec.check(data, len(self._sum), largest=largest)
        with np.errstate(all="ignore"):
            for start, values in self._sum_codec.blocks(data, len(self._sum)):
                block = self._sum[start : start + len(values)]
                np.add(block, values, out=block)

    def partial(self) -> bytes:
        """What an inner node sends to its parent."""
        return self._sum_codec.encode(self._sum)

    def mean(self, total_weight: int) -> Float32Array:
        """The weighted mean [N]; ends the sum, whose memory it takes over. `total_weight`: `W` of all that is in."""
        if total_weight <= 0:
            raise ValueError(f"a mean needs a total weight above 0, not {total_weight}")
        mean, self._sum = self._sum, np.zeros(0, np.float32)
        with np.errstate(all="ignore"):
            np.divide(mean, as_float32(total_weight), out=mean)
        if not np.isfinite(mean).all():
            raise CodecError("the sum overflowed; partial sums must be checked against their bound")
        return mean


def partial_bound(weights: Sequence[int], bitmap: int, largest: Sequence[float]) -> float:
    """No partial sum over `bitmap` may exceed it: weights times declared bounds. `weights`, `largest` [READYs]."""
    return math.fsum(weights[index] * min(largest[index], LARGEST_MAGNITUDE) for index in bits(bitmap))
