"""Fields: what a single value in a stranger's message may be, and the bounds that the wire format sets."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Final, TypeVar

from protocol.names import DIGEST_BYTES, Digest, PeerId

MAX_PEERS: Final = 1024
"""Joins or leaves of a roster, members of a reform."""
MAX_READYS: Final = 1024
"""READYs of a roster: as many as two levels of trees with 64 children a node hold (`protocol.grouping`). At 330 bytes a
READY such a ROSTER and its plan take 0.47 MB, and never more than 2.8 MB (`protocol.ready_limits`)."""
MAX_PLAN_NODES: Final = 64 * MAX_READYS
"""Nodes of all trees of a plan together (`protocol.planning.MAX_GROUPED_SHARDS`)."""
MAX_CERTIFIED_VOTE_BYTES: Final = 1024
"""Body of a vote in a certificate: it is for a decision, and so has no reasons attached."""
MAX_PARTS: Final = 32_768
MAX_RANGES: Final = 4096
"""Unit ranges, and token runs, of a READY."""
MAX_EDGES: Final = 64
MAX_LEFT_OUT: Final = 4
"""READYs attached to a NIL: one is enough to say why."""
MAX_LEVELS: Final = 8
MAX_EVIDENCE: Final = 16
MAX_COUNT: Final = 1 << 40
"""Tokens, units, bytes, rounds, shares: sums of thousands of these still fit 64 bits."""
MAX_ATTEMPT: Final = 1 << 20
MAX_SIGNATURE_BYTES: Final = 128

_PEER_ID: Final = re.compile(r"[0-9A-Za-z_.-]{1,64}")

ItemT = TypeVar("ItemT")


class WireError(Exception):
    """Bytes that are no message of ours; the text is one sentence that says why."""


def integer(value: int, name: str, limit: int = MAX_COUNT) -> int:
    if value > limit:
        raise WireError(f"{name} is {value}, more than {limit}")
    return value


def real(value: float, name: str) -> float:
    if not math.isfinite(value) or value < 0:
        raise WireError(f"{name} is {value}, not a finite number of at least 0")
    return value


def digest_field(value: bytes, name: str) -> Digest:
    if len(value) != DIGEST_BYTES:
        raise WireError(f"{name} has {len(value)} bytes instead of {DIGEST_BYTES}")
    return value


def peer_id(value: str, name: str = "a peer id") -> PeerId:
    """`value` if it has the form of a peer id; whether it is one, its signatures tell."""
    if _PEER_ID.fullmatch(value) is None:
        raise WireError(f"{name} is {value[:80]!r}, which is no peer id")
    return value


def few(values: Sequence[ItemT], limit: int, name: str) -> Sequence[ItemT]:
    if len(values) > limit:
        raise WireError(f"{len(values)} {name} are more than {limit}")
    return values


def distinct(values: tuple[PeerId, ...], name: str) -> tuple[PeerId, ...]:
    if len(set(values)) != len(values):
        raise WireError(f"the {name} name a peer twice")
    return values


def check_signature(signature: bytes) -> bytes:
    if not 1 <= len(signature) <= MAX_SIGNATURE_BYTES:
        raise WireError(f"a signature has {len(signature)} bytes instead of 1 to {MAX_SIGNATURE_BYTES}")
    return signature


def bitmap(data: bytes, name: str) -> int:
    if len(data) > MAX_PEERS // 8:
        raise WireError(f"{name} has {len(data)} bytes, more than {MAX_PEERS // 8}")
    if data and data[-1] == 0:
        raise WireError(f"{name} ends with a zero byte")
    return int.from_bytes(data, "little")


def bitmap_bytes(bits: int) -> bytes:
    return bits.to_bytes((bits.bit_length() + 7) // 8, "little")
