"""What the engine says unasked."""

from __future__ import annotations

import msgspec

from node.engine.api.refs import PartRef


class TokenWanted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The engine wants to dial `peer_id`: ask its daemon for a token over the control stream."""

    peer_id: str


class CallWanted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The engine cannot dial `peer_id`, but that one can dial this node: ask its daemon to have it done."""

    peer_id: str


class SpliceWanted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Neither can this node dial `peer_id` nor the other way round: have a volunteer join them."""

    peer_id: str


class HeaderWanted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A part of which this node is root is reduced and encoded: sign its header."""

    roster_id: bytes
    part: int
    bitmap_bytes: bytes
    hash: bytes
    length: int

    @property
    def bitmap(self) -> int:
        """Of the contributions in it."""
        return int.from_bytes(self.bitmap_bytes, "little")


class PartHeld(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The payload is verified against its header (root's signature included), finite, and durable."""

    header: PartRef


class PayloadDropped(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An UP of this peer failed its checks: the first one per peer and exchange. Its slot stays open until due."""

    peer_id: str
    part: int
    why: str
    """A constant text: what is wrong with it."""


class ExchangeEnded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """All that this node was to do for the roster is done or closed."""

    roster_id: bytes
    seconds: float
    bytes_sent: int
    bytes_received: int
    failed_edges: tuple[str, ...]
    excluded: dict[str, str]
    """peer id → why one of its slots closed without it (as seen here)."""


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """The best that was seen of a stretch of traffic; None: too little of it to say anything."""

    sent_bytes_s: float | None = None
    sent_is_sure: bool = False
    """There was always something to send, and it went no faster. Else it may go faster, and nothing more is known."""
    received_bytes_s: float | None = None
    received_is_sure: bool = False


class LinkMeasured(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Of the link to one peer, whatever else went over the line at the same time."""

    peer_id: str
    rates: Rates


class LineMeasured(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Of this node's line: all links together."""

    rates: Rates


class StorageFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Received bytes could not be stored (disk full, for one); parts are not held until `StorageWorks`."""

    reason: str


class StorageWorks(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Storing works again after `StorageFailed`."""
