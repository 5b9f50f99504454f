"""What this node measured of its links and its line, and what it tells others of it (design section 7).

Round trips come from the control streams, rates from the engine. What others are told holds still while it only
wobbles, so that a record changes when a link does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import trio

from node.daemon.membership import MAX_LINKS, LinkSummary, link_key
from node.daemon.rates import RateEstimate, Steady
from node.daemon.round_trips import RoundTrips
from node.engine.api import Rates
from protocol.names import PeerId, digest

MAX_PEERS = 2048
"""Of which something is remembered; links come and go, what they carry stays."""
LEAST_ROUND_TRIP_CHANGE_S = 0.002
"""Below this it is the two machines' own wobble."""


class MeasuredLink(Protocol):
    """The control connection of a peer."""

    @property
    def round_trips(self) -> RoundTrips: ...


@dataclass(slots=True)
class Pair:
    """A sent and a received rate, measured and as told."""

    sent: RateEstimate = field(default_factory=RateEstimate)
    received: RateEstimate = field(default_factory=RateEstimate)
    told_sent: Steady = field(default_factory=Steady)
    told_received: Steady = field(default_factory=Steady)

    def observe(self, rates: Rates) -> None:
        now_s = trio.current_time()
        if rates.sent_bytes_s is not None:
            self.sent.observe(rates.sent_bytes_s, sure=rates.sent_is_sure, now_s=now_s)
        if rates.received_bytes_s is not None:
            self.received.observe(rates.received_bytes_s, sure=rates.received_is_sure, now_s=now_s)

    @property
    def sent_bytes_s(self) -> float | None:
        return self.sent.at(trio.current_time())

    @property
    def received_bytes_s(self) -> float | None:
        return self.received.at(trio.current_time())

    @property
    def age_s(self) -> float | None:
        """Since the newest of both; None: neither is known."""
        now_s = trio.current_time()
        known = [one.age_s(now_s) for one in (self.sent, self.received) if one.at(now_s) is not None]
        return min(known, default=None)

    def tell(self) -> tuple[float | None, float | None]:
        """Sent and received, for the record."""
        return self.told_sent.settle(self.sent_bytes_s), self.told_received.settle(self.received_bytes_s)


@dataclass(slots=True)
class _Known:
    rates: Pair = field(default_factory=Pair)
    round_trip: Steady = field(default_factory=lambda: Steady(LEAST_ROUND_TRIP_CHANGE_S))


class LinkTable:
    """One per daemon; it outlives links and engines."""

    def __init__(self, me: PeerId) -> None:
        self.line = Pair()
        """All links together: what this node's line carries."""
        self._me = me
        self._known: dict[PeerId, _Known] = {}

    def saw_peer(self, peer: PeerId, rates: Rates) -> None:
        self._of(peer).rates.observe(rates)

    def saw_line(self, rates: Rates) -> None:
        self.line.observe(rates)

    def rates_of(self, peer: PeerId) -> Pair:
        known = self._known.get(peer)
        return known.rates if known is not None else Pair()

    def summaries(self, links: Mapping[PeerId, MeasuredLink], most: int = MAX_LINKS) -> dict[str, LinkSummary]:
        """For this node's record: of those connected, at most `most`.

        Where there are more, half of them are the nearest, and half are drawn by a hash, the same ones as long as they
        are there: who reads many nodes' records sees both who is near to whom and how far the rest is.
        """
        told: dict[PeerId, LinkSummary] = {}
        for peer, link in links.items():
            known = self._of(peer)
            round_trip_s = known.round_trip.settle(link.round_trips.smoothed_s)
            if round_trip_s is not None:
                told[peer] = LinkSummary(round_trip_s, *known.rates.tell())
        chosen = set(told)
        if len(told) > most:
            drawn = sorted(told, key=lambda peer: digest(self._me.encode(), peer.encode()))
            near = sorted(drawn, key=lambda peer: told[peer].round_trip_s)[: most // 2]
            far = [peer for peer in drawn if peer not in set(near)]
            chosen = {*near, *far[: most - len(near)]}
        return {link_key(peer): told[peer] for peer in sorted(chosen)}

    def _of(self, peer: PeerId) -> _Known:
        """What is known of a peer, now the last to be forgotten."""
        known = self._known[peer] = self._known.pop(peer) if peer in self._known else _Known()
        while len(self._known) > MAX_PEERS:
            del self._known[next(iter(self._known))]
        return known
