"""What lets a killed engine finish an outer step exactly: the step is in place and not idempotent.

A file mapped into memory, so that its pages outlive the process as the memfds do (not the machine: after a reboot the
memfds are gone too, and a snapshot is replayed). Before a block is stepped its old θ and momentum are copied here and
the slot is armed; afterwards the part's count of finished elements grows, then the slot is free again. Stores of one
thread become visible in program order even when the process is killed, so at any moment each block is either untouched,
restorable, or counted.

    header     magic, phase, identity of the memfds (boot and inodes), base, new round, digest of the parts, result
    progress   finished elements of every part, 8 bytes each
    slots      one a thread: first element, elements, copies of θ and momentum [BLOCK]
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import numpy as np
import numpy.typing as npt

from node.engine.geometry import Geometry
from protocol.codecs import BLOCK_ELEMENTS, Float32Array

_HEADER = struct.Struct("<8sB7x32sQQ32sQ32s32s")  # the state's hash last
_PHASE_AT = 8
_STATE_HASH_AT = _HEADER.size - 32
_HEADER_BYTES = 4096
_MAGIC = b"ATLAPLY1"
_SLOT_HEADER_BYTES = 4096
_SLOT_BYTES = _SLOT_HEADER_BYTES + 2 * 4 * BLOCK_ELEMENTS
_FREE = -1


class Phase(IntEnum):
    IDLE = 0
    RUNNING = 1
    COMPLETE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Which outer step the journal is about."""

    phase: Phase
    base: bytes = bytes(32)
    new_round: int = 0
    parts: bytes = bytes(32)
    """Digest of the part hashes of the commit."""
    state_hash: bytes = bytes(32)
    """Of the state after it, once complete."""


class Slot:
    """One thread's place for the block that it is stepping."""

    def __init__(self, head: npt.NDArray[np.int64], theta: Float32Array, momentum: Float32Array) -> None:
        self._head = head
        self.old_theta = theta
        self.old_momentum = momentum

    def arm(self, start: int, theta: Float32Array, momentum: Float32Array) -> None:
        """Copy a block: `theta` [b] begins at element `start`; `momentum` [≤ b] is what of it has momentum."""
        self.old_theta[: len(theta)] = theta
        self.old_momentum[: len(momentum)] = momentum
        self._head[1] = len(theta)
        self._head[2] = len(momentum)
        self._head[0] = start

    def free(self) -> None:
        self._head[0] = _FREE

    @property
    def armed(self) -> tuple[int, int, int] | None:
        """First element, elements, elements with momentum."""
        start, elements, with_momentum = (int(value) for value in self._head[:3])
        return None if start == _FREE else (start, elements, with_momentum)


class ApplyJournal:
    def __init__(self, path: Path, geometry: Geometry, threads: int, memory: tuple[int, int]) -> None:
        """`memory`: the descriptors of θ and momentum. A journal of other memory or sizes starts empty."""
        self._identity = _identity(memory)
        progress_bytes = -(-8 * geometry.part_count // 4096) * 4096
        size = _HEADER_BYTES + progress_bytes + threads * _SLOT_BYTES
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fresh = os.fstat(fd).st_size != size
            if fresh:
                os.ftruncate(fd, 0)
                os.posix_fallocate(fd, 0, size)
            self._map = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        self.progress: npt.NDArray[np.int64] = np.frombuffer(self._map, np.int64, geometry.part_count, _HEADER_BYTES)
        self.slots = [
            _slot(self._map, _HEADER_BYTES + progress_bytes + index * _SLOT_BYTES) for index in range(threads)
        ]
        if fresh or self._read() is None:
            self.reset()

    @property
    def mark(self) -> Mark:
        return self._read() or Mark(phase=Phase.IDLE)

    def reset(self) -> None:
        """No outer step is under way: the state was loaded anew."""
        self._write(Mark(phase=Phase.IDLE))
        self.progress[:] = 0
        for slot in self.slots:
            slot.free()

    def begin(self, mark: Mark) -> None:
        self.reset()
        self._write(mark)

    def complete(self, state_hash: bytes) -> None:
        """Every part is stepped; the result's hash first, then the phase."""
        self._map[_STATE_HASH_AT : _STATE_HASH_AT + 32] = state_hash
        self._map[_PHASE_AT] = Phase.COMPLETE

    def _read(self) -> Mark | None:
        magic, phase, boot, theta, momentum, base, new_round, parts, state_hash = _HEADER.unpack_from(self._map)
        if magic != _MAGIC or (boot, theta, momentum) != self._identity or phase not in tuple(Phase):
            return None
        return Mark(phase=Phase(phase), base=base, new_round=new_round, parts=parts, state_hash=state_hash)

    def _write(self, mark: Mark) -> None:
        # The phase goes first to idle and last to its value: a header half written is never taken for a running step.
        self._map[_PHASE_AT] = Phase.IDLE
        _HEADER.pack_into(
            self._map,
            0,
            _MAGIC,
            Phase.IDLE,
            *self._identity,
            mark.base,
            mark.new_round,
            mark.parts,
            mark.state_hash,
        )
        self._map[_PHASE_AT] = mark.phase


def _slot(buffer: mmap.mmap, offset: int) -> Slot:
    head = np.frombuffer(buffer, np.int64, 4, offset)
    theta = np.frombuffer(buffer, np.float32, BLOCK_ELEMENTS, offset + _SLOT_HEADER_BYTES)
    momentum = np.frombuffer(buffer, np.float32, BLOCK_ELEMENTS, offset + _SLOT_HEADER_BYTES + 4 * BLOCK_ELEMENTS)
    return Slot(head, theta, momentum)


def _identity(memory: tuple[int, int]) -> tuple[bytes, int, int]:
    """Inode numbers of memfds are unique within a boot."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_bytes().strip().replace(b"-", b"")[:32].ljust(32, b"\0")
    return boot, os.fstat(memory[0]).st_ino, os.fstat(memory[1]).st_ino
