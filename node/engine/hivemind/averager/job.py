"""One roster's all-reduce: who takes part, who reduces which piece, and with what weights.

hivemind cuts a list of tensors into contiguous ranges, one a peer. Here every tensor is one piece of a part, and the
list is in the order of the parts' roots, so that the root of a part is the peer that hivemind lets reduce it: it knows
whose values are in each mean, and nobody else needs to.

Shapes: `c` contributors, `p` parts. Positions are among the contributors, in the roster's order.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple


class Piece(NamedTuple):
    part: int
    start: int
    """First element of the vector."""
    stop: int
    is_last: bool
    """Of its part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    roster: str
    """Hex."""
    names: tuple[str, ...]
    """[c] Their peer ids, as the roster has them."""
    me: int
    owners: tuple[int, ...]
    """[p] Position of each part's root."""
    weights: tuple[tuple[int, tuple[float, ...]], ...]
    """Over my own parts, ascending: (how many, their weights [c])."""
    largest: tuple[float, ...]
    """[c] Magnitudes that no value may exceed."""
    sender_timeout_s: float
    """The longest gap between two pieces of one sender."""
    deadline_s: float
    """For all of it."""

    @classmethod
    def of(cls, said: dict[str, Any]) -> Job:
        """From the message `begin`, whose fields are these."""
        names = cls.__slots__
        return cls(**{name: _tuples(said[name]) for name in names})

    def pieces(self, elements: int, part_elements: int, piece_elements: int) -> list[Piece]:
        """In hivemind's order: by root, then by part, then by place."""
        order = sorted(range(len(self.owners)), key=lambda part: (self.owners[part], part))
        pieces = []
        for part in order:
            start, end = part * part_elements, min((part + 1) * part_elements, elements)
            for first in range(start, end, piece_elements):
                stop = min(first + piece_elements, end)
                pieces.append(Piece(part, first, stop, stop == end))
        return pieces

    def shares(self, pieces: Sequence[Piece]) -> tuple[int, ...]:
        """[c] Elements that each peer reduces."""
        shares = [0] * len(self.names)
        for piece in pieces:
            shares[self.owners[piece.part]] += piece.stop - piece.start
        return tuple(shares)

    def mine(self, pieces: Sequence[Piece]) -> list[Piece]:
        return [piece for piece in pieces if self.owners[piece.part] == self.me]


class Weights:
    """Of my own parts."""

    def __init__(self, job: Job) -> None:
        my_parts = [part for part, owner in enumerate(job.owners) if owner == job.me]
        self._ends = list(accumulate(count for count, _ in job.weights))
        self._weights = [weights for _, weights in job.weights]
        self._place = {part: place for place, part in enumerate(my_parts)}
        if self._ends[-1:] != [len(my_parts)] and my_parts:
            raise ValueError(f"weights for {self._ends[-1:]} parts; {len(my_parts)} are mine")

    def of(self, part: int, position: int) -> float:
        return self._weights[bisect_right(self._ends, self._place[part])][position]


def _tuples(value: Any) -> Any:
    """What JSON has as lists, as tuples."""
    return tuple(_tuples(one) for one in value) if isinstance(value, list) else value
