"""Content-addressed bytes of the manifest: served to anyone who may connect, downloaded in chunks.

    artifacts/HASH            complete; BLAKE3 of the file is its name
    artifacts/HASH.partial    a download that can go on

An artifact's hash says nothing of its chunks, so a source is asked for a list of chunk hashes first. The list cannot be
proved before the end; if the whole does not match, the list was a lie, and its sources are not asked again.
"""

from __future__ import annotations

import os
from pathlib import Path

from blake3 import blake3

from node.engine.disk import disk_bytes, hash_file, read_at, sync_directory, write_at

CHUNK_BYTES = 1 << 20


def chunk_count(length: int) -> int:
    return -(-length // CHUNK_BYTES)


def chunk_bytes(index: int, length: int) -> int:
    return min(CHUNK_BYTES, length - index * CHUNK_BYTES)


class ArtifactStore:
    """All methods may run in any thread."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._lists: dict[bytes, bytes] = {}
        self._verified: set[bytes] = set()
        """Artifacts that were whole when this engine looked."""

    def path(self, artifact: bytes) -> Path:
        return self._directory / artifact.hex()

    def has(self, artifact: bytes) -> bool:
        return self.path(artifact).is_file()

    def is_whole(self, artifact: bytes) -> bool:
        """Whether it is here and its bytes are its hash; read once in the engine's life.

        One found damaged becomes a download that can go on: only its bad chunks are fetched again.
        """
        if artifact in self._verified:
            return self.has(artifact)
        if not self.has(artifact):
            return False
        if not self.verify(artifact):
            self._lists.pop(artifact, None)
            self.path(artifact).replace(self._partial(artifact))
            return False
        self._verified.add(artifact)
        return True

    def disk_bytes(self) -> int:
        return disk_bytes(self._directory)

    def verify(self, artifact: bytes) -> bool:
        try:
            return hash_file(self.path(artifact)) == artifact
        except OSError:
            return False

    # ---------------------------------------------------------------- serving

    def chunk_list(self, artifact: bytes) -> bytes | None:
        """The concatenated hashes of its chunks; None: not here. Kept once computed: a few bytes a megabyte."""
        known = self._lists.get(artifact)
        if known is not None:
            return known
        hashes = bytearray()
        try:
            with self.path(artifact).open("rb", buffering=0) as file:
                offset = 0
                while data := read_at(file.fileno(), CHUNK_BYTES, offset):
                    hashes += blake3(data).digest()
                    offset += len(data)
        except OSError:
            return None
        self._lists[artifact] = bytes(hashes)
        return self._lists[artifact]

    def read_chunk(self, artifact: bytes, index: int) -> bytes | None:
        try:
            fd = os.open(self.path(artifact), os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            return read_at(fd, CHUNK_BYTES, index * CHUNK_BYTES) or None
        finally:
            os.close(fd)

    # ---------------------------------------------------------------- downloading

    def begin_download(self, artifact: bytes, length: int, hashes: list[bytes]) -> set[int]:
        """Open (or go on with) a download; returns the chunks that it does not hold yet by this list."""
        missing = set(range(chunk_count(length)))
        fd = os.open(self._partial(artifact), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(fd).st_size > length:
                os.ftruncate(fd, length)
            for index in range(chunk_count(length)):
                data = read_at(fd, chunk_bytes(index, length), index * CHUNK_BYTES)
                if len(data) == chunk_bytes(index, length) and blake3(data).digest() == hashes[index]:
                    missing.discard(index)
        finally:
            os.close(fd)
        return missing

    def put_chunk(self, artifact: bytes, index: int, data: bytes | bytearray) -> None:
        fd = os.open(self._partial(artifact), os.O_RDWR | os.O_CLOEXEC)
        try:
            write_at(fd, data, index * CHUNK_BYTES)
        finally:
            os.close(fd)

    def finish_download(self, artifact: bytes) -> bool:
        """Verify the whole and give it its name. False: the chunks were lies, the partial file is gone."""
        partial = self._partial(artifact)
        if hash_file(partial) != artifact:
            partial.unlink()
            return False
        fd = os.open(partial, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        partial.rename(self.path(artifact))
        sync_directory(self._directory)
        return True

    def _partial(self, artifact: bytes) -> Path:
        return self._directory / f"{artifact.hex()}.partial"
