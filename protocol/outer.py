"""The outer step, elementwise in fp32 on the CPU (design section 5.1; DiLoCo, arXiv 2311.08105).

Nesterov momentum on the averaged pseudo-gradient `g`, as separate multiplications and additions, each rounded once:

    m = m·µ;  m = m+g;  d = m·µ;  d = d+g;  d = d·lr;  θ = θ−d

A fused multiply-add rounds once where this rounds twice, and processors differ in having it: every peer must get the
same bits, so nothing here may be written as one fused call. Shapes: `N` elements of a range of the flat vector.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from protocol.codecs import BLOCK_ELEMENTS, Float32Array


def outer_step(
    theta: Float32Array, momentum: Float32Array, gradient: Float32Array, *, lr: float, momentum_factor: float
) -> None:
    """One step of the parameters segment, in place in `theta` [N] and `momentum` [N]; `gradient` [N] is only read.

    `lr` and `momentum_factor` are rounded to float32 once. Needs one block of scratch. Any range may be stepped by
    itself, in any order or thread: each element depends on itself alone.
    """
    _require_vectors(theta, momentum, gradient)
    rate, factor = np.float32(lr), np.float32(momentum_factor)
    scratch = np.empty(min(len(theta), BLOCK_ELEMENTS), np.float32)
    with np.errstate(all="ignore"):
        for block in _blocks(len(theta)):
            m, g, t = momentum[block], gradient[block], theta[block]
            d = scratch[: len(t)]
            np.multiply(m, factor, out=m)
            np.add(m, g, out=m)
            np.multiply(m, factor, out=d)
            np.add(d, g, out=d)
            np.multiply(d, rate, out=d)
            np.subtract(t, d, out=t)


def buffer_step(theta: Float32Array, gradient: Float32Array) -> None:
    """One step of the buffers segment, in place: `θ = θ − g`, the plain average of what the contributors hold."""
    _require_vectors(theta, gradient)
    with np.errstate(all="ignore"):
        for block in _blocks(len(theta)):
            np.subtract(theta[block], gradient[block], out=theta[block])


def step_range(
    theta: Float32Array,
    momentum: Float32Array,
    gradient: Float32Array,
    *,
    start: int,
    lr: float,
    momentum_factor: float,
) -> None:
    """Step elements `[start, start + len(gradient))` of the whole vector, which may reach into the buffers segment.

    `theta` [elements] and `momentum` [elements − buffer elements] are the whole state, `gradient` one part's mean.
    """
    stop = start + len(gradient)
    if not 0 <= start <= stop <= len(theta):
        raise ValueError(f"elements {start} … {stop} are outside a vector of {len(theta)}")
    boundary = min(max(len(momentum), start), stop)
    if start < boundary:
        outer_step(
            theta[start:boundary],
            momentum[start:boundary],
            gradient[: boundary - start],
            lr=lr,
            momentum_factor=momentum_factor,
        )
    if boundary < stop:
        buffer_step(theta[boundary:stop], gradient[boundary - start :])


def flushes_subnormals() -> bool:
    """Whether this thread's processor rounds subnormal float32 results to zero: such a node would leave the others.

    Some libraries switch this on when they are loaded. A node asks once at start and refuses to run if so.
    """
    with np.errstate(all="ignore"):
        smallest_normal = np.full(16, 2.0**-126, np.float32)
        return bool(((smallest_normal * np.float32(0.5)).view(np.uint32) == 0).any())


def _blocks(elements: int) -> Iterator[slice]:
    for start in range(0, elements, BLOCK_ELEMENTS):
        yield slice(start, min(start + BLOCK_ELEMENTS, elements))


def _require_vectors(*vectors: Float32Array) -> None:
    for vector in vectors:
        if vector.dtype != np.float32 or vector.shape != (len(vectors[0]),):
            raise ValueError(
                f"the outer step takes float32 vectors of one length, not {vector.dtype} of shape {vector.shape} "
                f"beside {vectors[0].shape}"
            )
