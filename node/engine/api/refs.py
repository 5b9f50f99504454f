"""What requests, answers and events name: a part of a round, a copy of a state."""

from __future__ import annotations

import msgspec


class PartRef(msgspec.Struct, frozen=True, kw_only=True):
    """A part header with its root's signature."""

    roster_id: bytes
    part: int
    bitmap_bytes: bytes
    hash: bytes
    length: int
    root: str
    body: bytes
    """The signed body, verbatim (forwarded with DOWN)."""
    signature: bytes

    @property
    def bitmap(self) -> int:
        """Of the contributions in it."""
        return int.from_bytes(self.bitmap_bytes, "little")


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    round: int
    state_hash: bytes
