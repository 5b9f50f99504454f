"""Where incoming frames go: to the exchange of their roster, to the answerer, or to the request that they answer."""

from __future__ import annotations

from collections import OrderedDict

from node.engine.drops import Drops
from node.engine.exchange import Exchange
from node.engine.frames import Header, Kind, want_payload_bytes
from node.engine.gauge import Gauge
from node.engine.geometry import Geometry
from node.engine.link import Link
from node.engine.requests import Requester, Responder
from node.errors import StrangerError

MAX_EARLY_WANTS = 4
"""WANTs per peer for rosters that this node does not know yet."""


class Traffic:
    """The `LinkWatcher` of the switchboard."""

    def __init__(
        self, *, geometry: Geometry, requester: Requester, responder: Responder, gauge: Gauge, dropped: Drops
    ) -> None:
        self.exchanges: dict[bytes, Exchange] = {}
        """By roster id: those under way, or still served."""
        self._geometry = geometry
        self._requester = requester
        self._responder = responder
        self._gauge = gauge
        self._dropped = dropped
        self._early: dict[Link, OrderedDict[bytes, tuple[bytes, bytearray]]] = {}

    @property
    def exchanging(self) -> bool:
        """Whether an exchange has work to do on this node."""
        return any(not exchange.over for exchange in self.exchanges.values())

    def add(self, exchange: Exchange) -> None:
        self.exchanges[exchange.roster_id] = exchange
        for link, wants in list(self._early.items()):
            if want := wants.pop(exchange.roster_id, None):
                exchange.wanted(link, *want)

    def remove(self, roster_id: bytes) -> None:
        exchange = self.exchanges.pop(roster_id, None)
        if exchange is not None:
            self._dropped.add(exchange.dropped)

    # ---------------------------------------------------------------- LinkWatcher

    def link_up(self, link: Link) -> None:
        self._gauge.watch(link)
        for exchange in self.exchanges.values():
            exchange.link_up(link)

    def link_down(self, link: Link) -> None:
        self._early.pop(link, None)
        self._requester.link_down(link)
        self._responder.link_down(link)
        for exchange in self.exchanges.values():
            exchange.link_down(link)

    def admit(self, link: Link, header: Header, meta: bytes) -> bool:
        match header.kind:
            case Kind.UP | Kind.DOWN:
                exchange = self.exchanges.get(header.id)
                if exchange is None:
                    self._dropped.count(f"{header.kind.name} for a roster that is over or unknown", link.peer_id)
                    return False
                return exchange.admit(link, header, meta)
            case Kind.WANT:
                if header.payload_bytes != want_payload_bytes(self._geometry.part_count):
                    raise StrangerError("a WANT that does not fit the vector")
                return True
            case Kind.ASK:
                if header.payload_bytes:
                    raise StrangerError("a request with a payload")
                return True
            case Kind.ANSWER | Kind.HAVE_NOT:
                if not self._requester.admit(link, header):
                    if self._requester.gave_up(link, header):
                        return False
                    self._dropped.count("an answer that nobody waits for", link.peer_id)
                    return False
                return True
        raise StrangerError("a keep-alive with content")

    async def deliver(self, link: Link, header: Header, meta: bytes, payload: bytearray) -> None:
        match header.kind:
            case Kind.UP | Kind.DOWN:
                # Stopped meanwhile: what it brought is of no use.
                if exchange := self.exchanges.get(header.id):
                    await exchange.deliver(link, header, meta, payload)
            case Kind.WANT:
                if exchange := self.exchanges.get(header.id):
                    exchange.wanted(link, meta, payload)
                else:
                    early = self._early.setdefault(link, OrderedDict())
                    early[header.id] = meta, payload
                    while len(early) > MAX_EARLY_WANTS:
                        early.popitem(last=False)
            case Kind.ASK:
                self._responder.asked(link, header, meta)
            case Kind.ANSWER | Kind.HAVE_NOT:
                self._requester.answered(link, header, payload)

    def progressed(self, link: Link, header: Header) -> None:
        if exchange := self.exchanges.get(header.id):
            exchange.progressed(link)

    def broke_off(self, link: Link, header: Header) -> None:
        if exchange := self.exchanges.get(header.id):
            exchange.broke_off(link, header)

    def broken(self, link: Link, error: BaseException) -> None:
        if isinstance(error, StrangerError):
            self._dropped.count(str(error), link.peer_id)
