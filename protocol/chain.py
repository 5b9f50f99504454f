"""The chain: who counts, what is leased to whom, and how a commit changes both (protocol sections 1 and 2)."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.messages import UnitRange
from protocol.names import Base, Digest, PeerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    joined_round: int
    """First round it may contribute to; founders: 0."""
    last_ready_rounds: tuple[int, ...] = ()
    """Rounds (at most the two newest) whose committed roster held its READY."""
    last_counted_round: int | None = None
    """Newest round that counted it in a part; founders count as counted before round 0 (-1)."""
    lease: tuple[UnitRange, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainState:
    """All that follows from the commits so far. `base.round` is the round being worked on."""

    base: Base
    members: tuple[tuple[PeerId, Member], ...]
    """Ascending by peer id."""
    electors: tuple[PeerId, ...]
    demoted: tuple[tuple[PeerId, int], ...] = ()
    """(peer, first round in which it is no longer demoted)"""
    returned: tuple[UnitRange, ...] = ()
    """Ranges to lease first: what departed members did not train on."""
    cursor_epoch: int = 0
    cursor_unit: int = 0
    tokens_total: int = 0
    """Tokens counted by all commits."""


def genesis(run: Digest) -> Base:  # replaced by the chain implementation
    raise NotImplementedError
