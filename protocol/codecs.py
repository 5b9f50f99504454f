"""Codecs: how float32 values travel (design section 9).

Shapes: `N` values of a part, `B` values of a codec block, `K = ceil(N / B)` blocks. All bytes are little-endian.

| codec | bytes                                             | error of a value                               |
|-------|---------------------------------------------------|------------------------------------------------|
| fp32  | N × fp32                                          | none                                           |
| fp16  | N × fp16                                          | 2⁻¹¹ of it, or 2⁻²⁵; saturates at ±65504       |
| int8  | K × fp32 scale, N × int8, B = 256                 | half a scale; scale = block's absmax / 127     |
| int4  | K × fp32 scale, ⌈N/2⌉ × 2 codes, B = 64           | half a scale; scale = block's absmax / 7       |
| sum16 | N × fp16, K × int8 exponent, B = 256              | 2⁻¹¹ of it, or 2⁻³⁸ of the block's absmax      |

Decoding is one fp32 multiplication of two exactly represented numbers, whose product is a normal number or zero. So it
gives the same bits on every processor, also where a library has told the processor to flush subnormals to zero.
Encoding is defined just as exactly here, but nothing depends on it: a device may encode in another way.

The size is a pure function of the element count. The decoder rejects what no encoder emits: other sizes, non-finite
values, reserved codes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

Float32Array: TypeAlias = npt.NDArray[np.float32]
Buffer: TypeAlias = bytes | bytearray | memoryview

BLOCK_ELEMENTS = 65_536
"""Values handled at a time, a multiple of every codec's block: 256 KiB of fp32, which stays in a core's cache."""

LARGEST_MAGNITUDE = 2.0**64
"""No declared bound may exceed it: 2⁵³ tokens times this times 2¹⁰ contributors is still a finite float32."""

SMALLEST_NORMAL = 2.0**-126
_FLOAT32_MAX = float(np.finfo(np.float32).max)
_FLOAT16_MAX = 65504.0


class CodecError(ValueError):
    """Bytes that no encoder emits, or values that cannot be encoded. Says which rule they break."""


class Codec(Protocol):
    """Encode to bytes, decode to values. Stateless; all methods may run in any thread."""

    @property
    def name(self) -> str: ...

    def encoded_bytes(self, elements: int) -> int:
        """Length of the encoding of `elements` values."""
        ...

    def encode(self, values: Float32Array) -> bytes:
        """`values` [N] → bytes. Raises CodecError when a value is NaN or infinite."""
        ...

    def check(self, data: Buffer, elements: int, *, largest: float = math.inf) -> None:
        """Everything that decoding would reject, and whether some value may exceed `largest` in magnitude.

        `largest` is the sender's declared bound of the values before encoding; rounding is allowed for. Much cheaper
        than decoding. Raises CodecError.
        """
        ...

    def decode(self, data: Buffer, elements: int) -> Float32Array:
        """Bytes → values [N]. Raises CodecError."""
        ...

    def decode_into(self, data: Buffer, out: Float32Array) -> None:
        """Like `decode`, into `out` [N], which is untouched when CodecError is raised."""
        ...

    def blocks(self, data: Buffer, elements: int) -> Iterator[tuple[int, Float32Array]]:
        """Decode checked bytes at most `BLOCK_ELEMENTS` values at a time: (first element, scratch [≤ BLOCK_ELEMENTS]).

        The scratch is overwritten by the next step; the caller may change it. Only after `check` passed.
        """
        ...


def codec(name: str) -> Codec:
    """Raises ValueError for a name that is not a codec."""
    try:
        return CODECS[name]
    except KeyError:
        raise ValueError(f"codec {name!r} is unknown; use one of {', '.join(sorted(CODECS))}") from None


class _Base:
    """What the codecs share. A codec supplies `_check`, `_encode_block` and `_decode_block`."""

    name: str
    block: int
    """Values that share a scale."""

    def encoded_bytes(self, elements: int) -> int:
        raise NotImplementedError

    def encode(self, values: Float32Array) -> bytes:
        if values.dtype != np.float32 or values.ndim != 1:
            raise CodecError(f"{self.name} encodes a vector of float32, not {values.dtype} of shape {values.shape}")
        elements = len(values)
        data = bytearray(self.encoded_bytes(elements))
        with np.errstate(all="ignore"):
            for start in range(0, elements, BLOCK_ELEMENTS):
                self._encode_block(values[start : start + BLOCK_ELEMENTS], data, elements, start)
        return bytes(data)

    def check(self, data: Buffer, elements: int, *, largest: float = math.inf) -> None:
        expected = self.encoded_bytes(elements)
        if len(data) != expected:
            raise CodecError(f"{self.name} encodes {elements} values in {expected} bytes, not {len(data)}")
        if elements == 0:
            return
        with np.errstate(all="ignore"):
            self._check(data, elements, largest)

    def decode(self, data: Buffer, elements: int) -> Float32Array:
        self.check(data, elements)
        out = np.empty(elements, np.float32)
        self._decode(data, out)
        return out

    def decode_into(self, data: Buffer, out: Float32Array) -> None:
        if out.dtype != np.float32 or out.ndim != 1:
            raise CodecError(f"{self.name} decodes into a vector of float32, not {out.dtype} of shape {out.shape}")
        self.check(data, len(out))
        self._decode(data, out)

    def blocks(self, data: Buffer, elements: int) -> Iterator[tuple[int, Float32Array]]:
        scratch = np.empty(min(elements, BLOCK_ELEMENTS), np.float32)
        for start in range(0, elements, BLOCK_ELEMENTS):
            block = scratch[: min(BLOCK_ELEMENTS, elements - start)]
            with np.errstate(all="ignore"):
                self._decode_block(data, elements, start, block)
            yield start, block

    def _decode(self, data: Buffer, out: Float32Array) -> None:
        with np.errstate(all="ignore"):
            for start in range(0, len(out), BLOCK_ELEMENTS):
                self._decode_block(data, len(out), start, out[start : start + BLOCK_ELEMENTS])

    def _block_count(self, elements: int) -> int:
        return -(-elements // self.block)

    def _absmax(self, values: Float32Array) -> Float32Array:
        """Largest magnitude of each block [K]. NaN and infinity are found here, in passing."""
        largest = np.maximum.reduceat(np.abs(values), np.arange(0, len(values), self.block)).astype(np.float32)
        self._require_finite(largest)
        return largest

    def _require_finite(self, values: npt.NDArray[Any]) -> None:
        if not np.isfinite(values).all():
            raise CodecError(f"{self.name} cannot encode NaN or infinity; leave such a contribution out")

    def _require_within(self, magnitude: float, largest: float) -> None:
        # Written so that NaN fails.
        if not magnitude <= largest:
            raise CodecError(f"{self.name} holds magnitude {magnitude:g}, above the declared bound {largest:g}")

    def _encode_block(self, values: Float32Array, data: bytearray, elements: int, start: int) -> None:
        raise NotImplementedError

    def _decode_block(self, data: Buffer, elements: int, start: int, out: Float32Array) -> None:
        raise NotImplementedError

    def _check(self, data: Buffer, elements: int, largest: float) -> None:
        raise NotImplementedError


class _Fp32(_Base):
    name = "fp32"
    block = 1

    def encoded_bytes(self, elements: int) -> int:
        return 4 * elements

    def _encode_block(self, values: Float32Array, data: bytearray, elements: int, start: int) -> None:
        self._require_finite(values)
        np.frombuffer(data, "<f4", len(values), 4 * start)[:] = values

    def _decode_block(self, data: Buffer, elements: int, start: int, out: Float32Array) -> None:
        out[:] = np.frombuffer(data, "<f4", len(out), 4 * start)

    def _check(self, data: Buffer, elements: int, largest: float) -> None:
        values = np.frombuffer(data, "<f4", elements)
        # A reduction keeps NaN, so two passes without a temporary find everything.
        magnitude = max(abs(float(values.max())), abs(float(values.min())))
        if not math.isfinite(magnitude):
            raise CodecError("fp32 holds NaN or infinity")
        self._require_within(magnitude, largest)


class _Fp16(_Base):
    name = "fp16"
    block = 1

    def encoded_bytes(self, elements: int) -> int:
        return 2 * elements

    def _encode_block(self, values: Float32Array, data: bytearray, elements: int, start: int) -> None:
        self._require_finite(values)
        np.frombuffer(data, "<f2", len(values), 2 * start)[:] = np.clip(values, -_FLOAT16_MAX, _FLOAT16_MAX)

    def _decode_block(self, data: Buffer, elements: int, start: int, out: Float32Array) -> None:
        out[:] = np.frombuffer(data, "<f2", len(out), 2 * start)

    def _check(self, data: Buffer, elements: int, largest: float) -> None:
        magnitude = _largest_half(data, elements, 0)
        if magnitude is None:
            raise CodecError("fp16 holds NaN or infinity")
        self._require_within(magnitude, largest * (1 + 2.0**-10) + 2.0**-24)


class _Int8(_Base):
    """Symmetric absmax: `scale = absmax / 127`, `code = round(x · (127 / absmax))`, half to even; −128 is reserved."""

    name = "int8"
    block = 256

    def encoded_bytes(self, elements: int) -> int:
        return 4 * self._block_count(elements) + elements

    def _encode_block(self, values: Float32Array, data: bytearray, elements: int, start: int) -> None:
        scales, factors = _scales(self._absmax(values), 127)
        np.frombuffer(data, "<f4", len(scales), 4 * (start // self.block))[:] = scales
        codes = np.frombuffer(data, np.int8, len(values), 4 * self._block_count(elements) + start)
        scaled = _by_block(values, factors, self.block, np.empty_like(values))
        np.rint(scaled, out=scaled)
        np.copyto(codes, scaled, casting="unsafe")

    def _decode_block(self, data: Buffer, elements: int, start: int, out: Float32Array) -> None:
        scales = np.frombuffer(data, "<f4", self._block_count(len(out)), 4 * (start // self.block))
        out[:] = np.frombuffer(data, np.int8, len(out), 4 * self._block_count(elements) + start)
        _by_block(out, scales, self.block, out)

    def _check(self, data: Buffer, elements: int, largest: float) -> None:
        scales = np.frombuffer(data, "<f4", self._block_count(elements))
        _check_scales(self, scales, 127, largest)
        if np.frombuffer(data, np.int8, elements, 4 * len(scales)).min() == -128:
            raise CodecError("int8 holds the reserved code -128")


class _Int4(_Base):
    """As int8 with codes −7 … 7, stored plus 8 in nibbles; the even element has the low nibble; 0 is reserved."""

    name = "int4"
    block = 64

    def encoded_bytes(self, elements: int) -> int:
        return 4 * self._block_count(elements) + (elements + 1) // 2

    def _encode_block(self, values: Float32Array, data: bytearray, elements: int, start: int) -> None:
        scales, factors = _scales(self._absmax(values), 7)
        np.frombuffer(data, "<f4", len(scales), 4 * (start // self.block))[:] = scales
        scaled = _by_block(values, factors, self.block, np.empty_like(values))
        np.rint(scaled, out=scaled)
        scaled += np.float32(8)
        nibbles = np.full(len(values) + len(values) % 2, 8, np.uint8)
        np.copyto(nibbles[: len(values)], scaled, casting="unsafe")
        pairs = np.frombuffer(data, np.uint8, len(nibbles) // 2, 4 * self._block_count(elements) + start // 2)
        np.left_shift(nibbles[1::2], 4, out=pairs)
        pairs |= nibbles[0::2]

    def _decode_block(self, data: Buffer, elements: int, start: int, out: Float32Array) -> None:
        scales = np.frombuffer(data, "<f4", self._block_count(len(out)), 4 * (start // self.block))
        pairs = np.frombuffer(data, np.uint8, (len(out) + 1) // 2, 4 * self._block_count(elements) + start // 2)
        out[0::2] = _NIBBLES[pairs & 15]
        out[1::2] = _NIBBLES[pairs[: len(out) // 2] >> 4]
        _by_block(out, scales, self.block, out)

    def _check(self, data: Buffer, elements: int, largest: float) -> None:
        scales = np.frombuffer(data, "<f4", self._block_count(elements))
        _check_scales(self, scales, 7, largest)
        pairs = np.frombuffer(data, np.uint8, offset=4 * len(scales))
        if pairs.min() < 16 or (pairs & 15).min() == 0:
            raise CodecError("int4 holds the reserved code 0")
        if elements % 2 and pairs[-1] >> 4 != 8:
            raise CodecError("int4 has a value behind the last one")


class _Sum16(_Base):
    """Partial sums: fp16 values times a power of two per block, chosen so that the block's absmax is 2¹³ … 2¹⁴.

    Exponents −102 … 113: below, fp16's smallest step would decode to a float32 that is not normal. Values within 2⁻²⁷
    of the block's largest keep 11 bits.
    """

    name = "sum16"
    block = 256
    least_exponent, greatest_exponent = -102, 113
    half_limit = 2.0**15
    """Largest magnitude before scaling. With the greatest exponent it must stay below, or the product is infinite."""

    def encoded_bytes(self, elements: int) -> int:
        return 2 * elements + self._block_count(elements)

    def _encode_block(self, values: Float32Array, data: bytearray, elements: int, start: int) -> None:
        # absmax = mantissa · 2^exponent with mantissa in [½, 1)
        exponents = np.clip(np.frexp(self._absmax(values))[1] - 14, self.least_exponent, self.greatest_exponent)
        at = 2 * elements + start // self.block
        np.frombuffer(data, np.int8, len(exponents), at)[:] = exponents
        scaled = _by_block(values, _powers_of_two(-exponents), self.block, np.empty_like(values))
        if exponents.max() == self.greatest_exponent:
            np.clip(scaled, -_BELOW_2_15, _BELOW_2_15, out=scaled)
        np.copyto(np.frombuffer(data, "<f2", len(values), 2 * start), scaled, casting="unsafe")

    def _decode_block(self, data: Buffer, elements: int, start: int, out: Float32Array) -> None:
        at = 2 * elements + start // self.block
        exponents = np.frombuffer(data, np.int8, self._block_count(len(out)), at)
        out[:] = np.frombuffer(data, "<f2", len(out), 2 * start)
        _by_block(out, _powers_of_two(exponents), self.block, out)

    def _check(self, data: Buffer, elements: int, largest: float) -> None:
        exponents = np.frombuffer(data, np.int8, self._block_count(elements), 2 * elements)
        greatest = int(exponents.max())
        if exponents.min() < self.least_exponent or greatest > self.greatest_exponent:
            raise CodecError(f"sum16 holds an exponent outside {self.least_exponent} … {self.greatest_exponent}")
        magnitude = _largest_half(data, elements, 0)
        if magnitude is None:
            raise CodecError("sum16 holds NaN or infinity")
        limit = _BELOW_2_15 if greatest == self.greatest_exponent else self.half_limit
        if magnitude > limit:
            raise CodecError(f"sum16 holds magnitude {magnitude:g} before scaling, above {limit:g}")
        if largest < math.inf:
            # Per block, without decoding: the magnitude bits of an fp16 order like the numbers themselves.
            halves = np.frombuffer(data, "<u2", elements) & np.uint16(0x7FFF)
            tops = np.maximum.reduceat(halves, np.arange(0, elements, self.block)).view(np.float16)
            top = float(np.ldexp(tops.astype(np.float64), exponents).max())
            # Sums of sums round once per level.
            self._require_within(top, largest * (1 + 2.0**-8) + SMALLEST_NORMAL)


_BELOW_2_15 = 32752.0
"""The largest fp16 below 2¹⁵."""

_NIBBLES = np.arange(-8, 8, dtype=np.float32)


def _scales(absmax: Float32Array, codes: int) -> tuple[Float32Array, Float32Array]:
    """Scales [K] and the factors [K] that map a block onto ±codes. A scale below the normal numbers becomes zero."""
    scales = absmax / np.float32(codes)
    scales[scales < np.float32(SMALLEST_NORMAL)] = 0
    factors = np.divide(np.float32(codes), absmax, out=np.zeros_like(absmax), where=scales > 0)
    # The rounded scale times `codes` may overflow where absmax is float32's largest; one step less does not.
    too_large = np.isinf(scales * np.float32(codes))
    scales[too_large] = np.nextafter(scales[too_large], np.float32(0))
    return scales, factors


def _check_scales(codec: _Base, scales: npt.NDArray[np.float32], codes: int, largest: float) -> None:
    # The bits of non-negative floats order like the floats; negative zero and NaN of either sign are above all.
    bits = scales.view("<u4")
    top = np.frombuffer(bits.max().tobytes(), np.float32)[0]
    if not np.isfinite(top * np.float32(codes)) or np.signbit(top):
        raise CodecError(f"{codec.name} holds a scale that is negative, not finite or too large")
    if ((bits > 0) & (bits < _SMALLEST_NORMAL_BITS)).any():
        raise CodecError(f"{codec.name} holds a scale below {SMALLEST_NORMAL:g} that is not zero")
    codec._require_within(float(top) * codes, largest * (1 + 2.0**-20))


_SMALLEST_NORMAL_BITS = np.uint32(0x0080_0000)


def _by_block(values: Float32Array, factors: Float32Array, block: int, out: Float32Array) -> Float32Array:
    """`out[i] = values[i] · factors[i // block]`, one fp32 multiplication each; `out` may be `values`."""
    whole = len(values) // block * block
    count = whole // block
    np.multiply(values[:whole].reshape(-1, block), factors[:count, None], out=out[:whole].reshape(-1, block))
    if whole < len(values):
        np.multiply(values[whole:], factors[count], out=out[whole:])
    return out


def _powers_of_two(exponents: npt.NDArray[Any]) -> Float32Array:
    """2^exponent as float32, built from bits: a mathematics library's `exp2` need not be exact."""
    return ((exponents.astype(np.int32) + 127) << 23).view(np.float32)


def _largest_half(data: Buffer, elements: int, offset: int) -> float | None:
    """The largest magnitude among fp16 values, or None when one is not finite. No conversion of all of them."""
    bits = int((np.frombuffer(data, "<u2", elements, offset) & np.uint16(0x7FFF)).max())
    if bits >= 0x7C00:
        return None
    return float(np.frombuffer(bits.to_bytes(2, "little"), "<f2")[0])


CODECS: dict[str, Codec] = {instance.name: instance for instance in (_Fp32(), _Fp16(), _Int8(), _Int4(), _Sum16())}
