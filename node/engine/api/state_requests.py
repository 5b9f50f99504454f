"""Requests about the outer state of this node: to open, load, save, encode and step."""

from __future__ import annotations

import msgspec

from node.engine.api.refs import PartRef


class Open(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """First request. → Opened. Starts the data listener on `listen_host`:`listen_port` (0: any)."""

    id: int
    directory: str
    peer_id: str
    certificate_pem: bytes
    """Self-signed TLS certificate of this process start; its fingerprint stands in the membership record."""
    key_pem: bytes
    listen_host: str
    listen_port: int
    elements: int
    buffer_elements: int
    part_elements: int
    codec: str
    sum_codec: str
    momentum: float
    keep_rounds: int
    """Rounds whose parts are kept (the round log)."""
    keep_snapshots: int
    disk_limit_bytes: int
    """0: no limit. Beyond it the oldest parts and snapshots that nobody pins go first, never the newest state."""
    threads: int
    relay_bytes_s: float = 0.0
    """What this engine passes on for pairs that cannot dial each other, at most; 0: nothing."""
    engine: str = "atoll"
    """The manifest's: what averages (`node.engine.engines`)."""
    averager_python: str = ""
    """Interpreter with hivemind, of the engine `hivemind`; empty: the engine's own."""


class LoadInitial(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Load S_0 (artifact `hash`: safetensors, one fp32 vector `theta`); momentum is zero. → StateLoaded."""

    id: int
    hash: bytes


class LoadSnapshot(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Load a snapshot of this node's disk; its bytes must hash to `state_hash`. → StateLoaded."""

    id: int
    round: int
    state_hash: bytes


class ResumeState(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The memfds may still hold a state (the engine was restarted): verify it. → StateLoaded, or Failed.

    Also succeeds when they hold the outer step that follows it, under way or complete: then only `Apply` of that very
    commit may follow. Failed: load a snapshot and replay.
    """

    id: int
    round: int
    state_hash: bytes


class SaveSnapshot(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Copy the current state to disk as the snapshot of `round`. Never blocks an exchange. → StateLoaded."""

    id: int
    round: int


class SetAside(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The run holds another state of `round` than `state_hash`: it is corrupt here. → Done.

    The memory counts as holding no state; a snapshot of it is kept apart, with `reason`, and neither loaded nor served.
    """

    id: int
    round: int
    state_hash: bytes
    reason: str


class Encode(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Freeze: encode `delta` part by part into the outbox, durably. → Encoded."""

    id: int
    base: bytes


class Apply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The outer step, in place, blockwise, with a progress mark; parts come from `parts/`. → Applied.

    Sent again after the engine died in it (Open, ResumeState of the round before, Apply), it is finished exactly.

    For parts whose bitmap lacks my bit the engine leaves `θ_{r+1} − θ_r` in `delta`; for counted parts zeros.
    """

    id: int
    base: bytes
    new_round: int
    headers: tuple[PartRef | None, ...]
    """One per part; None: EMPTY, θ and momentum unchanged there."""
    outer_lr: float
    my_index: int | None
    contributed: bool
    """Whether `delta` holds my frozen contribution of this base."""
