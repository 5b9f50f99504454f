"""What the daemon and the engine say to each other (msgpack frames over a socket pair, `node.ipc`).

Requests carry an `id`; the engine answers each with one `Done` or one `Failed` of that id, in any order. Events come
unasked. Digests are 32 raw bytes, peer ids base58. The engine owns the folder `Open.directory` and nothing else:

    artifacts/HASH          content-addressed bytes of the manifest (tokenizer, S_0, small data); served to anyone
    parts/ROSTER.*          reduced parts of the last rounds (the round log's bodies), found by hash; served
    outbox/BASE.*           my encoded contributions of the last two freezes, for audits; served
    snapshots/ROUND-HASH/   immutable copies of the outer state (chunk hashes + data); served
    apply.journal           progress mark of the outer step, for restarts

The memfds arrive as descriptors with `Open`: theta, momentum, delta, in this order, each `elements` fp32
(momentum: `elements - buffer_elements`).

Bitmaps over a roster's READYs travel as little-endian bytes (`protocol.fields.bitmap_bytes`): msgpack's integers end at
64 bits, rosters do not.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

# ---------------------------------------------------------------- requests: state


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


# ---------------------------------------------------------------- requests: peers and transfers


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


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """Where and how another engine is reached, from its signed membership record."""

    peer_id: str
    addresses: tuple[str, ...]
    """`host:port` of its data listener, best first; empty: it cannot be dialled."""
    certificate_sha256: bytes


class SetPeers(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Replace the directory of engines. Connections to peers no longer listed are closed. → Done."""

    id: int
    peers: tuple[Peer, ...]


class AcceptToken(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A peer asked our daemon for a one-time token; a connection that shows it is that peer's. → Done."""

    id: int
    peer_id: str
    token: bytes
    """32 random bytes; valid once, for `expires_s`."""
    expires_s: float


class DialToken(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to the event `TokenWanted`; None: the peer's daemon did not give one. → Done."""

    id: int
    peer_id: str
    token: bytes | None


class ShardPlan(msgspec.Struct, frozen=True, kw_only=True):
    share: int
    parents: tuple[int, ...]


class Exchange(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Take part in the exchange of one roster. → Done at once; then events PartHeld …, ExchangeEnded."""

    id: int
    roster_id: bytes
    base: bytes
    my_index: int
    peers: tuple[str, ...]
    """Peer ids in bit order."""
    contributing_bytes: bytes
    tokens: tuple[tuple[tuple[int, int], ...], ...]
    """Per READY: run-length (parts, tokens)."""
    shards: tuple[ShardPlan, ...]
    durations_s: tuple[float, ...]
    progress_s: float
    slack_s: float
    parts_roots: tuple[bytes, ...]
    """Per READY: what binds the bytes of its parts (`protocol.commitment`)."""
    largest: tuple[float, ...] = ()
    """Per READY: its declared largest magnitude, the bound that its values are checked against; empty: no bound."""
    weight_cap_ratio: float = 3.0
    """Of the manifest: no weight exceeds this many times the roster's median."""

    @property
    def contributing(self) -> int:
        """Bitmap of READYs with an UP slot."""
        return int.from_bytes(self.contributing_bytes, "little")


class StopExchange(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Another attempt or a commit overtook it. → Done."""

    id: int
    roster_id: bytes


class SignedHeader(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to the event `HeaderWanted`; None: refused, the part stays EMPTY. → Done."""

    id: int
    roster_id: bytes
    part: int
    header: PartRef | None


class FetchParts(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Get part payloads by hash from any of `sources`. → PartsFetched; each also as event PartHeld."""

    id: int
    headers: tuple[PartRef, ...]
    sources: tuple[str, ...]
    timeout_s: float


class Recompute(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Recompute a committed part from the bytes that READYs bind, asking the contributors for theirs. → Recomputed."""

    id: int
    base: bytes
    part: int
    bitmap_bytes: bytes
    result_hash: bytes
    """What the part's header says."""
    peers: tuple[str, ...]
    contributing_bytes: bytes
    tokens: tuple[tuple[tuple[int, int], ...], ...]
    shards: tuple[ShardPlan, ...]
    parts_roots: tuple[bytes, ...]
    weight_cap_ratio: float
    sources: tuple[str, ...]
    """Who may have a contribution whose own peer does not give it."""
    yields: bool
    """To the next exchange, which ends it: `unknown`."""
    timeout_s: float

    @property
    def bitmap(self) -> int:
        """What the part's header says that it holds."""
        return int.from_bytes(self.bitmap_bytes, "little")

    @property
    def contributing(self) -> int:
        """Bitmap of READYs with an UP slot."""
        return int.from_bytes(self.contributing_bytes, "little")


class FetchArtifact(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Get an artifact by hash, in chunks, resumable, from any of `sources`. → Done when it lies in artifacts/."""

    id: int
    hash: bytes
    length: int
    sources: tuple[str, ...]
    timeout_s: float


class FetchSnapshot(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Get a snapshot in verified chunks from several of `sources` at once. → Done when it lies in snapshots/."""

    id: int
    round: int
    state_hash: bytes
    sources: tuple[str, ...]
    timeout_s: float


class Inventory(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """→ Inventoried: what this engine has, for the daemon's answers to joiners and for `status`."""

    id: int


class KeepCommits(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Tell which part hashes belong to which round, so that `keep_rounds` can drop old ones. → Done."""

    id: int
    round: int
    hashes: tuple[bytes, ...]


Request: TypeAlias = (
    Open
    | LoadInitial
    | LoadSnapshot
    | ResumeState
    | SaveSnapshot
    | SetAside
    | Encode
    | Apply
    | SetPeers
    | AcceptToken
    | DialToken
    | Exchange
    | StopExchange
    | SignedHeader
    | FetchParts
    | Recompute
    | FetchArtifact
    | FetchSnapshot
    | Inventory
    | KeepCommits
)

# ---------------------------------------------------------------- answers


class Done(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    id: int


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """`reason` is one sentence that names the value and the fix."""

    id: int
    reason: str


class Opened(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    id: int
    port: int


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


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    round: int
    state_hash: bytes


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
    dropped: dict[str, int]
    """Rejected input by reason, since the start."""


# ---------------------------------------------------------------- events


class TokenWanted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The engine wants to dial `peer_id`: ask its daemon for a token over the control stream."""

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


class PeerRate(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A transfer's measured rate, for the link table."""

    peer_id: str
    sent_bytes_s: float | None = None
    received_bytes_s: float | None = None


class StorageFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Received bytes could not be stored (disk full, for one); parts are not held until `StorageWorks`."""

    reason: str


class StorageWorks(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Storing works again after `StorageFailed`."""


Event: TypeAlias = (
    TokenWanted | HeaderWanted | PartHeld | PayloadDropped | ExchangeEnded | PeerRate | StorageFailed | StorageWorks
)
Answer: TypeAlias = Done | Failed | Opened | StateLoaded | Encoded | Applied | PartsFetched | Recomputed | Inventoried
FromEngine: TypeAlias = Answer | Event
