"""Immutable copies of the outer state on disk, written, read and served in chunks (design section 5).

snapshots/ROUND-HASH/data       θ, then momentum, little-endian fp32
snapshots/ROUND-HASH/chunks     the hash of every chunk, in order; their root is the state's hash
snapshots/ROUND-HASH.partial/   the same, incomplete: a copy in progress, or a download that can go on
snapshots/corrupt/ROUND-HASH/   found corrupt, with a file `why`; the newest few stay for inspection
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from node.engine.api import Snapshot
from node.engine.disk import disk_bytes, read_at, remove_tree, sync_directory, write_at
from node.engine.geometry import ELEMENT_BYTES, Geometry
from protocol.codecs import Float32Array
from protocol.names import DIGEST_BYTES
from protocol.state_hash import CHUNK_BYTES, Chunk, chunk, chunk_count, chunk_hash, chunk_view, root_of

PIN_S = 60.0
"""How long after its last chunk was read a snapshot stays for a download."""
LONGEST_PIN_S = 3600.0
MAX_PINS = 2
MAX_CORRUPT = 2


class SnapshotError(Exception):
    """A snapshot is not what its name says; one sentence."""


class SnapshotStore:
    """All methods may run in any thread."""

    def __init__(self, directory: Path, geometry: Geometry) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._geometry = geometry
        self._lock = threading.Lock()
        self._pins: dict[Path, tuple[float, float]] = {}
        """Snapshots that somebody is downloading: since when, and until when (monotonic seconds) they stay for it."""
        self.chunk_count = chunk_count(geometry.elements, geometry.buffer_elements)

    # ---------------------------------------------------------------- what there is

    def complete(self) -> list[Snapshot]:
        """Complete snapshots, oldest first."""
        found = []
        for path in self._directory.iterdir():
            number, separator, name = path.name.partition("-")
            if not separator or not number.isdigit() or len(name) != 2 * DIGEST_BYTES:
                continue
            try:
                found.append(Snapshot(round=int(number), state_hash=bytes.fromhex(name)))
            except ValueError:
                continue
        return sorted(found, key=lambda one: (one.round, one.state_hash))

    def partial(self) -> list[Snapshot]:
        """Downloads that were begun and can go on."""
        found = []
        for path in self._directory.glob("*.partial"):
            number, _, name = path.stem.partition("-")
            if number.isdigit() and len(name) == 2 * DIGEST_BYTES:
                with contextlib.suppress(ValueError):
                    found.append(Snapshot(round=int(number), state_hash=bytes.fromhex(name)))
        return found

    def has(self, round_number: int, state_hash: bytes) -> bool:
        return self._path(round_number, state_hash).is_dir()

    def disk_bytes(self) -> int:
        return disk_bytes(self._directory)

    # ---------------------------------------------------------------- saving

    def save(
        self,
        round_number: int,
        theta: Float32Array,
        momentum: Float32Array,
        *,
        expected: bytes,
        check: Callable[[], None],
    ) -> bytes:
        """Copy the state to disk and return its hash, computed from what was written.

        `check` is called between chunks and may raise. Raises `SnapshotError` when the memory does not hash to
        `expected`, `OSError` when the disk is full.
        """
        final = self._path(round_number, expected)
        if final.is_dir():
            return expected
        partial = self._partial(round_number, expected)
        remove_tree(partial)
        partial.mkdir()
        try:
            hashes = []
            with (partial / "data").open("wb", buffering=0) as file:
                for index in range(self.chunk_count):
                    check()
                    which = self._chunk(index)
                    view = chunk_view(which, theta, momentum)
                    hashes.append(chunk_hash(view))
                    write_at(file.fileno(), view, self._offset(which))
                os.fsync(file.fileno())
            root = root_of(hashes, elements=self._geometry.elements, buffer_elements=self._geometry.buffer_elements)
            if root != expected:
                raise SnapshotError(
                    f"the state in memory hashes to {root.hex()}, not to {expected.hex()} of round {round_number}; "
                    "it is corrupt: load a snapshot"
                )
            self._complete(partial, final, b"".join(hashes))
        except BaseException:
            remove_tree(partial)
            raise
        return root

    def _complete(self, partial: Path, final: Path, hashes: bytes) -> None:
        with (partial / "chunks").open("wb") as file:
            file.write(hashes)
            file.flush()
            os.fsync(file.fileno())
        sync_directory(partial)
        partial.rename(final)
        sync_directory(self._directory)

    # ---------------------------------------------------------------- loading and serving

    def load(
        self,
        round_number: int,
        state_hash: bytes,
        theta: Float32Array,
        momentum: Float32Array,
        *,
        check: Callable[[], None],
    ) -> None:
        """Fill `theta` and `momentum`. Raises `SnapshotError`; a snapshot found corrupt is set aside."""
        path = self._path(round_number, state_hash)
        was_here = path.is_dir()
        hashes = self.chunk_hashes(round_number, state_hash)
        if hashes is None and was_here:
            raise SnapshotError(
                f"the list of chunk hashes of the snapshot of round {round_number} is corrupt; it was set aside: load "
                "an older one or fetch it again"
            )
        if hashes is None:
            raise SnapshotError(f"there is no snapshot of round {round_number} with hash {state_hash.hex()} here")
        with (path / "data").open("rb", buffering=0) as file:
            for index in range(self.chunk_count):
                check()
                which = self._chunk(index)
                values = (momentum if which.of_momentum else theta)[which.start : which.stop]
                file.seek(self._offset(which))
                view = values.view(np.uint8).data
                got = 0
                while got < len(view) and (size := file.readinto(view[got:])):
                    got += size
                if got != len(view) or chunk_hash(view) != hashes[index]:
                    self._move_aside(path, f"chunk {index} does not match its hash")
                    raise SnapshotError(
                        f"chunk {index} of the snapshot of round {round_number} is corrupt; it was set aside: "
                        "load an older one or fetch it again"
                    )

    def chunk_hashes(self, round_number: int, state_hash: bytes) -> list[bytes] | None:
        """The hashes of a complete snapshot's chunks, checked against `state_hash`; None: not here or corrupt."""
        path = self._path(round_number, state_hash)
        try:
            hashes = split_hashes((path / "chunks").read_bytes())
        except OSError:
            return None
        if not self.fits(hashes, state_hash):
            self._move_aside(path, "its list of chunk hashes does not match its name")
            return None
        return hashes

    def fits(self, hashes: list[bytes], state_hash: bytes) -> bool:
        """Whether a list of chunk hashes is that of the state with hash `state_hash`."""
        try:
            root = root_of(hashes, elements=self._geometry.elements, buffer_elements=self._geometry.buffer_elements)
        except ValueError:
            return False
        return root == state_hash

    def read_chunk(self, round_number: int, state_hash: bytes, index: int) -> bytes | None:
        """For serving; the receiver verifies. None: not here."""
        if not 0 <= index < self.chunk_count:
            return None
        which = self._chunk(index)
        try:
            fd = os.open(self._path(round_number, state_hash) / "data", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            data = read_at(fd, which.length, self._offset(which))
        finally:
            os.close(fd)
        self._pin(self._path(round_number, state_hash))
        return data if len(data) == which.length else None

    def _pin(self, path: Path) -> None:
        """A download keeps its snapshot while it goes on; at most `MAX_PINS` at a time, so that disk use is bounded."""
        now_s = time.monotonic()
        with self._lock:
            self._pins = {old: pin for old, pin in self._pins.items() if pin[1] > now_s}
            if path in self._pins or len(self._pins) < MAX_PINS:
                since_s = self._pins.get(path, (now_s, now_s))[0]
                self._pins[path] = (since_s, min(now_s + PIN_S, since_s + LONGEST_PIN_S))

    def _pinned(self, path: Path) -> bool:
        with self._lock:
            return path in self._pins and self._pins[path][1] > time.monotonic()

    # ---------------------------------------------------------------- downloading

    def begin_download(self, round_number: int, state_hash: bytes, hashes: list[bytes]) -> set[int]:
        """Open (or go on with) a partial snapshot; returns the chunks that it does not hold yet."""
        partial = self._partial(round_number, state_hash)
        partial.mkdir(exist_ok=True)
        missing = set(range(self.chunk_count))
        path = partial / "data"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            for index in range(self.chunk_count):
                which = self._chunk(index)
                data = read_at(fd, which.length, self._offset(which))
                if len(data) == which.length and chunk_hash(data) == hashes[index]:
                    missing.discard(index)
        finally:
            os.close(fd)
        return missing

    def put_chunk(self, round_number: int, state_hash: bytes, index: int, data: bytes | bytearray) -> None:
        """Write a verified chunk of a download. Raises `OSError`."""
        fd = os.open(self._partial(round_number, state_hash) / "data", os.O_RDWR | os.O_CLOEXEC)
        try:
            write_at(fd, data, self._offset(self._chunk(index)))
        finally:
            os.close(fd)

    def finish_download(self, round_number: int, state_hash: bytes, hashes: list[bytes]) -> None:
        partial = self._partial(round_number, state_hash)
        fd = os.open(partial / "data", os.O_RDWR | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        self._complete(partial, self._path(round_number, state_hash), b"".join(hashes))

    # ---------------------------------------------------------------- forgetting

    def prune(self, keep: int) -> None:
        """Keep the `keep` newest; downloads of older rounds than the newest snapshot are given up."""
        complete = self.complete()
        for old in complete[: -max(1, keep)]:
            path = self._path(old.round, old.state_hash)
            if not self._pinned(path):
                remove_tree(path)
        if complete:
            for path in self._directory.glob("*.partial"):
                number = path.name.partition("-")[0]
                if number.isdigit() and int(number) <= complete[-1].round:
                    remove_tree(path)

    def drop_oldest(self) -> bool:
        """Make room. False when only the newest is left."""
        if aside := self._aside():
            remove_tree(aside[0])
            return True
        complete = self.complete()
        if len(complete) < 2:
            return False
        remove_tree(self._path(complete[0].round, complete[0].state_hash))
        return True

    def set_aside(self, round_number: int, state_hash: bytes, why: str) -> None:
        """The state of that name is not the run's. Raises `OSError`."""
        path = self._path(round_number, state_hash)
        if path.is_dir():
            self._move_aside(path, why)

    def _move_aside(self, path: Path, why: str) -> None:
        """A corrupt snapshot stays for inspection, a few at a time, under a name that nothing serves or loads."""
        folder = self._directory / "corrupt"
        folder.mkdir(exist_ok=True)
        remove_tree(folder / path.name)
        path.rename(folder / path.name)
        for old in self._aside()[:-MAX_CORRUPT]:
            remove_tree(old)
        try:
            (folder / path.name / "why").write_text(why + "\n")
        except OSError:
            return  # on a full disk, say: the log has the sentence too

    def _aside(self) -> list[Path]:
        """What was found corrupt, oldest first."""
        folder = self._directory / "corrupt"
        return sorted(folder.iterdir(), key=lambda path: path.stat().st_ctime_ns) if folder.is_dir() else []

    # ---------------------------------------------------------------- places

    def chunk_bytes(self, index: int) -> int:
        return self._chunk(index).length

    def _chunk(self, index: int) -> Chunk:
        return chunk(index, self._geometry.elements, self._geometry.buffer_elements)

    def _offset(self, which: Chunk) -> int:
        behind = self._geometry.elements if which.of_momentum else 0
        return ELEMENT_BYTES * (behind + which.start)

    def _path(self, round_number: int, state_hash: bytes) -> Path:
        return self._directory / f"{round_number}-{state_hash.hex()}"

    def _partial(self, round_number: int, state_hash: bytes) -> Path:
        return self._directory / f"{round_number}-{state_hash.hex()}.partial"


def split_hashes(data: bytes | bytearray) -> list[bytes]:
    return [bytes(data[start : start + DIGEST_BYTES]) for start in range(0, len(data), DIGEST_BYTES)]


assert CHUNK_BYTES % ELEMENT_BYTES == 0
