"""Partial sums that wait for their parents to take them: few, since each is as large as a part."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import trio

from node.engine.frames import UpMeta
from protocol.fields import bitmap_bytes

MAX_PARTIALS = 16
"""Made at a time; the next is summed when one of them was taken."""


@dataclass(slots=True, kw_only=True)
class _Partial:
    parent: int
    bitmap: int
    data: bytes
    taken: trio.Event


class Partials:
    """By part."""

    def __init__(self) -> None:
        self.room = trio.CapacityLimiter(MAX_PARTIALS)
        """To be held from before a sum is made until it was taken."""
        self._waiting: dict[int, _Partial] = {}

    @property
    def parts(self) -> set[int]:
        return set(self._waiting)

    def put(self, part: int, *, parent: int, bitmap: int, data: bytes) -> None:
        self._waiting[part] = _Partial(parent=parent, bitmap=bitmap, data=data, taken=trio.Event())

    def frame(self, part: int) -> tuple[bytes, bytes] | None:
        """Meta and payload of its UP; None: no sum of this part waits."""
        held = self._waiting.get(part)
        return None if held is None else (msgspec.msgpack.encode(UpMeta(bitmap_bytes(held.bitmap), b"")), held.data)

    def taken(self, part: int) -> None:
        if held := self._waiting.get(part):
            held.taken.set()

    def give_up(self, parent: int) -> None:
        """It takes none any more."""
        for held in self._waiting.values():
            if held.parent == parent:
                held.taken.set()

    async def wait_taken(self, part: int, until_s: float) -> None:
        """Until its parent has it, or will not have it by `until_s`; then it is forgotten."""
        with trio.move_on_at(until_s):
            await self._waiting[part].taken.wait()
        del self._waiting[part]
