"""When lineages meet: which one goes on (protocol section 10).

A tree of verified facts. Its nodes are lineages, each born of another at some round by a signed REFORM; along a
lineage lie its places, one a round, with the electors and members there and the tokens that the commit before counted.
Nothing that is only claimed is in it, and who stands on a lineage that is not in it has no voice. Places of all peers
that are heard make branchings; at each of them, from the newest place that all share upwards, the child goes on that
has more live electors, then more tokens counted since for the branching's members, then the smaller name. In a closed
run, where every key is trusted, they are electors of the newest proven place of their own lineage: those that train
now. In an open one, where keys cost nothing, they are electors of the branching.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TypeAlias

from protocol import chain
from protocol.chain import ChainState
from protocol.messages import Commit
from protocol.names import Digest, PeerId
from protocol.rules import Rules

PLACES_KEPT = 65_536
"""Places in the tree; lineages that nobody is heard on make room."""
OWN_PLACES_KEPT = 64
"""Of my own chain, while no other lineage is known."""

Position: TypeAlias = tuple[Digest, int]
"""(lineage, round): where somebody says that it works. What lies before it follows from the tree."""
Path: TypeAlias = tuple[Position, ...]
"""From the oldest known lineage on: each lineage with the round in which the path leaves it; the last is the tip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One place of a verified chain: what a branching there is decided by."""

    lineage: Digest
    round: int
    electors: tuple[PeerId, ...]
    members: frozenset[PeerId]
    tokens: Mapping[PeerId, int] = field(default_factory=dict)
    """Counted by the commit that led here; empty at a lineage's birth."""

    @classmethod
    def of(cls, state: ChainState, rules: Rules, commit: Commit | None = None) -> Place:
        """`commit` led to `state`; None: a REFORM did, or it is not known."""
        return cls(
            lineage=state.base.lineage,
            round=state.base.round,
            electors=state.electors,
            members=frozenset(peer for peer, _ in state.members),
            tokens={} if commit is None else chain.counted_tokens(rules, commit),
        )

    @property
    def position(self) -> Position:
        return self.lineage, self.round


class Side(Enum):
    """Where I am, seen from the lineage that goes on."""

    WINNER = auto()
    """I am on it, or behind on it."""
    BEHIND = auto()
    """It goes on from my place, or from a later one of my lineage: nothing of mine is lost by following it."""
    LOSER = auto()
    """My chain and it have branched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Branching:
    """What decided at one place where chains part."""

    place: Position
    winner: Digest
    """Lineage of the child that goes on; the place's own one if that is an ordinary commit."""
    winner_live: int
    """Live electors on that child (`Lineages`)."""
    other_live: int
    """And on mine if I am on another, else on the next best."""

    @property
    def tied(self) -> bool:
        """As many electors live on both, or none on either: more than their number decides."""
        return self.winner_live == self.other_live


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    side: Side
    lineage: Digest
    """The one that goes on."""
    round: int
    """The furthest that anybody is heard on it."""
    peers: tuple[PeerId, ...]
    """Who is on it, the furthest first; without me."""
    branchings: tuple[Branching, ...]
    """Where I stood on one of the children, oldest first; if I lost, the last is where."""


@dataclass(frozen=True, slots=True)
class _Tip:
    peer: PeerId
    path: Path


class Lineages:
    """The tree, from one peer's point of view."""

    def __init__(self, me: PeerId, *, closed: bool = False) -> None:
        self.me = me
        self._closed = closed
        self._places: dict[Digest, dict[int, Place]] = {}
        self._births: dict[Digest, Position] = {}

    # ------------------------------------------------------------ facts

    def learn(self, course: Sequence[Place]) -> None:
        """Consecutive places of one verified chain, oldest first."""
        before: Place | None = None
        for place in course:
            along = self._places.setdefault(place.lineage, {})
            if place.tokens or place.round not in along:
                # Who starts at a place does not know what the commit before it counted; others have told it.
                along[place.round] = place
            if before is not None and before.lineage != place.lineage:
                self._births[place.lineage] = before.position
            before = place

    def born(self, lineage: Digest, of: Position) -> None:
        """`lineage` was born at `of`, which is verified; what else lies there does not matter yet."""
        self._births[lineage] = of

    def forget(self, mine: Digest, heard: Iterable[Digest]) -> None:
        """Make room: keep what leads to my lineage and to those that are heard."""
        if not self._births and self._places.keys() == {mine} and len(self._places[mine]) <= 2 * OWN_PLACES_KEPT:
            return  # my own chain is all that is known
        named = set(self._places) | {parent for parent, _ in self._births.values()}
        heard = {lineage for lineage in heard if lineage != mine and lineage in named}
        own = self._places.get(mine, {})
        if not heard:
            if self._births or len(self._places) > 1 or len(own) > 2 * OWN_PLACES_KEPT:
                self._places, self._births = {mine: dict(sorted(own.items())[-OWN_PLACES_KEPT:])}, {}
        elif sum(len(places) for places in self._places.values()) > PLACES_KEPT:
            kept_lineages = {lineage for end in (mine, *heard) for lineage in self._ancestors(end)}
            self._places = {lineage: known for lineage, known in self._places.items() if lineage in kept_lineages}
            self._births = {lineage: at for lineage, at in self._births.items() if lineage in kept_lineages}

    def member(self, peer: PeerId) -> bool:
        """Whether the tree knows `peer` as a member at any place's side."""
        return any(peer in places[max(places)].members for places in self._places.values() if places) or any(
            peer in place.members
            for parent, round_ in self._births.values()
            if (place := self._places.get(parent, {}).get(round_)) is not None
        )

    def tip(self, lineage: Digest) -> int | None:
        """The furthest round of `lineage` that is proven; None: nothing of it is."""
        places = self._places.get(lineage)
        return max(places) if places else None

    def proven(self, position: Position) -> bool:
        """Whether it is certain on which side of every known branching `position` lies."""
        lineage, round_ = position
        if lineage in self._births and round_ < self._births[lineage][1]:
            return False
        branched = max((at for parent, at in self._births.values() if parent == lineage), default=-1)
        if round_ <= branched:
            return True
        tip = self.tip(lineage)
        return tip is not None and (round_ <= tip or tip > branched)

    # ------------------------------------------------------------ the choice

    def choose(self, mine: Position, heard: Mapping[PeerId, Sequence[Position]]) -> Verdict | None:
        """Which lineage goes on among mine and those heard; None: none but mine is.

        Args:
            mine: where I work; I count there.
            heard: everyone else heard of late, with every place that it named lately, the newest first. A peer heard on
                two children of a branching counts for neither.
        """
        root = self._ancestors(mine[0])[-1]
        paths: dict[PeerId, tuple[Path, ...]] = {self.me: (self._path(mine),)}
        for peer, positions in heard.items():
            found = tuple(self._path(position) for position in positions if self.proven(position))
            if found and self.proven(positions[0]) and found[0][0][0] == root:
                paths[peer] = found
        if all(found[0][-1][0] == mine[0] for found in paths.values()):
            return None
        return self._walk(paths)

    def _walk(self, paths: Mapping[PeerId, tuple[Path, ...]]) -> Verdict | None:
        tips = [_Tip(peer, found[0]) for peer, found in paths.items()]
        mine = paths[self.me][0]
        side = Side.WINNER
        branchings: list[Branching] = []
        depth = 0
        while True:
            lineage = tips[0].path[depth][0]
            entered = False
            for round_ in sorted({tip.path[depth][1] for tip in tips if len(tip.path) > depth + 1}):
                children: dict[Digest, list[_Tip]] = {}
                for tip in tips:
                    child = _child(tip.path, depth, lineage, round_)
                    if child is not None:
                        children.setdefault(child, []).append(tip)
                winner = next(iter(children))
                my_child = _child(mine, depth, lineage, round_) if side is Side.WINNER else None
                if len(children) > 1:
                    place = self._places.get(lineage, {}).get(round_)
                    if place is None:
                        return None
                    ranked = self._ranked(place, depth, children, paths)
                    winner = ranked[0][1]
                    if my_child is not None:
                        rival = my_child if my_child != winner else ranked[1][1]
                        live = {child: -key[0] for key, child in ranked}
                        branchings.append(
                            Branching(
                                place=(lineage, round_),
                                winner=winner,
                                winner_live=live[winner],
                                other_live=live[rival],
                            )
                        )
                if side is Side.WINNER and my_child != winner:
                    side = Side.BEHIND if my_child is None else Side.LOSER
                tips = children[winner]
                if winner != lineage:
                    depth, entered = depth + 1, True
                    break
            if not entered:
                break
        ahead = sorted((tip for tip in tips if tip.peer != self.me), key=lambda tip: (-tip.path[-1][1], tip.peer))
        return Verdict(
            side=side,
            lineage=lineage,
            round=max(tip.path[-1][1] for tip in tips),
            peers=tuple(tip.peer for tip in ahead),
            branchings=tuple(branchings),
        )

    def _ranked(
        self,
        place: Place,
        depth: int,
        children: Mapping[Digest, list[_Tip]],
        paths: Mapping[PeerId, tuple[Path, ...]],
    ) -> list[tuple[tuple[int, int, Digest], Digest]]:
        """The children of a branching, the best first, each behind what it is ranked by."""
        live = dict.fromkeys(children, 0)
        voices = paths if self._closed else place.electors
        for elector in voices:
            if self._closed and not self._elector(elector, paths[elector][0]):
                continue
            on = {_child(path, depth, place.lineage, place.round) for path in paths.get(elector, ())} - {None}
            if len(on) == 1 and (child := on.pop()) in live and paths[elector][0] in [t.path for t in children[child]]:
                live[child] += 1
        most = max(live.values())
        tied = sum(count == most for count in live.values()) > 1
        ranked = []
        for child, tips in children.items():
            counts = tied and live[child] == most
            tokens = max(self._tokens(tip.path, depth, place) for tip in tips) if counts else 0
            ranked.append(((-live[child], -tokens, child), child))
        return sorted(ranked)

    def _elector(self, peer: PeerId, path: Path) -> bool:
        """Whether `peer` is an elector of the newest proven place of the lineage that it is on."""
        along = self._places.get(path[-1][0])
        return along is not None and peer in along[max(along)].electors

    def _tokens(self, path: Path, depth: int, place: Place) -> int:
        """Tokens that the commits on `path` behind `place` counted for its members."""
        total = 0
        since = place.round
        for lineage, until in path[depth:]:
            for round_, there in self._places.get(lineage, {}).items():
                if since < round_ <= until:
                    total += sum(tokens for peer, tokens in there.tokens.items() if peer in place.members)
            since = until
        return total

    # ------------------------------------------------------------ descent

    def _ancestors(self, lineage: Digest) -> list[Digest]:
        """`lineage` and those that it comes from, as far as they are known."""
        found = [lineage]
        while (birth := self._births.get(found[-1])) is not None:
            found.append(birth[0])
        return found

    def _path(self, position: Position) -> Path:
        steps = [position]
        while (birth := self._births.get(steps[0][0])) is not None:
            steps.insert(0, birth)
        return tuple(steps)


def _child(path: Path, depth: int, lineage: Digest, round_: int) -> Digest | None:
    """The child of the branching at (`lineage`, `round_`) that `path` goes on by; None: it ends at or before it, or
    never comes by."""
    if len(path) <= depth or path[depth][0] != lineage or path[depth][1] < round_:
        return None
    if path[depth][1] > round_:
        return lineage
    return path[depth + 1][0] if len(path) > depth + 1 else None
