"""Where training stands in its lease: which sequences come next, and which whole units are done. Pure.

A sequence is *handed out* when a batch with it is made, and *trained* when the step after it ends. Units are reported
only when all their sequences are trained; a unit in the middle is finished in the next round.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from node.trainer.wire import Lease

Unit: TypeAlias = tuple[int, int]
"""(epoch, unit)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Sequences `[start, stop)` of one unit."""

    epoch: int
    unit: int
    start: int
    stop: int


class LeaseCursor:
    """One member's way through the units that the chain leases it, round after round."""

    def __init__(self, unit_sequences: int) -> None:
        self._unit_sequences = unit_sequences
        self._pending: deque[Stretch] = deque()
        self._handed_out: list[Stretch] = []
        self._done: dict[Unit, None] = {}
        """Whole units trained and not counted yet, in order."""
        self._started: dict[Unit, int] = {}
        """Sequences trained of units in the middle."""
        self._counted: dict[Unit, int] = {}
        """The same, of what commits have counted: all that survives a hard reset."""
        self.sequences = 0
        """Trained since `begin`."""

    def begin(self, lease: tuple[Lease, ...]) -> None:
        """A round starts with `lease`. What it no longer has is forgotten; what is done is not handed out again."""
        units = [(held.epoch, unit) for held in lease for unit in range(held.start, held.stop)]
        leased = set(units)
        self._done = {unit: None for unit in self._done if unit in leased}
        self._started = {unit: count for unit, count in self._started.items() if unit in leased}
        self._counted = {unit: count for unit, count in self._counted.items() if unit in leased}
        first = dict(self._started)
        for stretch in self._handed_out:
            first[stretch.epoch, stretch.unit] = stretch.stop
        self._pending = deque(
            Stretch(epoch=epoch, unit=unit, start=first.get((epoch, unit), 0), stop=self._unit_sequences)
            for epoch, unit in units
            if (epoch, unit) not in self._done and first.get((epoch, unit), 0) < self._unit_sequences
        )
        self.sequences = 0

    def take(self, sequences: int) -> list[Stretch]:
        """The next `sequences` of the lease, fewer at its end, none when it is used up."""
        taken: list[Stretch] = []
        while sequences > 0 and self._pending:
            head = self._pending.popleft()
            stop = min(head.stop, head.start + sequences)
            taken.append(Stretch(epoch=head.epoch, unit=head.unit, start=head.start, stop=stop))
            sequences -= stop - head.start
            if stop < head.stop:
                self._pending.appendleft(Stretch(epoch=head.epoch, unit=head.unit, start=stop, stop=head.stop))
        self._handed_out.extend(taken)
        return taken

    def put_back(self) -> None:
        """What was handed out and not trained comes next again, as when a new loop begins."""
        for stretch in reversed(self._handed_out):
            head = self._pending[0] if self._pending else None
            stop = stretch.stop
            if head is not None and (head.epoch, head.unit, head.start) == (stretch.epoch, stretch.unit, stop):
                stop = self._pending.popleft().stop
            self._pending.appendleft(Stretch(epoch=stretch.epoch, unit=stretch.unit, start=stretch.start, stop=stop))
        self._handed_out.clear()

    def trained(self) -> None:
        """A step ended: all that was handed out is in the local model."""
        for stretch in self._handed_out:
            unit = (stretch.epoch, stretch.unit)
            self.sequences += stretch.stop - stretch.start
            if stretch.stop == self._unit_sequences:
                self._done[unit] = None
                self._started.pop(unit, None)
            else:
                self._started[unit] = stretch.stop
        self._handed_out.clear()

    def ranges_done(self) -> tuple[Lease, ...]:
        """Whole units trained since the last counted contribution."""
        ranges: list[Lease] = []
        for epoch, unit in sorted(self._done):
            if ranges and (ranges[-1].epoch, ranges[-1].stop) == (epoch, unit):
                ranges[-1] = Lease(epoch=epoch, start=ranges[-1].start, stop=unit + 1)
            else:
                ranges.append(Lease(epoch=epoch, start=unit, stop=unit + 1))
        return tuple(ranges)

    def counted(self) -> None:
        """The contribution was counted in at least one part: its units are consumed."""
        self._done.clear()
        self._counted = dict(self._started)

    def discarded(self) -> None:
        """The local model became θ: what was not counted is to be trained again. `begin` follows."""
        self._done.clear()
        self._handed_out.clear()
        self._started = dict(self._counted)

    def counted_units(self) -> dict[Unit, int]:
        """For a checkpoint: sequences counted of units in the middle."""
        return dict(self._counted)

    def restore(self, counted: Mapping[Unit, int]) -> None:
        """From a checkpoint. `begin` follows."""
        self._counted = {unit: count for unit, count in counted.items() if 0 < count < self._unit_sequences}
        self._started = dict(self._counted)
