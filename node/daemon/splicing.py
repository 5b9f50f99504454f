"""Pairs of which neither can dial the other, joined by a volunteer (design section 8): who asks whom, and when.

    A  → volunteer   splice        peer B, kind, lanes
         volunteer → B             splice-offer: peer A, kind, B's ticket
    A  ← volunteer                 A's ticket
    A, B → the volunteer's engine  each with its ticket; from then on its engine passes bytes on (`node.engine.splice`)

Control connections and data channels are joined alike; what runs through is Noise or TLS between A and B, so that all
else of a peer behind a router is as it is of any other: its votes, its READY, its tokens for data channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec
import structlog
import trio

from node.daemon import rpc
from node.daemon.allowance import Allowances
from node.daemon.engine_client import EngineClient, ask_engine
from node.daemon.link import Link
from node.daemon.membership import Membership, link_key
from node.daemon.streams import RequestFailed
from node.engine import api
from node.engine.dialling import at_host
from node.engine.handshake import HandshakeFailed
from node.engine.splice import dial_through
from node.errors import AtollError, StrangerError
from protocol.names import PeerId, digest

CONTROL, DATA = "control", "data"
DATA_LANES = 2
MAX_TRIED = 4
"""Volunteers that are asked for one splice."""
OFFER_S = 8.0
ASK_S = OFFER_S + 4.0
SET_ASIDE_S = 6.0
"""How long a volunteer that could not join a pair is not asked again for that pair."""
UNKNOWN_ROUND_TRIP_S = 2.0
"""Between a volunteer and the other side, where the volunteer's record says nothing of it."""
NEAR_S = 0.01
"""Volunteers whose ways differ by less are equally near: then a lot decides, so that pairs spread over them."""
MAX_SAID_CHARACTERS = 200
"""Of a volunteer's reason, in `status`."""
MAX_AT_ONCE = 16
ASKED_AT_ONCE, ASKED_PER_S = 16.0, 0.5
"""Of one peer. A pair needs two splices, and again when a volunteer dies."""

_log = structlog.get_logger(__name__)


class SpliceFailed(AtollError):
    """No volunteer joins this node with a peer; one sentence."""


class SpliceRequest(msgspec.Struct, frozen=True, kw_only=True):
    peer: PeerId
    kind: str
    lanes: int


class SpliceOffer(msgspec.Struct, frozen=True, kw_only=True):
    peer: PeerId
    kind: str
    lanes: int
    ticket: bytes


class SplicingOwner(Protocol):
    """What this asks of the network."""

    peer_id: PeerId
    membership: Membership

    @property
    def peers(self) -> Mapping[PeerId, Link]: ...

    async def request(self, peer: PeerId, method: str, payload: bytes, *, timeout_s: float) -> bytes: ...

    async def connect_over(self, peer: PeerId, tcp: trio.SocketStream) -> Link: ...

    async def welcome_over(self, tcp: trio.SocketStream) -> None: ...


class Splicing:
    """All three parts: asking for a splice, being offered one, and joining others."""

    def __init__(self, owner: SplicingOwner) -> None:
        self.engine: EngineClient | None = None
        """The run's, while there is one."""
        self.through: dict[PeerId, PeerId] = {}
        """Peer → the volunteer by which this node was joined with it last."""
        self.failures: dict[PeerId, str] = {}
        """Peers that no volunteer joins this node with → why."""
        self._owner = owner
        self._nursery: trio.Nursery
        self._set_aside: dict[tuple[PeerId, PeerId], float] = {}
        """(volunteer, peer) → until when."""
        self._allowances = Allowances(at_once=ASKED_AT_ONCE, per_s=ASKED_PER_S)
        self._offers = Allowances(at_once=4 * ASKED_AT_ONCE, per_s=4 * ASKED_PER_S)
        self._running = 0
        self._meeting = 0

    def start(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery

    # ------------------------------------------------------------ this node and a peer

    async def connect(self, peer: PeerId) -> Link:
        """The control connection to a peer, through a volunteer. Raises `SpliceFailed`."""

        async def join(volunteer: PeerId, splice: api.Splice) -> Link:
            tcp = await _dial(splice)
            self._joined_by(volunteer, peer)
            return await self._owner.connect_over(peer, tcp)

        failures = []
        for volunteer in self._volunteers(peer):
            try:
                link = await join(volunteer, await self._splice(volunteer, peer, CONTROL, 1))
            except (RequestFailed, HandshakeFailed, AtollError) as error:
                failures.append(self._failed(volunteer, peer, error))
                continue
            self.failures.pop(peer, None)
            return link
        raise self._nobody(peer, failures)

    async def data_splice(self, peer: PeerId) -> api.Splice:
        """For this node's engine to dial. Raises `SpliceFailed`."""
        failures = []
        for volunteer in self._volunteers(peer):
            try:
                return await self._splice(volunteer, peer, DATA, DATA_LANES)
            except RequestFailed as error:
                failures.append(self._failed(volunteer, peer, error))
        raise self._nobody(peer, failures)

    def _nobody(self, peer: PeerId, failures: Sequence[str]) -> SpliceFailed:
        why = "; ".join(failures) or "none of this node's peers volunteers"
        records = self._owner.membership.records
        self.failures = {one: said for one, said in self.failures.items() if one in records} | {peer: why}
        return SpliceFailed(f"neither can dial the other, and no volunteer joins this node with {peer}: {why}")

    async def _splice(self, volunteer: PeerId, peer: PeerId, kind: str, lanes: int) -> api.Splice:
        """Raises `RequestFailed`."""
        addresses = self._addresses(volunteer)
        if not addresses:
            raise RequestFailed("it has left")
        request = rpc.encode(SpliceRequest(peer=peer, kind=kind, lanes=lanes))
        ticket = await self._owner.request(volunteer, rpc.SPLICE, request, timeout_s=ASK_S)
        return api.Splice(addresses=addresses, ticket=ticket, lanes=lanes)

    def _addresses(self, volunteer: PeerId) -> tuple[str, ...]:
        """Of its engine, at the very host that its control connection leads to: whoever offers to join this node with
        another does not choose whose door it knocks at.
        """
        record, link = self._owner.membership.records.get(volunteer), self._owner.peers.get(volunteer)
        if record is None or link is None or link.is_spliced:
            return ()
        return at_host(link.remote_host, record.data_addresses)

    def _failed(self, volunteer: PeerId, peer: PeerId, error: Exception) -> str:
        now_s = trio.current_time()
        self._set_aside = {key: until_s for key, until_s in self._set_aside.items() if until_s > now_s}
        self._set_aside[volunteer, peer] = now_s + SET_ASIDE_S
        _log.debug("a volunteer does not join this node with a peer", volunteer=volunteer, peer=peer, why=str(error))
        return f"{volunteer[-8:]} says {str(error)[:MAX_SAID_CHARACTERS]}"

    def _volunteers(self, peer: PeerId) -> list[PeerId]:
        """Whom to ask: the nearest first, by the measured round trips of the whole way."""
        now_s = trio.current_time()
        records = self._owner.membership.records
        found: list[tuple[int, bytes, PeerId]] = []
        for volunteer, link in self._owner.peers.items():
            record = records.get(volunteer)
            if volunteer == peer or link.is_spliced or record is None or not record.relays or not record.data_addresses:
                continue
            if self._set_aside.get((volunteer, peer), 0.0) > now_s:
                continue
            beyond = record.links.get(link_key(peer))
            way_s = (link.round_trip_s or 0.0) + (beyond.round_trip_s if beyond else UNKNOWN_ROUND_TRIP_S)
            pair = "".join(sorted((self._owner.peer_id, peer)))
            lot = digest(b"atoll/volunteer", pair.encode(), volunteer.encode())
            found.append((round(way_s / NEAR_S), lot, volunteer))
        return [volunteer for _, _, volunteer in sorted(found)][:MAX_TRIED]

    # ------------------------------------------------------------ an offer

    async def offered(self, volunteer: PeerId, payload: bytes) -> bytes:
        """The request `rpc.SPLICE_OFFER`: a peer of the run waits for this node at the volunteer."""
        offer = rpc.decode(payload, SpliceOffer)
        addresses = self._addresses(volunteer)
        if not addresses:
            raise AtollError("only a peer of the run, connected directly and with a data address, joins others")
        if offer.peer not in self._owner.membership.records or offer.peer == self._owner.peer_id:
            raise AtollError(f"{offer.peer[:60]} is no other peer that this node knows")
        if not self._offers.take(volunteer):
            raise AtollError("too many offers; ask again later")
        splice = api.Splice(addresses=addresses, ticket=offer.ticket, lanes=_lanes(offer.kind, offer.lanes))
        if offer.kind == DATA:
            await ask_engine(self.engine, lambda engine: engine.accept_splice(peer_id=offer.peer, splice=splice))
        elif offer.peer in self._owner.peers:
            raise AtollError("it is connected with that peer")
        elif self._meeting >= MAX_AT_ONCE:
            raise AtollError(f"{MAX_AT_ONCE} peers wait for this node already; ask again later")
        else:
            self._meeting += 1
            self._nursery.start_soon(self._meet, volunteer, offer.peer, splice)
        return b""

    async def _meet(self, volunteer: PeerId, peer: PeerId, splice: api.Splice) -> None:
        try:
            tcp = await _dial(splice)
        except HandshakeFailed as error:
            _log.debug("a peer was not met", volunteer=volunteer, peer=peer, why=str(error))
            return
        finally:
            self._meeting -= 1
        self._joined_by(volunteer, peer)
        await self._owner.welcome_over(tcp)

    def _joined_by(self, volunteer: PeerId, peer: PeerId) -> None:
        records = self._owner.membership.records
        self.through = {one: by for one, by in self.through.items() if one in records} | {peer: volunteer}

    # ------------------------------------------------------------ as a volunteer

    async def asked(self, peer: PeerId, payload: bytes) -> bytes:
        """The request `rpc.SPLICE`: the asker's ticket. Raises `AtollError` with a sentence for it."""
        request = rpc.decode(payload, SpliceRequest)
        lanes = _lanes(request.kind, request.lanes)
        peers = self._owner.peers
        asker, other = peers.get(peer), peers.get(request.peer)
        if asker is None or asker.is_spliced:
            raise AtollError("only those who are connected here directly are joined with others")
        if other is None or other.is_spliced or request.peer == peer:
            raise AtollError("it is not connected with that peer itself")
        if self._running >= MAX_AT_ONCE or not self._allowances.take(peer):
            raise AtollError("it is asked for too many splices at once; ask again later")
        self._running += 1
        try:
            opened = await ask_engine(
                self.engine, lambda engine: engine.open_splice(first=peer, second=request.peer, lanes=lanes)
            )
            mine, theirs = opened.tickets
            offer = SpliceOffer(peer=peer, kind=request.kind, lanes=lanes, ticket=theirs)
            try:
                await self._owner.request(request.peer, rpc.SPLICE_OFFER, rpc.encode(offer), timeout_s=OFFER_S)
            except RequestFailed as error:
                raise AtollError(f"the other side does not come: {error}") from error
        finally:
            self._running -= 1
        return mine


def _lanes(kind: str, lanes: int) -> int:
    """Raises `StrangerError`."""
    if kind not in (CONTROL, DATA) or lanes != (1 if kind == CONTROL else DATA_LANES):
        raise StrangerError(f"a splice of {lanes} lanes for {kind[:20]!r} is none")
    return lanes


async def _dial(splice: api.Splice) -> trio.SocketStream:
    """Raises `HandshakeFailed`."""
    failures = []
    for address in splice.addresses:
        try:
            return await dial_through(address, ticket=splice.ticket, lane=0, lanes=splice.lanes)
        except HandshakeFailed as error:
            failures.append(str(error))
    raise HandshakeFailed("; ".join(failures))
