"""The state's hash: chunked, verifiable piece by piece, and sensitive to every bit."""

from __future__ import annotations

import numpy as np
import pytest
from blake3 import blake3

from protocol.names import digest, encode_integer
from protocol.state_hash import (
    CHUNK_BYTES,
    CHUNK_ELEMENTS,
    chunk,
    chunk_count,
    chunk_hash,
    chunk_hashes,
    chunk_view,
    chunks,
    chunks_of_range,
    root_of,
    state_hash,
)


def state(elements: int, buffer_elements: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(1)
    theta = generator.standard_normal(elements).astype(np.float32)
    return theta, generator.standard_normal(elements - buffer_elements).astype(np.float32)


@pytest.mark.parametrize(
    ("elements", "buffer_elements"),
    [(256, 0), (CHUNK_ELEMENTS, 0), (CHUNK_ELEMENTS + 256, 512), (2 * CHUNK_ELEMENTS + 256, 256)],
)
def test_chunks_tile_theta_then_momentum(elements: int, buffer_elements: int) -> None:
    theta, momentum = state(elements, buffer_elements)
    all_chunks = list(chunks(elements, buffer_elements))
    assert [which.index for which in all_chunks] == list(range(chunk_count(elements, buffer_elements)))
    assert all(0 < which.length <= CHUNK_BYTES for which in all_chunks)
    joined = b"".join(bytes(chunk_view(which, theta, momentum)) for which in all_chunks)
    assert joined == theta.tobytes() + momentum.tobytes()


def test_the_hash_is_what_its_text_says() -> None:
    theta, momentum = state(CHUNK_ELEMENTS + 256, 512)
    data = [
        theta.tobytes()[:CHUNK_BYTES],
        theta.tobytes()[CHUNK_BYTES:],
        momentum.tobytes(),
    ]
    header = [encode_integer(value) for value in (CHUNK_ELEMENTS + 256, 512, 1 << 20)]
    expected = digest(b"atoll/state", *header, b"".join(blake3(one).digest() for one in data))
    assert state_hash(theta, momentum) == expected


def test_a_downloader_checks_the_list_and_then_each_chunk() -> None:
    theta, momentum = state(CHUNK_ELEMENTS + 256, 0)
    trusted = state_hash(theta, momentum)
    hashes = chunk_hashes(theta, momentum)
    sizes = {"elements": len(theta), "buffer_elements": 0}
    assert root_of(hashes, **sizes) == trusted
    assert root_of([hashes[1], hashes[0], *hashes[2:]], **sizes) != trusted
    assert root_of([*hashes[:-1], bytes(32)], **sizes) != trusted
    for which in chunks(**sizes):
        data = bytearray(chunk_view(which, theta, momentum))
        assert chunk_hash(data) == hashes[which.index]
        data[-1] ^= 1
        assert chunk_hash(data) != hashes[which.index]


@pytest.mark.parametrize("damage", [lambda h: h[:-1], lambda h: [*h, h[0]], lambda h: [*h[:-1], h[-1][:-1]]])
def test_a_list_that_does_not_fit_the_sizes_is_refused(damage) -> None:
    theta, momentum = state(CHUNK_ELEMENTS + 256, 0)
    with pytest.raises(ValueError, match="4 chunk hashes"):
        root_of(damage(chunk_hashes(theta, momentum)), elements=len(theta), buffer_elements=0)


def test_every_bit_and_the_boundary_count() -> None:
    theta, momentum = state(1024, 512)
    seen = {state_hash(theta, momentum)}
    for vector in (theta, momentum):
        vector.view(np.uint32)[-1] ^= 1
        seen.add(state_hash(theta, momentum))
    zeros = np.zeros(2048, np.float32)
    seen |= {state_hash(zeros, zeros[:size]) for size in (2048, 1792)}
    seen.add(state_hash(-zeros, zeros))
    assert len(seen) == 6, "negative zero is another state"


@pytest.mark.parametrize(
    ("start", "stop"), [(0, 256), (200_000, 300_000), (CHUNK_ELEMENTS, 600_000), (599_000, 600_064)]
)
def test_stepping_a_range_changes_exactly_the_named_chunks(start: int, stop: int) -> None:
    elements, buffer_elements = 600_064, 1024
    theta, momentum = state(elements, buffer_elements)
    before = chunk_hashes(theta, momentum)
    theta[start:stop] += 1
    momentum[start : min(stop, len(momentum))] += 1
    after = chunk_hashes(theta, momentum)
    named = chunks_of_range(start, stop, elements, buffer_elements)
    assert named == tuple(index for index in range(len(before)) if before[index] != after[index])


def test_a_chunk_that_does_not_exist_is_refused() -> None:
    for index in (-1, 2):
        with pytest.raises(ValueError, match="chunks 0 … 1"):
            chunk(index, 256, 0)
