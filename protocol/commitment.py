"""A contribution's commitment: one hash in READY that binds the encoded bytes of every part (protocol sections 3, 7).

READY is signed and stands in the ROSTER, so whoever has the roster can check any leaf payload with an inclusion proof
of at most `MAX_PROOF_HASHES` hashes. Leaves and nodes are hashed under different names, and a leaf names its part: no
node passes for a leaf, and no part's bytes for another's. A node without a neighbour goes up a level as it is, so the
tree's shape follows from the number of parts alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from protocol.fields import MAX_PARTS
from protocol.names import DIGEST_BYTES, Digest, digest, encode_integer

MAX_PROOF_HASHES: Final = (MAX_PARTS - 1).bit_length()


def leaf(part: int, payload_hash: Digest) -> Digest:
    """`payload_hash`: BLAKE3 of the encoded part."""
    return digest(b"atoll/leaf", encode_integer(part), payload_hash)


def _node(left: Digest, right: Digest) -> Digest:
    return digest(b"atoll/node", left, right)


class Commitment:
    """The tree over one contribution's payload hashes, one a part; raises `ValueError` for none."""

    def __init__(self, payload_hashes: Sequence[Digest]) -> None:
        if not payload_hashes:
            raise ValueError("a contribution without parts has no commitment")
        level = [leaf(part, payload_hash) for part, payload_hash in enumerate(payload_hashes)]
        self._levels = [level]
        while len(level) > 1:
            pairs = [_node(level[at], level[at + 1]) for at in range(0, len(level) - 1, 2)]
            level = pairs + level[len(level) & ~1 :]
            self._levels.append(level)

    @property
    def root(self) -> Digest:
        """What READY carries as `parts_root`."""
        return self._levels[-1][0]

    def proof(self, part: int) -> bytes:
        """The neighbours on the way from the part's leaf to the root, one after another."""
        hashes = []
        for level in self._levels[:-1]:
            if part ^ 1 < len(level):
                hashes.append(level[part ^ 1])
            part >>= 1
        return b"".join(hashes)


def proves(root: Digest, part: int, part_count: int, payload_hash: Digest, proof: bytes) -> bool:
    """Whether `payload_hash` is that of `part` among the `part_count` parts under `root`."""
    if not 0 <= part < part_count or len(proof) > MAX_PROOF_HASHES * DIGEST_BYTES:
        return False
    reached, used, width = leaf(part, payload_hash), 0, part_count
    while width > 1:
        if part ^ 1 < width:
            neighbour = proof[used : used + DIGEST_BYTES]
            used += DIGEST_BYTES
            reached = _node(neighbour, reached) if part & 1 else _node(reached, neighbour)
        part, width = part >> 1, (width + 1) >> 1
    return used == len(proof) and reached == root
