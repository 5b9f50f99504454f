"""Contributions that wait for the others of their part, and their sums (protocol section 4, rule 6).

UPs wait encoded. Each sender has a window: when what waits of it exceeds that, its lanes are not read. All send in
ascending order of parts, so what one sender's full window waits for is always next in another's, and it drains.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import partial

import trio

from node.engine.geometry import Geometry
from node.engine.outbox import OutboxReader
from node.engine.threads import Threads
from protocol.codecs import CodecError
from protocol.exchange import ExchangeMachine, Reduce, SendPartial
from protocol.state_hash import chunk_hash
from protocol.sums import PartSum

WINDOW_BYTES = 64 << 20
"""Over all senders."""


class WaitingSums:
    def __init__(
        self, machine: ExchangeMachine, geometry: Geometry, outbox: OutboxReader | None, threads: Threads
    ) -> None:
        """`outbox`: my own contribution, if I have one."""
        self._machine = machine
        self._geometry = geometry
        self._outbox = outbox
        self._threads = threads
        self._kept: dict[int, dict[int, bytearray]] = {}
        """Part → sender → payload."""
        self._bytes: Counter[int] = Counter()
        """Sender → bytes of it that wait."""
        others = max(1, len(machine.view.tokens) - 1)
        self._window_bytes = max(WINDOW_BYTES // others, 2 * geometry.slot_bytes)
        self._held_back: Counter[int] = Counter()
        """Sender → lanes that are not read."""
        self._room = trio.lowlevel.ParkingLot()
        self._closed = False

    @property
    def held_back(self) -> Iterable[int]:
        """Senders that are not read at the moment: their silence is our doing."""
        return self._held_back.keys()

    async def keep(self, part: int, sender: int, payload: bytearray) -> None:
        """Keep an accepted payload for its part; returns when the sender's window has room."""
        self._kept.setdefault(part, {})[sender] = payload
        self._bytes[sender] += len(payload)
        if self._bytes[sender] <= self._window_bytes:
            return
        self._held_back[sender] += 1
        try:
            while self._bytes[sender] > self._window_bytes and not self._closed:
                await self._room.park()
        finally:
            self._held_back[sender] -= 1
            if not self._held_back[sender]:
                del self._held_back[sender]

    def forget(self, part: int) -> None:
        """The part stays empty."""
        self._free(self._kept.pop(part, {}))

    async def add_up(self, decision: Reduce | SendPartial) -> tuple[bytes, bytes]:
        """The part's mean or partial sum, encoded, and its hash; empty when it cannot be encoded."""
        payloads = self._kept.pop(decision.part, {})
        try:
            return await self._threads.compute(partial(self._add_up, decision, payloads))
        except (CodecError, OSError):
            # An overflow, or a contribution of mine that the disk does not give back: the part stays empty.
            self._machine.dropped["a sum that could not be made"] += 1
            return b"", b""
        finally:
            self._free(payloads)

    def close(self) -> None:
        self._closed = True
        self._room.unpark_all()

    def _add_up(self, decision: Reduce | SendPartial, payloads: dict[int, bytearray]) -> tuple[bytes, bytes]:
        """In a thread: sum in the stated order, encode once."""
        part, geometry, machine = decision.part, self._geometry, self._machine
        weights = machine.weights(part)
        total = PartSum(geometry.part_size(part), geometry.sum_codec)
        for index in decision.order:
            if index == machine.view.my_index:
                assert self._outbox is not None, "only contributors sum"
                total.add_leaf(weights[index], geometry.codec, self._outbox.read(part))
            elif machine.sends_partial(index, part):
                total.add_partial(payloads[index])
            else:
                total.add_leaf(weights[index], geometry.codec, payloads[index])
        if isinstance(decision, SendPartial):
            return total.partial(), b""
        data = geometry.codec.encode(total.mean(decision.weight))
        return data, chunk_hash(data)

    def _free(self, payloads: dict[int, bytearray]) -> None:
        for sender, payload in payloads.items():
            self._bytes[sender] -= len(payload)
        self._room.unpark_all()
