"""Peer ids agree with base58 and libp2p's encoding, and bad ones are refused, not crashed on."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from node import peer_id
from node.errors import StrangerError


def test_an_id_holds_its_public_key() -> None:
    key = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
    public = key.public_key().public_bytes_raw()
    name = peer_id.peer_id_of(public)
    assert name.startswith("12D3KooW")
    assert peer_id.public_key_of(name) == public


def test_the_encoding_is_that_of_the_base58_library() -> None:
    base58 = pytest.importorskip("base58")
    for seed in range(20):
        public = bytes((seed * 7 + i * 13) % 256 for i in range(32))
        expected = base58.b58encode(bytes((0, 0x24, 8, 1, 0x12, 0x20)) + public).decode()
        assert peer_id.peer_id_of(public) == expected


def test_signatures_verify_by_the_id_alone() -> None:
    key = Ed25519PrivateKey.from_private_bytes(bytes(32))
    name = peer_id.peer_id_of(key.public_key().public_bytes_raw())
    signature = key.sign(b"message")
    assert peer_id.verify(name, b"message", signature)
    assert not peer_id.verify(name, b"massage", signature)
    assert not peer_id.verify(name, b"message", b"short")
    assert not peer_id.verify("not base58: 0OIl", b"message", signature)


@pytest.mark.parametrize("bad", ["", "0", "1" * 52, "12D3KooW", "Qm" * 23, "1" * 1_000_000, "12D3KooWé"])
def test_bad_ids_are_refused(bad: str) -> None:
    with pytest.raises(StrangerError):
        peer_id.public_key_of(bad)
