"""The exchange of a roster in which hivemind does the way up.

Contributions go from averager to averager, each part's root averages it, encodes it once, has its header signed and
sends it DOWN as every engine does: so all hold the same bytes, although hivemind's own copies of an average differ from
peer to peer. hivemind knows no trees: whatever the plan, every contributor sends to every root, and every root to all.

Who is waited for, and how long, `ExchangeMachine` decides, from what the averager says that it has got. Whose values
are in a mean only the averager knows: what it says is what the header names.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace

import msgspec
import numpy as np
import trio

from node.engine import api
from node.engine.exchange import Exchange
from node.engine.exchange_duties import Duties
from node.engine.exchange_tools import Tools
from node.engine.exchange_view import view_of
from node.engine.hivemind.process import AveragerGone, AveragerProcess, Turn
from node.engine.hivemind.words import (
    Begin,
    Contact,
    ContactOf,
    Delivered,
    Ended,
    Exclude,
    Lost,
    OfRoster,
    Reduced,
    Unreached,
)
from node.engine.link import Link
from node.engine.outbox import OutboxReader
from protocol.codecs import LARGEST_MAGNITUDE, CodecError
from protocol.exchange import Reduce, SendPartial
from protocol.state_hash import chunk_hash
from protocol.stations import ExchangeView, Station
from protocol.weights import bits, enough

SILENCE_RATIO = 2.0
"""A sender may be silent for so many times the roster's `progress_s`: hivemind tells of a message when it is whole."""

log = logging.getLogger("atoll.engine")


class HivemindExchange(Exchange):
    """Made when a `api.Exchange` asks for it; `run` takes the averager's turn."""

    def __init__(
        self, request: api.Exchange, *, tools: Tools, outbox: OutboxReader | None, averager: AveragerProcess
    ) -> None:
        super().__init__(request, tools=tools, outbox=outbox)
        self._averager = averager
        self._contributors = tuple(bits(request.contributing))
        self._position = {index: position for position, index in enumerate(self._contributors)}
        self._my_parts = [part for part in range(self._geometry.part_count) if self._machine.root(part) == self._me]
        roots = {self._machine.root(part) for part in range(self._geometry.part_count)}
        self._averages = self._me in self._position
        if self._averages:
            self._neighbours |= roots - {self._me}
            if self._my_parts:
                self._neighbours |= set(self._contributors) - {self._me}
        self._turn: Turn | None = None
        self._has_begun = not self._averages
        """Others may send: said by WANT."""
        self._contacts: dict[int, Contact] = {}
        self._delivered: dict[int, int] = dict.fromkeys(self._machine_slots(), 0)
        """Who sends to me, unless lost → its messages."""
        self._excluded: set[int] = set()
        self._means: dict[int, tuple[int, ...] | None] = {}
        """Part → positions whose values are in its mean; None: it is the mean of nothing that can be named."""
        self._news = trio.lowlevel.ParkingLot()
        self._over_why: str | None = None
        """Why no mean comes any more."""

    def _view(self) -> ExchangeView:
        """The plan's roots, with everybody directly below each."""
        request = self._request
        flat = tuple(
            msgspec.structs.replace(
                shard,
                parents=tuple(-1 if parent == -1 else shard.parents.index(-1) for parent in shard.parents),
            )
            for shard in request.shards
        )
        return view_of(
            msgspec.structs.replace(request, shards=flat),
            self._geometry,
            my_index=request.my_index,
            durations_s=request.durations_s[-2:],
            progress_s=SILENCE_RATIO * request.progress_s,
            slack_s=request.slack_s,
        )

    def _make_duties(self) -> Duties:
        """Nothing goes UP here."""
        return Duties(Station(replace(self._machine.view, contributing=0)), self._geometry.part_count)

    def _machine_slots(self) -> Iterable[int]:
        return self._machine.slots(self._my_parts[0]) if self._my_parts else ()

    # ---------------------------------------------------------------- life

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            if self._averages:
                nursery.start_soon(self._average)
            await super().run()

    async def _average(self) -> None:
        """With an averager that dies before it has begun nothing is lost but time: the next one is asked."""
        if not await self._average_once(is_last=False):
            await self._average_once(is_last=True)

    async def _average_once(self, *, is_last: bool) -> bool:
        """False: another try may do."""
        try:
            async with self._averager.turn(self.roster_id.hex(), within_s=self._request.progress_s) as turn:
                try:
                    await self._threads.compute(self._load)
                    await self._averager.begin(turn, self._begin())
                    self._turn = turn
                    self._invite()
                    for index in list(self._contacts):
                        await self._introduce(index)
                    async for event in turn.events:
                        await self._on_event(event)
                    self._end_means("hivemind's averager has ended")
                except (AveragerGone, OSError) as error:
                    if not is_last and not self._has_begun:
                        return False
                    self._has_no_averager(str(error))
                # As long as means may be read, and those served who still read from this averager.
                await trio.sleep_forever()
        except AveragerGone as error:
            self._has_no_averager(str(error))
        finally:
            self._turn = None
        self._end_means("another roster's turn has come")
        return True

    def _has_no_averager(self, why: str) -> None:
        if not self._stopped:
            log.warning("hivemind does not average roster %s here: %s", self.roster_id.hex()[:16], why)
        self._end_means(why)
        self._invite()

    def _invite(self) -> None:
        """Say WANT to all who are connected; to others when they are."""
        self._has_begun = True
        for index in self._neighbours:
            if link := self._switchboard.link(self.peers[index]):
                self.link_up(link)

    def _load(self) -> None:
        """In a thread: my contribution, as its READY binds it. Raises `OSError`."""
        assert self._outbox is not None
        geometry, values = self._geometry, self._averager.contribution.values
        for part in range(geometry.part_count):
            start, stop = geometry.part_range(part)
            geometry.codec.decode_into(self._outbox.read(part), values[start:stop])

    def _begin(self) -> Begin:
        request = self._request
        largest = request.largest or (LARGEST_MAGNITUDE,) * len(request.peers)
        return Begin(
            roster=self.roster_id.hex(),
            names=tuple(request.peers[index] for index in self._contributors),
            me=self._position[self._me],
            owners=tuple(self._position[self._machine.root(part)] for part in range(self._geometry.part_count)),
            weights=tuple(self._weights()),
            largest=tuple(min(largest[index], LARGEST_MAGNITUDE) for index in self._contributors),
            sender_timeout_s=self._machine.view.progress_s,
            deadline_s=max(1.0, self._last_s - trio.current_time()),
        )

    def _weights(self) -> list[tuple[int, tuple[float, ...]]]:
        """Run-length over my parts: (parts, weights of the contributors)."""
        runs: list[tuple[int, tuple[float, ...]]] = []
        for part in self._my_parts:
            of_all = self._machine.weights(part)
            weights = tuple(float(of_all[index]) for index in self._contributors)
            if runs and runs[-1][1] == weights:
                runs[-1] = runs[-1][0] + 1, weights
            else:
                runs.append((1, weights))
        return runs

    # ---------------------------------------------------------------- connections

    def _want_meta(self) -> bytes:
        contact = self._averager.contact if self._turn is not None else None
        return b"" if contact is None else msgspec.msgpack.encode(contact)

    def link_up(self, link: Link) -> None:
        if self._has_begun:
            super().link_up(link)

    def wanted(self, link: Link, meta: bytes, payload: bytes | bytearray) -> None:
        known = link in self._wanted_on
        super().wanted(link, meta, payload)
        index = self._index.get(link.peer_id)
        if known or link not in self._wanted_on or index not in self._position or index == self._me:
            return
        try:
            contact = msgspec.msgpack.decode(meta, type=Contact) if meta else None
        except msgspec.DecodeError:
            contact = None
            self._machine.dropped["a contact of an averager that does not decode"] += 1
        if contact is None:
            self._lose(index, "hivemind's averager does not run there")
        elif index not in self._contacts:
            self._contacts[index] = contact
            if self._nursery is not None:
                self._nursery.start_soon(self._introduce, index)

    async def _introduce(self, index: int) -> None:
        """Tell the averager where another one is, once it takes part."""
        contact, turn = self._contacts[index], self._turn
        if turn is None:
            return
        hosts = [address.rpartition(":")[0].strip("[]") for address in self._switchboard.addresses(self.peers[index])]
        addresses = tuple(
            f"/{'ip6' if ':' in host else _family(host)}/{host}/tcp/{contact.port}" for host in dict.fromkeys(hosts)
        )
        told = ContactOf(roster=turn.roster, sender=self._position[index], peer=contact.peer, addresses=addresses)
        await self._tell(turn, told)

    async def _tell(self, turn: Turn, message: ContactOf | Exclude) -> None:
        try:
            await turn.tell(message)
        except AveragerGone as error:
            self._end_means(str(error))

    def _give_up(self, index: int) -> None:
        super()._give_up(index)
        self._delivered.pop(index, None)

    # ---------------------------------------------------------------- what the averager says

    async def _on_event(self, event: OfRoster) -> None:
        now_s = trio.current_time()
        self._wake.set()
        match event:
            case Delivered():
                sender = self._contributors[event.sender]
                if sender in self._delivered:
                    self._delivered[sender] += 1
                    self._machine.on_progress(sender, now_s)
                    if event.part is not None:
                        self._on_whole(sender, event.part, now_s)
            case Reduced():
                self._means[event.part] = event.senders
                self._news.unpark_all()
            case Lost():
                sender = self._contributors[event.sender]
                if event.is_its_fault and sender not in self._bad:
                    self._bad[sender] = event.why
                    dropped = api.PayloadDropped(peer_id=self.peers[sender], part=self._my_parts[0], why=event.why)
                    await self._emit(dropped)
                    self._machine.dropped[event.why] += 1
                self._lose(sender, event.why)
            case Unreached():
                self._failed_edges.add(self._contributors[event.reducer])
                log.info("%s is not reached by hivemind: %s", self.peers[self._contributors[event.reducer]], event.why)
            case Ended():
                self._bytes_sent += event.bytes_sent
                self._bytes_received += event.bytes_received
                if event.why:
                    log.info("hivemind's all-reduce ended early: %s", event.why)
                self._end_means(event.why or "hivemind has averaged all that it was given")

    def _on_whole(self, sender: int, part: int, now_s: float) -> None:
        """All pieces of a part are added; its mean comes when the others' are."""
        bitmap, size = 1 << sender, self._machine.up_bytes(sender, part)
        if self._machine.on_up(sender, part, sender, bitmap, size, now_s):
            self._machine.on_up_done(sender, part, bitmap, now_s)

    def _lose(self, index: int, why: str) -> None:
        self._delivered.pop(index, None)
        self._machine.on_slots_lost(index, why)
        self._wake.set()

    def _held_back(self) -> Iterable[int]:
        """hivemind adds a sender's next piece when the one before is a mean: who is ahead of the slowest waits."""
        slowest = min(self._delivered.values(), default=0)
        return [sender for sender, count in self._delivered.items() if count > slowest]

    def _end_means(self, why: str) -> None:
        self._over_why = self._over_why or why
        self._news.unpark_all()
        self._wake.set()

    # ---------------------------------------------------------------- means

    async def _sum(self, decision: Reduce | SendPartial) -> None:
        assert isinstance(decision, Reduce), "everybody is directly below a root"
        try:
            await self._exclude_all_but(decision.order)
            with trio.move_on_at(self._last_s):
                while decision.part not in self._means and self._over_why is None:
                    await self._news.park()
            senders = self._means.get(decision.part)
            turn = self._turn
            if senders is None or turn is None:
                return
            bitmap = sum(1 << self._contributors[position] for position in senders)
            if not enough(self._machine.weights(decision.part), bitmap):
                return
            async with self._reductions:
                data, data_hash = await self._threads.compute(lambda: self._encoded(decision.part))
                if data and not turn.is_over:
                    await self._publish(replace(decision, bitmap=bitmap), data, data_hash)
        finally:
            self._working -= 1
            self._wake.set()

    async def _exclude_all_but(self, order: tuple[int, ...]) -> None:
        """Who was not waited for here is not waited for there."""
        for index in self._contributors:
            if index not in order and index not in self._excluded and self._turn is not None:
                self._excluded.add(index)
                await self._tell(self._turn, Exclude(roster=self._turn.roster, sender=self._position[index]))

    def _encoded(self, part: int) -> tuple[bytes, bytes]:
        """In a thread: a part's mean and its hash; empty when it cannot be encoded."""
        start, stop = self._geometry.part_range(part)
        try:
            data = self._geometry.codec.encode(np.array(self._averager.means.values[start:stop]))
        except CodecError:
            self._machine.dropped["a mean that cannot be encoded"] += 1
            return b"", b""
        return data, chunk_hash(data)


def _family(host: str) -> str:
    """How a multiaddr begins."""
    return "ip4" if host.replace(".", "").isdigit() else "dns"
