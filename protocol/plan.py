"""A roster's plan: which root reduces which parts, over which tree (protocol section 3, design section 6)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """The parts that one root reduces, and the tree they travel on.

    `parents[i]` is the index of READY `i`'s parent in this shard's tree; the root's own parent is -1. Every READY of
    the roster is in the tree, since all receive DOWN; those that do not contribute have no UP slot.
    """

    share: int
    """This shard's weight in the dealing of parts: parts are dealt in proportion to shares."""
    parents: tuple[int, ...]

    @property
    def root(self) -> int:
        return self.parents.index(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    shards: tuple[Shard, ...]
