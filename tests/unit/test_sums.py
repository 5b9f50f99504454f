"""The weighted sum of a part: in the stated order, atomic, within declared bounds."""

from __future__ import annotations

import numpy as np
import pytest

from protocol.codecs import BLOCK_ELEMENTS, CodecError, codec
from protocol.sums import PartSum, partial_bound

INT8, FP32, SUM16 = codec("int8"), codec("fp32"), codec("sum16")


def gaussian(elements: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(elements).astype(np.float32)


@pytest.mark.parametrize("elements", [256, 1000, BLOCK_ELEMENTS + 256])
def test_each_operation_is_one_rounded_float32_operation(elements: int) -> None:
    contributions, weights = [gaussian(elements, seed) for seed in range(4)], [3, 1000, 2**25 + 1, 7]
    acc = np.zeros(elements, np.float32)
    part_sum = PartSum(elements, SUM16)
    for x, weight in zip(contributions, weights, strict=True):
        acc = acc + np.float32(weight) * x
        part_sum.add_leaf(weight, FP32, FP32.encode(x))
    expected = acc / np.float32(sum(weights))
    assert part_sum.mean(sum(weights)).tobytes() == expected.tobytes()


def test_the_order_of_sums_is_visible_in_the_bits() -> None:
    data = [FP32.encode(gaussian(4096, seed)) for seed in range(3)]
    results = set()
    for order in [(0, 1, 2), (2, 1, 0)]:
        part_sum = PartSum(4096, SUM16)
        for index in order:
            part_sum.add_leaf(1, FP32, data[index])
        results.add(part_sum.mean(3).tobytes())
    assert len(results) == 2


def test_partial_sums_are_weighted_already() -> None:
    inner, root = PartSum(512, SUM16), PartSum(512, SUM16)
    first, second, third = (gaussian(512, seed) for seed in range(3))
    inner.add_leaf(5, INT8, INT8.encode(first))
    inner.add_leaf(7, INT8, INT8.encode(second))
    sent = inner.partial()
    root.add_leaf(2, INT8, INT8.encode(third))
    root.add_partial(sent)
    decoded = [INT8.decode(INT8.encode(x), 512) for x in (first, second, third)]
    exact = sum(w * x.astype(np.float64) for w, x in zip((5, 7, 2), decoded, strict=True)) / 14
    assert np.abs(root.mean(14) - exact).max() < 1e-2
    assert np.abs(SUM16.decode(sent, 512) - (5 * decoded[0] + 7 * decoded[1])).max() < 0.02


def test_a_refused_contribution_leaves_no_trace() -> None:
    elements = BLOCK_ELEMENTS + 512
    clean, disturbed = PartSum(elements, SUM16), PartSum(elements, SUM16)
    good = INT8.encode(gaussian(elements, 1))
    nan_at_the_end = bytearray(FP32.encode(gaussian(elements, 2)))
    nan_at_the_end[-4:] = b"\x00\x00\xc0\x7f"
    bad_code_at_the_end = bytearray(good)
    bad_code_at_the_end[-1] = 0x80
    for attempt in (
        lambda: disturbed.add_leaf(1, FP32, nan_at_the_end),
        lambda: disturbed.add_leaf(1, INT8, bad_code_at_the_end),
        lambda: disturbed.add_leaf(1, INT8, good[:-1]),
        lambda: disturbed.add_leaf(1, INT8, good, largest=1.0),
        lambda: disturbed.add_partial(b"\xff" * SUM16.encoded_bytes(elements)),
        lambda: disturbed.add_partial(SUM16.encode(gaussian(elements, 3)), largest=1.0),
    ):
        with pytest.raises(CodecError):
            attempt()
    for part_sum in (clean, disturbed):
        part_sum.add_leaf(3, INT8, good)
    assert clean.mean(3).tobytes() == disturbed.mean(3).tobytes()


def test_no_contribution_within_bounds_can_overflow_a_sum() -> None:
    """3e38 is a finite float32, and would be infinite after weighting: it is refused although nobody declared less."""
    part_sum = PartSum(256, SUM16)
    with pytest.raises(CodecError, match="above the declared bound"):
        part_sum.add_leaf(1, FP32, FP32.encode(np.full(256, 3e38, np.float32)), largest=3.4e38)
    largest = FP32.encode(np.full(256, 2.0**64, np.float32))
    for _ in range(65):
        part_sum.add_leaf(2**53 - 1, FP32, largest)
    assert SUM16.decode(part_sum.partial(), 256) == pytest.approx(65 * 2.0**117, rel=1e-3)
    assert part_sum.mean(65 * (2**53 - 1)) == pytest.approx(2.0**64, rel=1e-5)


def test_an_unbounded_partial_sum_that_overflows_is_caught() -> None:
    part_sum = PartSum(256, SUM16)
    for _ in range(4):
        part_sum.add_partial(SUM16.encode(np.full(256, 3e38, np.float32)))
    with pytest.raises(CodecError, match="overflowed"):
        part_sum.mean(1)


def test_the_bound_of_a_partial_sum() -> None:
    weights, largest = (2, 0, 5, 1), (1.0, 9.0, 0.5, float("inf"))
    assert partial_bound(weights, 0b0101, largest) == 4.5
    assert partial_bound(weights, 0b1000, largest) == 2.0**64
    honest = SUM16.encode(np.full(256, 4.5, np.float32))
    PartSum(256, SUM16).add_partial(honest, largest=partial_bound(weights, 0b0101, largest))
    with pytest.raises(CodecError, match="above the declared bound"):
        PartSum(256, SUM16).add_partial(honest, largest=partial_bound(weights, 0b0001, largest))


def test_a_mean_without_weight_is_refused() -> None:
    with pytest.raises(ValueError, match="above 0"):
        PartSum(256, SUM16).mean(0)


def test_negative_zero_is_not_kept() -> None:
    part_sum = PartSum(256, SUM16)
    part_sum.add_leaf(1, FP32, FP32.encode(np.full(256, -0.0, np.float32)))
    assert not np.signbit(part_sum.mean(1)).any()


def test_the_callers_floating_point_error_mode_does_not_matter() -> None:
    with np.errstate(all="raise"):
        part_sum = PartSum(256, SUM16)
        part_sum.add_leaf(3, FP32, FP32.encode(np.full(256, 1e-45, np.float32)))
        part_sum.add_partial(part_sum.partial())
        part_sum.mean(7)
