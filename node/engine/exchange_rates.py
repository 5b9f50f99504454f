"""How fast each link was while an exchange used it, for the link table (design section 7)."""

from __future__ import annotations

from collections.abc import Iterator

from node.engine import api
from node.engine.link import Link

MIN_RATED_BYTES = 1 << 18
"""Shorter transfers say more of latency than of a rate."""


class LinkRates:
    """Reads the meters of links from the moment that each is first seen."""

    def __init__(self) -> None:
        self._before: dict[Link, tuple[int, float, int, float]] = {}

    def begin(self, link: Link) -> None:
        self._before[link] = (link.sending.bytes, link.sending.busy_s, link.receiving.bytes, link.receiving.busy_s)

    def measured(self) -> Iterator[api.PeerRate]:
        """Of the links that moved enough, in either direction."""
        for link, (sent, sent_s, received, received_s) in self._before.items():
            sent_rate = _rate(link.sending.bytes - sent, link.sending.busy_s - sent_s)
            received_rate = _rate(link.receiving.bytes - received, link.receiving.busy_s - received_s)
            if sent_rate or received_rate:
                yield api.PeerRate(peer_id=link.peer_id, sent_bytes_s=sent_rate, received_bytes_s=received_rate)


def _rate(size: int, seconds: float) -> float | None:
    return size / seconds if size >= MIN_RATED_BYTES and seconds > 0 else None
