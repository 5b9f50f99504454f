"""What the engine answers to a request of an `id`."""

from __future__ import annotations

import msgspec

from node.engine.api.refs import Snapshot


class Done(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    id: int


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """`reason` is one sentence that names the value and the fix."""

    id: int
    reason: str


class Opened(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    id: int
    port: int


class SpliceOpened(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    id: int
    tickets: tuple[bytes, bytes]
    """For the first and for the second."""


class StateLoaded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    id: int
    state_hash: bytes


class Encoded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    id: int
    parts_root: bytes
    """Binds the encoded bytes of every part (`protocol.commitment`), for READY."""
    norm: float
    largest: float
    finite: bool
    """False: delta held NaN or infinity; nothing was encoded and the peer must not contribute."""


class Applied(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    id: int
    state_hash: bytes
    counted: tuple[bool, ...]
    """Per part: my contribution is in it (the trainer takes θ); else it adds `delta`."""


class PartsFetched(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    id: int
    missing: tuple[int, ...]


class Recomputed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    id: int
    verdict: str
    """`right`, `wrong`, or `unknown`: some bytes could not be had."""
    why: str
    """Of `unknown`: one sentence."""
    bytes_received: int


class Probed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    id: int
    bytes_received: int
    why: str
    """Why it ended early, in one sentence; empty: it did not. What it measured comes as `LinkMeasured`."""


class Inventoried(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    id: int
    snapshots: tuple[Snapshot, ...]
    part_rounds: tuple[int, ...]
    """Rounds whose parts are all here, ascending."""
    partial: tuple[Snapshot, ...] = ()
    """Snapshots of which an interrupted download left chunks."""
    disk_bytes: int
    resident_bytes: int
    connections: int
    bytes_sent: int
    bytes_received: int
    relayed_bytes: int = 0
    """Passed on for pairs that cannot dial each other, since the start."""
    relayed_pairs: int = 0
    """Such pairs now."""
    dropped: dict[str, int]
    """Rejected input by reason, since the start."""
