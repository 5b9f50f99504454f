"""What decides a round: part headers, PROPOSAL, VOTE and certificates, commits; to protobuf and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from protocol.fields import (
    MAX_ATTEMPT,
    MAX_CERTIFIED_VOTE_BYTES,
    MAX_LEFT_OUT,
    MAX_PARTS,
    MAX_PEERS,
    WireError,
    bitmap,
    bitmap_bytes,
    digest_field,
    few,
    integer,
)
from protocol.messages import Certificate, Commit, PartHeader, Proposal, Ready, Roster, Signed, Vote
from protocol.nested import get_base, get_edges, get_signed, put_base, put_signed, signed_list
from protocol.pb import round_pb2 as pb


def _headers(messages: Sequence[pb.Signed]) -> tuple[Signed[PartHeader] | None, ...]:
    return tuple(
        get_signed(PartHeader, message) if message.body or message.sender or message.signature else None
        for message in few(messages, MAX_PARTS, "part headers")
    )


def _put_headers(headers: Iterable[Signed[PartHeader] | None]) -> list[pb.Signed]:
    return [pb.Signed() if header is None else put_signed(header) for header in headers]


def _certificate(message: pb.Certificate) -> Certificate:
    votes = few(message.votes, MAX_PEERS, "votes of a certificate")
    if any(len(vote.body) > MAX_CERTIFIED_VOTE_BYTES for vote in votes):
        raise WireError(f"a vote in a certificate is over {MAX_CERTIFIED_VOTE_BYTES} bytes: it is for no decision")
    return Certificate(votes=tuple(get_signed(Vote, vote) for vote in votes))


def _put_certificate(certificate: Certificate) -> pb.Certificate:
    return pb.Certificate(votes=[put_signed(vote) for vote in certificate.votes])


def get_part_header(message: pb.PartHeader) -> PartHeader:
    return PartHeader(
        roster_id=digest_field(message.roster_id, "roster id"),
        part=integer(message.part, "part", MAX_PARTS - 1),
        bitmap=bitmap(message.bitmap, "a part's bitmap"),
        hash=digest_field(message.hash, "hash of a part"),
        length=integer(message.length, "length of a part"),
    )


def put_part_header(header: PartHeader) -> pb.PartHeader:
    return pb.PartHeader(
        roster_id=header.roster_id,
        part=header.part,
        bitmap=bitmap_bytes(header.bitmap),
        hash=header.hash,
        length=header.length,
    )


def get_proposal(message: pb.Proposal) -> Proposal:
    if message.HasField("valid_attempt") != message.HasField("valid_certificate"):
        raise WireError("a proposal has a valid attempt without its certificate, or the reverse")
    return Proposal(
        base=get_base(message.base),
        attempt=integer(message.attempt, "attempt", MAX_ATTEMPT),
        roster_id=digest_field(message.roster_id, "roster id"),
        headers=_headers(message.headers),
        valid_attempt=(
            integer(message.valid_attempt, "valid attempt", MAX_ATTEMPT) if message.HasField("valid_attempt") else None
        ),
        valid_certificate=(_certificate(message.valid_certificate) if message.HasField("valid_certificate") else None),
    )


def put_proposal(proposal: Proposal) -> pb.Proposal:
    certificate = proposal.valid_certificate
    return pb.Proposal(
        base=put_base(proposal.base),
        attempt=proposal.attempt,
        roster_id=proposal.roster_id,
        headers=_put_headers(proposal.headers),
        valid_attempt=proposal.valid_attempt,
        valid_certificate=None if certificate is None else _put_certificate(certificate),
    )


def get_vote(message: pb.Vote) -> Vote:
    if message.phase not in (1, 2):
        raise WireError(f"a vote has phase {message.phase} instead of 1 or 2")
    if message.value and (message.failed_edges or message.left_out):
        raise WireError("a vote for a decision carries reasons, which only a vote for NIL may")
    return Vote(
        base=get_base(message.base),
        attempt=integer(message.attempt, "attempt", MAX_ATTEMPT),
        phase=message.phase,
        value=digest_field(message.value, "value of a vote") if message.value else b"",
        failed_edges=get_edges(message.failed_edges),
        left_out=signed_list(Ready, message.left_out, MAX_LEFT_OUT, "READYs left out"),
    )


def put_vote(vote: Vote) -> pb.Vote:
    return pb.Vote(
        base=put_base(vote.base),
        attempt=vote.attempt,
        phase=vote.phase,
        value=vote.value,
        failed_edges=vote.failed_edges,
        left_out=[put_signed(item) for item in vote.left_out],
    )


def get_commit(message: pb.Commit) -> Commit:
    return Commit(
        roster=get_signed(Roster, message.roster),
        headers=_headers(message.headers),
        certificate=_certificate(message.certificate),
    )


def put_commit(commit: Commit) -> pb.Commit:
    return pb.Commit(
        roster=put_signed(commit.roster),
        headers=_put_headers(commit.headers),
        certificate=_put_certificate(commit.certificate),
    )
