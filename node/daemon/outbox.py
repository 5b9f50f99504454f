"""What waits to be written to one peer: bounded, and in order of urgency."""

from __future__ import annotations

from collections import deque

import trio

MAX_QUEUED_DATAGRAMS = 256
MAX_QUEUED_BYTES = 16 * 1024 * 1024
MAX_URGENT_FRAMES = 1024
COALESCED_BYTES = 16 * 1024
"""Small frames are written together up to this size."""


class Outbox:
    """Pings and refusals first, then datagrams, then requests, answers and records."""

    def __init__(self) -> None:
        self._urgent: deque[bytes] = deque()
        self._datagrams: deque[tuple[str | None, bytes]] = deque()
        self._datagram_bytes = 0
        self._bulk: deque[bytes] = deque()
        self.bulk_bytes = 0
        self._arrived = trio.Event()

    @property
    def is_flooded(self) -> bool:
        """The peer provokes answers faster than it reads them."""
        return len(self._urgent) > MAX_URGENT_FRAMES

    @property
    def has_messages(self) -> bool:
        """Datagrams, or what goes before them, wait to be written."""
        return bool(self._urgent or self._datagrams)

    def put_urgent(self, frame: bytes) -> None:
        self._urgent.append(frame)
        self._arrived.set()

    def put_bulk(self, frame: bytes) -> None:
        self._bulk.append(frame)
        self.bulk_bytes += len(frame)
        self._arrived.set()

    def put_datagram(self, frame: bytes, replaces: str | None) -> int:
        """Takes the place of one that waits under the same key; how many of the oldest had to give way."""
        self._arrived.set()
        if replaces is not None:
            for index, (key, old) in enumerate(self._datagrams):
                if key == replaces:
                    self._datagrams[index] = (key, frame)
                    self._datagram_bytes += len(frame) - len(old)
                    return 0
        self._datagrams.append((replaces, frame))
        self._datagram_bytes += len(frame)
        dropped = 0
        while len(self._datagrams) > MAX_QUEUED_DATAGRAMS or self._datagram_bytes > MAX_QUEUED_BYTES:
            _, oldest = self._datagrams.popleft()
            self._datagram_bytes -= len(oldest)
            dropped += 1
        return dropped

    async def take(self) -> list[bytes]:
        """The next frames to write: several small ones, or one large."""
        while not (frames := self._next()):
            await self._arrived.wait()
            self._arrived = trio.Event()
        return frames

    def _next(self) -> list[bytes]:
        frames: list[bytes] = []
        size = 0
        while size < COALESCED_BYTES:
            if self._urgent:
                frame = self._urgent.popleft()
            elif self._datagrams:
                _, frame = self._datagrams.popleft()
                self._datagram_bytes -= len(frame)
            elif self._bulk:
                frame = self._bulk.popleft()
                self.bulk_bytes -= len(frame)
            else:
                break
            frames.append(frame)
            size += len(frame)
        return frames
