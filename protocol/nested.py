"""Messages inside others, and the fields that many have: to protobuf and back, bounded before anything is parsed.

`BODIES` says how each kind is converted. A body that holds signed messages looks them up there, so the modules of the
kinds do not import one another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias, cast

from google.protobuf.message import DecodeError
from google.protobuf.message import Message as ProtobufMessage

from protocol.fields import MAX_EDGES, WireError, check_signature, digest_field, few, integer, peer_id
from protocol.messages import (
    Commit,
    Evidence,
    Fetch,
    Have,
    Heartbeat,
    Join,
    Leave,
    Message,
    MessageT,
    PartHeader,
    Proposal,
    Ready,
    Reform,
    Reformed,
    ReformVote,
    Roster,
    Signed,
    Vote,
)
from protocol.names import Base, PeerId
from protocol.pb import round_pb2 as pb

BodyCodec: TypeAlias = tuple[type[ProtobufMessage], Callable[[Any], Message], Callable[[Any], ProtobufMessage]]
"""(the protobuf type, from it, to it)"""

BODIES: Final[dict[type[object], BodyCodec]] = {}
"""Filled by `protocol.bodies`, through which alone bodies are read and written."""

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


def encode_body(message: Message) -> bytes:
    """The bytes that a signature covers. Deterministic: equal messages give equal bytes.

    Raises `ValueError` for a number that the format cannot hold (negative, over 64 bits).
    """
    put = BODIES[type(message)][2]
    return put(message).SerializeToString(deterministic=True)


def decode_body(kind: type[MessageT], body: bytes) -> MessageT:
    """The message in `body`. Raises `WireError` on anything malformed, oversized or out of range."""
    if len(body) > MAX_BODY_BYTES[kind]:
        raise WireError(f"a {kind.__name__} of {len(body)} bytes is over the limit of {MAX_BODY_BYTES[kind]}")
    protobuf, get, _ = BODIES[kind]
    parsed = protobuf()
    try:
        parsed.ParseFromString(body)
    except DecodeError as error:
        raise WireError(f"a {kind.__name__} of {len(body)} bytes does not parse") from error
    return cast(MessageT, get(parsed))


def get_base(message: pb.Base) -> Base:
    return Base(
        run=digest_field(message.run, "run"),
        lineage=digest_field(message.lineage, "lineage"),
        round=integer(message.round, "round"),
        prev=digest_field(message.prev, "prev"),
        state_hash=digest_field(message.state_hash, "state hash"),
    )


def put_base(base: Base) -> pb.Base:
    return pb.Base(run=base.run, lineage=base.lineage, round=base.round, prev=base.prev, state_hash=base.state_hash)


def get_signed(kind: type[MessageT], message: pb.Signed) -> Signed[MessageT]:
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


def put_signed(signed: Signed[Any]) -> pb.Signed:
    return pb.Signed(sender=signed.sender, body=signed.body, signature=signed.signature)


def signed_list(
    kind: type[MessageT], messages: Sequence[pb.Signed], limit: int, name: str
) -> tuple[Signed[MessageT], ...]:
    return tuple(get_signed(kind, message) for message in few(messages, limit, name))


def get_edges(values: Sequence[str]) -> tuple[PeerId, ...]:
    return tuple(peer_id(value) for value in few(values, MAX_EDGES, "failed edges"))
