"""Codecs: sizes, errors of values, exact decoding, and rejection of everything that no encoder emits."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
from blake3 import blake3

from protocol.codecs import BLOCK_ELEMENTS, CODECS, LARGEST_MAGNITUDE, Codec, CodecError, codec

NAMES = sorted(CODECS)
FLOAT32_MAX = float(np.finfo(np.float32).max)
RECORDED = {
    "fp16": "c22ed619010f80f5af653e17bc6169a0",
    "fp32": "a76eefb790a228b18e3153594e845180",
    "int4": "3f268b219cd37119730e02ff9ca30c52",
    "int8": "3b97b8ff89888ebe4d24ffa7833ef74e",
    "sum16": "b1204d88b1c2e3b1a25e46ef5e7bcb8b",
}
TINIEST = float(np.finfo(np.float32).smallest_subnormal)


def gaussian(elements: int, scale: float = 1e-3, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(elements) * scale).astype(np.float32)


def bytes_of(name: str, elements: int) -> int:
    return {
        "fp32": 4 * elements,
        "fp16": 2 * elements,
        "int8": elements + 4 * math.ceil(elements / 256),
        "int4": math.ceil(elements / 2) + 4 * math.ceil(elements / 64),
        "sum16": 2 * elements + math.ceil(elements / 256),
    }[name]


def test_an_unknown_codec_is_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="codec 'int7' is unknown; use one of fp16, fp32, int4, int8, sum16"):
        codec("int7")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("elements", [0, 1, 2, 63, 65, 255, 256, 257, 5000, BLOCK_ELEMENTS, BLOCK_ELEMENTS + 257])
def test_the_size_is_a_function_of_the_count_and_values_survive(name: str, elements: int) -> None:
    one = codec(name)
    values = gaussian(elements)
    data = one.encode(values)
    assert len(data) == one.encoded_bytes(elements) == bytes_of(name, elements)
    decoded = one.decode(data, elements)
    assert decoded.dtype == np.float32
    largest = float(np.abs(values).max()) if elements else 0.0
    error = {"fp32": 0, "fp16": 2.0**-11, "int8": 0.5 / 127, "int4": 0.5 / 7, "sum16": 2.0**-11}[name]
    assert np.abs(decoded - values).max(initial=0) <= error * largest * 1.001
    one.check(data, elements, largest=largest)
    out = np.full(elements, np.nan, np.float32)
    one.decode_into(memoryview(data), out)
    assert out.tobytes() == decoded.tobytes()
    blocks = [values.copy() for _, values in one.blocks(bytearray(data), elements)]
    assert b"".join(block.tobytes() for block in blocks) == decoded.tobytes()


@pytest.mark.parametrize(("name", "rms"), [("int8", 0.0075), ("int4", 0.11), ("fp16", 3e-4), ("sum16", 2.2e-4)])
def test_relative_error_on_gaussian_values(name: str, rms: float) -> None:
    values = gaussian(100_000)
    decoded = codec(name).decode(codec(name).encode(values), len(values))
    measured = float(np.sqrt(np.mean((decoded - values) ** 2)) / np.std(values))
    assert rms / 2 < measured < rms


@pytest.mark.parametrize("name", NAMES)
def test_encoding_what_was_decoded_changes_nothing(name: str) -> None:
    one = codec(name)
    decoded = one.decode(one.encode(gaussian(3000)), 3000)
    assert one.decode(one.encode(decoded), 3000).tobytes() == decoded.tobytes()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 255, 256, BLOCK_ELEMENTS + 3])
def test_values_that_are_not_finite_cannot_be_encoded(name: str, bad: float, at: int) -> None:
    values = gaussian(BLOCK_ELEMENTS + 256)
    values[at] = bad
    with pytest.raises(CodecError, match="NaN or infinity"):
        codec(name).encode(values)


@pytest.mark.parametrize("name", NAMES)
def test_only_vectors_of_float32_are_taken(name: str) -> None:
    with pytest.raises(CodecError, match="float64"):
        codec(name).encode(np.zeros(4))  # type: ignore[arg-type]
    with pytest.raises(CodecError, match=r"\(2, 2\)"):
        codec(name).encode(np.zeros((2, 2), np.float32))
    with pytest.raises(CodecError, match="float64"):
        codec(name).decode_into(codec(name).encode(gaussian(4)), np.zeros(4))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scale", [1e-45, 1e-41, 1e-38, 2e-36, 1e-30, 1.0, 1e30, FLOAT32_MAX / 8])
def test_every_magnitude_decodes_to_finite_values_of_normal_numbers(name: str, scale: float) -> None:
    values = np.clip(gaussian(1024, 1.0), -4, 4) * np.float32(scale)
    one = codec(name)
    data = one.encode(values)
    decoded = one.decode(data, len(values))
    assert np.isfinite(decoded).all()
    one.check(data, len(values), largest=float(np.abs(values).max()))
    if name != "fp32":
        magnitudes = np.abs(decoded[decoded != 0])
        assert (magnitudes >= 2.0**-126).all(), "a subnormal product would depend on the processor's flush mode"


@pytest.mark.parametrize("name", NAMES)
def test_the_ends_of_float32_survive(name: str) -> None:
    values = np.array([FLOAT32_MAX, -FLOAT32_MAX, 0.0, -0.0, TINIEST, 1.0, -1.0, 65504.0, 65520.0], np.float32)
    decoded = codec(name).decode(codec(name).encode(values), len(values))
    top = 65504.0 if name == "fp16" else FLOAT32_MAX
    assert decoded[0] == pytest.approx(top, rel=2.0**-10)
    assert decoded[1] == -decoded[0]
    assert (decoded[2:4] == 0).all()


def test_int8_is_what_the_design_says_bit_for_bit() -> None:
    values = np.array([1.0, -0.5, 0.25, 0.0], np.float32)
    scale = np.float32(1) / np.float32(127)
    assert codec("int8").encode(values) == struct.pack("<f4b", scale, 127, -64, 32, 0)
    assert codec("int8").decode(struct.pack("<f3b", 0.1, 3, -127, 1), 3).tolist() == [
        float(np.float32(code) * np.float32(0.1)) for code in (3, -127, 1)
    ]


def test_int4_is_what_the_design_says_bit_for_bit() -> None:
    data = codec("int4").encode(np.array([7.0, -7.0, 1.0], np.float32))
    assert data == struct.pack("<f2B", 1.0, 15 | 1 << 4, 9 | 8 << 4)


def test_sum16_is_what_the_design_says_bit_for_bit() -> None:
    data = codec("sum16").encode(np.array([1.0, -0.5], np.float32))
    assert data == struct.pack("<2eb", 8192.0, -4096.0, -13)


def test_each_block_has_its_own_scale() -> None:
    for name, block, error in [("int8", 256, 1 / 127), ("int4", 64, 1 / 7), ("sum16", 256, 2.0**-10)]:
        values = np.concatenate([np.full(block, 1e-9, np.float32), np.full(block, 1e9, np.float32)])
        decoded = codec(name).decode(codec(name).encode(values), len(values))
        assert np.abs(decoded / values - 1).max() <= error


def test_sum16_keeps_small_values_beside_large_ones() -> None:
    values = np.array([1.0, 2.0**-26, 3e-8, 2.0**-37], np.float32)
    decoded = codec("sum16").decode(codec("sum16").encode(values), 4)
    assert np.abs(decoded[:3] / values[:3] - 1).max() < 2.0**-10
    assert decoded[3] == values[3], "one smallest step of fp16"


@pytest.mark.parametrize("name", NAMES)
def test_other_sizes_are_rejected(name: str) -> None:
    one = codec(name)
    data = one.encode(gaussian(300))
    for wrong in (data[:-1], data + b"\0", b"", data * 2):
        with pytest.raises(CodecError, match=rf"in {len(data)} bytes, not {len(wrong)}"):
            one.decode(wrong, 300)
    for elements in (299 if name != "int4" else 298, 301, 600, 0):
        with pytest.raises(CodecError, match="bytes, not"):
            one.check(data, elements)


def patched(one: Codec, elements: int, at: int, replacement: bytes) -> bytes:
    data = bytearray(one.encode(gaussian(elements)))
    data[at : at + len(replacement)] = replacement
    return bytes(data)


@pytest.mark.parametrize(
    ("name", "at", "replacement", "words"),
    [
        ("fp32", 40, struct.pack("<f", math.nan), "NaN"),
        ("fp32", 4 * 299, struct.pack("<f", math.inf), "NaN or infinity"),
        ("fp32", 0, struct.pack("<f", -math.inf), "NaN or infinity"),
        ("fp16", 0, struct.pack("<e", math.nan), "NaN or infinity"),
        ("fp16", 598, struct.pack("<e", -math.inf), "NaN or infinity"),
        ("int8", 0, struct.pack("<f", math.nan), "negative, not finite or too large"),
        ("int8", 4, b"\xff\xff\xff\xff", "negative, not finite or too large"),
        ("int8", 4, struct.pack("<f", math.inf), "negative, not finite or too large"),
        ("int8", 4, struct.pack("<f", 3e38), "negative, not finite or too large"),
        ("int8", 4, struct.pack("<f", -1.0), "negative, not finite or too large"),
        ("int8", 4, struct.pack("<f", -0.0), "negative, not finite or too large"),
        ("int8", 4, struct.pack("<f", 1e-39), "that is not zero"),
        ("int8", 8, b"\x80", "reserved code -128"),
        ("int8", 307, b"\x80", "reserved code -128"),
        ("int4", 16, struct.pack("<f", math.nan), "negative, not finite or too large"),
        ("int4", 16, struct.pack("<f", 1e38), "negative, not finite or too large"),
        ("int4", 16, struct.pack("<f", TINIEST), "that is not zero"),
        ("int4", 20, b"\x10", "reserved code 0"),
        ("int4", 20, b"\x01", "reserved code 0"),
        ("sum16", 0, struct.pack("<e", math.nan), "NaN or infinity"),
        ("sum16", 0, struct.pack("<e", math.inf), "NaN or infinity"),
        ("sum16", 0, struct.pack("<e", -40000.0), "above 32768"),
        ("sum16", 600, struct.pack("<b", 114), "exponent outside"),
        ("sum16", 601, struct.pack("<b", -103), "exponent outside"),
    ],
)
def test_what_no_encoder_emits_is_rejected(name: str, at: int, replacement: bytes, words: str) -> None:
    one = codec(name)
    data = patched(one, 300, at, replacement)
    out = np.full(300, 7, np.float32)
    for act in (lambda: one.decode(data, 300), lambda: one.check(data, 300), lambda: one.decode_into(data, out)):
        with pytest.raises(CodecError, match=words):
            act()
    assert (out == 7).all(), "a refused payload must not reach the output"


def test_int4_has_nothing_behind_an_odd_last_value() -> None:
    data = bytearray(codec("int4").encode(gaussian(3)))
    data[-1] = data[-1] & 15 | 9 << 4
    with pytest.raises(CodecError, match="behind the last one"):
        codec("int4").decode(bytes(data), 3)


def test_sum16_cannot_decode_to_infinity() -> None:
    with pytest.raises(CodecError, match="above 32752"):
        codec("sum16").decode(struct.pack("<eb", 32768.0, 113), 1)
    assert np.isfinite(codec("sum16").decode(struct.pack("<eb", 32752.0, 113), 1)).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("largest", [1e-30, 1e-3, 1.0, 1e4, LARGEST_MAGNITUDE])
def test_the_declared_bound_holds_for_honest_senders_only(name: str, largest: float) -> None:
    bound = float(np.float32(largest))
    honest = np.clip(gaussian(512, bound, seed=3), -bound, bound)
    honest[77] = bound
    one = codec(name)
    one.check(one.encode(honest), 512, largest=bound)
    if name == "fp16" and not 1e-3 <= largest <= 6e4:
        return  # its range is narrower than the bound
    cheating = honest.copy()
    cheating[300] = -1.02 * bound
    with pytest.raises(CodecError, match="above the declared bound"):
        one.check(one.encode(cheating), 512, largest=bound)


@pytest.mark.parametrize("name", NAMES)
def test_random_bytes_never_decode_to_anything_that_is_not_finite(name: str) -> None:
    generator = np.random.default_rng(5)
    one = codec(name)
    refused = 0
    for _ in range(200):
        data = generator.bytes(one.encoded_bytes(96))
        try:
            assert np.isfinite(one.decode(data, 96)).all()
        except CodecError:
            refused += 1
    assert refused > 0


def test_the_callers_floating_point_error_mode_does_not_matter() -> None:
    values = np.array([FLOAT32_MAX, 1.0, TINIEST, -FLOAT32_MAX], np.float32)
    with np.errstate(all="raise"):
        for name in NAMES:
            data = codec(name).encode(values)
            codec(name).check(data, 4, largest=FLOAT32_MAX)
            codec(name).decode(data, 4)
            list(codec(name).blocks(data, 4))


@pytest.mark.parametrize("name", NAMES)
def test_the_same_bits_on_every_machine(name: str) -> None:
    """Recorded once: encoding and decoding of values made by integer arithmetic."""
    count = np.arange(BLOCK_ELEMENTS + 1000, dtype=np.int64)
    values = ((count * 48_271 % 65_521).astype(np.float32) - np.float32(32_760)) * np.float32(2.0**-23)
    data = codec(name).encode(values)
    assert blake3(data + codec(name).decode(data, len(values)).tobytes()).hexdigest()[:32] == RECORDED[name]
