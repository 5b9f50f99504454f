"""My encoded contributions: frozen once per round, the same bytes for every attempt (protocol section 4.1).

outbox/BASE.data   the encoding of part p at p × slot bytes
outbox/BASE.meta   hashes of all parts, norm and largest magnitude; written last, so its presence means "durable"
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import msgspec

from node.engine.disk import SharedFile, disk_bytes, read_at, read_cached, sync_directory, write_at, write_atomic
from node.engine.geometry import Geometry
from protocol.commitment import Commitment
from protocol.state_hash import chunk_hash


class Contribution(msgspec.Struct, frozen=True, kw_only=True):
    hashes: tuple[bytes, ...]
    """BLAKE3 of each encoded part."""
    parts_root: bytes
    norm: float
    largest: float


class OutboxWriter:
    """A contribution being encoded; `put` may run in any thread, each part once."""

    def __init__(self, outbox: Outbox, base: bytes) -> None:
        self._outbox = outbox
        self._base = base
        path = outbox.directory / f"{base.hex()}.data"
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)

    def put(self, part: int, data: bytes) -> None:
        write_at(self._fd, data, part * self._outbox.geometry.slot_bytes)

    def finish(self, contribution: Contribution) -> None:
        """Make it durable, and forget the contributions of other rounds. Raises `OSError`."""
        os.fsync(self._fd)
        self.close()
        path = self._outbox.directory / f"{self._base.hex()}.meta"
        write_atomic(path, msgspec.msgpack.encode(contribution))
        self._outbox.forget_others(self._base)

    def discard(self) -> None:
        """It cannot be stored: give the room back."""
        os.ftruncate(self._fd, 0)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class OutboxReader:
    """A durable contribution, for sending and for the part sums of which this node is root.

    What a READY binds is all that this node may ever send or sum: bytes that the disk gives back differently are as
    good as gone. Otherwise a bad sector would look like a lie.
    """

    def __init__(self, directory: Path, base: bytes, geometry: Geometry, contribution: Contribution) -> None:
        """Raises `OSError`."""
        self.contribution = contribution
        self.commitment = Commitment(contribution.hashes)
        self._geometry = geometry
        self._file = SharedFile(directory / f"{base.hex()}.data", os.O_RDONLY)

    def read(self, part: int) -> bytes:
        """Raises `OSError` when the disk does not give back what was frozen, or after `close`."""
        with self._file.use() as fd:
            data = read_at(fd, self._geometry.part_bytes(part), part * self._geometry.slot_bytes)
        return self._frozen(part, data)

    def read_cached(self, part: int) -> bytes | None:
        """None: it would block on the disk. Raises `OSError` as `read`."""
        with self._file.use() as fd:
            data = read_cached(fd, self._geometry.part_bytes(part), part * self._geometry.slot_bytes)
        return None if data is None else self._frozen(part, data)

    def _frozen(self, part: int, data: bytes) -> bytes:
        if chunk_hash(data) != self.contribution.hashes[part]:
            raise OSError(errno.EIO, f"part {part} of this node's contribution went bad on its disk")
        return data

    def close(self) -> None:
        self._file.close()


class Outbox:
    def __init__(self, directory: Path, geometry: Geometry) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.geometry = geometry

    def find(self, base: bytes) -> Contribution | None:
        """The durable contribution of `base`, if there is one."""
        try:
            data = (self.directory / f"{base.hex()}.meta").read_bytes()
            found = msgspec.msgpack.decode(data, type=Contribution)
        except (FileNotFoundError, msgspec.DecodeError):
            return None
        whole = len(found.hashes) == self.geometry.part_count
        return found if whole and (self.directory / f"{base.hex()}.data").exists() else None

    def write(self, base: bytes) -> OutboxWriter:
        return OutboxWriter(self, base)

    def read(self, base: bytes) -> OutboxReader | None:
        contribution = self.find(base)
        if contribution is None:
            return None
        return OutboxReader(self.directory, base, self.geometry, contribution)

    def disk_bytes(self) -> int:
        return disk_bytes(self.directory)

    def forget_others(self, base: bytes) -> None:
        for path in self.directory.iterdir():
            if not path.name.startswith(base.hex()):
                path.unlink(missing_ok=True)
        sync_directory(self.directory)
