"""The way through the lease: no sequence twice, none left out, units reported once all of them is trained."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from node.errors import OperatorError
from node.trainer.batches import DatasetSource, _share
from node.trainer.lease_cursor import LeaseCursor, Stretch
from node.trainer.wire import Lease

UNIT = 8


def lease(start: int, stop: int, epoch: int = 0) -> tuple[Lease, ...]:
    return (Lease(epoch=epoch, start=start, stop=stop),)


def places(stretches: list[Stretch]) -> list[tuple[int, int, int]]:
    return [
        (stretch.epoch, stretch.unit, sequence)
        for stretch in stretches
        for sequence in range(stretch.start, stretch.stop)
    ]


def train(cursor: LeaseCursor, sequences: int) -> list[tuple[int, int, int]]:
    taken = places(cursor.take(sequences))
    cursor.trained()
    return taken


def test_batches_run_through_the_units_in_order_across_ranges() -> None:
    cursor = LeaseCursor(UNIT)
    cursor.begin((Lease(epoch=0, start=9, stop=10), Lease(epoch=1, start=0, stop=1)))
    seen = []
    while taken := cursor.take(3):
        seen += places(taken)
    assert seen == [(0, 9, sequence) for sequence in range(8)] + [(1, 0, sequence) for sequence in range(8)]


def test_a_unit_is_done_when_all_of_it_is_trained_not_when_it_is_handed_out() -> None:
    cursor = LeaseCursor(UNIT)
    cursor.begin(lease(4, 7))
    cursor.take(UNIT)
    assert cursor.ranges_done() == ()
    cursor.trained()
    assert cursor.ranges_done() == lease(4, 5)
    train(cursor, UNIT + 5)
    assert cursor.ranges_done() == lease(4, 6)
    assert cursor.sequences == 2 * UNIT + 5


def test_a_started_unit_goes_on_in_the_next_round() -> None:
    cursor = LeaseCursor(UNIT)
    cursor.begin(lease(0, 3))
    train(cursor, 11)
    cursor.counted()
    cursor.begin(lease(1, 5))
    assert train(cursor, 6) == [(0, 1, sequence) for sequence in range(3, 8)] + [(0, 2, 0)]
    assert cursor.ranges_done() == lease(1, 2)


def test_uncounted_units_are_reported_again_and_not_trained_again() -> None:
    cursor = LeaseCursor(UNIT)
    cursor.begin(lease(0, 4))
    train(cursor, 2 * UNIT)
    cursor.begin(lease(0, 4))  # not counted: the chain still leases them
    assert train(cursor, UNIT)[0] == (0, 2, 0)
    assert cursor.ranges_done() == lease(0, 3)


def test_discarded_work_is_trained_again_from_what_was_counted() -> None:
    cursor = LeaseCursor(UNIT)
    cursor.begin(lease(0, 4))
    train(cursor, 3)
    cursor.counted()
    cursor.begin(lease(0, 4))
    train(cursor, 10)
    cursor.take(2)
    cursor.discarded()
    cursor.begin(lease(0, 4))
    assert cursor.ranges_done() == ()
    assert train(cursor, 2) == [(0, 0, 3), (0, 0, 4)]


def test_units_that_left_the_lease_are_forgotten() -> None:
    cursor = LeaseCursor(UNIT)
    cursor.begin(lease(0, 2))
    train(cursor, 12)
    cursor.begin(lease(7, 9))
    assert cursor.ranges_done() == ()
    assert cursor.counted_units() == {}
    assert train(cursor, 1) == [(0, 7, 0)]


def test_what_was_handed_out_and_never_stepped_comes_again() -> None:
    cursor = LeaseCursor(UNIT)
    cursor.begin(lease(0, 2))
    train(cursor, 3)
    handed_out = places(cursor.take(4)) + places(cursor.take(4))
    cursor.put_back()
    assert places(cursor.take(8)) == handed_out
    cursor.put_back()
    assert places(cursor.take(100)) == [(0, 0, s) for s in range(3, 8)] + [(0, 1, s) for s in range(8)]


def test_a_checkpoint_keeps_counted_places_only() -> None:
    cursor = LeaseCursor(UNIT)
    cursor.begin(lease(0, 4))
    train(cursor, 11)
    cursor.counted()
    kept = cursor.counted_units()
    train(cursor, 2)
    assert kept == cursor.counted_units() == {(0, 1): 3}
    later = LeaseCursor(UNIT)
    later.restore(kept)
    later.begin(lease(1, 4))
    assert train(later, 1) == [(0, 1, 3)]


def test_over_random_histories_every_sequence_is_trained_once() -> None:
    """Counted rounds only: what the chain consumes is exactly what was trained, without a gap or a repetition."""
    for seed in range(50):
        dice = random.Random(seed)
        cursor = LeaseCursor(UNIT)
        trained: Counter[tuple[int, int, int]] = Counter()
        consumed = 0
        for _ in range(10):
            cursor.begin(lease(consumed, consumed + dice.randint(1, 6)))
            for _ in range(dice.randint(0, 12)):
                if dice.random() < 0.2:
                    cursor.take(dice.randint(1, 9))
                    cursor.put_back()
                taken = places(cursor.take(dice.randint(1, 9)))
                trained.update(taken)
                cursor.trained()
            done = cursor.ranges_done()
            assert all(held.start == consumed for held in done[:1])
            consumed += sum(held.stop - held.start for held in done)
            cursor.counted()
        assert set(trained.values()) <= {1}
        whole = {(0, unit, sequence) for unit in range(consumed) for sequence in range(UNIT)}
        assert whole <= set(trained)
        assert {unit for _, unit, _ in set(trained) - whole} <= {consumed}


def test_ranks_share_a_batch_evenly() -> None:
    taken = [Stretch(epoch=0, unit=3, start=5, stop=8), Stretch(epoch=0, unit=4, start=0, stop=6)]
    shares = [places(_share(taken, rank, 4)) for rank in range(4)]
    assert [len(share) for share in shares] == [2, 2, 2, 2]
    assert [place for share in shares for place in share] == places(taken)[:8]


def test_a_dataset_for_a_run_without_a_known_length_covers_itself_epoch_by_epoch() -> None:
    dataset = torch.arange(20)
    source = DatasetSource(dataset, run=bytes(32), unit_sequences=4, units=0)
    first, second = (
        [
            int(value)
            for place in range(5 * epoch, 5 * epoch + 5)
            for value in source.read([Stretch(epoch=0, unit=place, start=0, stop=4)])
        ]
        for epoch in range(2)
    )
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second


def test_a_dataset_that_is_too_small_is_refused() -> None:
    with pytest.raises(OperatorError, match="the dataset has 20 samples and an epoch of the run 24"):
        DatasetSource(range(20), run=bytes(32), unit_sequences=4, units=6)
