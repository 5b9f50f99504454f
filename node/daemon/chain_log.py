"""The chain log: an append-only file of framed records, one a run (protocol section 9, "headers are kept for ever").

    file    magic (8 bytes), run id (32)
    frame   payload length (u32), kind (u8), BLAKE3 of kind and payload (32), payload

A frame is whole or it does not count: whatever follows the last whole frame (a write that a crash tore, a damaged
sector) is copied to `chain.log.torn-OFFSET` and cut off. All calls block on the disk; use them from a thread.
"""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from blake3 import blake3

from node.engine.disk import read_at, sync_directory, write_at
from node.errors import AtollError
from protocol.names import DIGEST_BYTES, Digest

MAGIC = b"ATOLLC2\0"
_EARLIER_MAGICS = frozenset({b"ATOLLC1\0"})
HEADER_BYTES = len(MAGIC) + DIGEST_BYTES
_FRAME = struct.Struct(f"<IB{DIGEST_BYTES}s")
MAX_PAYLOAD_BYTES = 64 * 1024 * 1024
_COPY_BYTES = 1 << 20


class StoreError(AtollError):
    """What lies on disk, or is to be put there, does not fit the chain. One sentence with the fix."""


class FrameKind(IntEnum):
    COMMIT = 1
    REFORM = 2
    APPLIED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    offset: int
    kind: FrameKind
    payload: bytes

    @property
    def end(self) -> int:
        return self.offset + _FRAME.size + len(self.payload)


def _checksum(kind: int, payload: bytes) -> Digest:
    hasher = blake3(kind.to_bytes(1, "little"))
    hasher.update(payload)
    return hasher.digest()


def _frame_at(fd: int, offset: int) -> Frame | None:
    head = read_at(fd, _FRAME.size, offset)
    if len(head) < _FRAME.size:
        return None
    length, kind, checksum = _FRAME.unpack(head)
    if length > MAX_PAYLOAD_BYTES or kind not in FrameKind.__members__.values():
        return None
    payload = read_at(fd, length, offset + _FRAME.size)
    if len(payload) < length or _checksum(kind, payload) != checksum:
        return None
    return Frame(offset=offset, kind=FrameKind(kind), payload=payload)


def frames_of(path: Path) -> Iterator[Frame]:
    """Whole frames of a file that holds nothing else (`ChainLog.copy`), up to the first that is not."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        offset = 0
        while (frame := _frame_at(fd, offset)) is not None:
            yield frame
            offset = frame.end
    finally:
        os.close(fd)


class ChainLog:
    """One open log. Not safe for two threads at once: `node.daemon.store.Store` serialises."""

    def __init__(self, path: Path, run: Digest) -> None:
        """Opens or creates the file. Raises `StoreError` if it is another run's, `OSError` if the disk fails."""
        self._path = path
        self.set_aside: Path | None = None
        """Where what was cut off last lies."""
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.end = os.fstat(self._fd).st_size
        """Offset behind the last frame."""
        header = read_at(self._fd, HEADER_BYTES, 0)
        if header == MAGIC + run:
            return
        first = self.read(HEADER_BYTES)
        if first is not None and run in first.payload and header[: len(MAGIC)] not in _EARLIER_MAGICS:
            # Records of this run behind a header that the disk has spoilt.
            write_at(self._fd, MAGIC + run, 0)
            os.fsync(self._fd)
            return
        if len(header) == HEADER_BYTES and header.startswith(MAGIC):
            self.close()
            raise StoreError(f"{path} is the chain of run {header[len(MAGIC) :].hex()[:16]}; move it away")
        if header[: len(MAGIC)] in _EARLIER_MAGICS:
            self.close()
            raise StoreError(
                f"{path} was written by an earlier version of Atoll, which this one cannot follow; move it away"
            )
        if self.end:
            self.cut(0)
        write_at(self._fd, MAGIC + run, 0)
        os.fsync(self._fd)
        sync_directory(path.parent)
        self.end = HEADER_BYTES

    def frames(self, start: int) -> Iterator[Frame]:
        """Whole frames from offset `start` on, up to the first that is not."""
        offset = start
        while (frame := self.read(offset)) is not None:
            yield frame
            offset = frame.end

    def read(self, offset: int) -> Frame | None:
        """The frame at `offset`; None: none that is whole."""
        return _frame_at(self._fd, offset)

    def append(self, kind: FrameKind, payload: bytes) -> int:
        """Writes a frame, durably, and returns its offset. On `OSError` (disk full) nothing of it stays."""
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise StoreError(f"a record of {len(payload)} bytes is over the log's limit of {MAX_PAYLOAD_BYTES}")
        offset = self.end
        try:
            write_at(self._fd, _FRAME.pack(len(payload), kind, _checksum(kind, payload)) + payload, offset)
            os.fdatasync(self._fd)
        except OSError:
            os.ftruncate(self._fd, offset)
            raise
        self.end = offset + _FRAME.size + len(payload)
        return offset

    def replace(self, offset: int, stop: int, kind: FrameKind, payload: bytes) -> int:
        """Put a whole frame in the place of what lies from `offset` to `stop`; by how much all behind it has moved.

        The file is written anew beside the old one and takes its name. Raises `OSError`: then nothing has changed.
        """
        frame = _FRAME.pack(len(payload), kind, _checksum(kind, payload)) + payload
        draft = self._path.with_name(f"{self._path.name}.new")
        fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            written = 0
            for start, end in ((0, offset), (stop, self.end)):
                if start == stop:
                    write_at(fd, frame, written)
                    written += len(frame)
                for at in range(start, end, _COPY_BYTES):
                    piece = read_at(self._fd, min(_COPY_BYTES, end - at), at)
                    write_at(fd, piece, written)
                    written += len(piece)
            os.fsync(fd)
            os.replace(draft, self._path)
        except OSError:
            os.close(fd)
            draft.unlink(missing_ok=True)
            raise
        sync_directory(self._path.parent)
        os.close(self._fd)
        self._fd, self.end = fd, written
        return len(frame) - (stop - offset)

    def cut(self, offset: int, name: str = "torn") -> None:
        """Copy what lies behind `offset` aside, to `chain.log.NAME-OFFSET`, then take it out of the log."""
        size = os.fstat(self._fd).st_size
        if offset < size:
            self.set_aside = self.copy(offset, size, name)
            self.truncate(offset)
        self.end = offset

    def copy(self, start: int, stop: int, name: str, behind: Path | None = None) -> Path:
        """What lies from `start` to `stop`, and then all of the file `behind`, durably in `chain.log.NAME-START`."""
        aside = self._path.with_name(f"{self._path.name}.{name}-{start}")
        with aside.open("wb") as file:
            for at in range(start, stop, _COPY_BYTES):
                file.write(read_at(self._fd, min(_COPY_BYTES, stop - at), at))
            if behind is not None:
                with behind.open("rb") as more:
                    shutil.copyfileobj(more, file, _COPY_BYTES)
            file.flush()
            os.fsync(file.fileno())
        sync_directory(self._path.parent)
        return aside

    def truncate(self, offset: int) -> None:
        """Take what lies behind `offset` out of the log, durably."""
        os.ftruncate(self._fd, offset)
        os.fsync(self._fd)
        self.end = offset

    def close(self) -> None:
        os.close(self._fd)
