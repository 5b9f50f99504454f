"""The keyed permutation of an epoch's units."""

from __future__ import annotations

from itertools import pairwise

import pytest

from protocol.names import digest
from protocol.permutation import Permutation, extra_unit

RUN = digest(b"run")


@pytest.mark.parametrize("units", [1, 2, 3, 4, 5, 7, 16, 17, 64, 65, 255, 256, 257, 1000, 4097])
def test_it_is_a_bijection(units: int) -> None:
    permutation = Permutation(run=RUN, epoch=3, units=units)
    assert sorted(permutation[position] for position in range(units)) == list(range(units))


def test_it_depends_on_run_and_epoch() -> None:
    def first(run: bytes, epoch: int) -> list[int]:
        permutation = Permutation(run=run, epoch=epoch, units=1000)
        return [permutation[position] for position in range(50)]

    assert first(RUN, 0) == first(RUN, 0)
    assert first(RUN, 0) != first(RUN, 1)
    assert first(RUN, 0) != first(digest(b"another"), 0)


def test_it_never_changes() -> None:
    """Every peer and every version must read a lease alike: these are the units of the format."""
    permutation = Permutation(run=digest(b"fixed"), epoch=1, units=100_003)
    assert [permutation[position] for position in (0, 1, 2, 50_000, 100_002)] == FIXED
    assert [extra_unit(digest(b"fixed"), "Peer", n, 100_003) for n in range(3)] == FIXED_EXTRA


FIXED = [66214, 63598, 25564, 59305, 82117]
FIXED_EXTRA = [99944, 26977, 70549]


def test_neighbours_scatter() -> None:
    """Leases are ranges: were neighbours to stay together, a lease would be one speech of the corpus."""
    units = 10_000
    permutation = Permutation(run=RUN, epoch=0, units=units)
    values = [permutation[position] for position in range(2000)]
    gaps = [abs(second - first) for first, second in pairwise(values)]
    # For a random order the mean gap is units / 3.
    assert 0.28 < sum(gaps) / len(gaps) / units < 0.39
    quarters = [sum(quarter * 2500 <= value < (quarter + 1) * 2500 for value in values) for quarter in range(4)]
    assert all(400 < count < 600 for count in quarters)


def test_it_needs_no_memory_for_large_epochs() -> None:
    permutation = Permutation(run=RUN, epoch=0, units=1 << 40)
    assert all(0 <= permutation[position] < 1 << 40 for position in (0, 1, (1 << 40) - 1))


def test_outside_is_an_error() -> None:
    permutation = Permutation(run=RUN, epoch=0, units=10)
    for position in (-1, 10):
        with pytest.raises(IndexError):
            permutation[position]
    with pytest.raises(ValueError, match="at least 0"):
        Permutation(run=RUN, epoch=0, units=-1)


def test_data_without_a_length_is_taken_in_order() -> None:
    permutation = Permutation(run=RUN, epoch=0, units=0)
    assert [permutation[position] for position in (0, 5, 10**9)] == [0, 5, 10**9]


def test_extra_units_differ_by_peer_and_turn() -> None:
    drawn = {(peer, n): extra_unit(RUN, peer, n, 1 << 30) for peer in ("A", "B") for n in range(100)}
    assert len(set(drawn.values())) == len(drawn)
    assert all(0 <= unit < 1 << 30 for unit in drawn.values())
    with pytest.raises(ValueError, match="at least 1 unit"):
        extra_unit(RUN, "A", 0, 0)
