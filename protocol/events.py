"""What goes into a peer's state machine and what comes out (`protocol.peer.PeerMachine`).

The driver performs effects strictly in the order given: a `Persist` is on disk before the `Send` behind it leaves.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from protocol.lineages import Place, Position
from protocol.links import Reports
from protocol.messages import Commit, Evidence, PartHeader, Reformed, Roster, Signed, UnitRange
from protocol.names import Base, Digest, PeerId

# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """An envelope's bytes from the network. Parsed, checked and verified by the machine; bad ones are counted."""

    data: bytes
    from_peer: PeerId
    """The neighbour that handed it over (not necessarily its signer)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time passed: `next_wakeup_s` was reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerProgress:
    """What the local trainer says of its budget. `remaining_s` is None while no trainer is attached."""

    remaining_s: float | None
    units_wanted: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    """The contribution of round `base.round` is encoded and durable; every attempt reuses these bytes."""

    base: Base
    tokens: tuple[tuple[int, int], ...]
    norm: float
    largest: float
    ranges_done: tuple[UnitRange, ...]
    units_wanted: int
    parts_root: Digest = b""
    """Of the encoded parts (`protocol.commitment`); empty without work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinksChanged:
    """Byte limits of the operator, and peers to avoid beside those with which an exchange failed here."""

    upload_limit_bytes: int
    download_limit_bytes: int
    failed_edges: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportsChanged:
    """The newest table of what peers report of their links. A coordinator plans by it; it decides nothing else."""

    reports: Reports


@dataclass(frozen=True, slots=True, kw_only=True)
class HeaderDraft:
    """The engine, root of `header.part`, asks for the node's signature."""

    header: PartHeader


@dataclass(frozen=True, slots=True, kw_only=True)
class PartHeld:
    """The payload of a part is verified against its header and on disk."""

    header: Signed[PartHeader]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeEnded:
    """The engine has closed all it was to do for this roster."""

    roster_id: Digest
    failed_edges: tuple[PeerId, ...] = ()
    missed: tuple[PeerId, ...] = ()
    """Contributors whose slots closed here without them; this node itself when its frozen bytes are gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartsFetched:
    """The answer to `FetchParts`: all are held (each was also announced by `PartHeld`), or `missing` is not empty."""

    roster_id: Digest
    missing: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """The commit of round `round - 1` is applied and durable; the state is now that of round `round`."""

    round: int
    state_hash: Digest


class Verdict(StrEnum):
    """What came of recomputing a part from the bytes that READYs bind."""

    RIGHT = "right"
    WRONG = "wrong"
    UNKNOWN = "unknown"
    """Some of the bytes could not be had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRecomputed:
    """The answer to `RecomputePart`, always given, however late."""

    base: Digest
    """Digest of the commit's base."""
    part: int
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageAble:
    """Whether storing and receiving bytes works; goes out in heartbeats as `able`."""

    able: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LineageLearned:
    """The answer to `LearnLineage`: the peer's chain is verified from the newest place on that it shares with mine."""

    peer: PeerId
    births: tuple[tuple[Digest, Position], ...] = ()
    """Lineages that my chain has gone through since the shared place, each with where it was born."""
    mine: tuple[Place, ...] = ()
    """My chain from the shared place to my tip, as of this answer; empty where the peer is only behind."""
    theirs: tuple[Place, ...] = ()
    """The peer's from the same place on, as far as it was read; empty likewise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineageUnproven:
    """The answer to `LearnLineage` when the peer shows no chain that verifies and branches from mine."""

    peer: PeerId


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveRequested:
    """SIGTERM or `atoll stop`."""


Event: TypeAlias = (
    Received
    | Tick
    | TrainerProgress
    | Frozen
    | LinksChanged
    | ReportsChanged
    | HeaderDraft
    | PartHeld
    | ExchangeEnded
    | PartsFetched
    | Applied
    | PartRecomputed
    | StorageAble
    | LineageLearned
    | LineageUnproven
    | LeaveRequested
)

# ---------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True, kw_only=True)
class Persist:
    """Write the vote journal, durably (fsync), before any later effect."""

    journal: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """An envelope to one peer, or with `to` None to every connected peer of the run. Loss is allowed."""

    to: PeerId | None
    data: bytes
    replaces: str | None = None
    """A message still queued for the same peer under this key is outdated by this one (repetitions, heartbeats)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Freeze:
    """Ask the trainer for its contribution within `within_s`, finished or not; answered by `Frozen`."""

    base: Base
    within_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StartExchange:
    roster_id: Digest
    roster: Signed[Roster]
    my_index: int | None
    """My bit in this roster; None: I am not in it (nothing to send; parts come by `FetchParts`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopExchange:
    roster_id: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class HeaderSigned:
    """The answer to `HeaderDraft`; None: refused (a roster of an earlier life, or not the current one)."""

    header: PartHeader
    signed: Signed[PartHeader] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchParts:
    """Get these payloads from any of `sources`; answered by `PartHeld` for each and one `PartsFetched`."""

    roster_id: Digest
    headers: tuple[Signed[PartHeader], ...]
    sources: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Apply:
    """All bytes of this commit are held: apply it; answered by `Applied`."""

    commit: Commit
    commit_hash: Digest
    my_index: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputePart:
    """Recompute a part of an applied commit from its leaves' bytes; answered by `PartRecomputed`. Never urgent."""

    commit: Commit
    part: int
    audit: bool
    """Drawn by lot; False: a peer says that it is wrong."""
    sources: tuple[PeerId, ...] = ()
    """Who says that it is wrong: they have the bytes, should the contributors not give them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Convicted:
    """Evidence was verified here: its culprit is not listened to any more. If that is me, my key is in other hands."""

    evidence: Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class NewLineage:
    """A REFORM took effect: store it. The machine is on the new lineage, same round and state."""

    reformed: Reformed


@dataclass(frozen=True, slots=True, kw_only=True)
class CatchUp:
    """`peer` is at a tip that I cannot reach from what I hold: the driver catches up and builds a new machine."""

    peer: PeerId
    round: int
    lineage: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnLineage:
    """Have `peer` prove the lineage that it names: answered by `LineageLearned` or `LineageUnproven`, always one."""

    peer: PeerId


@dataclass(frozen=True, slots=True, kw_only=True)
class LineageLeft:
    """This peer is a member of the lineage that it followed: its own earlier one is given up for good."""

    left: Base


@dataclass(frozen=True, slots=True, kw_only=True)
class LineageResumed:
    """The lineage that this peer followed did not take it in: the driver restores the earlier one, with a new
    machine."""

    left: Base


@dataclass(frozen=True, slots=True, kw_only=True)
class Misbehaved:
    """Bad input from a stranger: counted, logged once."""

    peer: PeerId
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """Something that must stop the node: two decisions for one round."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCorrupt:
    """A quorum holds another outer state of the place where I stand: mine is corrupt (section 8).

    The machine does nothing more: the driver sets the state aside, catches up, and builds a new machine.
    """

    base: Base
    """Mine, with my state's hash."""
    agreed: Digest
    """The hash that the electors name."""
    electors: int
    """How many of them do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The run is over and every live member shows the final tip, or the bounded wait is over."""


Effect: TypeAlias = (
    Persist
    | Send
    | Freeze
    | StartExchange
    | StopExchange
    | HeaderSigned
    | FetchParts
    | Apply
    | RecomputePart
    | Convicted
    | NewLineage
    | CatchUp
    | LearnLineage
    | LineageLeft
    | LineageResumed
    | Misbehaved
    | Alarm
    | StateCorrupt
    | Finished
)
