"""READY, JOIN, LEAVE, the ROSTER that gathers them, and EVIDENCE: to protobuf and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from protocol.fields import (
    MAX_ATTEMPT,
    MAX_EVIDENCE,
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
    few,
    integer,
    peer_id,
    real,
)
from protocol.messages import Evidence, Join, Leave, Offence, PartHeader, Ready, Roster, Statement, UnitRange
from protocol.nested import get_base, get_edges, get_signed, put_base, put_signed, signed_list
from protocol.pb import round_pb2 as pb
from protocol.plan import Plan, Shard

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


def get_ready(message: pb.Ready) -> Ready:
    return Ready(
        base=get_base(message.base),
        ranges_done=tuple(_unit_range(item) for item in few(message.ranges_done, MAX_RANGES, "unit ranges")),
        tokens=_token_runs(message.tokens),
        norm=real(message.norm, "norm"),
        largest=real(message.largest, "largest magnitude"),
        units_wanted=integer(message.units_wanted, "units wanted"),
        upload_limit_bytes=integer(message.upload_limit_bytes, "upload limit"),
        download_limit_bytes=integer(message.download_limit_bytes, "download limit"),
        failed_edges=get_edges(message.failed_edges),
        parts_root=digest_field(message.parts_root, "root of the parts") if message.parts_root else b"",
    )


def put_ready(ready: Ready) -> pb.Ready:
    return pb.Ready(
        base=put_base(ready.base),
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


def get_join(message: pb.Join) -> Join:
    return Join(base=get_base(message.base), units_wanted=integer(message.units_wanted, "units wanted"))


def put_join(join: Join) -> pb.Join:
    return pb.Join(base=put_base(join.base), units_wanted=join.units_wanted)


def get_leave(message: pb.Leave) -> Leave:
    return Leave(base=get_base(message.base))


def put_leave(leave: Leave) -> pb.Leave:
    return pb.Leave(base=put_base(leave.base))


# ---------------------------------------------------------------- ROSTER


def _shard(message: pb.Shard, readys: int) -> Shard:
    # Lengths agree with the roster before a list is built: a plan never costs more than its READYs allow.
    if len(message.parents_plus_one) != readys:
        raise WireError(f"a shard's tree has {len(message.parents_plus_one)} nodes for {readys} READYs")
    parents = tuple(parent - 1 for parent in message.parents_plus_one)
    if parents.count(-1) != 1 or max(parents) >= readys:
        raise WireError("a shard's tree has not exactly one root, or a parent that is no READY")
    return Shard(share=integer(message.share, "share"), parents=parents)


def get_roster(message: pb.Roster) -> Roster:
    readys = signed_list(Ready, message.readys, MAX_READYS, "READYs")
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
        base=get_base(message.base),
        attempt=integer(message.attempt, "attempt", MAX_ATTEMPT),
        readys=readys,
        joins=signed_list(Join, message.joins, MAX_PEERS, "joins"),
        leaves=signed_list(Leave, message.leaves, MAX_PEERS, "leaves"),
        plan=plan,
        durations_s=tuple(real(item, "a duration") for item in few(message.durations_s, MAX_LEVELS, "durations")),
        absent=absent,
        evidence=tuple(get_evidence(item) for item in few(message.evidence, MAX_EVIDENCE, "pieces of evidence")),
    )


def put_roster(roster: Roster) -> pb.Roster:
    plan = None
    if roster.plan is not None:
        plan = pb.Plan(
            shards=[
                pb.Shard(share=shard.share, parents_plus_one=[parent + 1 for parent in shard.parents])
                for shard in roster.plan.shards
            ]
        )
    return pb.Roster(
        base=put_base(roster.base),
        attempt=roster.attempt,
        readys=[put_signed(item) for item in roster.readys],
        joins=[put_signed(item) for item in roster.joins],
        leaves=[put_signed(item) for item in roster.leaves],
        plan=plan,
        durations_s=roster.durations_s,
        absent=bitmap_bytes(roster.absent),
        evidence=[put_evidence(item) for item in roster.evidence],
    )


# ---------------------------------------------------------------- EVIDENCE


def _statement(message: pb.Statement) -> tuple[Statement, bytes]:
    statement = Statement(
        base=get_base(message.base),
        attempt=integer(message.attempt, "attempt", MAX_ATTEMPT),
        phase=integer(message.phase, "phase", 2),
        value=digest_field(message.value, "value of a vote") if message.value else b"",
        with_work=message.with_work,
        body_hash=digest_field(message.body_hash, "hash of a body"),
    )
    return statement, check_signature(message.signature)


def get_evidence(message: pb.Evidence) -> Evidence:
    statements = tuple(_statement(item) for item in few(message.statements, 2, "statements of one peer"))
    headers = tuple(get_signed(PartHeader, item) for item in few(message.headers, 2, "part headers as evidence"))
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
        base=get_base(message.base) if message.HasField("base") else None,
    )


def put_evidence(evidence: Evidence) -> pb.Evidence:
    return pb.Evidence(
        culprit=evidence.culprit,
        kind=next(kind for (kind, _, _), offence in _OFFENCES.items() if offence is evidence.offence),
        statements=[
            pb.Statement(
                base=put_base(statement.base),
                attempt=statement.attempt,
                phase=statement.phase,
                value=statement.value,
                with_work=statement.with_work,
                body_hash=statement.body_hash,
                signature=signature,
            )
            for statement, signature in evidence.statements
        ],
        headers=[put_signed(header) for header in evidence.headers],
        base=None if evidence.base is None else put_base(evidence.base),
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
