"""What the engine and hivemind's averager say to each other, as lines of JSON (`averager.process` has the meanings).

Positions (`sender`, `reducer`, `me`, in `owners` and `senders`) are among the roster's contributors, in its order.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec


class Begin(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", tag="begin"):
    roster: str
    names: tuple[str, ...]
    me: int
    owners: tuple[int, ...]
    weights: tuple[tuple[int, tuple[float, ...]], ...]
    largest: tuple[float, ...]
    sender_timeout_s: float
    deadline_s: float


class ContactOf(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", tag="contact"):
    roster: str
    sender: int
    peer: str
    addresses: tuple[str, ...]


class Exclude(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", tag="exclude"):
    roster: str
    sender: int


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", tag="stop"):
    roster: str


class Listening(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="listening"):
    peer: str
    port: int


class Begun(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="begun"):
    roster: str


class Delivered(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="delivered"):
    roster: str
    sender: int
    part: int | None


class Reduced(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="reduced"):
    roster: str
    part: int
    senders: tuple[int, ...] | None


class Lost(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="lost"):
    roster: str
    sender: int
    why: str
    is_its_fault: bool
    """It sent what no honest engine sends."""


class Unreached(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="unreached"):
    roster: str
    reducer: int
    why: str


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="ended"):
    roster: str
    why: str
    bytes_sent: int
    bytes_received: int


class ProcessFailed(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="failed"):
    why: str


ToAverager: TypeAlias = Begin | ContactOf | Exclude | Stop
OfRoster: TypeAlias = Begun | Delivered | Reduced | Lost | Unreached | Ended
FromAverager: TypeAlias = Listening | OfRoster | ProcessFailed


class Contact(msgspec.Struct, frozen=True, array_like=True):
    """What goes with a WANT: where this node's averager is to be found. Its host is where the peer's engine is."""

    peer: str
    """Its libp2p id."""
    port: int
