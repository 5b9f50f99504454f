"""Who is there, and on which lineage: HEARTBEAT and REFORM; FETCH and HAVE; to protobuf and back."""

from __future__ import annotations

import itertools

from protocol.fields import (
    MAX_ATTEMPT,
    MAX_PEERS,
    WireError,
    check_signature,
    digest_field,
    distinct,
    few,
    integer,
    peer_id,
)
from protocol.messages import Fetch, Have, Heartbeat, Reform, Reformed, ReformVote
from protocol.names import DIGEST_BYTES
from protocol.nested import decode_body, get_base, put_base
from protocol.pb import round_pb2 as pb

# ---------------------------------------------------------------- REFORM


def get_reform(message: pb.Reform) -> Reform:
    members = tuple(peer_id(member) for member in few(message.members, MAX_PEERS, "members"))
    if not members or any(first >= second for first, second in itertools.pairwise(members)):
        raise WireError("the members of a reform are empty or not in ascending order")
    return Reform(base=get_base(message.base), k=integer(message.k, "k", MAX_ATTEMPT), members=members)


def put_reform(reform: Reform) -> pb.Reform:
    return pb.Reform(base=put_base(reform.base), k=reform.k, members=reform.members)


def get_reform_vote(message: pb.ReformVote) -> ReformVote:
    vote = ReformVote(
        base=get_base(message.base), k=integer(message.k, "k", MAX_ATTEMPT), sign=message.sign, reform=message.reform
    )
    if vote.sign != bool(vote.reform):
        raise WireError("a vote signs a reform without its body, or carries one that it does not sign")
    if vote.sign:
        reform = decode_body(Reform, vote.reform)
        if (reform.base, reform.k) != (vote.base, vote.k):
            raise WireError("a vote's base and k are not those of the reform it signs")
    return vote


def put_reform_vote(vote: ReformVote) -> pb.ReformVote:
    return pb.ReformVote(base=put_base(vote.base), k=vote.k, sign=vote.sign, reform=vote.reform)


def get_reformed(message: pb.Reformed) -> Reformed:
    signatures = tuple(
        (peer_id(item.member), check_signature(item.signature))
        for item in few(message.signatures, MAX_PEERS, "signatures of a reform")
    )
    distinct(tuple(member for member, _ in signatures), "signatures of a reform")
    return Reformed(reform=decode_body(Reform, message.body), body=message.body, signatures=signatures)


def put_reformed(reformed: Reformed) -> pb.Reformed:
    return pb.Reformed(
        body=reformed.body,
        signatures=[
            pb.MemberSignature(member=member, signature=signature) for member, signature in reformed.signatures
        ],
    )


# ---------------------------------------------------------------- HEARTBEAT, FETCH, HAVE


def get_heartbeat(message: pb.Heartbeat) -> Heartbeat:
    if len(message.incarnation) > DIGEST_BYTES:
        raise WireError(f"an incarnation has {len(message.incarnation)} bytes, more than {DIGEST_BYTES}")
    return Heartbeat(
        base=get_base(message.base),
        attempt=integer(message.attempt, "attempt", MAX_ATTEMPT),
        able=message.able,
        incarnation=message.incarnation,
    )


def put_heartbeat(heartbeat: Heartbeat) -> pb.Heartbeat:
    return pb.Heartbeat(
        base=put_base(heartbeat.base),
        attempt=heartbeat.attempt,
        able=heartbeat.able,
        incarnation=heartbeat.incarnation,
    )


def get_fetch(message: pb.Fetch) -> Fetch:
    return Fetch(hash=digest_field(message.hash, "hash"))


def put_fetch(fetch: Fetch) -> pb.Fetch:
    return pb.Fetch(hash=fetch.hash)


def get_have(message: pb.Have) -> Have:
    return Have(hash=digest_field(message.hash, "hash"), content=message.content)


def put_have(have: Have) -> pb.Have:
    return pb.Have(hash=have.hash, content=have.content)
