"""Parts on their way to the disk: written (and readable) at once, announced as held after one fsync for many."""

from __future__ import annotations

import errno
from collections.abc import Awaitable, Callable

import trio

from node.engine.api import Event, PartHeld, PartRef, StorageFailed, StorageWorks
from node.engine.parts import PartStore
from node.engine.threads import Threads

RETRY_S = 2.0


class PartKeeper:
    def __init__(
        self,
        parts: PartStore,
        threads: Threads,
        emit: Callable[[Event], Awaitable[None]],
        make_room: Callable[[], bool],
    ) -> None:
        """`make_room` gives up something old on a full disk (in a thread); False: there is nothing to give up."""
        self.parts = parts
        self._make_room = make_room
        self._threads = threads
        self._emit = emit
        self._written: list[PartRef] = []
        self._wake = trio.Event()
        self._failing = False
        self._syncing = False
        self._settled = trio.lowlevel.ParkingLot()

    async def write(self, ref: PartRef, payload: bytes | bytearray) -> bool:
        """Write a verified part; `PartHeld` follows. False: the disk refused it (the daemon is told)."""
        while True:
            try:
                await self._threads.disk(lambda: self.parts.write(ref, payload))
            except OSError as error:
                if error.errno == errno.ENOSPC and await self._threads.disk(self._make_room):
                    continue
                await self._failed(error)
                return False
            self.announce(ref)
            return True

    def announce(self, ref: PartRef) -> None:
        """`PartHeld` for a part that is written, once it is durable."""
        self._written.append(ref)
        self._wake.set()

    async def settle(self) -> None:
        """Wait until everything announced so far is held, or the disk refuses it."""
        while (self._written or self._syncing) and not self._failing:
            await self._settled.park()

    async def run(self) -> None:
        while True:
            self._settled.unpark_all()
            await self._wake.wait()
            self._wake = trio.Event()
            self._syncing = True
            batch, self._written = self._written, []
            try:
                await self._threads.disk(lambda batch=batch: self.parts.sync(batch))  # type: ignore[misc]
            except OSError as error:
                self._written = batch + self._written
                self._wake.set()
                await self._failed(error)
                self._settled.unpark_all()
                await trio.sleep(RETRY_S)
                continue
            if self._failing:
                self._failing = False
                await self._emit(StorageWorks())
            for ref in batch:
                await self._emit(PartHeld(header=ref))
            self._syncing = False

    async def _failed(self, error: OSError) -> None:
        if not self._failing:
            self._failing = True
            await self._emit(StorageFailed(reason=f"a part could not be stored: {error.strerror or error}"))
