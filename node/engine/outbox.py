"""My encoded contributions: frozen once per round, the same bytes for every attempt (protocol section 4.1).

The one before is kept, too: its parts are audited until the next commit (section 7).

outbox/BASE.data   the encoding of part p at p × slot bytes
outbox/BASE.meta   hashes of all parts, norm and largest magnitude; written last, so its presence means "durable"
"""

from __future__ import annotations

import errno
import os
import threading
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
        """Make it durable, and forget the contributions before the last one. Raises `OSError`."""
        os.fsync(self._fd)
        self.close()
        path = self._outbox.directory / f"{self._base.hex()}.meta"
        write_atomic(path, msgspec.msgpack.encode(contribution))
        self._outbox.forget_old(self._base)

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
        self._lock = threading.Lock()
        self._served: dict[bytes, OutboxReader] = {}
        """By root: contributions that somebody has asked for."""
        self._bases: dict[bytes, bytes] | None = None
        """Root → base of what is here; None: not looked at since it changed."""

    def leaf(self, parts_root: bytes, part: int) -> bytes | None:
        """A part of the contribution that `parts_root` binds, then its proof; None: it is not here, or went bad."""
        if not 0 <= part < self.geometry.part_count:
            return None
        reader = self._reader_of(parts_root)
        if reader is None:
            return None
        try:
            return reader.read(part) + reader.commitment.proof(part)
        except OSError:
            return None

    def _reader_of(self, parts_root: bytes) -> OutboxReader | None:
        with self._lock:
            if parts_root in self._served:
                return self._served[parts_root]
            if self._bases is None:
                self._bases = self._by_root()
            base = self._bases.get(parts_root)
            found = None if base is None else self.find(base)
            if base is None or found is None:
                return None
            reader = self._served[parts_root] = OutboxReader(self.directory, base, self.geometry, found)
            return reader

    def _by_root(self) -> dict[bytes, bytes]:
        bases: dict[bytes, bytes] = {}
        for path in self.directory.glob("*.meta"):
            try:
                base = bytes.fromhex(path.stem)
            except ValueError:
                continue
            if (found := self.find(base)) is not None:
                bases[found.parts_root] = base
        return bases

    def close(self) -> None:
        """Nobody is served from what was there until now."""
        with self._lock:
            for reader in self._served.values():
                reader.close()
            self._served.clear()
            self._bases = None

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

    def forget_old(self, base: bytes) -> None:
        """Keep that of `base` and the one frozen before it: until the next commit others may audit that one."""
        self.close()
        others = [path for path in self.directory.glob("*.meta") if path.stem != base.hex()]
        newest = max(others, key=lambda path: path.stat().st_mtime_ns, default=None)
        kept = {base.hex()} if newest is None else {base.hex(), newest.stem}
        for path in self.directory.iterdir():
            if path.stem not in kept:
                path.unlink(missing_ok=True)
        sync_directory(self.directory)
