"""A splice: two connections to this engine joined into one, for a pair of peers neither of which the other can dial.

The engine passes bytes on and understands none of them: what runs through is the pair's own TLS or Noise, end to end
(design section 8). Both sides dial it at the data port and open with

    "ATLR", lane, lanes, two zero bytes, ticket (32 bytes)

A ticket is one side's, for one connection a lane, and was given to it by this node's daemon. When both sides of a lane
are there, each is told by one byte, 1, and the lane is theirs. Lanes, their buffers and their rate are bounded.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import trio

from node.engine.handshake import (
    HANDSHAKE_TIMEOUT_S,
    MAX_LANES,
    TOKEN_BYTES,
    HandshakeFailed,
    connect,
    describe,
)
from node.errors import AtollError, StrangerError
from node.sockets import keep_trying

FIRST_BYTE = b"A"
"""Of the opening; TLS begins with another."""
MEETING_S = 15.0
"""From the ticket to both sides of a lane being there."""
SILENCE_S = 60.0
"""Both sides of every lane say something every ten seconds, if only that they live."""
MAX_SPLICED_LANES = 96
MAX_LANES_PER_PEER = 24
"""Of one peer with all of its others, through this node."""
PIECE_BYTES = 1 << 16
"""What is held of each direction of a lane, beside the kernel's buffers."""
SMALL_BYTES = 1 << 12
"""Pieces that do not wait for the rate, though it counts them: heartbeats and votes."""

_OPENING = struct.Struct("<4sBBH32s")
_MAGIC = b"ATLR"
_JOINED = b"\x01"
_BROKEN = (trio.BrokenResourceError, trio.ClosedResourceError, OSError)


class SpliceRefused(AtollError):
    """This node cannot join a pair; one sentence."""


async def dial_through(address: str, *, ticket: bytes, lane: int, lanes: int) -> trio.SocketStream:
    """A lane through the engine at `address`, with the other side at its end. Raises `HandshakeFailed`."""
    tcp = await connect(address)
    try:
        with trio.fail_after(MEETING_S):
            await tcp.send_all(_OPENING.pack(_MAGIC, lane, lanes, 0, ticket))
            if await tcp.receive_some(1) != _JOINED:
                raise HandshakeFailed(f"{address} did not join this node with the other side")
    except HandshakeFailed:
        await trio.aclose_forcefully(tcp)
        raise
    except (*_BROKEN, trio.TooSlowError) as error:
        await trio.aclose_forcefully(tcp)
        raise HandshakeFailed(f"{address}: {describe(error)}") from error
    except BaseException:
        await trio.aclose_forcefully(tcp)
        raise
    return tcp


@dataclass(slots=True, eq=False)
class _Pair:
    peers: tuple[str, str]
    lanes: int
    expires_at_s: float
    waiting: dict[int, Seat] = field(default_factory=dict)
    """Lane → who came first."""
    met: int = 0
    """Lanes whose two sides are there, or were."""


@dataclass(slots=True, eq=False)
class Seat:
    """One side of one lane."""

    pair: _Pair
    side: int
    lane: int
    tcp: trio.SocketStream
    met: trio.Event = field(default_factory=trio.Event)
    """The other side came."""
    over: trio.Event = field(default_factory=trio.Event)
    """The lane has ended: the task of who came second carries both ways, and says so."""


class Splicer:
    """The volunteer's part."""

    def __init__(self, rate_bytes_s: float) -> None:
        """`rate_bytes_s`: of all lanes and both directions together; 0: this node joins nobody."""
        self._rate_bytes_s = rate_bytes_s
        self._next_free_s = 0.0
        self._tickets: dict[bytes, tuple[_Pair, int, set[int]]] = {}
        """Ticket → whose pair, which side, and the lanes that it has opened."""
        self._carried: dict[_Pair, int] = {}
        """Lanes that are joined now."""
        self.relayed_bytes = 0
        """Passed on since the start, both directions."""

    @property
    def lanes(self) -> int:
        """That are joined now."""
        return sum(self._carried.values())

    @property
    def pairs(self) -> int:
        """Of peers that are joined now."""
        return len({frozenset(pair.peers) for pair in self._carried})

    # ------------------------------------------------------------ tickets

    def open(self, first: str, second: str, lanes: int) -> tuple[bytes, bytes]:
        """Tickets for the two, of `lanes` connections each. Raises `SpliceRefused`."""
        self._expire()
        if not self._rate_bytes_s:
            raise SpliceRefused("this node passes nothing on for others (--max-relay 0)")
        if not 0 < lanes <= MAX_LANES or first == second:
            raise SpliceRefused(f"a splice of {lanes} lanes between {first} and {second} makes no sense")
        if self._promised() + lanes > MAX_SPLICED_LANES:
            raise SpliceRefused(f"this node passes on {MAX_SPLICED_LANES} connections for others already; ask another")
        for peer in (first, second):
            if self._promised(peer) + lanes > MAX_LANES_PER_PEER:
                raise SpliceRefused(f"this node passes on {MAX_LANES_PER_PEER} connections of {peer}; ask another")
        pair = _Pair((first, second), lanes, trio.current_time() + MEETING_S)
        tickets = secrets.token_bytes(TOKEN_BYTES), secrets.token_bytes(TOKEN_BYTES)
        for side, ticket in enumerate(tickets):
            self._tickets[ticket] = (pair, side, set())
        return tickets

    def _promised(self, peer: str | None = None) -> int:
        """Lanes, of one peer or of all, that are joined or may still be."""
        open_pairs = {pair: pair.lanes - pair.met for pair, _, _ in self._tickets.values()}
        return sum(
            count
            for pairs in (open_pairs, self._carried)
            for pair, count in pairs.items()
            if peer is None or peer in pair.peers
        )

    def _expire(self) -> None:
        now_s = trio.current_time()
        self._tickets = {
            ticket: entry
            for ticket, entry in self._tickets.items()
            if entry[0].expires_at_s > now_s and entry[0].met < entry[0].lanes
        }

    # ------------------------------------------------------------ lanes

    async def welcome(self, tcp: trio.SocketStream) -> Seat:
        """The seat that a connection has a ticket for; `carry` it then. Raises `StrangerError`; the caller closes."""
        keep_trying(tcp.socket)
        opening = bytearray()
        try:
            with trio.fail_after(HANDSHAKE_TIMEOUT_S):
                while len(opening) < _OPENING.size:
                    more = await tcp.receive_some(_OPENING.size - len(opening))
                    if not more:
                        raise StrangerError("a splice's opening that breaks off")
                    opening += more
        except _BROKEN as error:
            raise StrangerError(f"a broken splice: {describe(error)}") from error
        except trio.TooSlowError:
            raise StrangerError(f"a splice's opening of more than {HANDSHAKE_TIMEOUT_S:g} s") from None
        magic, lane, lanes, _, ticket = _OPENING.unpack(opening)
        self._expire()
        entry = self._tickets.get(ticket) if magic == _MAGIC else None
        if entry is None:
            raise StrangerError("a splice with an unknown, used or expired ticket")
        pair, side, used = entry
        if lanes != pair.lanes or not 0 <= lane < lanes or lane in used:
            raise StrangerError("a splice of a lane that its ticket does not open")
        used.add(lane)
        return Seat(pair, side, lane, tcp)

    async def carry(self, seat: Seat) -> None:
        """Until the lane ends; closes the connection."""
        try:
            await self._carry(seat)
        except _BROKEN:
            pass  # the pair sees its lane end
        finally:
            await trio.aclose_forcefully(seat.tcp)

    async def _carry(self, seat: Seat) -> None:
        pair = seat.pair
        first = pair.waiting.pop(seat.lane, None)
        if first is None:
            pair.waiting[seat.lane] = seat
            try:
                with trio.move_on_at(pair.expires_at_s):
                    await seat.met.wait()
            finally:
                if pair.waiting.get(seat.lane) is seat:
                    del pair.waiting[seat.lane]
            if seat.met.is_set():
                await seat.over.wait()
            return
        first.met.set()
        pair.met += 1
        try:
            with self._counted(pair):
                for side in (first, seat):
                    await side.tcp.send_all(_JOINED)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._pump, first.tcp, seat.tcp, nursery.cancel_scope)
                    nursery.start_soon(self._pump, seat.tcp, first.tcp, nursery.cancel_scope)
        finally:
            first.over.set()

    @contextmanager
    def _counted(self, pair: _Pair) -> Iterator[None]:
        self._carried[pair] = self._carried.get(pair, 0) + 1
        try:
            yield
        finally:
            self._carried[pair] -= 1
            if not self._carried[pair]:
                del self._carried[pair]

    async def _pump(self, source: trio.SocketStream, sink: trio.SocketStream, scope: trio.CancelScope) -> None:
        """Pass on what comes until either end closes, or nothing comes for long: then the lane is over both ways."""
        try:
            while True:
                with trio.fail_after(SILENCE_S):
                    piece = await source.receive_some(PIECE_BYTES)
                if not piece:
                    break
                await self._wait_for_rate(len(piece))
                with trio.fail_after(SILENCE_S):
                    await sink.send_all(piece)
                self.relayed_bytes += len(piece)
        except (*_BROKEN, trio.TooSlowError):
            pass
        scope.cancel()

    async def _wait_for_rate(self, size: int) -> None:
        """All lanes take their turns on one line."""
        now_s = trio.current_time()
        starts_s = max(now_s, self._next_free_s)
        self._next_free_s = starts_s + size / self._rate_bytes_s
        if size > SMALL_BYTES:
            await trio.sleep_until(starts_s)
