"""What one node owes its neighbours in an exchange, and what it has from them: the bookkeeping behind WANT frames."""

from __future__ import annotations

from collections.abc import Iterable

from node.engine.frames import Kind
from protocol.stations import Role, Station

Duty = tuple[Kind, int]
"""UP or DOWN, and the part."""


class Duties:
    def __init__(self, machine: Station, part_count: int) -> None:
        self._owed: dict[int, set[Duty]] = {}
        self._leaves: dict[int, list[int]] = {}
        """Peer → parts of which it gets my contribution."""
        self._receivers: dict[int, set[int]] = {}
        """Peer → parts that I send down to it."""
        self._ups_held: dict[int, int] = {}
        self._downs_held = 0
        self._decided = 0
        self._given_up: set[int] = set()
        neighbours: set[int] = set()
        for part in range(part_count):
            target, source = machine.up_target(part), machine.down_source(part)
            if target is not None:
                neighbours.add(target)
                if machine.role(part) is Role.LEAF:
                    self._leaves.setdefault(target, []).append(part)
                    self._owed.setdefault(target, set()).add((Kind.UP, part))
            if source is not None:
                neighbours.add(source)
            neighbours.update(machine.slots(part))
            for index in machine.receivers(part):
                neighbours.add(index)
                self._receivers.setdefault(index, set()).add(part)
        self.neighbours = frozenset(neighbours)
        """Everyone whom I send to or receive from."""

    # ---------------------------------------------------------------- what I owe

    @property
    def owed(self) -> int:
        """Frames that their receivers have not taken yet."""
        return sum(len(duties) for duties in self._owed.values())

    def owed_to(self, index: int) -> list[Duty]:
        """Ascending by part, UP before DOWN."""
        return sorted(self._owed.get(index, ()), key=lambda duty: (duty[1], duty[0]))

    def add(self, index: int, kind: Kind, part: int) -> None:
        if index not in self._given_up:
            self._owed.setdefault(index, set()).add((kind, part))

    def done(self, index: int, kind: Kind, part: int) -> None:
        self._owed.get(index, set()).discard((kind, part))

    def give_up(self, index: int) -> None:
        """This peer cannot be reached: nothing is owed to it until it says WANT."""
        self._given_up.add(index)
        self._owed.pop(index, None)

    def on_want(
        self, index: int, ups_held: int, downs_held: int, partials: Iterable[int], downs: Iterable[int]
    ) -> None:
        """The peer says which parts it has; `partials` and `downs` are those that I could send."""
        self._given_up.discard(index)
        leaves = self._leaves.get(index, [])
        owed = {(Kind.UP, part) for part in leaves if not ups_held >> part & 1}
        # A partial sum is owed only to its parent, and only while it is kept.
        owed |= {duty for duty in self._owed.get(index, ()) if duty[0] is Kind.UP and duty[1] in set(partials)}
        to_peer = self._receivers.get(index, set())
        owed |= {(Kind.DOWN, part) for part in downs if part in to_peer and not downs_held >> part & 1}
        self._owed[index] = owed

    # ---------------------------------------------------------------- what I have

    def received_up(self, index: int, part: int) -> None:
        self._ups_held[index] = self._ups_held.get(index, 0) | 1 << part

    def received_down(self, part: int) -> None:
        self._downs_held |= 1 << part

    def decided(self, part: int) -> None:
        """Summed or left: no UP of it is of use any more."""
        self._decided |= 1 << part

    def held_from(self, index: int) -> tuple[int, int]:
        """For my WANT to this peer: bitmaps of UPs and DOWNs that I need no more."""
        return self._ups_held.get(index, 0) | self._decided, self._downs_held
