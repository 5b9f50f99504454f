"""py-libp2p 0.8.1 made fit for the open internet: the parts below the host.

Each class mends faults of the library by overriding as little as it can; `tests/swarm/test_libp2p_faults.py` shows
every fault in the bare library and its absence here, so that an upgrade of libp2p tells which of these may go.
"""

from __future__ import annotations

import contextlib
import logging
import struct
from collections import deque
from collections.abc import Sequence
from typing import Any

import trio
from libp2p.abc import IMuxedConn, ISecureConn
from libp2p.io.exceptions import IOException
from libp2p.network.connection.exceptions import RawConnError
from libp2p.peer.envelope import Envelope
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStore, _peer_record_signer_matches
from libp2p.stream_muxer.exceptions import MuxedStreamError
from libp2p.stream_muxer.muxer_multistream import MuxerMultistream
from libp2p.stream_muxer.yamux import yamux
from libp2p.stream_muxer.yamux.yamux import Yamux, YamuxStream
from libp2p.transport.tcp.tcp import TCP
from multiaddr import Multiaddr

from node.sockets import keep_trying

CONNECT_TIMEOUT_S = 5.0
STALL_TIMEOUT_S = 30.0
"""How long a stream may wait for the peer to read before it counts as broken."""

CHUNK_BYTES = 16 * 1024
"""Of one Yamux frame that we send. The library reads a message in at most 100 pieces: small frames arrive whole even in
TCP segments of a few hundred bytes."""

MAX_FRAME_BYTES = 256 * 1024
MAX_STREAMS = 64
STRANGER_BUFFER_BYTES = 1024 * 1024
"""Unread bytes that one connection may pile up before its peer has introduced itself."""

PEER_BUFFER_BYTES = 16 * 1024 * 1024
MAX_URGENT_FRAMES = 1024
MAX_WAITING_FRAMES = 64
"""Of writers of one connection; those that gave up waiting leave theirs."""
MAX_PEERS_STORED = 1000
MAX_ADDRESSES_STORED = 16

_GOODBYE = struct.pack(yamux.YAMUX_HEADER_FORMAT, 0, yamux.TYPE_GO_AWAY, 0, 0, yamux.GO_AWAY_NORMAL)


def quieten_libp2p() -> None:
    """libp2p logs every stranger's mistake, partly on the root logger; what matters, our own code reports."""
    logging.getLogger("libp2p").setLevel(logging.CRITICAL)
    root = logging.getLogger()
    if not any(isinstance(one, _NotFromLibp2p) for one in root.filters):
        root.addFilter(_NotFromLibp2p())


class _NotFromLibp2p(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return "/libp2p/" not in record.pathname


class FloodError(trio.TooSlowError):
    """A peer sent beyond what it was allowed to.

    A `TooSlowError` because that is the one error on which Yamux's read loop closes the connection at once.
    """


class PatientStream(YamuxStream):  # type: ignore[misc]
    """A Yamux stream that waits `STALL_TIMEOUT_S` for a slow reader, on an event; the library polls, for 5 s."""

    _send_window: int
    _window_opened: trio.Event

    @classmethod
    def adopt(cls, stream: YamuxStream) -> PatientStream:
        """Yamux makes its streams itself, in the middle of long methods; so they change class afterwards."""
        window = stream.__dict__.pop("send_window")
        stream.__class__ = cls
        stream._window_opened = trio.Event()
        stream.send_window = window
        return stream  # type: ignore[no-any-return]

    @property
    def send_window(self) -> int:
        """Bytes that the peer is ready to take."""
        return self._send_window

    @send_window.setter
    def send_window(self, value: int) -> None:
        self._send_window = value
        if value > 0:
            self._window_opened.set()

    async def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            await self._wait_for_window()
            size = min(self.send_window, CHUNK_BYTES, len(view))
            await super().write(bytes(view[:size]))
            view = view[size:]

    async def send_window_update(self, increment: int, skip_lock: bool = False) -> None:
        """Queued: who read does not wait until it is written."""
        if increment > 0:
            update = struct.pack(yamux.YAMUX_HEADER_FORMAT, 0, yamux.TYPE_WINDOW_UPDATE, 0, self.stream_id, increment)
            self.conn.queue_urgent(update)

    async def _wait_for_window(self) -> None:
        with trio.move_on_after(STALL_TIMEOUT_S):
            while self.send_window <= 0:
                if self.closed or self.send_closed:
                    raise MuxedStreamError("the stream closed while its peer did not read")
                self._window_opened = trio.Event()
                with trio.move_on_after(1.0):  # closing fires no event
                    await self._window_opened.wait()
            return
        raise MuxedStreamError(f"the peer read nothing for {STALL_TIMEOUT_S:.0f} s")


class _Frame:
    """A frame that waits to be written."""

    __slots__ = ("data", "over", "written")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.written = False
        self.over = trio.Event()
        """Written, or never to be."""


class HardenedYamux(Yamux):  # type: ignore[misc]
    """Yamux whose read loop never waits for a write, whose writers may be cancelled, whose peer cannot make it hoard.

    The library answers pings and SYNs from its read loop under the lock that writers hold while they wait for the
    other side's read loop: two such sides freeze. Here the read loop only queues those answers.

    The library's writers write themselves: one that is cancelled (a deadline) has numbered a Noise message that is
    never sent, or sent half of it, and the peer can decrypt nothing from then on. Here one task writes, and a writer
    that is cancelled no longer waits for its frame.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.greeted = False
        """The peer introduced itself on the control stream."""
        self.settled = trio.Event()
        """It did, or the connection ended before."""
        self.introducing = False
        """A control stream was opened on it; a second one is not served."""
        self.refusal: Exception | None = None
        """Why the introduction failed, where it did."""
        self.buffer_limit_bytes = STRANGER_BUFFER_BYTES
        self.refused_streams = 0
        self._reader: trio.lowlevel.Task | None = None
        self._urgent: deque[bytes] = deque()
        self._frames: deque[_Frame] = deque()
        self._arrived = trio.Event()
        self._room = trio.lowlevel.ParkingLot()
        self._written_out = False
        """Nothing is written any more."""
        self._muted = False

    def greet(self) -> None:
        self.greeted = True
        self.buffer_limit_bytes = PEER_BUFFER_BYTES
        self.settled.set()

    async def start(self) -> None:
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write)
                await super().start()
                nursery.cancel_scope.cancel()
        finally:
            self.settled.set()
            if not self.event_closed.is_set():
                with trio.CancelScope(shield=True), trio.move_on_after(2.0):
                    await self.close()

    async def handle_incoming(self) -> None:
        self._reader = trio.lowlevel.current_task()
        await super().handle_incoming()

    async def _write_frame(self, data: bytes) -> None:
        if self._muted:
            return
        if trio.lowlevel.current_task() is self._reader:
            if len(self._urgent) >= MAX_URGENT_FRAMES:
                raise RawConnError("the peer asks for answers faster than it reads them")
            self.queue_urgent(data)
            return
        while len(self._frames) >= MAX_WAITING_FRAMES and not self._written_out:
            await self._room.park()
        frame = _Frame(data)
        if not self._written_out:
            self._frames.append(frame)
            self._arrived.set()
            await frame.over.wait()
        if not frame.written:
            raise RawConnError("the connection ended before this was written")

    def queue_urgent(self, frame: bytes) -> None:
        """Written before anything else, as soon as the peer takes it."""
        self._urgent.append(frame)
        self._arrived.set()

    async def _write(self) -> None:
        try:
            while True:
                await self._arrived.wait()
                self._arrived = trio.Event()
                while self._urgent or self._frames:
                    if self._urgent:
                        urgent = b"".join(self._urgent)
                        self._urgent.clear()
                        await self.secured_conn.write(urgent)
                    else:
                        await self.secured_conn.write(self._frames[0].data)
                        frame = self._frames.popleft()
                        frame.written = True
                        frame.over.set()
                        self._room.unpark()
        except (RawConnError, IOException, OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            return  # the read loop notices the broken connection and cleans up
        finally:
            self._written_out = True
            self._room.unpark_all()
            for frame in self._frames:
                frame.over.set()
            self._frames.clear()

    async def _read_data_body(self, length: int) -> bytes:
        buffered = sum(len(buffer) for buffer in self.stream_buffers.values())
        if length > MAX_FRAME_BYTES or buffered + length > self.buffer_limit_bytes:
            raise FloodError
        return await super()._read_data_body(length)  # type: ignore[no-any-return]

    async def open_stream(self) -> PatientStream:
        return PatientStream.adopt(await super().open_stream())

    async def accept_stream(self) -> PatientStream:
        while True:
            stream = await super().accept_stream()
            if len(self.streams) <= MAX_STREAMS:
                return PatientStream.adopt(stream)
            self.refused_streams += 1
            await stream.reset()

    async def close(self, error_code: int = yamux.GO_AWAY_NORMAL) -> None:
        """Says goodbye only if it can at once: what a stuck peer does not take, the library would wait for."""
        if not self._muted and not self.event_shutting_down.is_set():
            with trio.move_on_after(0.5):
                with contextlib.suppress(RawConnError, IOException, OSError):
                    await self._write_frame(_GOODBYE)
        self._muted = True
        self.settled.set()
        try:
            await self.secured_conn.close()  # wakes a writer that waits for the peer
        finally:
            await super().close(error_code)

    async def _cleanup_on_error(self) -> None:
        self._muted = True
        self.settled.set()
        await super()._cleanup_on_error()


class HardenedMuxers(MuxerMultistream):  # type: ignore[misc]
    """The library's negotiation, for the one muxer that we speak; it constructs its own Yamux whatever it is given."""

    def __init__(self, negotiate_timeout_s: int) -> None:
        super().__init__({yamux.PROTOCOL_ID: HardenedYamux}, negotiate_timeout_s)

    async def new_conn(self, conn: ISecureConn, peer_id: ID) -> IMuxedConn:
        protocol, _ = await self._selector.select(conn, conn.is_initiator, self.negotiate_timeout)
        muxed = HardenedYamux(conn, peer_id, is_initiator=conn.is_initiator)
        return self._annotate_connection(muxed, conn, protocol)


class HardenedTCP(TCP):  # type: ignore[misc]
    """TCP with a deadline for connecting: the system's own is over two minutes."""

    async def _dial_resolved(self, maddr: Multiaddr, source: tuple[str, int] | None = None) -> Any:
        with trio.fail_after(CONNECT_TIMEOUT_S):
            connection = await super()._dial_resolved(maddr, source)
        note_connection(connection.stream)
        return connection


def note_connection(stream: Any) -> tuple[str, int]:
    """A new TCP stream's options, and host and port at its other end: for IPv6 the library would answer None."""
    keep_trying(stream.stream.socket)
    name = stream.stream.socket.getpeername()
    stream._cached_remote_address = (str(name[0]), int(name[1]))
    return str(name[0]), int(name[1])


class HardenedPeerStore(PeerStore):  # type: ignore[misc]
    """A peer store that strangers cannot fill, nor make forget this node's own key.

    The library evicts entries without addresses first, and this node's own entry, with its private key, has none. It
    also treats a record older than the one it has as forged, which cuts off a peer whose clock was set back.
    """

    def __init__(self, own: ID) -> None:
        super().__init__(max_records=MAX_PEERS_STORED, max_peers=MAX_PEERS_STORED)
        self._own = own

    def _enforce_peer_limit(self) -> None:
        mine = self.peer_data_map.pop(self._own, None)
        super()._enforce_peer_limit()
        if mine is not None:
            self.peer_data_map[self._own] = mine

    def add_addrs(self, peer_id: ID, addrs: Sequence[Multiaddr], ttl: int = 0) -> None:
        super().add_addrs(peer_id, addrs, ttl)
        if data := self.peer_data_map.get(peer_id):
            del data.addrs[:-MAX_ADDRESSES_STORED]

    def consume_peer_record(self, envelope: Envelope, ttl: int) -> bool:
        record = envelope.record()
        if record.peer_id == self._own or len(record.addrs) > MAX_ADDRESSES_STORED:
            return bool(_peer_record_signer_matches(envelope))
        known = self.peer_record_map.get(record.peer_id)
        if known is not None and known.seq > record.seq:
            return bool(_peer_record_signer_matches(envelope))
        stored: bool = super().consume_peer_record(envelope, ttl)
        if len(self.peer_record_map) > self.max_records:
            self._enforce_record_limit()
        return stored
