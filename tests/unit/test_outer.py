"""The outer step: every rounding as written, whatever the block, the range or the caller's settings."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from blake3 import blake3

from protocol.codecs import BLOCK_ELEMENTS, CODECS, codec
from protocol.outer import buffer_step, flushes_subnormals, outer_step, step_range


def vectors(elements: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    theta, momentum, gradient = (generator.standard_normal(elements).astype(np.float32) for _ in range(3))
    return theta, momentum * np.float32(0.01), gradient * np.float32(0.003)


def rounded(exact: Fraction) -> Fraction:
    """The float32 nearest to an exact number, ties to even, for normal results: no processor involved."""
    if exact == 0:
        return exact
    exponent = 0
    while abs(exact) / Fraction(2) ** exponent >= 2:
        exponent += 1
    while abs(exact) / Fraction(2) ** exponent < 1:
        exponent -= 1
    unit = Fraction(2) ** (exponent - 23)
    return round(exact / unit) * unit


def test_every_operation_rounds_once_as_in_exact_arithmetic() -> None:
    theta, momentum, gradient = vectors(300)
    lr, factor = 0.7, 0.9
    rate, mu = Fraction(float(np.float32(lr))), Fraction(float(np.float32(factor)))
    expected_theta, expected_momentum = [], []
    for t, m, g in zip(theta.tolist(), momentum.tolist(), gradient.tolist(), strict=True):
        exact_m = rounded(rounded(Fraction(m) * mu) + Fraction(g))
        d = rounded(rounded(rounded(exact_m * mu) + Fraction(g)) * rate)
        expected_momentum.append(float(exact_m))
        expected_theta.append(float(rounded(Fraction(t) - d)))
    outer_step(theta, momentum, gradient, lr=lr, momentum_factor=factor)
    assert momentum.tolist() == expected_momentum
    assert theta.tolist() == expected_theta


def test_a_fused_step_would_be_noticed() -> None:
    """The test above is sensitive: in double precision, rounded at the end, many elements differ."""
    theta, momentum, gradient = vectors(10_000)
    wide = momentum.astype(np.float64) * np.float32(0.9) + gradient
    outer_step(theta, momentum, gradient, lr=0.7, momentum_factor=0.9)
    assert 0.02 < np.mean(wide.astype(np.float32) != momentum) < 0.5


def test_ranges_and_blocks_do_not_matter() -> None:
    elements = 2 * BLOCK_ELEMENTS + 777
    whole_theta, whole_momentum, gradient = vectors(elements)
    theta, momentum = whole_theta.copy(), whole_momentum.copy()
    outer_step(whole_theta, whole_momentum, gradient, lr=0.4, momentum_factor=0.9)
    for start, stop in [(100_000, elements), (0, 1), (1, 100_000)]:
        outer_step(theta[start:stop], momentum[start:stop], gradient[start:stop], lr=0.4, momentum_factor=0.9)
    assert theta.tobytes() == whole_theta.tobytes()
    assert momentum.tobytes() == whole_momentum.tobytes()


@pytest.mark.parametrize("start", [0, 300, 600, 768, 900])
def test_a_part_may_straddle_the_buffers(start: int) -> None:
    theta, momentum, gradient = vectors(1024)
    momentum = momentum[:768]
    expected_theta, expected_momentum = theta.copy(), momentum.copy()
    stop = min(start + 512, 1024)
    middle = min(max(768, start), stop)
    if start < 768:
        outer_step(
            expected_theta[start:middle],
            expected_momentum[start:middle],
            gradient[start:middle],
            lr=0.7,
            momentum_factor=0.9,
        )
    buffer_step(expected_theta[middle:stop], gradient[middle:stop])
    step_range(theta, momentum, gradient[start:stop], start=start, lr=0.7, momentum_factor=0.9)
    assert theta.tobytes() == expected_theta.tobytes()
    assert momentum.tobytes() == expected_momentum.tobytes()


def test_buffers_become_the_plain_average() -> None:
    theta = np.array([1.0, 5.0], np.float32)
    buffer_step(theta, np.array([0.25, -1.0], np.float32))
    assert theta.tolist() == [0.75, 6.0]


def test_a_range_outside_the_vector_or_another_kind_of_array_is_refused() -> None:
    theta, momentum, gradient = vectors(512)
    with pytest.raises(ValueError, match="elements 300 … 812 are outside a vector of 512"):
        step_range(theta, momentum, gradient, start=300, lr=0.7, momentum_factor=0.9)
    with pytest.raises(ValueError, match="float64"):
        outer_step(theta, momentum, gradient.astype(np.float64), lr=0.7, momentum_factor=0.9)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one length"):
        outer_step(theta, momentum[:-1], gradient, lr=0.7, momentum_factor=0.9)


def test_the_callers_floating_point_error_mode_does_not_matter() -> None:
    theta, momentum, gradient = (np.full(4, value, np.float32) for value in (3e38, 3e38, 3e38))
    with np.errstate(all="raise"):
        outer_step(theta, momentum, gradient, lr=0.7, momentum_factor=0.9)
        buffer_step(theta, gradient)


RECORDED = "196b8541b4d40edd4b7b681c29f76984"


def test_the_same_bits_on_every_machine() -> None:
    """Recorded once. A processor or a library that rounds differently must not take part in a run."""
    count = np.arange(100_000, dtype=np.int64)
    theta, momentum, gradient = (
        ((count * step % 65_521).astype(np.float32) - np.float32(32_760)) * np.float32(scale)
        for step, scale in [(48_271, 2.0**-12), (16_807, 2.0**-20), (39_373, 2.0**-21)]
    )
    for _ in range(10):
        outer_step(theta, momentum, gradient, lr=0.7, momentum_factor=0.9)
    assert blake3(theta.tobytes() + momentum.tobytes()).hexdigest()[:32] == RECORDED


def test_this_machine_keeps_subnormals() -> None:
    assert not flushes_subnormals()


@pytest.mark.slow
def test_a_flushing_processor_is_noticed_and_decodes_the_same_bits() -> None:
    """PyTorch can switch flushing on; what travelled must decode to the same bits all the same."""
    torch = pytest.importorskip("torch")
    values = np.concatenate([np.full(256, 2.0**power, np.float32) for power in range(-149, -90)])
    values[::3] *= np.float32(0.37)
    codecs = [codec(name) for name in CODECS if name != "fp32"]
    data = [one.encode(values) for one in codecs]
    expected = [one.decode(bytes_, len(values)).tobytes() for one, bytes_ in zip(codecs, data, strict=True)]
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        assert flushes_subnormals()
        decoded = [one.decode(bytes_, len(values)).tobytes() for one, bytes_ in zip(codecs, data, strict=True)]
    finally:
        torch.set_flush_denormal(False)
    assert not flushes_subnormals()
    assert decoded == expected
