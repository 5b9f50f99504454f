"""Requests about other engines and what goes between them: peers, tokens, exchanges, downloads, what is kept."""

from __future__ import annotations

import msgspec

from node.engine.api.refs import PartRef


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """Where and how another engine is reached, from its signed membership record."""

    peer_id: str
    addresses: tuple[str, ...]
    """`host:port` of its data listener, best first; empty: it cannot be dialled."""
    certificate_sha256: bytes
    dialable: bool = True
    """This node can dial it, as far as is known."""
    dials: bool = True
    """It can dial this node, as far as is known."""


class Splice(msgspec.Struct, frozen=True, kw_only=True):
    """Where a volunteer joins this node with another (`node.engine.splice`)."""

    addresses: tuple[str, ...]
    """`host:port` of the volunteer's data listener, best first."""
    ticket: bytes
    lanes: int


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


class Call(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A peer that this node can dial, and not the other way round, asks to be dialled. → Done."""

    id: int
    peer_id: str
    token: bytes
    """That the peer takes."""
    host: str
    """The IP address of the peer's control connection: nothing else is dialled on its wish."""


class CallAnswered(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to the event `CallWanted`. → Done."""

    id: int
    peer_id: str
    failure: str
    """Why the peer will not dial; empty: it dials now."""


class OpenSplice(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Join two peers that cannot dial each other, by `lanes` connections of each. → SpliceOpened."""

    id: int
    first: str
    second: str
    lanes: int


class AcceptSplice(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """`peer_id` dials this node through a volunteer: meet it there. → Done."""

    id: int
    peer_id: str
    splice: Splice


class SpliceAnswered(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to the event `SpliceWanted`. → Done."""

    id: int
    peer_id: str
    splice: Splice | None
    failure: str = ""
    """Why no volunteer joins this node with it, when there is no splice."""


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


class Probe(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Have a peer send a few bytes of no use, so that something is known of the link where nothing was sent. → Probed.

    An exchange ends it at once. The peer gives as much as it likes, which may be nothing.
    """

    id: int
    peer_id: str


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
