"""Peer ids without libp2p: an ed25519 id is the public key itself, in an identity multihash, in base58.

The engine verifies signatures with this (py-libp2p cannot be imported there, design section 2), the daemon too.
Source: libp2p specification, `peer-ids/peer-ids.md`.
"""

from __future__ import annotations

from functools import lru_cache

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from node.errors import StrangerError

PUBLIC_KEY_BYTES = 32
SIGNATURE_BYTES = 64
MAX_PEER_ID_CHARACTERS = 64
"""An ed25519 id has 52 characters; nothing longer is even decoded."""

_ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_DIGITS = {character: digit for digit, character in enumerate(_ALPHABET)}
_PREFIX = bytes((0x00, 0x24, 0x08, 0x01, 0x12, 0x20))
"""Identity multihash of 36 bytes: protobuf `PublicKey {type: Ed25519, data: 32 bytes}`."""


def peer_id_of(public_key: bytes) -> str:
    """The peer id of a raw ed25519 public key (32 bytes)."""
    if len(public_key) != PUBLIC_KEY_BYTES:
        raise ValueError(f"an ed25519 public key has {PUBLIC_KEY_BYTES} bytes, this one {len(public_key)}")
    return _encode_base58(_PREFIX + public_key)


@lru_cache(maxsize=4096)
def public_key_of(peer_id: str) -> bytes:
    """The raw ed25519 public key (32 bytes) in `peer_id`. Raises `StrangerError` for anything else."""
    if len(peer_id) > MAX_PEER_ID_CHARACTERS:
        raise StrangerError(f"a peer id of {len(peer_id)} characters is over the limit of {MAX_PEER_ID_CHARACTERS}")
    data = _decode_base58(peer_id)
    if len(data) != len(_PREFIX) + PUBLIC_KEY_BYTES or not data.startswith(_PREFIX):
        raise StrangerError(f"peer id {peer_id!r} is not that of an ed25519 key")
    return data[len(_PREFIX) :]


def verify(peer_id: str, message: bytes, signature: bytes) -> bool:
    """Whether `signature` is `peer_id`'s over `message`; False also for a malformed id or signature."""
    try:
        _key(peer_id).verify(signature, message)
    except (InvalidSignature, StrangerError):
        return False
    return True


@lru_cache(maxsize=4096)
def _key(peer_id: str) -> Ed25519PublicKey:
    return Ed25519PublicKey.from_public_bytes(public_key_of(peer_id))


def _encode_base58(data: bytes) -> str:
    number = int.from_bytes(data, "big")
    characters = []
    while number:
        number, digit = divmod(number, 58)
        characters.append(_ALPHABET[digit])
    zeros = len(data) - len(data.lstrip(b"\0"))
    return "1" * zeros + "".join(reversed(characters))


def _decode_base58(text: str) -> bytes:
    number = 0
    for character in text:
        digit = _DIGITS.get(character)
        if digit is None:
            raise StrangerError(f"peer id {text!r} holds {character!r}, which is not base58")
        number = number * 58 + digit
    zeros = len(text) - len(text.lstrip("1"))
    return bytes(zeros) + number.to_bytes((number.bit_length() + 7) // 8, "big")
