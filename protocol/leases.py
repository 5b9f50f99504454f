"""Leases: which units of the data are whose (protocol section 2, "Leases").

Ranges are kept normal: ascending, disjoint, adjacent ones merged. Within a lineage no unit is in two leases: a range
leaves the supply once, and comes back only when a member that did not train on it is gone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from protocol.messages import UnitRange

Ranges = tuple[UnitRange, ...]


def normal(ranges: Iterable[UnitRange]) -> Ranges:
    """The same units as ascending, disjoint, maximal ranges."""
    result: list[UnitRange] = []
    for item in sorted(ranges):
        last = result[-1] if result else None
        if last is not None and last.epoch == item.epoch and item.start <= last.stop:
            if item.stop > last.stop:
                result[-1] = UnitRange(epoch=last.epoch, start=last.start, stop=item.stop)
        else:
            result.append(item)
    return tuple(result)


def count(ranges: Iterable[UnitRange]) -> int:
    """Units in `ranges`, which are disjoint."""
    return sum(item.stop - item.start for item in ranges)


def subtract(ranges: Iterable[UnitRange], removed: Iterable[UnitRange]) -> Ranges:
    """Units of `ranges` that are not in `removed`. Both may be in any order; units only in `removed` are ignored."""
    cuts = normal(removed)
    result: list[UnitRange] = []
    first = 0
    for item in normal(ranges):
        # Both lists ascend: a cut wholly before this range is before all later ones too.
        while first < len(cuts) and (cuts[first].epoch, cuts[first].stop) <= (item.epoch, item.start):
            first += 1
        start = item.start
        for cut in cuts[first:]:
            if (cut.epoch, cut.start) >= (item.epoch, item.stop):
                break
            if cut.start > start:
                result.append(UnitRange(epoch=item.epoch, start=start, stop=cut.start))
            start = max(start, cut.stop)
        if start < item.stop:
            result.append(UnitRange(epoch=item.epoch, start=start, stop=item.stop))
    return tuple(result)


def covers(ranges: Iterable[UnitRange], part: Iterable[UnitRange]) -> bool:
    """Whether `part` is disjoint in itself and lies within `ranges`."""
    part = tuple(part)
    merged = normal(part)
    return count(merged) == count(part) and not subtract(merged, ranges)


@dataclass(frozen=True, slots=True, kw_only=True)
class Supply:
    """Where leases come from: returned ranges first, then the cursor, which walks epoch after epoch."""

    returned: Ranges
    cursor_epoch: int
    cursor_unit: int
    epoch_units: int
    """0: data without a known length; its one epoch never ends."""

    def take(self, units: int) -> tuple[Ranges, Supply]:
        """`units` units, normal, and the supply without them."""
        taken: list[UnitRange] = []
        returned = list(self.returned)
        epoch, unit = self.cursor_epoch, self.cursor_unit
        while units > 0 and returned:
            item = returned.pop(0)
            stop = min(item.stop, item.start + units)
            taken.append(UnitRange(epoch=item.epoch, start=item.start, stop=stop))
            units -= stop - item.start
            if stop < item.stop:
                returned.insert(0, UnitRange(epoch=item.epoch, start=stop, stop=item.stop))
        while units > 0:
            stop = unit + units if self.epoch_units == 0 else min(self.epoch_units, unit + units)
            taken.append(UnitRange(epoch=epoch, start=unit, stop=stop))
            units -= stop - unit
            epoch, unit = (epoch + 1, 0) if stop == self.epoch_units else (epoch, stop)
        supply = Supply(returned=tuple(returned), cursor_epoch=epoch, cursor_unit=unit, epoch_units=self.epoch_units)
        return normal(taken), supply

    def give_back(self, ranges: Iterable[UnitRange]) -> Supply:
        """The supply with `ranges` to lease first."""
        return Supply(
            returned=normal((*self.returned, *ranges)),
            cursor_epoch=self.cursor_epoch,
            cursor_unit=self.cursor_unit,
            epoch_units=self.epoch_units,
        )

    def top_up(self, lease: Ranges, units_wanted: int) -> tuple[Ranges, Supply]:
        """`lease` filled up to twice `units_wanted`, and what is left."""
        missing = 2 * units_wanted - count(lease)
        if missing <= 0:
            return lease, self
        taken, supply = self.take(missing)
        return normal((*lease, *taken)), supply
