"""A flat round in plain NumPy, written from the text of design section 5 and protocol section 4, not from the code.

Nothing here imports `protocol`: where this and the product agree bit for bit, two readings of the design agree. It is
slow and holds everything in memory.
"""

from __future__ import annotations

import struct
from fractions import Fraction

import numpy as np


def encode(codec: str, x: np.ndarray) -> bytes:
    """[N] float32 → bytes."""
    if codec == "fp32":
        return x.astype("<f4").tobytes()
    if codec == "fp16":
        return np.clip(x, np.float32(-65504), np.float32(65504)).astype("<f2").tobytes()
    assert codec == "int8"
    scales, codes = b"", b""
    for start in range(0, len(x), 256):
        block = x[start : start + 256]
        absmax = np.max(np.abs(block))
        scale = np.float32(absmax / np.float32(127))
        if scale < np.float32(2.0**-126):
            scale, factor = np.float32(0), np.float32(0)
        else:
            factor = np.float32(np.float32(127) / absmax)
        scales += struct.pack("<f", scale)
        codes += np.rint(block * factor).astype(np.int8).tobytes()
    return scales + codes


def decode(codec: str, data: bytes, elements: int) -> np.ndarray:
    """Bytes → [N] float32."""
    if codec == "fp32":
        return np.frombuffer(data, "<f4").astype(np.float32)
    if codec == "fp16":
        return np.frombuffer(data, "<f2").astype(np.float32)
    assert codec == "int8"
    blocks = -(-elements // 256)
    scales = np.frombuffer(data[: 4 * blocks], "<f4")
    codes = np.frombuffer(data[4 * blocks :], np.int8).astype(np.float32)
    return codes * np.repeat(scales, 256)[:elements]


def weights(tokens: list[int], ratio: float = 3.0) -> list[int]:
    """Tokens of a part's contributors → weights: capped at `ratio` times their median."""
    ordered = sorted(tokens)
    middle = len(ordered) // 2
    median = Fraction(ordered[middle]) if len(ordered) % 2 else Fraction(ordered[middle - 1] + ordered[middle], 2)
    return [min(value, int(Fraction(ratio) * median)) for value in tokens]


def mean(codec: str, contributions: list[bytes], tokens: list[int], elements: int) -> np.ndarray:
    """What one part's contributors agree on: summed in ascending order, divided, encoded once, decoded."""
    total = 0
    acc = np.zeros(elements, np.float32)
    for data, weight in zip(contributions, weights(tokens), strict=True):
        t = np.float32(weight) * decode(codec, data, elements)
        acc = acc + t
        total += weight
    return decode(codec, encode(codec, acc / np.float32(total)), elements)


def encode_sum(x: np.ndarray) -> bytes:
    """[N] float32 → a partial sum in sum16."""
    halves, exponents = b"", b""
    for start in range(0, len(x), 256):
        block = x[start : start + 256]
        exponent = min(max(int(np.frexp(np.max(np.abs(block)))[1]) - 14, -102), 113)
        halves += np.ldexp(block, -exponent).astype("<f2").tobytes()
        exponents += struct.pack("b", exponent)
    return halves + exponents


def decode_sum(data: bytes, elements: int) -> np.ndarray:
    """Bytes → [N] float32."""
    halves = np.frombuffer(data[: 2 * elements], "<f2").astype(np.float32)
    exponents = np.frombuffer(data[2 * elements :], np.int8).astype(np.int32)
    return np.ldexp(halves, np.repeat(exponents, 256)[:elements])


def tree_mean(
    codec: str, contributions: list[bytes], tokens: list[int], parents: tuple[int, ...], bitmap: int, elements: int
) -> np.ndarray:
    """As `mean`, over the contributions that `bitmap` names, summed on the way up the tree of `parents` (-1: root).

    A root adds its own and what its children sent in ascending order; another inner node its own first.
    """
    weighted = [
        np.float32(weight) * decode(codec, data, elements)
        for weight, data in zip(weights(tokens), contributions, strict=True)
    ]

    def reached(node: int) -> bool:
        below = [child for child, parent in enumerate(parents) if parent == node]
        return bool(bitmap >> node & 1) or any(reached(child) for child in below)

    def sum_of(node: int) -> np.ndarray:
        children = [child for child, parent in enumerate(parents) if parent == node and reached(child)]
        acc = np.zeros(elements, np.float32)
        for index in sorted([node, *children]) if parents[node] == -1 else [node, *children]:
            if index == node or index not in parents:
                acc = acc + weighted[index]
            else:
                acc = acc + decode_sum(encode_sum(sum_of(index)), elements)
        return acc

    total = sum(weight for index, weight in enumerate(weights(tokens)) if bitmap >> index & 1)
    return decode(codec, encode(codec, sum_of(parents.index(-1)) / np.float32(total)), elements)


def outer_step(
    theta: np.ndarray, momentum: np.ndarray, g: np.ndarray, lr: float, factor: float
) -> tuple[np.ndarray, np.ndarray]:
    """θ [E], momentum [E − buffers], the averaged pseudo-gradient [E] → the next θ and momentum."""
    lr32, factor32 = np.float32(lr), np.float32(factor)
    parameters, buffers = g[: len(momentum)], g[len(momentum) :]
    m = momentum * factor32
    m = m + parameters
    d = m * factor32
    d = d + parameters
    d = d * lr32
    return np.concatenate([theta[: len(momentum)] - d, theta[len(momentum) :] - buffers]), m


def flat_round(
    theta: np.ndarray,
    momentum: np.ndarray,
    deltas: list[np.ndarray],
    tokens: list[list[int]],
    *,
    codec: str,
    part_elements: int,
    lr: float,
    factor: float,
) -> tuple[np.ndarray, np.ndarray]:
    """One round in which everybody is counted. `deltas`: each peer's [E]; `tokens`: each peer's tokens per part."""
    g = np.zeros_like(theta)
    for part, start in enumerate(range(0, len(theta), part_elements)):
        stop = min(start + part_elements, len(theta))
        encoded = [encode(codec, delta[start:stop]) for delta in deltas]
        g[start:stop] = mean(codec, encoded, [of_peer[part] for of_peer in tokens], stop - start)
    return outer_step(theta, momentum, g, lr, factor)
