"""Bodies: each message to protobuf and back, with every bound that makes a stranger's bytes safe to hold.

`protocol.wire` wraps bodies into signed envelopes. Sizes are checked before anything nested is parsed; numbers are
finite, within range and countable; signed messages inside others keep their body bytes verbatim.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeAlias, cast

from google.protobuf.message import DecodeError
from google.protobuf.message import Message as ProtobufMessage

from protocol.fields import (
    MAX_ATTEMPT,
    MAX_CERTIFIED_VOTE_BYTES,
    MAX_EDGES,
    MAX_EVIDENCE,
    MAX_LEFT_OUT,
    MAX_LEVELS,
    MAX_PARTS,
    MAX_PEERS,
    MAX_PLAN_NODES,
    MAX_RANGES,
    MAX_READYS,
    WireError,
    bitmap,
    bitmap_bytes,
    check_signature,
    digest_field,
    distinct,
    few,
    integer,
    peer_id,
    real,
)
from protocol.messages import (
    Certificate,
    Commit,
    Evidence,
    Fetch,
    Have,
    Heartbeat,
    Join,
    Leave,
    Message,
    MessageT,
    Offence,
    PartHeader,
    Proposal,
    Ready,
    Reform,
    Reformed,
    ReformVote,
    Roster,
    Signed,
    Statement,
    UnitRange,
    Vote,
)
from protocol.names import DIGEST_BYTES, Base, PeerId
from protocol.pb import round_pb2 as pb
from protocol.plan import Plan, Shard

_KIB: Final = 1024
_MIB: Final = 1024 * 1024

MAX_BODY_BYTES: Final[dict[type[object], int]] = {
    Ready: 64 * _KIB,
    Join: _KIB,
    Leave: _KIB,
    Roster: 5 * _MIB,
    PartHeader: _KIB,
    Proposal: 16 * _MIB,
    Vote: 320 * _KIB,
    Commit: 32 * _MIB,
    Reform: 80 * _KIB,
    ReformVote: 96 * _KIB,
    Reformed: 320 * _KIB,
    Heartbeat: _KIB,
    Fetch: _KIB,
    Have: 32 * _MIB + _KIB,
    Evidence: 4 * _KIB,
}


# ---------------------------------------------------------------- shared fields


def _base(message: pb.Base) -> Base:
    return Base(
        run=digest_field(message.run, "run"),
        lineage=digest_field(message.lineage, "lineage"),
        round=integer(message.round, "round"),
        prev=digest_field(message.prev, "prev"),
        state_hash=digest_field(message.state_hash, "state hash"),
    )


def _put_base(base: Base) -> pb.Base:
    return pb.Base(run=base.run, lineage=base.lineage, round=base.round, prev=base.prev, state_hash=base.state_hash)


def _signed(kind: type[MessageT], message: pb.Signed) -> Signed[MessageT]:
    return make_signed(kind, message.sender, message.body, message.signature)


def make_signed(kind: type[MessageT], sender: str, body: bytes, signature: bytes) -> Signed[MessageT]:
    """Check the envelope's fields, then decode the body. Raises `WireError`."""
    peer_id(sender, "the sender")
    check_signature(signature)
    message = decode_body(kind, body)
    if isinstance(message, ReformVote) and encode_body(message) != body:
        # A Reformed holds only the signatures of its votes; each verifier writes the votes' bodies anew.
        raise WireError("a vote on a reform is not in its one canonical form")
    return Signed(sender=sender, message=message, body=body, signature=signature)


def _put_signed(signed: Signed[Any]) -> pb.Signed:
    return pb.Signed(sender=signed.sender, body=signed.body, signature=signed.signature)


def _signed_list(
    kind: type[MessageT], messages: Sequence[pb.Signed], limit: int, name: str
) -> tuple[Signed[MessageT], ...]:
    return tuple(_signed(kind, message) for message in few(messages, limit, name))


def _headers(messages: Sequence[pb.Signed]) -> tuple[Signed[PartHeader] | None, ...]:
    return tuple(
        _signed(PartHeader, message) if message.body or message.sender or message.signature else None
        for message in few(messages, MAX_PARTS, "part headers")
    )


def _put_headers(headers: Iterable[Signed[PartHeader] | None]) -> list[pb.Signed]:
    return [pb.Signed() if header is None else _put_signed(header) for header in headers]


def _edges(values: Sequence[str]) -> tuple[PeerId, ...]:
    return tuple(peer_id(value) for value in few(values, MAX_EDGES, "failed edges"))


def _certificate(message: pb.Certificate) -> Certificate:
    votes = few(message.votes, MAX_PEERS, "votes of a certificate")
    if any(len(vote.body) > MAX_CERTIFIED_VOTE_BYTES for vote in votes):
        raise WireError(f"a vote in a certificate is over {MAX_CERTIFIED_VOTE_BYTES} bytes: it is for no decision")
    return Certificate(votes=tuple(_signed(Vote, vote) for vote in votes))


def _put_certificate(certificate: Certificate) -> pb.Certificate:
    return pb.Certificate(votes=[_put_signed(vote) for vote in certificate.votes])


# ---------------------------------------------------------------- READY, JOIN, LEAVE


def _unit_range(message: pb.UnitRange) -> UnitRange:
    if message.start >= message.stop:
        raise WireError(f"the unit range from {message.start} to {message.stop} is empty")
    return UnitRange(
        epoch=integer(message.epoch, "epoch"), start=message.start, stop=integer(message.stop, "end of a unit range")
    )


def _token_runs(runs: Sequence[pb.TokenRun]) -> tuple[tuple[int, int], ...]:
    result = tuple((run.parts, integer(run.tokens, "tokens")) for run in few(runs, MAX_RANGES, "token runs"))
    if any(parts == 0 for parts, _ in result):
        raise WireError("a token run covers no part")
    integer(sum(parts for parts, _ in result), "parts of all token runs", MAX_PARTS)
    return result


def _ready(message: pb.Ready) -> Ready:
    return Ready(
        base=_base(message.base),
        ranges_done=tuple(_unit_range(item) for item in few(message.ranges_done, MAX_RANGES, "unit ranges")),
        tokens=_token_runs(message.tokens),
        norm=real(message.norm, "norm"),
        largest=real(message.largest, "largest magnitude"),
        units_wanted=integer(message.units_wanted, "units wanted"),
        upload_limit_bytes=integer(message.upload_limit_bytes, "upload limit"),
        download_limit_bytes=integer(message.download_limit_bytes, "download limit"),
        failed_edges=_edges(message.failed_edges),
        parts_root=digest_field(message.parts_root, "root of the parts") if message.parts_root else b"",
    )


def _put_ready(ready: Ready) -> pb.Ready:
    return pb.Ready(
        base=_put_base(ready.base),
        ranges_done=[pb.UnitRange(epoch=item.epoch, start=item.start, stop=item.stop) for item in ready.ranges_done],
        tokens=[pb.TokenRun(parts=parts, tokens=tokens) for parts, tokens in ready.tokens],
        norm=ready.norm,
        largest=ready.largest,
        units_wanted=ready.units_wanted,
        upload_limit_bytes=ready.upload_limit_bytes,
        download_limit_bytes=ready.download_limit_bytes,
        failed_edges=ready.failed_edges,
        parts_root=ready.parts_root,
    )


def _join(message: pb.Join) -> Join:
    return Join(base=_base(message.base), units_wanted=integer(message.units_wanted, "units wanted"))


def _put_join(join: Join) -> pb.Join:
    return pb.Join(base=_put_base(join.base), units_wanted=join.units_wanted)


def _leave(message: pb.Leave) -> Leave:
    return Leave(base=_base(message.base))


def _put_leave(leave: Leave) -> pb.Leave:
    return pb.Leave(base=_put_base(leave.base))


# ---------------------------------------------------------------- ROSTER


def _shard(message: pb.Shard, readys: int) -> Shard:
    # Lengths agree with the roster before a list is built: a plan never costs more than its READYs allow.
    if len(message.parents_plus_one) != readys:
        raise WireError(f"a shard's tree has {len(message.parents_plus_one)} nodes for {readys} READYs")
    parents = tuple(parent - 1 for parent in message.parents_plus_one)
    if parents.count(-1) != 1 or max(parents) >= readys:
        raise WireError("a shard's tree has not exactly one root, or a parent that is no READY")
    return Shard(share=integer(message.share, "share"), parents=parents)


def _roster(message: pb.Roster) -> Roster:
    readys = _signed_list(Ready, message.readys, MAX_READYS, "READYs")
    plan = None
    if message.HasField("plan"):
        shards = few(message.plan.shards, MAX_PEERS, "shards")
        if not shards:
            raise WireError("a plan has no shards")
        integer(sum(len(shard.parents_plus_one) for shard in shards), "nodes of a plan's trees", MAX_PLAN_NODES)
        plan = Plan(shards=tuple(_shard(shard, len(readys)) for shard in shards))
    absent = bitmap(message.absent, "the bitmap of absent READYs")
    if absent >> len(readys):
        raise WireError("the bitmap of absent READYs names one that is not in the roster")
    return Roster(
        base=_base(message.base),
        attempt=integer(message.attempt, "attempt", MAX_ATTEMPT),
        readys=readys,
        joins=_signed_list(Join, message.joins, MAX_PEERS, "joins"),
        leaves=_signed_list(Leave, message.leaves, MAX_PEERS, "leaves"),
        plan=plan,
        durations_s=tuple(real(item, "a duration") for item in few(message.durations_s, MAX_LEVELS, "durations")),
        absent=absent,
        evidence=tuple(_evidence(item) for item in few(message.evidence, MAX_EVIDENCE, "pieces of evidence")),
    )


def _put_roster(roster: Roster) -> pb.Roster:
    plan = None
    if roster.plan is not None:
        plan = pb.Plan(
            shards=[
                pb.Shard(share=shard.share, parents_plus_one=[parent + 1 for parent in shard.parents])
                for shard in roster.plan.shards
            ]
        )
    return pb.Roster(
        base=_put_base(roster.base),
        attempt=roster.attempt,
        readys=[_put_signed(item) for item in roster.readys],
        joins=[_put_signed(item) for item in roster.joins],
        leaves=[_put_signed(item) for item in roster.leaves],
        plan=plan,
        durations_s=roster.durations_s,
        absent=bitmap_bytes(roster.absent),
        evidence=[_put_evidence(item) for item in roster.evidence],
    )


# ---------------------------------------------------------------- EVIDENCE


def _statement(message: pb.Statement) -> tuple[Statement, bytes]:
    statement = Statement(
        base=_base(message.base),
        attempt=integer(message.attempt, "attempt", MAX_ATTEMPT),
        phase=integer(message.phase, "phase", 2),
        value=digest_field(message.value, "value of a vote") if message.value else b"",
        with_work=message.with_work,
        body_hash=digest_field(message.body_hash, "hash of a body"),
    )
    return statement, check_signature(message.signature)


def _evidence(message: pb.Evidence) -> Evidence:
    statements = tuple(_statement(item) for item in few(message.statements, 2, "statements of one peer"))
    headers = tuple(_signed(PartHeader, item) for item in few(message.headers, 2, "part headers as evidence"))
    offence = _OFFENCES.get((message.kind, len(statements), len(headers)))
    if offence is None or message.HasField("base") != (offence is Offence.WRONG_MEAN):
        raise WireError(
            f"evidence of kind {message.kind} with {len(statements)} statements and {len(headers)} headers is none"
        )
    return Evidence(
        culprit=peer_id(message.culprit),
        offence=offence,
        statements=statements,
        headers=headers,
        base=_base(message.base) if message.HasField("base") else None,
    )


def _put_evidence(evidence: Evidence) -> pb.Evidence:
    return pb.Evidence(
        culprit=evidence.culprit,
        kind=next(kind for (kind, _, _), offence in _OFFENCES.items() if offence is evidence.offence),
        statements=[
            pb.Statement(
                base=_put_base(statement.base),
                attempt=statement.attempt,
                phase=statement.phase,
                value=statement.value,
                with_work=statement.with_work,
                body_hash=statement.body_hash,
                signature=signature,
            )
            for statement, signature in evidence.statements
        ],
        headers=[_put_signed(header) for header in evidence.headers],
        base=None if evidence.base is None else _put_base(evidence.base),
    )


_OFFENCES: Final[dict[tuple[pb.Kind.ValueType, int, int], Offence]] = {
    (pb.READY, 2, 0): Offence.TWO_READYS,
    (pb.ROSTER, 2, 0): Offence.TWO_ROSTERS,
    (pb.PROPOSAL, 2, 0): Offence.TWO_PROPOSALS,
    (pb.VOTE, 2, 0): Offence.TWO_VOTES,
    (pb.PART_HEADER, 0, 2): Offence.TWO_HEADERS,
    (pb.PART_HEADER, 0, 1): Offence.WRONG_MEAN,
}
"""(kind, statements, headers) → what it shows."""


# ---------------------------------------------------------------- headers, proposals, votes, commits


def _part_header(message: pb.PartHeader) -> PartHeader:
    return PartHeader(
        roster_id=digest_field(message.roster_id, "roster id"),
        part=integer(message.part, "part", MAX_PARTS - 1),
        bitmap=bitmap(message.bitmap, "a part's bitmap"),
        hash=digest_field(message.hash, "hash of a part"),
        length=integer(message.length, "length of a part"),
    )


def _put_part_header(header: PartHeader) -> pb.PartHeader:
    return pb.PartHeader(
        roster_id=header.roster_id,
        part=header.part,
        bitmap=bitmap_bytes(header.bitmap),
        hash=header.hash,
        length=header.length,
    )


def _proposal(message: pb.Proposal) -> Proposal:
    if message.HasField("valid_attempt") != message.HasField("valid_certificate"):
        raise WireError("a proposal has a valid attempt without its certificate, or the reverse")
    return Proposal(
        base=_base(message.base),
        attempt=integer(message.attempt, "attempt", MAX_ATTEMPT),
        roster_id=digest_field(message.roster_id, "roster id"),
        headers=_headers(message.headers),
        valid_attempt=(
            integer(message.valid_attempt, "valid attempt", MAX_ATTEMPT) if message.HasField("valid_attempt") else None
        ),
        valid_certificate=(_certificate(message.valid_certificate) if message.HasField("valid_certificate") else None),
    )


def _put_proposal(proposal: Proposal) -> pb.Proposal:
    certificate = proposal.valid_certificate
    return pb.Proposal(
        base=_put_base(proposal.base),
        attempt=proposal.attempt,
        roster_id=proposal.roster_id,
        headers=_put_headers(proposal.headers),
        valid_attempt=proposal.valid_attempt,
        valid_certificate=None if certificate is None else _put_certificate(certificate),
    )


def _vote(message: pb.Vote) -> Vote:
    if message.phase not in (1, 2):
        raise WireError(f"a vote has phase {message.phase} instead of 1 or 2")
    if message.value and (message.failed_edges or message.left_out):
        raise WireError("a vote for a decision carries reasons, which only a vote for NIL may")
    return Vote(
        base=_base(message.base),
        attempt=integer(message.attempt, "attempt", MAX_ATTEMPT),
        phase=message.phase,
        value=digest_field(message.value, "value of a vote") if message.value else b"",
        failed_edges=_edges(message.failed_edges),
        left_out=_signed_list(Ready, message.left_out, MAX_LEFT_OUT, "READYs left out"),
    )


def _put_vote(vote: Vote) -> pb.Vote:
    return pb.Vote(
        base=_put_base(vote.base),
        attempt=vote.attempt,
        phase=vote.phase,
        value=vote.value,
        failed_edges=vote.failed_edges,
        left_out=[_put_signed(item) for item in vote.left_out],
    )


def _commit(message: pb.Commit) -> Commit:
    return Commit(
        roster=_signed(Roster, message.roster),
        headers=_headers(message.headers),
        certificate=_certificate(message.certificate),
    )


def _put_commit(commit: Commit) -> pb.Commit:
    return pb.Commit(
        roster=_put_signed(commit.roster),
        headers=_put_headers(commit.headers),
        certificate=_put_certificate(commit.certificate),
    )


# ---------------------------------------------------------------- REFORM


def _reform(message: pb.Reform) -> Reform:
    members = tuple(peer_id(member) for member in few(message.members, MAX_PEERS, "members"))
    if not members or any(first >= second for first, second in itertools.pairwise(members)):
        raise WireError("the members of a reform are empty or not in ascending order")
    return Reform(base=_base(message.base), k=integer(message.k, "k", MAX_ATTEMPT), members=members)


def _put_reform(reform: Reform) -> pb.Reform:
    return pb.Reform(base=_put_base(reform.base), k=reform.k, members=reform.members)


def _reform_vote(message: pb.ReformVote) -> ReformVote:
    vote = ReformVote(
        base=_base(message.base), k=integer(message.k, "k", MAX_ATTEMPT), sign=message.sign, reform=message.reform
    )
    if vote.sign != bool(vote.reform):
        raise WireError("a vote signs a reform without its body, or carries one that it does not sign")
    if vote.sign:
        reform = decode_body(Reform, vote.reform)
        if (reform.base, reform.k) != (vote.base, vote.k):
            raise WireError("a vote's base and k are not those of the reform it signs")
    return vote


def _put_reform_vote(vote: ReformVote) -> pb.ReformVote:
    return pb.ReformVote(base=_put_base(vote.base), k=vote.k, sign=vote.sign, reform=vote.reform)


def _reformed(message: pb.Reformed) -> Reformed:
    signatures = tuple(
        (peer_id(item.member), check_signature(item.signature))
        for item in few(message.signatures, MAX_PEERS, "signatures of a reform")
    )
    distinct(tuple(member for member, _ in signatures), "signatures of a reform")
    return Reformed(reform=decode_body(Reform, message.body), body=message.body, signatures=signatures)


def _put_reformed(reformed: Reformed) -> pb.Reformed:
    return pb.Reformed(
        body=reformed.body,
        signatures=[
            pb.MemberSignature(member=member, signature=signature) for member, signature in reformed.signatures
        ],
    )


# ---------------------------------------------------------------- HEARTBEAT, FETCH, HAVE


def _heartbeat(message: pb.Heartbeat) -> Heartbeat:
    if len(message.incarnation) > DIGEST_BYTES:
        raise WireError(f"an incarnation has {len(message.incarnation)} bytes, more than {DIGEST_BYTES}")
    return Heartbeat(
        base=_base(message.base),
        attempt=integer(message.attempt, "attempt", MAX_ATTEMPT),
        able=message.able,
        incarnation=message.incarnation,
    )


def _put_heartbeat(heartbeat: Heartbeat) -> pb.Heartbeat:
    return pb.Heartbeat(
        base=_put_base(heartbeat.base),
        attempt=heartbeat.attempt,
        able=heartbeat.able,
        incarnation=heartbeat.incarnation,
    )


def _fetch(message: pb.Fetch) -> Fetch:
    return Fetch(hash=digest_field(message.hash, "hash"))


def _put_fetch(fetch: Fetch) -> pb.Fetch:
    return pb.Fetch(hash=fetch.hash)


def _have(message: pb.Have) -> Have:
    return Have(hash=digest_field(message.hash, "hash"), content=message.content)


def _put_have(have: Have) -> pb.Have:
    return pb.Have(hash=have.hash, content=have.content)


# ---------------------------------------------------------------- the table

_Codec: TypeAlias = tuple[type[ProtobufMessage], Callable[[Any], Message], Callable[[Any], ProtobufMessage]]

_CODECS: Final[dict[type[object], _Codec]] = {
    Ready: (pb.Ready, _ready, _put_ready),
    Join: (pb.Join, _join, _put_join),
    Leave: (pb.Leave, _leave, _put_leave),
    Roster: (pb.Roster, _roster, _put_roster),
    PartHeader: (pb.PartHeader, _part_header, _put_part_header),
    Proposal: (pb.Proposal, _proposal, _put_proposal),
    Vote: (pb.Vote, _vote, _put_vote),
    Commit: (pb.Commit, _commit, _put_commit),
    Reform: (pb.Reform, _reform, _put_reform),
    ReformVote: (pb.ReformVote, _reform_vote, _put_reform_vote),
    Reformed: (pb.Reformed, _reformed, _put_reformed),
    Heartbeat: (pb.Heartbeat, _heartbeat, _put_heartbeat),
    Fetch: (pb.Fetch, _fetch, _put_fetch),
    Have: (pb.Have, _have, _put_have),
    Evidence: (pb.Evidence, _evidence, _put_evidence),
}


def encode_body(message: Message) -> bytes:
    """The bytes that a signature covers. Deterministic: equal messages give equal bytes.

    Raises `ValueError` for a number that the format cannot hold (negative, over 64 bits).
    """
    put = _CODECS[type(message)][2]
    return put(message).SerializeToString(deterministic=True)


def decode_body(kind: type[MessageT], body: bytes) -> MessageT:
    """The message in `body`. Raises `WireError` on anything malformed, oversized or out of range."""
    if len(body) > MAX_BODY_BYTES[kind]:
        raise WireError(f"a {kind.__name__} of {len(body)} bytes is over the limit of {MAX_BODY_BYTES[kind]}")
    protobuf, get, _ = _CODECS[kind]
    parsed = protobuf()
    try:
        parsed.ParseFromString(body)
    except DecodeError as error:
        raise WireError(f"a {kind.__name__} of {len(body)} bytes does not parse") from error
    return cast(MessageT, get(parsed))
