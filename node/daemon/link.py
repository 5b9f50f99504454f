"""An introduced peer: what rides on its control stream (`node.daemon.streams`).

- datagrams: round messages, queued per peer without blocking anyone, dropped (and counted) when a peer is too slow;
- requests and answers, bounded in number, errors as sentences; large answers in fragments, so that no heartbeat waits
  behind one;
- membership records; pings that measure the round trip and its loss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import structlog
import trio

from node.daemon.outbox import MAX_QUEUED_BYTES, Outbox
from node.daemon.round_trips import LOST_AFTER_S, RoundTrips
from node.daemon.streams import (
    MAX_FRAME_BYTES,
    Answer,
    Datagram,
    Failure,
    FramedStream,
    Goodbye,
    Gossip,
    Hello,
    LinkClosed,
    Ping,
    Pong,
    Refusal,
    Refused,
    Request,
    RequestFailed,
    RunChosen,
    encode_frame,
)
from node.errors import AtollError, StrangerError
from protocol.names import PeerId

MAX_REQUEST_BYTES = 1024 * 1024
MAX_ANSWER_BYTES = MAX_FRAME_BYTES
FRAGMENT_BYTES = 64 * 1024
MAX_CONCURRENT_REQUESTS = 8
STRANGER_REQUESTS_PER_S = 10.0
STRANGER_REQUESTS_AT_ONCE = 20.0

PING_INTERVAL_S = 5.0
FIRST_PINGS = 4
FIRST_PING_INTERVAL_S = 0.5
SILENCE_S = 30.0
"""A peer that says nothing for so long, pongs included, is gone: TCP does not notice a stopped machine."""
GOODBYE_HEARD_S = 1.5
"""For a goodbye to arrive, and the peer's end of the link to come back."""
LAST_WORDS_S = 1.0
"""After nothing can be written any more."""

_log = structlog.get_logger(__name__)


class LinkOwner(Protocol):
    """What a link asks of the network that it belongs to."""

    counts: Counter[str]

    def is_member(self, link: Link) -> bool: ...

    def handler_of(self, method: str) -> Callable[[PeerId, bytes], Awaitable[bytes]] | None: ...

    def on_datagram(self, link: Link, data: bytes) -> None: ...

    def on_gossip(self, link: Link, records: tuple[bytes, ...]) -> None: ...

    def on_run_chosen(self, link: Link, run: bytes) -> None: ...


class Link:
    """One introduced peer."""

    def __init__(
        self, *, owner: LinkOwner, peer_id: PeerId, stream: FramedStream, hello: Hello, dialled: bool, remote_host: str
    ) -> None:
        self.peer_id = peer_id
        self.run = hello.run
        self.version = hello.version
        self.incarnation = hello.incarnation
        self.dialled = dialled
        """Whether this side opened the connection."""
        self.remote_host = remote_host
        self.connected_at_s = trio.current_time()
        self.round_trips = RoundTrips()
        self.pings_sent = 0
        self.dropped_datagrams = 0
        self.closed = trio.Event()
        self.why_closed = ""
        self.left = False
        """The peer said goodbye."""
        self._owner = owner
        self._stream = stream
        self._outbox = Outbox()
        self._writing = False
        self._wrote = trio.Event()
        self._nursery: trio.Nursery | None = None
        self._last_heard_s = trio.current_time()
        self._heard = trio.Event()
        self._pings: dict[int, float] = {}
        self._waiting: dict[int, _Waiting] = {}
        self._next_request = 0
        self._outgoing = trio.CapacityLimiter(MAX_CONCURRENT_REQUESTS)
        self._serving = 0
        self._allowance = STRANGER_REQUESTS_AT_ONCE
        self._allowance_at_s = trio.current_time()
        stream.max_frame_bytes = MAX_FRAME_BYTES

    @property
    def round_trip_s(self) -> float | None:
        """Smoothed; None until the first answer."""
        return self.round_trips.smoothed_s

    @property
    def is_spliced(self) -> bool:
        """It passes through a volunteer: whose address the other end sees is not this node's."""
        return not self.remote_host

    @property
    def bytes_sent(self) -> int:
        return self._stream.bytes_sent

    @property
    def bytes_received(self) -> int:
        return self._stream.bytes_received

    # ------------------------------------------------------------ life

    async def run_until_closed(self) -> None:
        """To the end of the stream; `why_closed` says why. Raises `StrangerError` for a broken rule, or `Refused`."""
        broken_rule = ""
        refusal: BaseException | None = None
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                nursery.start_soon(self._write)
                nursery.start_soon(self._ping)
                try:
                    await self._read()
                finally:
                    nursery.cancel_scope.cancel()
        except* LinkClosed as group:
            self.why_closed = self.why_closed or str(_first(group))
        except* StrangerError as group:
            self.why_closed = broken_rule = str(_first(group))
        except* Refused as group:
            refusal = _first(group)
            self.why_closed = f"it refused this node: {refusal}"
        finally:
            self._nursery = None
            self.why_closed = self.why_closed or "the connection was closed here"
            self.closed.set()
            self._heard.set()
            self._wrote.set()
            for waiting in self._waiting.values():
                waiting.fail(f"{self.peer_id} is gone: {self.why_closed}")
            self._waiting.clear()
        if broken_rule:
            raise StrangerError(broken_rule)
        if refusal is not None:
            raise refusal

    def close(self, why: str) -> None:
        """From this side, at once; what is queued is lost."""
        self.why_closed = self.why_closed or why
        if self._nursery is not None:
            self._nursery.cancel_scope.cancel()

    async def say_goodbye(self, reason: str) -> None:
        """A last frame, if the peer still reads. Returns when it was heard: the peer closes the link then.

        Else the connection might end first, and with it what the peer has received and not read.
        """
        with trio.move_on_after(GOODBYE_HEARD_S):
            try:
                await self._stream.send(encode_frame(Goodbye(reason)))
            except LinkClosed:
                return
            await self.closed.wait()

    async def refuse(self, refusal: Refused) -> None:
        """End the link with a sentence that the peer can show."""
        with trio.move_on_after(0.5):
            try:
                await self._stream.send(encode_frame(Refusal(code=refusal.code, reason=refusal.reason)))
                await self.closed.wait()
            except LinkClosed:
                return
        self.close("this node refused it: " + refusal.reason)

    async def answers_within(self, timeout_s: float) -> bool:
        """Whether the peer says anything within that time when it is pinged now."""
        self._heard = trio.Event()
        self._send_ping()
        with trio.move_on_after(timeout_s) as waiting:
            await self._heard.wait()
        return not waiting.cancelled_caught and not self.closed.is_set()

    # ------------------------------------------------------------ sending

    def send(self, data: bytes, replaces: str | None = None) -> None:
        """Queue a datagram of less than 8 MiB; never blocks. One still queued under the same `replaces` gives way."""
        try:
            frame = encode_frame(Datagram(data))
        except ValueError:
            # What peers put into a roster adds up: a message that nobody can receive must not end this node.
            self._owner.counts["datagrams too large to be sent"] += 1
            return
        dropped = self._outbox.put_datagram(frame, replaces)
        self.dropped_datagrams += dropped
        if dropped:
            self._owner.counts["datagrams dropped for a slow peer"] += dropped

    def send_gossip(self, records: tuple[bytes, ...]) -> None:
        """Dropped when the peer is far behind: records come again."""
        if self._outbox.bulk_bytes < MAX_QUEUED_BYTES:
            self._outbox.put_bulk(encode_frame(Gossip(records)))

    def send_run(self, run: bytes) -> None:
        self._outbox.put_urgent(encode_frame(RunChosen(run)))

    async def drain(self) -> None:
        """Until every datagram that waits is written, or the link is closed."""
        while not self.closed.is_set() and (self._writing or self._outbox.has_messages):
            await self._wrote.wait()

    async def _write(self) -> None:
        while True:
            frames = await self._outbox.take()
            self._writing = True
            try:
                await self._stream.send(*frames)
            except LinkClosed:
                # What the peer said last, a goodbye perhaps, may not be read yet; the end of the reading ends this.
                await trio.sleep(LAST_WORDS_S)
                raise
            self._writing = False
            self._wrote.set()
            self._wrote = trio.Event()

    # ------------------------------------------------------------ round trips

    async def _ping(self) -> None:
        for count in range(1 << 62):
            self._send_ping()
            await trio.sleep(FIRST_PING_INTERVAL_S if count < FIRST_PINGS else PING_INTERVAL_S)
            now = trio.current_time()
            for nonce, sent_s in list(self._pings.items()):
                if now - sent_s > LOST_AFTER_S:
                    del self._pings[nonce]
                    self.round_trips.lost()
            if now - self._last_heard_s > SILENCE_S:
                raise LinkClosed(f"it said nothing for {SILENCE_S:.0f} s")

    def _send_ping(self) -> None:
        self.pings_sent += 1
        self._pings[self.pings_sent] = trio.current_time()
        self._outbox.put_urgent(encode_frame(Ping(self.pings_sent)))

    def _on_pong(self, nonce: int) -> None:
        sent_s = self._pings.pop(nonce, None)
        if sent_s is None:
            return  # too late (counted as lost), or never asked
        now_s = trio.current_time()
        self.round_trips.answered(now_s - sent_s, now_s)

    # ------------------------------------------------------------ receiving

    async def _read(self) -> None:
        while True:
            frame = await self._stream.receive()
            self._last_heard_s = trio.current_time()
            self._heard.set()
            match frame:
                case Ping(nonce):
                    if self._outbox.is_flooded:
                        raise StrangerError("it pings faster than it reads the answers")
                    self._outbox.put_urgent(encode_frame(Pong(nonce)))
                case Pong(nonce):
                    self._on_pong(nonce)
                case Datagram(data):
                    self._owner.on_datagram(self, data)
                case Request():
                    self._on_request(frame)
                case Answer():
                    self._on_answer(frame)
                case Failure(number, reason):
                    if waiting := self._waiting.pop(number, None):
                        waiting.fail(reason[:1000])
                case Gossip(records):
                    self._owner.on_gossip(self, records)
                case RunChosen(run):
                    self._owner.on_run_chosen(self, run)
                case Goodbye(reason):
                    self.left = True
                    raise LinkClosed(f"it left: {reason[:200]}")
                case Refusal(code, reason):
                    raise Refused(code[:20], reason[:500])
                case Hello():
                    raise StrangerError("a second Hello on one control stream")

    # ------------------------------------------------------------ requests

    async def request(self, method: str, payload: bytes, timeout_s: float) -> bytes:
        """The peer's answer. Raises `RequestFailed` with a sentence."""
        if len(payload) > MAX_REQUEST_BYTES:
            raise RequestFailed(f"a request of {len(payload)} bytes is over the limit of {MAX_REQUEST_BYTES}")
        with trio.move_on_after(timeout_s):
            async with self._outgoing:
                if self.closed.is_set():
                    raise RequestFailed(f"{self.peer_id} is gone: {self.why_closed}")
                self._next_request += 1
                number = self._next_request
                waiting = self._waiting[number] = _Waiting()
                self._outbox.put_bulk(encode_frame(Request(number, method, payload)))
                try:
                    await waiting.done.wait()
                finally:
                    self._waiting.pop(number, None)
                if waiting.failure is not None:
                    raise RequestFailed(waiting.failure)
                return bytes(waiting.answer)
        raise RequestFailed(f"{self.peer_id} did not answer {method!r} within {timeout_s:g} s")

    def _on_answer(self, frame: Answer) -> None:
        waiting = self._waiting.get(frame.id)
        if waiting is None:
            return  # given up in the meantime
        waiting.answer += frame.fragment
        if len(waiting.answer) > MAX_ANSWER_BYTES:
            raise StrangerError(f"an answer is over the limit of {MAX_ANSWER_BYTES} bytes")
        if not frame.more:
            waiting.done.set()

    def _on_request(self, request: Request) -> None:
        assert self._nursery is not None, "requests are read inside the nursery"
        handler = self._owner.handler_of(request.method)
        if handler is None:
            self._refuse(request, f"this node does not serve {request.method[:50]!r}")
        elif self._serving >= MAX_CONCURRENT_REQUESTS:
            self._refuse(request, f"more than {MAX_CONCURRENT_REQUESTS} requests at once; ask again later")
        elif not self._owner.is_member(self) and not self._stranger_may_ask():
            self._refuse(request, "too many requests from outside the run; ask again later")
        else:
            self._serving += 1
            self._nursery.start_soon(self._serve, handler, request)

    def _refuse(self, request: Request, reason: str) -> None:
        self._owner.counts["requests refused"] += 1
        if self._outbox.is_flooded:
            raise StrangerError("it asks faster than it reads the answers")
        self._outbox.put_urgent(encode_frame(Failure(request.id, reason)))

    def _stranger_may_ask(self) -> bool:
        now = trio.current_time()
        refill = (now - self._allowance_at_s) * STRANGER_REQUESTS_PER_S
        self._allowance = min(STRANGER_REQUESTS_AT_ONCE, self._allowance + refill)
        self._allowance_at_s = now
        if self._allowance < 1:
            return False
        self._allowance -= 1
        return True

    async def _serve(self, handler: Callable[[PeerId, bytes], Awaitable[bytes]], request: Request) -> None:
        try:
            answer = await handler(self.peer_id, request.payload)
            if len(answer) > MAX_ANSWER_BYTES:
                raise RequestFailed(f"the answer of {len(answer)} bytes is over the limit of {MAX_ANSWER_BYTES}")
            if self._outbox.bulk_bytes > MAX_QUEUED_BYTES:
                raise RequestFailed("earlier answers are not read yet; ask again later")
        except AtollError as error:
            self._outbox.put_urgent(encode_frame(Failure(request.id, str(error)[:1000])))
        except Exception:  # noqa: BLE001 - the link goes on, and the log has it
            _log.exception("a request handler failed", method=request.method, peer=self.peer_id)
            self._outbox.put_urgent(encode_frame(Failure(request.id, "the answering node failed; its log says why")))
        else:
            for start in range(0, len(answer) or 1, FRAGMENT_BYTES):
                stop = start + FRAGMENT_BYTES
                self._outbox.put_bulk(encode_frame(Answer(request.id, stop < len(answer), answer[start:stop])))
        finally:
            self._serving -= 1


class _Waiting:
    """One request on its way."""

    def __init__(self) -> None:
        self.done = trio.Event()
        self.answer = bytearray()
        self.failure: str | None = None

    def fail(self, reason: str) -> None:
        self.failure = reason
        self.done.set()


def _first(group: BaseExceptionGroup[Any]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
