"""Lease arithmetic, against sets of single units."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from protocol.leases import Ranges, Supply, count, covers, normal, subtract
from protocol.messages import UnitRange

Units = set[tuple[int, int]]


def units_of(ranges: Ranges) -> Units:
    return {(item.epoch, unit) for item in ranges for unit in range(item.start, item.stop)}


def some_ranges(rng: random.Random, most: int = 6) -> Ranges:
    ranges = []
    for _ in range(rng.randint(0, most)):
        start = rng.randrange(30)
        ranges.append(UnitRange(epoch=rng.randrange(3), start=start, stop=start + rng.randint(1, 9)))
    return tuple(ranges)


def is_normal(ranges: Ranges) -> bool:
    return all((first.epoch, first.stop) < (second.epoch, second.start) for first, second in pairwise(ranges)) and all(
        len(item) > 0 for item in ranges
    )


@pytest.mark.parametrize("seed", range(200))
def test_ranges_behave_like_sets(seed: int) -> None:
    rng = random.Random(seed)
    first, second = some_ranges(rng), some_ranges(rng)
    assert units_of(normal(first)) == units_of(first)
    assert is_normal(normal(first))
    assert count(normal(first)) == len(units_of(first))
    left = subtract(first, second)
    assert units_of(left) == units_of(first) - units_of(second)
    assert is_normal(left)


@pytest.mark.parametrize("seed", range(100))
def test_covers_means_disjoint_and_inside(seed: int) -> None:
    rng = random.Random(seed)
    lease, part = normal(some_ranges(rng)), some_ranges(rng, most=2)
    disjoint = sum(len(item) for item in part) == len(units_of(part))
    assert covers(lease, part) == (disjoint and units_of(part) <= units_of(lease))


def test_covers_by_example() -> None:
    lease = (UnitRange(epoch=1, start=4, stop=8),)
    assert covers(lease, (UnitRange(epoch=1, start=6, stop=8), UnitRange(epoch=1, start=4, stop=6)))
    assert not covers(lease, (UnitRange(epoch=1, start=4, stop=6), UnitRange(epoch=1, start=5, stop=7)))
    assert not covers(lease, (UnitRange(epoch=0, start=4, stop=6),))
    assert covers((), ())


@pytest.mark.parametrize("seed", range(50))
def test_supply_hands_out_every_unit_once(seed: int) -> None:
    """Takes and returns in any order: what is out and what is in stay disjoint, and returned ranges go first."""
    rng = random.Random(seed)
    epoch_units = rng.choice((1, 5, 17, 0))
    supply = Supply(returned=(), cursor_epoch=0, cursor_unit=0, epoch_units=epoch_units)
    out: list[Ranges] = []
    for _ in range(60):
        if out and rng.random() < 0.4:
            back = out.pop(rng.randrange(len(out)))
            supply = supply.give_back(back)
            assert is_normal(supply.returned)
        else:
            waiting = units_of(supply.returned)
            wanted = rng.randint(0, 20)
            taken, supply = supply.take(wanted)
            assert count(taken) == wanted
            assert is_normal(taken)
            assert len(units_of(taken) & waiting) == min(wanted, len(waiting))
            out.append(taken)
        held = [unit for ranges in out for unit in units_of(ranges)]
        inside = units_of(supply.returned)
        assert len(held) == len(set(held))
        assert not inside & set(held)
        if epoch_units:
            # Nothing is lost: up to the cursor every unit is either out or returned.
            cursor = {(e, u) for e in range(supply.cursor_epoch + 1) for u in range(epoch_units)}
            cursor = {unit for unit in cursor if unit < (supply.cursor_epoch, supply.cursor_unit)}
            assert inside | set(held) == cursor


def test_an_epoch_ends_and_the_next_begins() -> None:
    supply = Supply(returned=(), cursor_epoch=2, cursor_unit=8, epoch_units=10)
    taken, supply = supply.take(5)
    assert taken == (UnitRange(epoch=2, start=8, stop=10), UnitRange(epoch=3, start=0, stop=3))
    assert (supply.cursor_epoch, supply.cursor_unit) == (3, 3)
    taken, supply = supply.take(7)
    assert (supply.cursor_epoch, supply.cursor_unit) == (4, 0)


def test_top_up_fills_to_twice_the_wish() -> None:
    supply = Supply(returned=(), cursor_epoch=0, cursor_unit=0, epoch_units=100)
    lease, supply = supply.top_up((), 4)
    assert count(lease) == 8
    again, same = supply.top_up(lease, 4)
    assert (again, same) == (lease, supply)
    # A smaller wish takes nothing away.
    assert supply.top_up(lease, 1)[0] == lease
