"""What daemons ask each other over the control stream: the manifest, the tip, the chain, a token for a data channel.

Small answers only. Tensors, parts and artifacts travel between engines.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from node.errors import StrangerError

MANIFEST = "manifest"
TIP = "tip"
CHAIN = "chain"
DATA_TOKEN = "data-token"
DATA_CALL = "data-call"
"""Asks to be dialled by the receiver's engine, with the token of the payload: the sender cannot dial it."""
DIAL_BACK = "dial-back"
SPLICE, SPLICE_OFFER = "splice", "splice-offer"
IDENTITY_USED_TWICE = "identity-used-twice"
"""Tells, asks nothing: the receiver's key was shown by another machine, which was refused."""

MAX_CHAIN_PAGE_BYTES = 2 * 1024 * 1024
TOKEN_BYTES = 32
TOKEN_EXPIRES_S = 30.0

AnswerT = TypeVar("AnswerT")


class SnapshotOffer(msgspec.Struct, frozen=True, kw_only=True):
    round: int
    state_hash: bytes


class Tip(msgspec.Struct, frozen=True, kw_only=True):
    """Where a peer stands and what it can give. Claims: everything is verified against the chain."""

    lineage: bytes
    round: int
    prev: bytes
    state_hash: bytes
    snapshots: tuple[SnapshotOffer, ...] = ()
    part_rounds: tuple[int, ...] = ()
    """Rounds whose parts its engine still holds."""
    catching_up: bool = False
    """It has followed this chain, and not yet its state: it lacks what others lack."""


class ChainRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Records that follow the commit `prev`; a peer that does not have it on its chain answers `known=False`."""

    round: int
    prev: bytes
    lineage: bytes


class ChainPage(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive records, oldest first; `more` when the page was full."""

    known: bool
    records: tuple[bytes, ...] = ()
    more: bool = False


class Empty(msgspec.Struct, frozen=True, kw_only=True):
    pass


def encode(value: msgspec.Struct) -> bytes:
    return msgspec.msgpack.encode(value)


def decode(data: bytes, kind: type[AnswerT]) -> AnswerT:
    """Raises `StrangerError`: a peer's bytes may hold anything."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise StrangerError(f"what should be a {kind.__name__} does not decode: {error}") from error
