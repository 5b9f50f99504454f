"""Names that bind: identifiers, digests, and the base that every message of a round carries (protocol section 1)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
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
    # Fields are short (hashes, numbers, names): one call over all of them is twice as quick as two calls a field.
    return blake3(b"".join([piece for field in fields for piece in (encode_integer(len(field)), field)])).digest()


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
        return _base_digest(self)


@lru_cache(maxsize=256)
def _base_digest(base: Base) -> Digest:
    """Kept: every message of a round asks for the same one."""
    return digest(b"atoll/base", base.run, base.lineage, encode_integer(base.round), base.prev, base.state_hash)


def initial_lineage(run: Digest) -> Digest:
    return digest(b"atoll/lineage", run)


class Keyring(Protocol):
    """Signatures, injected: ed25519 in a node, a cheap stand-in in simulation."""

    def sign(self, message: bytes) -> bytes: ...

    def verify(self, signer: PeerId, message: bytes, signature: bytes) -> bool: ...
