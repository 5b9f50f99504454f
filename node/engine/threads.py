"""Work that would keep the event loop waiting, in a bounded number of threads (design section 2)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import trio

T = TypeVar("T")

CHECKED_AT_ONCE_BYTES = 1 << 17
"""A quarter of a millisecond with the signature of a part; a thread and back costs the loop about as much."""


class Threads:
    """`compute`: NumPy and BLAKE3, which release the GIL; `disk`: a round's own blocking reads, writes and fsyncs;
    `bulk`: the same for what may wait (serving others, downloads, snapshots, housekeeping), in threads of its own."""

    def __init__(self, count: int) -> None:
        self.count = max(1, count)
        self._compute = trio.CapacityLimiter(self.count)
        self._disk = trio.CapacityLimiter(2)
        self._bulk = trio.CapacityLimiter(2)

    async def compute(self, work: Callable[[], T]) -> T:
        return await trio.to_thread.run_sync(work, limiter=self._compute)

    async def check(self, work: Callable[[], T], size: int) -> T:
        """Hashes and bounds of `size` bytes: at once where handing them to a thread and back takes longer."""
        if size > CHECKED_AT_ONCE_BYTES:
            return await self.compute(work)
        return work()

    async def disk(self, work: Callable[[], T]) -> T:
        return await trio.to_thread.run_sync(work, limiter=self._disk)

    async def bulk(self, work: Callable[[], T]) -> T:
        return await trio.to_thread.run_sync(work, limiter=self._bulk)

    async def spread(self, work: Callable[[int, int], None], count: int) -> None:
        """Call `work(worker, index)` for every index below `count`, in as many threads as there are; order is free.

        `worker` numbers the thread, below `self.count`. Stops between two calls when cancelled or when one raises.
        """
        indices = itertools.count()
        failed = False

        def run(worker: int) -> None:
            nonlocal failed
            try:
                while not failed and (index := next(indices)) < count:
                    trio.from_thread.check_cancelled()
                    work(worker, index)
            except BaseException:
                failed = True
                raise

        errors: list[Exception] = []

        async def start(worker: int) -> None:
            try:
                await self.compute(partial(run, worker))
            except Exception as error:  # noqa: BLE001 - raised below, without a group around it
                errors.append(error)

        async with trio.open_nursery() as nursery:
            for worker in range(min(self.count, max(1, count))):
                nursery.start_soon(start, worker)
        if errors:
            raise errors[0]
