"""A link: all lanes (TLS connections) between this engine and one other, with one queue of frames for all of them.

Whichever lane is free takes the next frame, so frames are striped without any order among them: every frame stands for
itself. Payloads are loaded when a lane takes them, so a slow peer costs a queue of small descriptions and a few
buffers, never a backlog of tensors. If one lane breaks, frames may be lost, so all lanes are closed and the link is
made anew; the WANT frames of the exchange and the retries of fetches say what must be sent again.
"""

from __future__ import annotations

import heapq
import ssl
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

import trio

from node.engine.frames import HEADER_BYTES, Header, Kind
from node.engine.handshake import Stream
from node.errors import StrangerError
from protocol.names import ZERO_DIGEST

ALIVE_INTERVAL_S = 10.0
SILENCE_LIMIT_S = 35.0
"""A lane on which nothing arrived for so long is dead (three keep-alives lost)."""
PASSED_BYTES = 1 << 16
"""Of a payload that nobody wants, read at a time."""

Buffer = bytes | bytearray | memoryview
LaneErrors = (trio.BrokenResourceError, trio.ClosedResourceError, trio.EndOfChannel, trio.TooSlowError, OSError)


@dataclass(slots=True, kw_only=True, eq=False)
class Outgoing:
    """A frame to be sent. `load` gives meta and payload, or None when the frame is of no use any more."""

    kind: Kind
    id: bytes
    load: Callable[[], Awaitable[tuple[bytes, Buffer] | None]]
    part: int = 0
    slot: int = 0
    sent: Callable[[], None] | None = None
    """Called when the kernel has taken the whole frame."""


class Receiver(Protocol):
    """What a link hands its frames to."""

    def admit(self, link: Link, header: Header, meta: bytes) -> bool:
        """Whether to buffer and deliver this frame (False: read past it). Raises `StrangerError` to end the link.

        Called before a byte of the payload is read.
        """

    async def deliver(self, link: Link, header: Header, meta: bytes, payload: bytearray) -> None:
        """Handle a frame. Blocking here stops reading from this lane: that is the backpressure."""

    def progressed(self, link: Link, header: Header) -> None:
        """Some bytes of an admitted payload came."""

    def broke_off(self, link: Link, header: Header) -> None:
        """The lane broke in the payload of a frame that was admitted."""

    def broken(self, link: Link, error: BaseException) -> None:
        """A lane broke; the link closes."""


class Meter:
    """Bytes, and the time in which at least one lane was busy with them."""

    def __init__(self) -> None:
        self.bytes = 0
        self.began: Callable[[], None] = _nothing
        """Called when a lane becomes busy and none was."""
        self._busy_s = 0.0
        self._active = 0
        self._since = 0.0

    @property
    def busy_s(self) -> float:
        """Until now."""
        return self._busy_s + (trio.current_time() - self._since if self._active else 0.0)

    @property
    def active(self) -> bool:
        return self._active > 0

    def begin(self) -> None:
        self._active += 1
        if self._active == 1:
            self._since = trio.current_time()
            self.began()

    def end(self, size: int) -> None:
        self._active -= 1
        self.bytes += size
        if self._active == 0:
            self._busy_s += trio.current_time() - self._since


def _nothing() -> None: ...


class Link:
    def __init__(self, peer_id: str, receiver: Receiver) -> None:
        self.peer_id = peer_id
        self.since = trio.current_time()
        self.sending = Meter()
        self.receiving = Meter()
        self.closed = False
        self.groups: set[bytes] = set()
        """Tokens under which its lanes were opened."""
        self._receiver = receiver
        self._lanes: dict[trio.CancelScope, Stream] = {}
        self._first: list[tuple[int, int, Outgoing]] = []
        self._queued_ever = 0
        self._later: deque[Outgoing] = deque()
        self._idle_lanes = trio.lowlevel.ParkingLot()

    @property
    def lanes(self) -> int:
        return len(self._lanes)

    @property
    def sockets(self) -> list[trio.socket.SocketType]:
        """Of its lanes."""
        transports = (stream.transport_stream for stream in self._lanes.values())
        return [one.socket for one in transports if isinstance(one, trio.SocketStream)]

    @property
    def queued(self) -> int:
        return len(self._first) + len(self._later)

    def send(self, frame: Outgoing, *, later: bool = False) -> None:
        """Queue `frame`: lowest part first, so that a part comes down before later ones go up.

        `later` is for answers, which give way to rounds. Nothing is sent on a closed link.
        """
        if self.closed:
            return
        if later:
            self._later.append(frame)
        else:
            self._queued_ever += 1
            heapq.heappush(self._first, (frame.part, self._queued_ever, frame))
        self._idle_lanes.unpark()

    def withdraw(self, subject: bytes) -> None:
        """Forget queued frames of the roster or content `subject`."""
        self._first = [entry for entry in self._first if entry[2].id != subject]
        heapq.heapify(self._first)
        self._later = deque(frame for frame in self._later if frame.id != subject)

    def close(self) -> None:
        self.closed = True
        self._first.clear()
        self._later.clear()
        for scope in list(self._lanes):
            scope.cancel()

    async def run_lane(self, stream: Stream) -> None:
        """Carry frames over `stream` until it breaks or the link closes; closes the stream and the link."""
        scope = trio.CancelScope()
        self._lanes[scope] = stream
        try:
            if not self.closed:
                with scope:
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(self._run, self._send_frames, stream, nursery.cancel_scope)
                        nursery.start_soon(self._run, self._receive_frames, stream, nursery.cancel_scope)
        finally:
            del self._lanes[scope]
            self.close()
            await trio.aclose_forcefully(stream.transport_stream)

    async def _run(self, loop: Callable[[Stream], Awaitable[None]], stream: Stream, scope: trio.CancelScope) -> None:
        try:
            await loop(stream)
        except (*LaneErrors, ssl.SSLError, StrangerError) as error:
            if not self.closed:
                self._receiver.broken(self, error)
        scope.cancel()

    # ---------------------------------------------------------------- sending

    async def _next(self) -> Outgoing:
        while True:
            if self._first:
                return heapq.heappop(self._first)[2]
            if self._later:
                return self._later.popleft()
            await self._idle_lanes.park()

    async def _send_frames(self, stream: Stream) -> None:
        while True:
            with trio.move_on_after(ALIVE_INTERVAL_S) as waiting:
                frame = await self._next()
            if waiting.cancelled_caught:
                await stream.send_all(Header(kind=Kind.ALIVE, id=ZERO_DIGEST).pack())
                continue
            loaded = await frame.load()
            if loaded is None:
                continue
            meta, payload = loaded
            await self._send(stream, frame, meta, memoryview(payload))
            if frame.sent is not None:
                frame.sent()

    async def _send(self, stream: Stream, frame: Outgoing, meta: bytes, payload: memoryview) -> None:
        header = Header(
            kind=frame.kind,
            id=frame.id,
            part=frame.part,
            slot=frame.slot,
            meta_bytes=len(meta),
            payload_bytes=len(payload),
        )
        head = header.pack() + meta
        self.sending.begin()
        sent = 0
        try:
            await stream.send_all(head, payload)
            sent = len(head) + len(payload)
        finally:
            self.sending.end(sent)

    # ---------------------------------------------------------------- receiving

    async def _receive_frames(self, stream: Stream) -> None:
        while True:
            with trio.fail_after(SILENCE_LIMIT_S):
                header = Header.unpack(await stream.receive_exactly(HEADER_BYTES))
            if header.kind is Kind.ALIVE and not header.meta_bytes and not header.payload_bytes:
                continue
            self.receiving.begin()
            received = HEADER_BYTES + header.meta_bytes
            payload: bytearray | None = None
            try:
                with trio.fail_after(SILENCE_LIMIT_S):
                    meta = bytes(await stream.receive_exactly(header.meta_bytes))
                wanted = self._receiver.admit(self, header, meta)
                try:
                    payload = await self._receive_payload(stream, header, keep=wanted)
                    received += header.payload_bytes
                finally:
                    if wanted and payload is None:
                        self._receiver.broke_off(self, header)
            finally:
                self.receiving.end(received)
            if wanted and payload is not None:
                await self._receiver.deliver(self, header, meta, payload)

    async def _receive_payload(self, stream: Stream, header: Header, *, keep: bool) -> bytearray:
        """The payload; read past and empty unless `keep`."""
        payload = bytearray(header.payload_bytes if keep else 0)
        view = memoryview(payload if keep else bytearray(min(header.payload_bytes, PASSED_BYTES)))
        remaining = header.payload_bytes
        while remaining:
            with trio.fail_after(SILENCE_LIMIT_S):
                got = await stream.receive_into(view[: min(remaining, len(view))])
            remaining -= got
            if keep:
                view = view[got:]
                self._receiver.progressed(self, header)
        return payload
