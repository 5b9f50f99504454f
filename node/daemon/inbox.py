"""Datagrams on their way from the links to the round's state machine: bounded per peer, and fair between peers."""

from __future__ import annotations

from collections import Counter, deque

import trio

from protocol.names import PeerId

MAX_MESSAGES_PER_PEER = 256
MAX_BYTES_PER_PEER = 16 * 1024 * 1024


class Inbox(trio.abc.ReceiveChannel[tuple[PeerId, bytes]]):
    """What peers sent, one message of each peer in turn: a peer that floods displaces only its own oldest messages."""

    def __init__(self, counts: Counter[str]) -> None:
        self._counts = counts
        self._queues: dict[PeerId, deque[bytes]] = {}
        self._bytes: Counter[PeerId] = Counter()
        self._arrived = trio.Event()
        self._closed = False

    def put(self, peer: PeerId, data: bytes) -> None:
        queue = self._queues.setdefault(peer, deque())
        queue.append(data)
        self._bytes[peer] += len(data)
        while len(queue) > MAX_MESSAGES_PER_PEER or self._bytes[peer] > MAX_BYTES_PER_PEER:
            self._bytes[peer] -= len(queue.popleft())
            self._counts["datagrams dropped because this node was too slow"] += 1
        self._arrived.set()

    def receive_nowait(self) -> tuple[PeerId, bytes]:
        """Raises `trio.WouldBlock` when there is nothing, `trio.EndOfChannel` when the network is closed."""
        if not self._queues:
            raise trio.EndOfChannel if self._closed else trio.WouldBlock
        peer = next(iter(self._queues))
        queue = self._queues.pop(peer)
        data = queue.popleft()
        self._bytes[peer] -= len(data)
        if queue:
            self._queues[peer] = queue  # to the end of the line
        else:
            del self._bytes[peer]
        return peer, data

    async def receive(self) -> tuple[PeerId, bytes]:
        """The next message. Raises `trio.EndOfChannel` when the network is closed."""
        while True:
            await trio.lowlevel.checkpoint()
            try:
                return self.receive_nowait()
            except trio.WouldBlock:
                self._arrived = trio.Event()
                await self._arrived.wait()

    def close(self) -> None:
        self._closed = True
        self._arrived.set()

    async def aclose(self) -> None:
        self.close()
        await trio.lowlevel.checkpoint()
