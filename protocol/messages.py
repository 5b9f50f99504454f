"""The messages of a round (protocol section 3) as values; `protocol.wire` turns them into bytes and back.

A `Signed` keeps the body bytes exactly as they arrived: signatures are checked over those, nothing is serialised again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, TypeAlias, TypeVar

from protocol.names import Base, Digest, PeerId
from protocol.plan import Plan

NIL: Digest = b""
"""The value of a vote for no decision."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class UnitRange:
    """Units `[start, stop)` of epoch `epoch`'s permutation."""

    epoch: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    base: Base
    ranges_done: tuple[UnitRange, ...] = ()
    tokens: tuple[tuple[int, int], ...] = ()
    """Run-length (parts, tokens), over all parts of the fragment. Empty or all zero: votes, does not contribute."""
    norm: float = 0.0
    largest: float = 0.0
    """Largest magnitude of the pseudo-gradient, before encoding."""
    units_wanted: int = 0
    upload_limit_bytes: int = 0
    """0: no limit."""
    download_limit_bytes: int = 0
    failed_edges: tuple[PeerId, ...] = ()
    """Peers that I could not exchange with lately."""
    parts_root: Digest = b""
    """Binds the encoded bytes of every part (`protocol.commitment`); empty without work."""

    @property
    def contributes(self) -> bool:
        return any(tokens > 0 for _, tokens in self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    base: Base
    units_wanted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    base: Base


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """What a signature under a READY, ROSTER, PROPOSAL or VOTE covers: enough to tell if two exclude each other."""

    base: Base
    attempt: int = 0
    phase: int = 0
    """Of a VOTE."""
    value: Digest = NIL
    """Of a VOTE."""
    with_work: bool = False
    """Of a READY."""
    body_hash: Digest
    """BLAKE3 of the body as signed."""


class Offence(StrEnum):
    TWO_READYS = "two READYs with work for one round"
    TWO_ROSTERS = "two ROSTERs for one attempt"
    TWO_PROPOSALS = "two PROPOSALs in one attempt"
    TWO_VOTES = "two VOTEs in one phase of an attempt"
    TWO_HEADERS = "two results of one part of a roster"
    WRONG_MEAN = "a result that is not the mean of the contributions it names"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """That `culprit` signed two things of which it may sign one, or a mean that is none (protocol section 7)."""

    culprit: PeerId
    offence: Offence
    statements: tuple[tuple[Statement, bytes], ...] = ()
    """Two, each with its signature, for the first four offences."""
    headers: tuple[Signed[PartHeader], ...] = ()
    """Two that differ, or the one that is wrong."""
    base: Base | None = None
    """WRONG_MEAN: the base of the round whose commit holds the header."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    base: Base
    attempt: int
    readys: tuple[Signed[Ready], ...]
    """In ascending order of peer id; bit `i` of every bitmap is the i-th of these."""
    joins: tuple[Signed[Join], ...] = ()
    leaves: tuple[Signed[Leave], ...] = ()
    plan: Plan | None = None
    """None: a roster without parts (it applies joins and leaves, and leaves the state unchanged)."""
    durations_s: tuple[float, ...] = ()
    """Per level, leaves first, from one's own receipt of the roster."""
    absent: int = 0
    """Bitmap of READYs that stand without a slot and without weight."""
    evidence: tuple[Evidence, ...] = ()
    """Against members, one each: the commit leaves them out for good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartHeader:
    """What the root of a part says of its result; signed by the root."""

    roster_id: Digest
    part: int
    bitmap: int
    hash: Digest
    """BLAKE3 of the payload."""
    length: int
    """Bytes of the payload."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    base: Base
    attempt: int
    roster_id: Digest
    headers: tuple[Signed[PartHeader] | None, ...]
    """One per part of the fragment; None is EMPTY."""
    valid_attempt: int | None = None
    valid_certificate: Certificate | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    base: Base
    attempt: int
    phase: int
    """1 or 2."""
    value: Digest
    """D, or NIL."""
    failed_edges: tuple[PeerId, ...] = ()
    left_out: tuple[Signed[Ready], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """QC (phase 1) or CC (phase 2): the votes of a quorum for one (base, attempt, D)."""

    votes: tuple[Signed[Vote], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """What a decision binds: stored, served and replayed. The certificate stands beside it, never in a hash."""

    roster: Signed[Roster]
    headers: tuple[Signed[PartHeader] | None, ...]
    certificate: Certificate


@dataclass(frozen=True, slots=True, kw_only=True)
class Reform:
    base: Base
    k: int
    members: tuple[PeerId, ...]
    """E′, ascending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReformVote:
    """Phase "willing" answers a call for `k`; phase "sign" is a signature under the exact body of a Reform."""

    base: Base
    k: int
    sign: bool
    reform: bytes = b""
    """Body bytes of the Reform being signed; empty when only willing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reformed:
    """A lineage's birth: the body and the signatures of all of E′."""

    reform: Reform
    body: bytes
    signatures: tuple[tuple[PeerId, bytes], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    base: Base
    """Of the sender's tip: the round it works on."""
    attempt: int
    able: bool
    incarnation: bytes = b""
    """16 random bytes drawn at each start: a restarted peer is never taken for its old self."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """Asks for small content by hash: rosters, commits. (Parts and artifacts travel between engines.)"""

    hash: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Have:
    hash: Digest
    content: bytes


Message: TypeAlias = (
    Ready
    | Join
    | Leave
    | Roster
    | PartHeader
    | Proposal
    | Vote
    | Commit
    | Reform
    | ReformVote
    | Reformed
    | Heartbeat
    | Fetch
    | Have
    | Evidence
)
MessageT = TypeVar("MessageT", bound=Message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Signed(Generic[MessageT]):
    """A message with its sender, its body as received, and the signature over (kind, body)."""

    sender: PeerId
    message: MessageT
    body: bytes = field(repr=False)
    signature: bytes = field(repr=False)
