"""`h_r`: the hash of the outer state, over fixed-size chunks (design section 5).

The state is θ [elements], then momentum [elements − buffer elements], both little-endian fp32. Each is cut into chunks
of `CHUNK_BYTES` (the last of each may be shorter); a chunk's hash is the BLAKE3 of its bytes, and the state's hash
binds the sizes and all chunk hashes in order. Who knows only the state's hash can check a list of chunk hashes, then
each chunk as it arrives, from any peer, in any order; who changed some chunks hashes only those again.

A chunk of 1 MiB is long enough that BLAKE3 runs at full width (it gains nothing beyond 128 KiB) and that the list stays
small (270 KiB for a billion parameters), and short enough that a bad one costs little to fetch again (0.4 s at
20 Mbit/s).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from blake3 import blake3

from protocol.codecs import Buffer, Float32Array
from protocol.names import DIGEST_BYTES, Digest, digest, encode_integer

CHUNK_BYTES = 1 << 20
CHUNK_ELEMENTS = CHUNK_BYTES // 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Elements `[start, stop)` of θ, or of momentum."""

    index: int
    of_momentum: bool
    start: int
    stop: int

    @property
    def length(self) -> int:
        """Bytes."""
        return 4 * (self.stop - self.start)


def chunk_count(elements: int, buffer_elements: int) -> int:
    return -(-elements // CHUNK_ELEMENTS) + -(-(elements - buffer_elements) // CHUNK_ELEMENTS)


def chunk(index: int, elements: int, buffer_elements: int) -> Chunk:
    """The `index`-th chunk. Raises ValueError when the state has no such chunk."""
    of_theta = -(-elements // CHUNK_ELEMENTS)
    count = chunk_count(elements, buffer_elements)
    if not 0 <= index < count:
        raise ValueError(f"chunk {index} does not exist; the state has chunks 0 … {count - 1}")
    of_momentum = index >= of_theta
    segment = elements - buffer_elements if of_momentum else elements
    start = (index - of_theta if of_momentum else index) * CHUNK_ELEMENTS
    return Chunk(index=index, of_momentum=of_momentum, start=start, stop=min(start + CHUNK_ELEMENTS, segment))


def chunks(elements: int, buffer_elements: int) -> Iterator[Chunk]:
    for index in range(chunk_count(elements, buffer_elements)):
        yield chunk(index, elements, buffer_elements)


def chunks_of_range(start: int, stop: int, elements: int, buffer_elements: int) -> tuple[int, ...]:
    """Indices of the chunks that change when elements `[start, stop)` of the vector are stepped."""
    of_theta = -(-elements // CHUNK_ELEMENTS)
    stop_momentum = min(stop, elements - buffer_elements)
    changed = list(range(start // CHUNK_ELEMENTS, -(-stop // CHUNK_ELEMENTS)))
    if start < stop_momentum:
        changed += range(of_theta + start // CHUNK_ELEMENTS, of_theta - (-stop_momentum // CHUNK_ELEMENTS))
    return tuple(changed)


def chunk_view(which: Chunk, theta: Float32Array, momentum: Float32Array) -> memoryview:
    """The chunk's bytes as they are hashed, stored and sent: no copy where the processor is little-endian."""
    values = (momentum if which.of_momentum else theta)[which.start : which.stop]
    return np.ascontiguousarray(values, dtype="<f4").data.cast("B")


def chunk_hash(data: Buffer) -> Digest:
    return blake3(data).digest()


def chunk_hashes(theta: Float32Array, momentum: Float32Array) -> list[Digest]:
    """Hash every chunk of a state: θ [elements], momentum [elements − buffer elements]. Releases the GIL."""
    sizes = len(theta), len(theta) - len(momentum)
    return [chunk_hash(chunk_view(which, theta, momentum)) for which in chunks(*sizes)]


def root_of(hashes: Sequence[Digest], *, elements: int, buffer_elements: int) -> Digest:
    """The state's hash from its chunks' hashes. Raises ValueError when the list does not fit the sizes."""
    expected = chunk_count(elements, buffer_elements)
    if len(hashes) != expected or any(len(one) != DIGEST_BYTES for one in hashes):
        raise ValueError(
            f"a state of {elements} elements has {expected} chunk hashes of {DIGEST_BYTES} bytes; got {len(hashes)}"
        )
    header = (elements, buffer_elements, CHUNK_BYTES)
    return digest(b"atoll/state", *(encode_integer(size) for size in header), b"".join(hashes))


def state_hash(theta: Float32Array, momentum: Float32Array) -> Digest:
    """`h` of a state that lies in memory."""
    return root_of(chunk_hashes(theta, momentum), elements=len(theta), buffer_elements=len(theta) - len(momentum))
