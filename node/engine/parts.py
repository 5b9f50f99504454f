"""Reduced parts on disk: one pair of files a roster, so that a round of thousands of parts costs few fsyncs.

    parts/ROSTER.data    the payload of part p at p × slot bytes (sparse)
    parts/ROSTER.index   records (length, checksum, PartRef) of the parts that are durable, in order of arrival
    parts/rounds         which hashes each committed round needs

A part is readable as soon as it is written, and counts as held once `sync` returned: its record is then in the index.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from blake3 import blake3

from node.engine.api import PartRef
from node.engine.disk import SharedFile, disk_bytes, read_at, read_cached, sync_directory, write_at, write_atomic

_RECORD = struct.Struct("<I8s")


@dataclass(slots=True)
class _Roster:
    data_path: Path
    index_path: Path
    data: SharedFile
    born: int
    """Number of commits kept when it was created: what no commit names goes two commits later."""
    parts: dict[bytes, PartRef] = field(default_factory=dict)
    """By hash; written, maybe not yet durable."""


class PartStore:
    """All methods but `__init__` may run in any thread."""

    def __init__(self, directory: Path, slot_bytes: int) -> None:
        """Reads the indexes; a torn record ends an index, since what follows was never announced as held."""
        self._directory = directory
        self._slot_bytes = slot_bytes
        self._lock = threading.Lock()
        self._rosters: dict[bytes, _Roster] = {}
        self._rounds: dict[int, list[bytes]] = {}
        self._lacking: dict[int, set[bytes]] = {}
        """Round → parts of its commit that are not here."""
        self._commits_kept = 0
        directory.mkdir(parents=True, exist_ok=True)
        self._rounds_path = directory / "rounds"
        try:
            self._rounds = msgspec.msgpack.decode(self._rounds_path.read_bytes(), type=dict[int, list[bytes]])
        except (FileNotFoundError, msgspec.DecodeError):
            self._rounds = {}
        for index_path in sorted(directory.glob("*.index")):
            self._load(index_path)
        for number in self._rounds:
            self._lacking[number] = self._absent(number)

    def close(self) -> None:
        with self._lock:
            for roster in self._rosters.values():
                roster.data.close()
            self._rosters.clear()

    # ---------------------------------------------------------------- writing

    def write(self, ref: PartRef, payload: bytes | bytearray | memoryview) -> None:
        """Write a verified payload; not durable before `sync`. Raises `OSError` (disk full)."""
        roster = self._roster(ref.roster_id)
        with roster.data.use() as fd:
            write_at(fd, payload, ref.part * self._slot_bytes)
        with self._lock:
            roster.parts[ref.hash] = ref
            for lacking in self._lacking.values():
                lacking.discard(ref.hash)

    def sync(self, refs: Sequence[PartRef]) -> None:
        """Make written parts durable, then record them. Raises `OSError`."""
        by_roster: dict[bytes, list[PartRef]] = {}
        for ref in refs:
            by_roster.setdefault(ref.roster_id, []).append(ref)
        for roster_id, members in by_roster.items():
            roster = self._roster(roster_id)
            with roster.data.use() as fd:
                os.fdatasync(fd)
            with roster.index_path.open("ab") as file:
                for ref in members:
                    record = msgspec.msgpack.encode(ref)
                    file.write(_RECORD.pack(len(record), blake3(record).digest(8)) + record)
                file.flush()
                os.fdatasync(file.fileno())

    # ---------------------------------------------------------------- reading

    def find(self, part_hash: bytes) -> PartRef | None:
        with self._lock:
            for roster in self._rosters.values():
                if ref := roster.parts.get(part_hash):
                    return ref
        return None

    def read(self, part_hash: bytes, *, only_cached: bool = False) -> bytes | None:
        """A part's payload, not verified again. None: not here, or with `only_cached` not in the page cache."""
        with self._lock:
            found = next(
                ((roster.data, ref) for roster in self._rosters.values() if (ref := roster.parts.get(part_hash))), None
            )
        if found is None:
            return None
        file, ref = found
        offset = ref.part * self._slot_bytes
        try:
            with file.use() as fd:
                if only_cached:
                    return read_cached(fd, ref.length, offset)
                data = read_at(fd, ref.length, offset)
        except FileNotFoundError:
            return None
        return data if len(data) == ref.length else None

    def complete_rounds(self) -> tuple[int, ...]:
        """Committed rounds all of whose parts are here, ascending."""
        with self._lock:
            return tuple(sorted(number for number, lacking in self._lacking.items() if not lacking))

    def disk_bytes(self) -> int:
        return disk_bytes(self._directory)

    # ---------------------------------------------------------------- forgetting

    def keep(self, round_number: int, hashes: Iterable[bytes], keep_rounds: int) -> None:
        """The commit of `round_number` needs `hashes`; drop what no kept round needs."""
        with self._lock:
            self._commits_kept += 1
            self._rounds[round_number] = list(hashes)
            self._lacking[round_number] = self._absent(round_number)
            for number in sorted(self._rounds)[: -max(1, keep_rounds)]:
                del self._rounds[number], self._lacking[number]
            self._write_rounds()
        self._drop_unneeded()

    def drop_oldest_round(self) -> bool:
        """Make room: forget the oldest kept round. False when only the newest is left."""
        with self._lock:
            if len(self._rounds) < 2:
                return False
            oldest = min(self._rounds)
            del self._rounds[oldest], self._lacking[oldest]
        self._drop_unneeded()
        with self._lock, contextlib.suppress(OSError):  # a round too many in the file only counts as incomplete
            self._write_rounds()
        return True

    def forget(self, part_hash: bytes) -> None:
        """The bytes under this hash are damaged: they count as not here, so that they are fetched again."""
        with self._lock:
            for roster in self._rosters.values():
                roster.parts.pop(part_hash, None)
            for number, hashes in self._rounds.items():
                if part_hash in hashes:
                    self._lacking.setdefault(number, set()).add(part_hash)

    def _drop_unneeded(self) -> None:
        with self._lock:
            needed = {part_hash for hashes in self._rounds.values() for part_hash in hashes}
            for roster_id, roster in list(self._rosters.items()):
                if roster.born >= self._commits_kept - 1 or not needed.isdisjoint(roster.parts):
                    continue
                del self._rosters[roster_id]
                roster.data.close()
                roster.index_path.unlink(missing_ok=True)
                roster.data_path.unlink(missing_ok=True)

    def _absent(self, round_number: int) -> set[bytes]:
        return {
            part_hash
            for part_hash in self._rounds[round_number]
            if not any(part_hash in roster.parts for roster in self._rosters.values())
        }

    def _write_rounds(self) -> None:
        write_atomic(self._rounds_path, msgspec.msgpack.encode(self._rounds))

    # ---------------------------------------------------------------- files

    def _roster(self, roster_id: bytes) -> _Roster:
        with self._lock:
            roster = self._rosters.get(roster_id)
            if roster is None:
                roster = self._rosters[roster_id] = self._open(roster_id)
                sync_directory(self._directory)
            return roster

    def _open(self, roster_id: bytes) -> _Roster:
        data_path = self._directory / f"{roster_id.hex()}.data"
        file = SharedFile(data_path, os.O_RDWR | os.O_CREAT)
        return _Roster(data_path, data_path.with_suffix(".index"), file, self._commits_kept)

    def _load(self, index_path: Path) -> None:
        try:
            roster_id = bytes.fromhex(index_path.stem)
        except ValueError:
            return
        roster = self._rosters[roster_id] = self._open(roster_id)
        data = index_path.read_bytes()
        offset = 0
        while len(data) - offset >= _RECORD.size:
            length, checksum = _RECORD.unpack_from(data, offset)
            record = data[offset + _RECORD.size : offset + _RECORD.size + length]
            if len(record) != length or blake3(record).digest(8) != checksum:
                break
            try:
                ref = msgspec.msgpack.decode(record, type=PartRef)
            except msgspec.DecodeError:
                break  # of another version of the software: no more use than a torn one
            roster.parts[ref.hash] = ref
            offset += _RECORD.size + length
        if offset < len(data):
            os.truncate(index_path, offset)
