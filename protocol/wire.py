"""Envelopes: messages as signed bytes and back (protocol section 3; `proto/round.proto`).

A signature covers `atoll/<kind>/1`, a zero byte and the body as received, so that a body signed as one kind can never
pass as another. Under READY, ROSTER, PROPOSAL and VOTE it covers, instead of the body, the message's `Statement`, which
holds the body's hash: two that exclude each other are then shown by a few hundred bytes, however large they are. Checks
of form are here; whether a message is valid now is `protocol.validity`'s question.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from blake3 import blake3
from google.protobuf.message import DecodeError

from protocol.bodies import MAX_BODY_BYTES, decode_body, encode_body, make_signed
from protocol.fields import MAX_ATTEMPT, WireError, check_signature, integer, peer_id
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
    Statement,
    Vote,
)
from protocol.names import Base, Digest, Keyring, PeerId, digest, encode_integer
from protocol.nested import get_base
from protocol.pb import round_pb2 as pb

__all__ = [
    "MAX_ENVELOPE_BYTES",
    "Beginning",
    "Sealed",
    "WireError",
    "beginning",
    "decode",
    "decode_body",
    "decode_commit",
    "encode",
    "encode_body",
    "encode_commit",
    "kind_name",
    "open_sealed",
    "roster_id",
    "sign",
    "signing_bytes",
    "statement_bytes",
    "statement_of",
    "unseal",
    "verify",
    "verify_beginning",
]

_KINDS: Final[dict[type[object], tuple[str, pb.Kind.ValueType]]] = {
    Ready: ("ready", pb.READY),
    Join: ("join", pb.JOIN),
    Leave: ("leave", pb.LEAVE),
    Roster: ("roster", pb.ROSTER),
    PartHeader: ("part_header", pb.PART_HEADER),
    Proposal: ("proposal", pb.PROPOSAL),
    Vote: ("vote", pb.VOTE),
    Commit: ("commit", pb.COMMIT),
    Reform: ("reform", pb.REFORM),
    ReformVote: ("reform_vote", pb.REFORM_VOTE),
    Reformed: ("reformed", pb.REFORMED),
    Heartbeat: ("heartbeat", pb.HEARTBEAT),
    Fetch: ("fetch", pb.FETCH),
    Have: ("have", pb.HAVE),
    Evidence: ("evidence", pb.EVIDENCE),
}
_BY_NUMBER: Final[dict[int, type[Any]]] = {number: kind for kind, (_, number) in _KINDS.items()}

_ENVELOPE_OVERHEAD_BYTES: Final = 512
"""Sender, signature and field tags."""
MAX_ENVELOPE_BYTES: Final = max(MAX_BODY_BYTES.values()) + _ENVELOPE_OVERHEAD_BYTES


def kind_name(kind: type[Message]) -> str:
    """The name that separates this kind's signatures from all others."""
    return _KINDS[kind][0]


def signing_bytes(kind: type[MessageT], body: bytes) -> bytes:
    """What a signature under a message of `kind` covers, for kinds that have no `Statement`."""
    return b"atoll/" + _KINDS[kind][0].encode() + b"/1\0" + body


def statement_of(message: Message, body: bytes) -> Statement | None:
    """What a signature under this message says, in short; None for kinds whose signatures cover the body itself."""
    match message:
        case Ready():
            return Statement(base=message.base, with_work=message.contributes, body_hash=blake3(body).digest())
        case Roster() | Proposal():
            return Statement(base=message.base, attempt=message.attempt, body_hash=blake3(body).digest())
        case Vote():
            return Statement(
                base=message.base,
                attempt=message.attempt,
                phase=message.phase,
                value=message.value,
                body_hash=blake3(body).digest(),
            )
        case _:
            return None


def statement_bytes(kind: type[Message], statement: Statement) -> bytes:
    """What a signature under a message of `kind` covers whose statement this is."""
    fields = (
        statement.base.digest(),
        encode_integer(statement.attempt),
        encode_integer(statement.phase),
        statement.value,
        encode_integer(statement.with_work),
        statement.body_hash,
    )
    return signing_bytes(kind, digest(b"atoll/statement", *fields))


def _covered(message: Message, body: bytes) -> bytes:
    statement = statement_of(message, body)
    kind = type(message)
    return signing_bytes(kind, body) if statement is None else statement_bytes(kind, statement)


def sign(keyring: Keyring, sender: PeerId, message: MessageT) -> Signed[MessageT]:
    """`message` signed with the keyring's own key, which must be `sender`'s."""
    body = encode_body(message)
    signature = keyring.sign(_covered(message, body))
    return Signed(sender=sender, message=message, body=body, signature=signature)


def verify(keyring: Keyring, signed: Signed[Any]) -> bool:
    """Whether `signed.sender` signed this body as this kind. Signatures nested inside are not looked at."""
    return keyring.verify(signed.sender, _covered(signed.message, signed.body), signed.signature)


def encode(signed: Signed[Any]) -> bytes:
    """The envelope: kind, sender, body and signature."""
    return pb.Envelope(
        kind=_KINDS[type(signed.message)][1], sender=signed.sender, body=signed.body, signature=signed.signature
    ).SerializeToString(deterministic=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealed:
    """An envelope whose body nobody has read yet: all that it costs is its size."""

    kind: type[Any]
    sender: PeerId
    body: bytes = field(repr=False)
    signature: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """What tells whether a ROSTER is worth reading: its first fields, and the name that its body gives it."""

    base: Base
    attempt: int
    roster_id: Digest


def unseal(data: bytes) -> Sealed:
    """The envelope alone. Raises `WireError` if it is malformed or oversized, by its kind's own limit too."""
    if len(data) > MAX_ENVELOPE_BYTES:
        raise WireError(f"an envelope of {len(data)} bytes is over the limit of {MAX_ENVELOPE_BYTES}")
    envelope = pb.Envelope()
    try:
        envelope.ParseFromString(data)
    except DecodeError as error:
        raise WireError(f"an envelope of {len(data)} bytes does not parse") from error
    kind = _BY_NUMBER.get(envelope.kind)
    if kind is None:
        raise WireError(f"an envelope has the unknown kind {envelope.kind}")
    body = envelope.body
    if len(body) > MAX_BODY_BYTES[kind]:
        raise WireError(f"a {kind.__name__} of {len(body)} bytes is over the limit of {MAX_BODY_BYTES[kind]}")
    return Sealed(
        kind=kind,
        sender=peer_id(envelope.sender, "the sender"),
        body=body,
        signature=check_signature(envelope.signature),
    )


def open_sealed(sealed: Sealed) -> Signed[Any]:
    """The message in an envelope; its signature is not verified. Raises `WireError`, and nothing else."""
    return make_signed(sealed.kind, sealed.sender, sealed.body, sealed.signature)


def decode(data: bytes) -> Signed[Any]:
    """The signed message in an envelope, of any kind; its signature is not verified yet.

    Raises `WireError`, and nothing else, on anything malformed, oversized or out of range.
    """
    return open_sealed(unseal(data))


def beginning(sealed: Sealed) -> Beginning:
    """Of a sealed ROSTER: nothing that it holds beyond its first fields is turned into values. Raises `WireError`."""
    roster = pb.Roster()
    try:
        roster.ParseFromString(sealed.body)
    except DecodeError as error:
        raise WireError(f"a Roster of {len(sealed.body)} bytes does not parse") from error
    return Beginning(
        base=get_base(roster.base),
        attempt=integer(roster.attempt, "an attempt", MAX_ATTEMPT),
        roster_id=_roster_id(sealed.body),
    )


def verify_beginning(keyring: Keyring, sealed: Sealed, start: Beginning) -> bool:
    """Whether a sealed ROSTER's sender signed it: its signature covers the first fields and the body's hash."""
    statement = Statement(base=start.base, attempt=start.attempt, body_hash=blake3(sealed.body).digest())
    return keyring.verify(sealed.sender, statement_bytes(sealed.kind, statement), sealed.signature)


def encode_commit(commit: Commit) -> bytes:
    """A commit as it is stored and served: its own signatures are all inside."""
    return encode_body(commit)


def decode_commit(data: bytes) -> Commit:
    """Raises `WireError`."""
    return decode_body(Commit, data)


def roster_id(signed: Signed[Roster]) -> Digest:
    """The name of a roster: the hash of its body."""
    return _roster_id(signed.body)


def _roster_id(body: bytes) -> Digest:
    return digest(b"atoll/roster", body)
