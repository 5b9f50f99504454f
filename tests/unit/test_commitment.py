"""Commitments to a contribution's parts: every part proves, and nothing else does."""

from __future__ import annotations

import pytest
from blake3 import blake3

from protocol.commitment import MAX_PROOF_HASHES, Commitment, leaf, proves
from protocol.fields import MAX_PARTS
from protocol.names import DIGEST_BYTES, digest


def hashes(count: int) -> list[bytes]:
    return [blake3(part.to_bytes(4, "little")).digest() for part in range(count)]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8, 9, 31, 64, 65, 100])
def test_every_part_proves_and_no_other_hash_or_place_does(count: int) -> None:
    made = hashes(count)
    tree = Commitment(made)
    for part, payload_hash in enumerate(made):
        proof = tree.proof(part)
        assert len(proof) <= DIGEST_BYTES * (count - 1).bit_length()
        assert proves(tree.root, part, count, payload_hash, proof)
        assert not proves(tree.root, part, count, blake3(b"other").digest(), proof)
        assert not proves(tree.root, part, count, payload_hash, proof + bytes(DIGEST_BYTES))
        assert not proves(blake3(b"root").digest(), part, count, payload_hash, proof)
        if proof:
            assert not proves(tree.root, part, count, payload_hash, proof[:-DIGEST_BYTES])
            assert not proves(tree.root, part, count, payload_hash, bytes([proof[0] ^ 1]) + proof[1:])
        for other in range(count):
            if other != part:
                assert not proves(tree.root, other, count, payload_hash, proof)


def test_the_tree_of_three_parts_by_hand() -> None:
    a, b, c = (leaf(part, payload_hash) for part, payload_hash in enumerate(hashes(3)))
    root = digest(b"atoll/node", digest(b"atoll/node", a, b), c)
    assert Commitment(hashes(3)).root == root
    assert Commitment(hashes(3)).proof(2) == digest(b"atoll/node", a, b)
    assert Commitment(hashes(1)).root == a


def test_a_node_does_not_pass_for_a_leaf() -> None:
    """A tree of two whose leaves are the nodes of a tree of four has another root."""
    four = Commitment(hashes(4))
    left = digest(b"atoll/node", *(leaf(part, item) for part, item in enumerate(hashes(2))))
    assert not proves(four.root, 0, 2, left, four.proof(0)[DIGEST_BYTES:])


def test_places_outside_and_endless_proofs_are_refused() -> None:
    tree = Commitment(hashes(3))
    assert not proves(tree.root, 3, 3, hashes(4)[3], tree.proof(2))
    assert not proves(tree.root, -1, 3, hashes(3)[2], tree.proof(2))
    assert not proves(tree.root, 0, MAX_PARTS, hashes(1)[0], bytes(DIGEST_BYTES) * (MAX_PROOF_HASHES + 1))
    with pytest.raises(ValueError, match="without parts"):
        Commitment([])
