"""Names that bind: identifiers, digests, and the base that every message of a round carries (protocol section 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

from blake3 import blake3

PeerId: TypeAlias = str
"""A libp2p peer id in base58 (`12D3KooW...`). An ed25519 id contains the public key: it verifies signatures alone."""

Digest: TypeAlias = bytes
"""32 bytes of BLAKE3."""

DIGEST_BYTES = 32
ZERO_DIGEST: Digest = bytes(DIGEST_BYTES)


def digest(*fields: bytes) -> Digest:
    """`H`: BLAKE3 over length-prefixed fields, so that no two field lists share an encoding."""
    hasher = blake3()
    for field in fields:
        hasher.update(len(field).to_bytes(8, "little"))
        hasher.update(field)
    return hasher.digest()


def encode_integer(value: int) -> bytes:
    """A non-negative integer as 8 little-endian bytes, for hashing."""
    return value.to_bytes(8, "little")


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """The place in the chain that a message belongs to; its hash is `base` in the protocol's text."""

    run: Digest
    lineage: Digest
    round: int
    prev: Digest
    state_hash: Digest

    def digest(self) -> Digest:
        return digest(b"atoll/base", self.run, self.lineage, encode_integer(self.round), self.prev, self.state_hash)


def initial_lineage(run: Digest) -> Digest:
    return digest(b"atoll/lineage", run)


class Keyring(Protocol):
    """Signatures, injected: ed25519 in a node, a cheap stand-in in simulation."""

    def sign(self, message: bytes) -> bytes: ...

    def verify(self, signer: PeerId, message: bytes, signature: bytes) -> bool: ...
