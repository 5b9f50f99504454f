"""Performs the exchange of one roster: what `protocol.exchange.ExchangeMachine` decides, this moves, sums and stores.

Nothing is sent to a peer before it says WANT for the roster: so no frame arrives before its receiver knows the roster,
and after a broken link the receiver says what it still lacks. UP payloads are read from the outbox and DOWN payloads
from the part store when a lane takes them, so what waits in memory is bounded: UPs whose part is not complete yet
(`WaitingSums`), parts being summed, and results whose headers are being signed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import partial

import msgspec
import trio

from node.engine import api
from node.engine.dialling import DIAL_ATTEMPTS, Unreachable
from node.engine.exchange_checks import UpChecks, why_bad_part
from node.engine.exchange_duties import Duties
from node.engine.exchange_partials import Partials
from node.engine.exchange_sums import WaitingSums
from node.engine.exchange_tools import Tools
from node.engine.exchange_view import view_of
from node.engine.frames import (
    HEADER_BYTES,
    DownMeta,
    Header,
    Kind,
    MetaDecoder,
    UpMeta,
    pack_want,
    unpack_want,
    want_payload_bytes,
)
from node.engine.link import Buffer, Link, Outgoing
from node.engine.outbox import OutboxReader
from node.errors import StrangerError
from protocol.exchange import Decision, ExchangeMachine, LeaveEmpty, Reduce, SendPartial
from protocol.fields import bitmap_bytes
from protocol.messages import PartHeader
from protocol.stations import ExchangeView
from protocol.wire import WireError, decode_body

REACH_TIMEOUT_S = 10.0
HEADER_TIMEOUT_S = 30.0
MAX_REDIALS = 4
RESULT_BYTES = 32 << 20
"""Of results that wait for their header's signature."""


class Exchange:
    def __init__(self, request: api.Exchange, *, tools: Tools, outbox: OutboxReader | None) -> None:
        """`outbox`: my contribution, if I have one. Raises `ValueError` for a request that does not fit the vector."""
        geometry = tools.geometry
        self.roster_id = request.roster_id
        self.peers = request.peers
        self._request = request
        self._geometry = geometry
        self._switchboard = tools.switchboard
        self._keeper = tools.keeper
        self._outbox = outbox
        self._threads = tools.threads
        self._emit = tools.emit
        self._want_header = tools.want_header
        self._index = {peer_id: index for index, peer_id in enumerate(request.peers)}
        self._machine = ExchangeMachine(self._view(), trio.current_time())
        self._started_s = trio.current_time()
        longest_s = max(request.durations_s, default=0.0)
        self._last_s = self._started_s + longest_s + request.slack_s + request.progress_s
        """When nobody can be waiting for anything of mine any more."""
        self._me = request.my_index
        self._meta = MetaDecoder()
        self._checks = UpChecks(request, self._machine, geometry)
        self._duties = self._make_duties()
        self._neighbours = self._duties.neighbours
        self._wake = trio.Event()
        self._working = 0
        self._sums = WaitingSums(self._machine, geometry, outbox, tools.threads)
        self._reductions = trio.CapacityLimiter(max(tools.threads.count, min(32, RESULT_BYTES // geometry.slot_bytes)))
        self._partials = Partials()
        self._refs: dict[int, api.PartRef] = {}
        """Parts that came down, or that I made."""
        self._redials: dict[int, int] = {}
        self._bad: dict[int, str] = {}
        """Peers of which an UP was dropped, and why the first was."""
        self._failed_edges: set[int] = set()
        self._unreachable: set[int] = set()
        """Failed edges that have not said WANT since."""
        self._wanted_on: set[Link] = set()
        """Links whose WANT was answered: one each."""
        self._stopped = False
        self.over = False
        """Nothing is left to do but to serve those who want its parts."""
        self._bytes_sent = 0
        self._bytes_received = 0
        self._nursery: trio.Nursery | None = None

    def _view(self) -> ExchangeView:
        request = self._request
        return view_of(
            request,
            self._geometry,
            my_index=request.my_index,
            durations_s=request.durations_s,
            progress_s=request.progress_s,
            slack_s=request.slack_s,
        )

    def _make_duties(self) -> Duties:
        return Duties(self._machine, self._geometry.part_count)

    # ---------------------------------------------------------------- life

    async def run(self) -> None:
        """Until cancelled (`StopExchange`): after `ExchangeEnded` it still serves those who want its parts."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                for index in self._neighbours:
                    if link := self._switchboard.link(self.peers[index]):
                        self.link_up(link)
                    else:
                        nursery.start_soon(self._connect, index)
                await self._decide(nursery)
                await self._keeper.settle()
                self.over = True
                await self._report()
                await trio.sleep_forever()
        finally:
            self._stopped = True
            for index in self._neighbours:
                if link := self._switchboard.link(self.peers[index]):
                    link.withdraw(self.roster_id)
            self._sums.close()
            if self._outbox is not None:
                self._outbox.close()

    async def _decide(self, nursery: trio.Nursery) -> None:
        while True:
            self._wake = trio.Event()
            for sender in self._held_back():
                # Not reading is my doing: such a peer is not silent.
                self._machine.on_progress(sender, trio.current_time())
            for decision in self._machine.poll(trio.current_time()):
                self._perform(decision, nursery)
            if self._machine.finished and not self._working:
                if not self._duties.owed or trio.current_time() >= self._last_s:
                    return
                wakeup_s = self._last_s
            else:
                wakeup_s = self._machine.next_wakeup_s()
            with trio.move_on_at(min(wakeup_s, trio.current_time() + self._request.progress_s)):
                await self._wake.wait()

    def _held_back(self) -> Iterable[int]:
        """Senders that are not read at the moment."""
        return self._sums.held_back

    async def _report(self) -> None:
        await self._emit(
            api.ExchangeEnded(
                roster_id=self.roster_id,
                seconds=trio.current_time() - self._started_s,
                bytes_sent=self._bytes_sent,
                bytes_received=self._bytes_received,
                failed_edges=tuple(self.peers[index] for index in sorted(self._failed_edges)),
                excluded={
                    self.peers[index]: f"it sent an {self._bad[index]}" if index in self._bad else why
                    for index, why in self._machine.excluded.items()
                },
            )
        )

    @property
    def dropped(self) -> Counter[str]:
        """Refused frames and payloads by reason."""
        return self._machine.dropped

    # ---------------------------------------------------------------- connections

    async def _connect(self, index: int) -> None:
        try:
            # A connection that died gets one redial (protocol section 4, rule 5).
            attempts = 1 if self._redials.get(index) else DIAL_ATTEMPTS
            await self._switchboard.reach(self.peers[index], within_s=REACH_TIMEOUT_S, attempts=attempts)
        except Unreachable:
            self._give_up(index)

    def _give_up(self, index: int) -> None:
        self._failed_edges.add(index)
        self._unreachable.add(index)
        self._machine.on_redial_failed(index)
        self._duties.give_up(index)
        self._partials.give_up(index)
        self._wake.set()

    def link_up(self, link: Link) -> None:
        """Say what I still lack from this peer."""
        index = self._index.get(link.peer_id)
        if index is None or self._stopped:
            return
        meta, payload = self._want_meta(), pack_want(*self._duties.held_from(index), self._geometry.part_count)

        async def load() -> tuple[bytes, Buffer]:
            return meta, payload

        link.send(Outgoing(kind=Kind.WANT, id=self.roster_id, load=load))

    def _want_meta(self) -> bytes:
        """What goes with my WANTs."""
        return b""

    def link_down(self, link: Link) -> None:
        index = self._index.get(link.peer_id)
        if index not in self._neighbours or self._stopped or self._nursery is None:
            return
        self._machine.on_connection_lost(index)
        if self._machine.finished and not self._duties.owed_to(index):
            return
        self._redials[index] = self._redials.get(index, 0) + 1
        if self._redials[index] > MAX_REDIALS:
            self._give_up(index)
        else:
            self._nursery.start_soon(self._connect, index)

    def wanted(self, link: Link, meta: bytes, payload: bytes | bytearray) -> None:
        """A peer takes part and says what it lacks."""
        index = self._index.get(link.peer_id)
        if index is None or link in self._wanted_on or len(payload) != want_payload_bytes(self._geometry.part_count):
            return
        self._wanted_on.add(link)
        self._unreachable.discard(index)
        self._machine.on_progress(index, trio.current_time())
        ups_held, downs_held = unpack_want(payload)
        self._duties.on_want(index, ups_held, downs_held, self._partials.parts, set(self._refs))
        for kind, part in self._duties.owed_to(index):
            self._send(link, index, kind, part)

    # ---------------------------------------------------------------- sending

    def _offer(self, index: int, kind: Kind, part: int) -> None:
        """Something new for this peer: now if it said WANT, else when it does."""
        self._duties.add(index, kind, part)
        link = self._switchboard.link(self.peers[index])
        if link is not None and link in self._wanted_on:
            self._send(link, index, kind, part)

    def _send(self, link: Link, index: int, kind: Kind, part: int) -> None:
        size = 0

        async def load() -> tuple[bytes, Buffer] | None:
            nonlocal size
            loaded = await (self._load_up(part) if kind is Kind.UP else self._load_down(part))
            if loaded is not None:
                size = HEADER_BYTES + len(loaded[0]) + len(loaded[1])
            return loaded

        def sent() -> None:
            self._bytes_sent += size
            self._duties.done(index, kind, part)
            if kind is Kind.UP:
                self._partials.taken(part)
            self._wake.set()

        link.send(Outgoing(kind=kind, id=self.roster_id, part=part, slot=self._me, load=load, sent=sent))

    async def _load_up(self, part: int) -> tuple[bytes, Buffer] | None:
        if self._stopped:
            return None
        if (partial_sum := self._partials.frame(part)) is not None:
            return partial_sum
        if self._outbox is None:
            return None
        try:
            data = self._outbox.read_cached(part)
            if data is None:
                data = await self._threads.disk(partial(self._outbox.read, part))
        except FileNotFoundError:
            return None  # the exchange ended meanwhile
        except OSError:
            self._machine.dropped["a part of this node's own contribution that its disk lost"] += 1
            return None
        proof = self._outbox.commitment.proof(part)
        meta = UpMeta(bitmap_bytes(1 << self._me), proof)
        return msgspec.msgpack.encode(meta), data

    async def _load_down(self, part: int) -> tuple[bytes, Buffer] | None:
        ref = self._refs[part]
        parts = self._keeper.parts
        data = parts.read(ref.hash, only_cached=True)
        if data is None:
            data = await self._threads.disk(partial(parts.read, ref.hash))
        if self._stopped or data is None:
            return None
        return msgspec.msgpack.encode(DownMeta(ref.root, ref.body, ref.signature)), data

    # ---------------------------------------------------------------- receiving

    def admit(self, link: Link, header: Header, meta: bytes) -> bool:
        """Whether the payload behind an UP or DOWN header is welcome (protocol section 4, rule 4)."""
        index = self._index.get(link.peer_id)
        if index is None or self._stopped:
            return False
        now_s = trio.current_time()
        if header.kind is Kind.UP:
            bitmap = int.from_bytes(self._meta.up(meta).bitmap, "little")
            verdict = self._machine.on_up(index, header.part, header.slot, bitmap, header.payload_bytes, now_s)
        else:
            said = self._header(meta)
            if said.roster_id != self.roster_id or said.part != header.part or said.length != header.payload_bytes:
                raise StrangerError("a DOWN frame whose signed header is of another part")
            verdict = self._machine.on_down(index, header.part, said.bitmap, header.payload_bytes, now_s)
        self._wake.set()
        return bool(verdict)

    def progressed(self, link: Link) -> None:
        """Some bytes of an admitted payload came."""
        index = self._index.get(link.peer_id)
        if index is not None:
            self._machine.on_progress(index, trio.current_time())

    def broke_off(self, link: Link, header: Header) -> None:
        if header.kind is Kind.UP:
            self._machine.on_up_bad(self._index[link.peer_id], header.part, "UP that broke off")

    async def deliver(self, link: Link, header: Header, meta: bytes, payload: bytearray) -> None:
        """An admitted frame is here. Waits while its sender's window is full."""
        self._bytes_received += HEADER_BYTES + len(meta) + len(payload)
        index = self._index[link.peer_id]
        if header.kind is Kind.UP:
            await self._receive_up(index, header.part, self._meta.up(meta), payload)
        else:
            await self._receive_down(header.part, meta, payload)
        self._wake.set()

    async def _receive_up(self, sender: int, part: int, meta: UpMeta, payload: bytearray) -> None:
        bitmap = int.from_bytes(meta.bitmap, "little")
        check = partial(self._checks.why_bad, sender, part, bitmap, meta.proof, payload)
        why = await self._threads.check(check, len(payload))
        if why:
            self._machine.on_up_bad(sender, part, why)
            if sender not in self._bad:
                self._bad[sender] = why
                await self._emit(api.PayloadDropped(peer_id=self.peers[sender], part=part, why=why))
        elif self._machine.on_up_done(sender, part, bitmap, trio.current_time()):
            self._duties.received_up(sender, part)
            self._wake.set()
            await self._sums.keep(part, sender, payload)

    async def _receive_down(self, part: int, meta: bytes, payload: bytearray) -> None:
        down = self._meta.down(meta)
        said = self._header(meta)
        root = self.peers[self._machine.root(part)]
        check = partial(
            why_bad_part,
            payload,
            part=part,
            part_hash=said.hash,
            root=root,
            body=down.body,
            signature=down.signature,
            geometry=self._geometry,
        )
        why = await self._threads.check(check, len(payload))
        if why:
            self._machine.dropped[why] += 1
            return
        ref = api.PartRef(
            roster_id=said.roster_id,
            part=part,
            bitmap_bytes=bitmap_bytes(said.bitmap),
            hash=said.hash,
            length=said.length,
            root=root,
            body=down.body,
            signature=down.signature,
        )
        await self._hold(ref, payload)

    async def _hold(self, ref: api.PartRef, payload: bytes | bytearray) -> None:
        if ref.part in self._refs or self._stopped or not await self._keeper.write(ref, payload):
            return
        self._refs[ref.part] = ref
        self._machine.on_down_done(ref.part, trio.current_time())
        self._duties.received_down(ref.part)
        for index in self._machine.receivers(ref.part):
            self._offer(index, Kind.DOWN, ref.part)
        self._wake.set()

    def _header(self, meta: bytes) -> PartHeader:
        try:
            return decode_body(PartHeader, self._meta.down(meta).body)
        except WireError as error:
            raise StrangerError(f"a DOWN frame's signed header does not decode: {error}") from error

    # ---------------------------------------------------------------- summing

    def _perform(self, decision: Decision, nursery: trio.Nursery) -> None:
        self._duties.decided(decision.part)
        if isinstance(decision, LeaveEmpty):
            self._sums.forget(decision.part)
            return
        self._working += 1
        nursery.start_soon(self._sum, decision)

    async def _sum(self, decision: Reduce | SendPartial) -> None:
        try:
            if isinstance(decision, SendPartial):
                async with self._partials.room:
                    await self._sum_for_parent(decision)
            else:
                async with self._reductions:
                    data, data_hash = await self._sums.add_up(decision)
                    if data:
                        await self._publish(decision, data, data_hash)
        finally:
            self._working -= 1
            self._wake.set()

    async def _sum_for_parent(self, decision: SendPartial) -> None:
        data, _ = await self._sums.add_up(decision)
        if not data or decision.parent in self._unreachable:
            return
        self._partials.put(decision.part, parent=decision.parent, bitmap=decision.bitmap, data=data)
        self._offer(decision.parent, Kind.UP, decision.part)
        await self._partials.wait_taken(decision.part, self._last_s)
        self._duties.done(decision.parent, Kind.UP, decision.part)

    async def _publish(self, decision: Reduce, data: bytes, data_hash: bytes) -> None:
        wanted = api.HeaderWanted(
            roster_id=self.roster_id,
            part=decision.part,
            bitmap_bytes=bitmap_bytes(decision.bitmap),
            hash=data_hash,
            length=len(data),
        )
        ref: api.PartRef | None = None
        with trio.move_on_after(HEADER_TIMEOUT_S):
            ref = await self._want_header(wanted)
        if ref is not None:
            await self._hold(ref, data)
