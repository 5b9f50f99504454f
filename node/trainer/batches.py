"""Batches of the sequences that the chain leases to this machine (design section 4, "Data is assigned").

B: sequences of a batch, T: tokens of a sequence, S: sequences of a unit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from node.errors import OperatorError
from node.trainer.lease_cursor import Stretch
from node.trainer.ranks import Ranks
from protocol.permutation import Permutation

if TYPE_CHECKING:
    from node.trainer.attach import Swarm
    from node.trainer.outer_optimizer import OuterOptimizer
    from node.trainer.units import UnitReader


class BatchSource(Protocol):
    """Where the sequences of a leased unit come from."""

    def read(self, stretches: Sequence[Stretch]) -> Any:
        """One batch of these sequences, in this order."""


class MapStyleDataset(Protocol):
    """As a `torch.utils.data.DataLoader` takes."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class RunSource:
    """The run's own data: `{"input_ids": [B, T], "labels": [B, T]}`, int64, on the CPU."""

    def __init__(self, reader: UnitReader) -> None:
        self._reader = reader

    def read(self, stretches: Sequence[Stretch]) -> dict[str, torch.Tensor]:
        rows = [
            torch.from_numpy(self._reader.read(stretch.epoch, stretch.unit, stretch.start, stretch.stop))
            for stretch in stretches
        ]
        input_ids = torch.cat(rows)
        return {"input_ids": input_ids, "labels": input_ids}


class DatasetSource:
    """A user's map-style dataset: the unit at a leased place is S samples in a row, the places permuted per epoch.

    Raises `OperatorError` when the dataset is smaller than the epoch that the chain leases from.
    """

    def __init__(self, dataset: MapStyleDataset, *, run: bytes, unit_sequences: int, units: int) -> None:
        if len(dataset) < max(units, 1) * unit_sequences:
            raise OperatorError(
                f"the dataset has {len(dataset)} samples and an epoch of the run {max(units, 1) * unit_sequences}: "
                "give the dataset that the run was created for"
            )
        self._dataset = dataset
        self._run = run
        self._unit_sequences = unit_sequences
        self._leased_units = units
        self._units = units or len(dataset) // unit_sequences
        self._permutation: tuple[int, Permutation] | None = None

    def read(self, stretches: Sequence[Stretch]) -> Any:
        samples = []
        for stretch in stretches:
            first = self._unit(stretch.epoch, stretch.unit) * self._unit_sequences
            samples += [self._dataset[first + index] for index in range(stretch.start, stretch.stop)]
        return torch.utils.data.default_collate(samples)

    def _unit(self, epoch: int, place: int) -> int:
        if self._leased_units == 0:
            # The run knows no length, so its one epoch never ends; this dataset's length divides it.
            epoch, place = divmod(place, self._units)
        if self._permutation is None or self._permutation[0] != epoch:
            self._permutation = epoch, Permutation(run=self._run, epoch=epoch, units=self._units)
        return self._permutation[1][place]


def batch_source(swarm: Swarm, dataset: MapStyleDataset | None) -> BatchSource:
    """The run's data, or the user's dataset in its place."""
    if dataset is None:
        from node.trainer.units import UnitReader

        return RunSource(UnitReader(swarm.manifest, swarm.artifacts_directory, allow_functions=swarm.allow_functions))
    data = swarm.manifest.data
    return DatasetSource(dataset, run=bytes.fromhex(swarm.run_id), unit_sequences=data.unit_sequences, units=data.units)


class Batches(Iterator[Any]):
    """Iterates over the lease, from round to round, until the run ends. Made by `OuterOptimizer.batches`.

    Everything handed out since the last `step` counts as trained when `step` is called, so several batches may make one
    step. What was handed out and never stepped comes again.
    """

    def __init__(self, outer: OuterOptimizer, source: BatchSource, batch_size: int, ranks: Ranks) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size = {batch_size}: give at least 1")
        self._outer = outer
        self._source = source
        self._batch_size = batch_size
        self._ranks = ranks
        outer.cursor.put_back()

    def __next__(self) -> Any:
        while not self._outer.done:
            taken = self._outer.cursor.take(self._batch_size * self._ranks.world)
            mine = _share(taken, self._ranks.rank, self._ranks.world)
            if mine:
                return self._source.read(mine)
            # Used up before the budget: contribute what there is; the commit brings the next lease.
            self._outer.finish_round()
        raise StopIteration


def _share(stretches: Sequence[Stretch], rank: int, world: int) -> list[Stretch]:
    """This rank's equal share of the sequences; what does not divide is left out, so that all ranks step alike."""
    if world == 1:
        return list(stretches)
    total = sum(stretch.stop - stretch.start for stretch in stretches)
    first, last = rank * (total // world), (rank + 1) * (total // world)
    mine, place = [], 0
    for stretch in stretches:
        length = stretch.stop - stretch.start
        start, stop = max(first - place, 0), min(last - place, length)
        if start < stop:
            mine.append(
                Stretch(epoch=stretch.epoch, unit=stretch.unit, start=stretch.start + start, stop=stretch.start + stop)
            )
        place += length
    return mine
