"""The outer state in shared memory: θ, momentum, and the trainer's Δ; freezing, stepping, hashing (design section 5).

Shapes: `E` elements, of which the last `F` are buffers without momentum; θ and Δ are [E], momentum is [E − F].
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import trio
from safetensors import SafetensorError, safe_open

from node.engine.api import Apply
from node.engine.apply_journal import ApplyJournal, Mark, Phase, Slot
from node.engine.artifacts import ArtifactStore
from node.engine.geometry import ELEMENT_BYTES, Geometry
from node.engine.outbox import Contribution, Outbox
from node.engine.parts import PartStore
from node.engine.snapshots import SnapshotStore
from node.engine.threads import Threads
from node.errors import AtollError
from protocol.codecs import BLOCK_ELEMENTS, CodecError, Float32Array
from protocol.commitment import Commitment
from protocol.names import Digest, digest
from protocol.outer import step_range
from protocol.state_hash import chunk, chunk_count, chunk_hash, chunk_view, root_of


class StateError(AtollError):
    """A request about the state cannot be carried out; one sentence for the daemon."""


class OuterState:
    """One task at a time may change it (`Engine` keeps the order)."""

    def __init__(self, geometry: Geometry, memory: Sequence[int], directory: Path, threads: Threads) -> None:
        """`memory`: descriptors of θ, momentum, Δ, mapped here and left to the caller. Raises `StateError`."""
        sizes = (geometry.elements, geometry.momentum_elements, geometry.elements)
        self.theta, self.momentum, self.delta = (
            _map(fd, size, name) for fd, size, name in zip(memory, sizes, ("theta", "momentum", "delta"), strict=True)
        )
        self.state_hash: Digest | None = None
        """Of what the memory holds; None: not known, or in the middle of an outer step."""
        self._geometry = geometry
        self._threads = threads
        self._journal = ApplyJournal(directory / "apply.journal", geometry, threads.count, (memory[0], memory[1]))

    @property
    def interrupted(self) -> Mark | None:
        """The outer step that an earlier process did not finish."""
        mark = self._journal.mark
        return mark if mark.phase is Phase.RUNNING else None

    # ---------------------------------------------------------------- loading

    async def load_initial(self, artifacts: ArtifactStore, artifact: bytes) -> Digest:
        """S_0: θ from a safetensors file, momentum zero. Raises `StateError`."""
        self.forget()
        await self._threads.disk(lambda: self._read_initial(artifacts, artifact))
        return await self.hash()

    def _read_initial(self, artifacts: ArtifactStore, artifact: bytes) -> None:
        path = artifacts.path(artifact)
        if not artifacts.verify(artifact):
            raise StateError(f"artifact {artifact.hex()} (S_0) is not here or corrupt; fetch it first")
        try:
            with safe_open(path, framework="numpy") as file:
                values = file.get_slice("theta")
                if values.get_dtype() != "F32" or values.get_shape() != [self._geometry.elements]:
                    raise StateError(
                        f"S_0 holds theta as {values.get_dtype()} {values.get_shape()}; "
                        f"the manifest's layout has F32 [{self._geometry.elements}]"
                    )
                for start in range(0, self._geometry.elements, BLOCK_ELEMENTS):
                    stop = min(start + BLOCK_ELEMENTS, self._geometry.elements)
                    self.theta[start:stop] = values[start:stop]
        except SafetensorError as error:
            raise StateError(f"S_0 (artifact {artifact.hex()}) is no safetensors file with `theta`: {error}") from error
        self.momentum[:] = 0

    async def load_snapshot(self, snapshots: SnapshotStore, round_number: int, state_hash: bytes) -> Digest:
        """Raises `SnapshotError`."""
        self.forget()
        await self._threads.disk(
            lambda: snapshots.load(round_number, state_hash, self.theta, self.momentum, check=_check_cancelled)
        )
        self.state_hash = state_hash
        return state_hash

    async def resume(self, round_number: int, state_hash: bytes) -> Digest:
        """Whether the memory holds that state, or the step that follows it, under way or complete.

        In the latter cases only `apply` of that very commit can follow; it goes on where the other process stopped, or
        answers at once. Raises `StateError`.
        """
        mark = self._journal.mark
        if mark.phase is Phase.RUNNING and mark.new_round == round_number + 1:
            self.state_hash = None
            return state_hash
        found = await self.hash()
        if found == state_hash:
            return state_hash
        if mark.phase is Phase.COMPLETE and mark.new_round == round_number + 1 and mark.state_hash == found:
            return state_hash
        self.state_hash = None
        raise StateError(
            f"the memory hashes to {found.hex()}, not to {state_hash.hex()} of round {round_number}; load a snapshot"
        )

    def forget(self) -> None:
        """What the memory holds is no state of the run."""
        self._journal.reset()
        self.state_hash = None

    async def hash(self) -> Digest:
        """Hash the memory, in threads, and remember it."""
        sizes = self._geometry.elements, self._geometry.buffer_elements
        hashes = [b""] * chunk_count(*sizes)

        def one(_: int, index: int) -> None:
            hashes[index] = chunk_hash(chunk_view(chunk(index, *sizes), self.theta, self.momentum))

        await self._threads.spread(one, len(hashes))
        self.state_hash = root_of(hashes, elements=sizes[0], buffer_elements=sizes[1])
        return self.state_hash

    # ---------------------------------------------------------------- freezing

    async def encode(self, outbox: Outbox, base: bytes) -> Contribution | None:
        """Freeze Δ into the outbox, durably; a second freeze of one base returns the first. None: Δ is not finite.

        Raises `OSError` when the disk is full.
        """
        found = await self._threads.disk(lambda: outbox.find(base))
        if found is not None:
            return found
        geometry = self._geometry
        hashes = [b""] * geometry.part_count
        squares = np.zeros(geometry.part_count)
        largest = np.zeros(geometry.part_count)
        writer = await self._threads.disk(lambda: outbox.write(base))

        def one(_: int, part: int) -> None:
            start, stop = geometry.part_range(part)
            values = self.delta[start:stop]
            squares[part], largest[part] = _measure(values)
            data = geometry.codec.encode(values)
            hashes[part] = chunk_hash(data)
            writer.put(part, data)

        try:
            await self._threads.spread(one, geometry.part_count)
            contribution = Contribution(
                hashes=tuple(hashes),
                parts_root=await self._threads.compute(lambda: Commitment(hashes).root),
                norm=math.sqrt(float(squares.sum())),
                largest=float(largest.max()),
            )
            await self._threads.disk(lambda: writer.finish(contribution))
        except CodecError:
            return None
        except OSError:
            writer.discard()
            raise
        finally:
            writer.close()
        return contribution

    # ---------------------------------------------------------------- stepping

    async def apply(self, request: Apply, parts: PartStore) -> tuple[Digest, tuple[bool, ...]]:
        """The outer step of one commit; returns the new state's hash, and per part whether my contribution is in it.

        Afterwards `delta` holds `θ_{r+1} − θ_r` where my contribution was not counted, zeros elsewhere. Interrupted by
        a kill, the same request finishes it exactly. Raises `StateError` before anything is changed.
        """
        geometry = self._geometry
        if len(request.headers) != geometry.part_count:
            raise StateError(f"a commit of {len(request.headers)} parts does not fit {geometry.part_count} parts")
        counted = self._counted(request)
        hashes = digest(*(b"" if ref is None else ref.hash for ref in request.headers))
        mark = self._journal.mark
        same = (mark.base, mark.new_round, mark.parts) == (request.base, request.new_round, hashes)
        if mark.phase is Phase.COMPLETE and same:
            self.state_hash = mark.state_hash
            return mark.state_hash, counted
        if mark.phase is Phase.RUNNING and not same:
            raise StateError(
                f"the step to round {mark.new_round} was interrupted; apply that commit, or load a snapshot"
            )
        await self._check_parts(request, parts)
        if mark.phase is Phase.RUNNING:
            self._restore_blocks()
        else:
            self._journal.begin(Mark(phase=Phase.RUNNING, base=request.base, new_round=request.new_round, parts=hashes))
        self.state_hash = None

        def one(worker: int, part: int) -> None:
            self._step_part(self._journal.slots[worker], part, request, parts, counted[part])

        await self._threads.spread(one, geometry.part_count)
        state_hash = await self.hash()
        self._journal.complete(state_hash)
        return state_hash, counted

    def _counted(self, request: Apply) -> tuple[bool, ...]:
        index = request.my_index if request.contributed else None
        return tuple(index is not None and ref is not None and bool(ref.bitmap >> index & 1) for ref in request.headers)

    async def _check_parts(self, request: Apply, parts: PartStore) -> None:
        """All bytes are here, unharmed, and decode: nothing can fail half-way through the step but the machine."""

        def one(_: int, part: int) -> None:
            ref = request.headers[part]
            if ref is not None:
                self._read_part(part, ref.hash, parts)

        await self._threads.spread(one, len(request.headers))

    def _read_part(self, part: int, part_hash: bytes, parts: PartStore) -> bytes:
        data = parts.read(part_hash)
        if data is None or chunk_hash(data) != part_hash:
            parts.forget(part_hash)
            raise StateError(f"the bytes of part {part} ({part_hash.hex()}) are not here or corrupt; fetch them")
        try:
            self._geometry.codec.check(data, self._geometry.part_size(part))
        except CodecError as error:
            raise StateError(f"part {part} ({part_hash.hex()}) does not decode: {error}") from error
        return data

    def _restore_blocks(self) -> None:
        """Undo the blocks in which the other process was when it died, unless they were finished and counted."""
        for slot in self._journal.slots:
            armed = slot.armed
            if armed is None:
                continue
            start, elements, with_momentum = armed
            part = start // self._geometry.part_elements
            if self._journal.progress[part] <= start - self._geometry.part_range(part)[0]:
                self.theta[start : start + elements] = slot.old_theta[:elements]
                self.momentum[start : start + with_momentum] = slot.old_momentum[:with_momentum]
            slot.free()

    def _step_part(self, slot: Slot, part: int, request: Apply, parts: PartStore, counted: bool) -> None:
        first, stop = self._geometry.part_range(part)
        ref = request.headers[part]
        if ref is None or counted:
            self.delta[first:stop] = 0
        if ref is None:
            return
        done = int(self._journal.progress[part])
        data = self._read_part(part, ref.hash, parts)
        for offset, gradient in self._geometry.codec.blocks(data, stop - first):
            if offset + len(gradient) <= done:
                continue
            start = first + offset
            theta = self.theta[start : start + len(gradient)]
            slot.arm(start, theta, self.momentum[start : start + len(gradient)])
            step_range(
                self.theta,
                self.momentum,
                gradient,
                start=start,
                lr=request.outer_lr,
                momentum_factor=self._geometry.momentum,
            )
            if not counted:
                np.subtract(theta, slot.old_theta[: len(theta)], out=self.delta[start : start + len(gradient)])
            self._journal.progress[part] = offset + len(gradient)
            slot.free()


def _measure(values: Float32Array) -> tuple[float, float]:
    """Sum of squares (in fp64) and largest magnitude; NaN and infinity show in both."""
    squares, largest = 0.0, 0.0
    for start in range(0, len(values), BLOCK_ELEMENTS):
        block = values[start : start + BLOCK_ELEMENTS]
        squares += float(np.square(block, dtype=np.float64).sum())
        largest = max(largest, float(block.max()), -float(block.min()))
    return squares, largest


def _map(fd: int, elements: int, name: str) -> Float32Array:
    size = elements * ELEMENT_BYTES
    if not elements:
        return np.zeros(0, np.float32)
    have = os.fstat(fd).st_size
    if have < size:
        raise StateError(f"the memory for {name} has {have} bytes; {elements} elements need {size}")
    return np.frombuffer(mmap.mmap(fd, size), np.float32, elements)


def _check_cancelled() -> None:
    trio.from_thread.check_cancelled()
