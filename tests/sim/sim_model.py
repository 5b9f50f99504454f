"""What a simulated swarm trains on: integers instead of tensors, so that every sum can be checked exactly.

A peer's work is one integer a part. A part's payload says whose integers it holds, with which weights, and their
weighted mean as an exact fraction; the outer state is the hash of the state before and of the payloads applied.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache

from protocol.chain import ChainState
from protocol.codecs import codec
from protocol.commitment import Commitment
from protocol.messages import NIL, Commit, UnitRange
from protocol.names import Digest, PeerId, digest, encode_integer
from protocol.rules import Quorum, Rules

PARTS = 3
PART_ELEMENTS = 256
UNIT_TOKENS = 64


class CheapKeyring:
    """Signatures that only `me` makes, checked by hashing: a stand-in for ed25519."""

    def __init__(self, me: PeerId) -> None:
        self.me = me

    def sign(self, message: bytes) -> bytes:
        return _cheap_signature(self.me, message)

    def verify(self, signer: PeerId, message: bytes, signature: bytes) -> bool:
        return signature == _cheap_signature(signer, message)


@lru_cache(maxsize=1 << 14)
def _cheap_signature(signer: PeerId, message: bytes) -> bytes:
    return digest(b"cheap", signer.encode(), message)


def make_rules(
    founders: Iterable[PeerId],
    *,
    min_peers: int = 1,
    final_round: int | None = None,
    quorum: Quorum = Quorum.MAJORITY,
    max_electors: int = 64,
    heartbeat_s: float = 1.0,
) -> Rules:
    return Rules(
        run=digest(b"simulated run"),
        founders=tuple(founders),
        initial_state_hash=digest(b"state", encode_integer(0)),
        quorum=quorum,
        min_peers=min_peers,
        max_electors=max_electors,
        elements=PARTS * PART_ELEMENTS,
        part_elements=PART_ELEMENTS,
        epoch_units=1000,
        lease_cap_units=4,
        unit_tokens=UNIT_TOKENS,
        final_round=final_round,
        heartbeat_s=heartbeat_s,
        heartbeat_timeout_s=max(6.0, 3.5 * heartbeat_s),
    )


def payload_bytes() -> int:
    return codec("int8").encoded_bytes(PART_ELEMENTS)


@dataclass(frozen=True, slots=True)
class Payload:
    """One reduced part."""

    part: int
    contributions: tuple[tuple[PeerId, int, int], ...]
    """(peer, weight, value)"""
    mean: Fraction

    @staticmethod
    def of(part: int, contributions: Mapping[PeerId, tuple[int, int]]) -> Payload:
        entries = tuple((peer, weight, value) for peer, (weight, value) in sorted(contributions.items()))
        total = sum(weight for _, weight, _ in entries)
        return Payload(part, entries, Fraction(sum(weight * value for _, weight, value in entries), total))

    @property
    def hash(self) -> Digest:
        return _payload_hash(self.part, self.contributions, self.mean.numerator, self.mean.denominator)


@lru_cache(maxsize=1 << 10)
def _payload_hash(
    part: int, contributions: tuple[tuple[PeerId, int, int], ...], numerator: int, denominator: int
) -> Digest:
    return digest(b"payload", f"{part} {contributions} {numerator}/{denominator}".encode())


@dataclass(frozen=True, slots=True)
class Outbox:
    """A frozen contribution, durable."""

    values: tuple[int, ...]
    tokens: int
    ranges_done: tuple[UnitRange, ...]

    @property
    def commitment(self) -> Commitment:
        """Binds the value of every part, as `parts_root` in READY."""
        return _commitment(self.values)


@lru_cache(maxsize=1 << 10)
def _commitment(values: tuple[int, ...]) -> Commitment:
    return Commitment([value_hash(value) for value in values])


@lru_cache(maxsize=1 << 12)
def value_hash(value: int) -> Digest:
    """Stands for the hash of an encoded part."""
    return digest(b"value", str(value).encode())


@dataclass(slots=True)
class Account:
    """Where a peer's work went, a part each (invariant I3)."""

    produced: list[int] = field(default_factory=lambda: [0] * PARTS)
    counted: list[int] = field(default_factory=lambda: [0] * PARTS)
    carried: list[int] = field(default_factory=lambda: [0] * PARTS)
    """In the local model, and in nothing that was committed."""
    discarded: list[int] = field(default_factory=lambda: [0] * PARTS)

    def reset(self) -> None:
        """Hard reset of the local model: what it carried is reported as discarded."""
        for part in range(PARTS):
            self.discarded[part] += self.carried[part]
            self.carried[part] = 0

    def balanced(self) -> bool:
        return all(
            self.produced[part] == self.counted[part] + self.carried[part] + self.discarded[part]
            for part in range(PARTS)
        )


def state_after(state: ChainState, commit: Commit, instead_of_empty: Digest | None = None) -> Digest:
    """Hash of the outer state that a commit leads to. `instead_of_empty`: of the mutant that fills EMPTY parts."""
    if commit.roster.message.plan is None:
        return state.base.state_hash
    empty = NIL if instead_of_empty is None else instead_of_empty
    hashes = (empty if header is None else header.message.hash for header in commit.headers)
    return digest(b"outer step", state.base.state_hash, *hashes)
