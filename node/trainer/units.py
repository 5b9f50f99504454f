"""From leased units to packed sequences (design section 4, "Data is assigned").

Shapes: S sequences of a unit, T tokens of a sequence; tokens are int64, ready for an embedding.

Packed tokens of the run are `leased`: the chain's (epoch, position) names a unit of a keyed permutation, the same bytes
on every peer, whatever the number of loader workers. Data without a known length or order, such as a dataset that is
streamed, is `local`: a lease says how much to train on, each peer draws it from its own shuffle of the dataset, and
nobody promises that all of it is covered, or once only.
"""

from __future__ import annotations

import queue
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from node import artifacts
from node.errors import AtollError
from node.manifest import Manifest
from node.trainer import documents, tokens
from node.trainer.documents import DataError, Document
from node.trainer.tokens import Packer
from protocol.names import digest, encode_integer
from protocol.permutation import Permutation

_KEPT_UNITS = 8
"""Units of a stream that can be asked for again: a step's batch may end in the middle of one."""
_AHEAD_UNITS = 4
"""Units that a stream makes ahead, so that the network does not hold up a step."""
_RESHARD_BELOW = 64
"""With fewer files than this, row groups of parquet files are shards too, so that peers start at different places of
one file. It reads the end of each file first, which many files would make long."""
_END_WAIT_S = 5.0

Sequences = npt.NDArray[np.int64]


class UnitReader:
    """Reads the units that the chain leases, from the run's artifacts or its dataset.

    `artifacts_directory` is a folder of content-addressed files; what is read of it is verified first.
    `data_directory` holds files of datasets that are on no hub (default: `ATOLL_DATA`). Raises `DataError`,
    `ArtifactError` or `TokensError`, each one sentence.
    """

    def __init__(
        self,
        manifest: Manifest,
        artifacts_directory: Path,
        *,
        allow_functions: Sequence[str] = (),
        data_directory: Path | None = None,
    ) -> None:
        self._data = manifest.data
        self._vocabulary = _vocabulary(manifest)
        self._run = manifest.run_id()
        self._permutation = Permutation(run=self._run, epoch=0, units=manifest.data.units)
        self._epoch = 0
        self._packed: tokens.TokenArray | None = None
        self._stream: _Stream | None = None
        if manifest.data.kind == "tokens":
            assert manifest.data.artifact is not None, "a valid manifest"
            self._packed = _open(manifest, manifest.data.artifact, artifacts_directory)
            needed = manifest.data.units * manifest.data.unit_sequences
            if len(self._packed) < needed:
                raise DataError(f"the run's tokens have {len(self._packed)} sequences and its units need {needed}")
        else:
            source = _Source(manifest, artifacts_directory, allow_functions, data_directory)
            self._stream = _Stream(source, run=self._run, unit_sequences=manifest.data.unit_sequences)

    @property
    def assignment(self) -> Literal["leased", "local"]:
        """`local`: no promise that the run covers the data."""
        return self._data.assignment

    def read(self, epoch: int, position: int, start: int = 0, stop: int | None = None) -> Sequences:
        """Sequences `[start, stop)` of the unit at `position` of `epoch`, [stop − start, T].

        Raises `IndexError` for a place outside the epoch or the unit.
        """
        stop = self._data.unit_sequences if stop is None else stop
        if not 0 <= start <= stop <= self._data.unit_sequences:
            raise IndexError(f"sequences {start} … {stop} are not within a unit of {self._data.unit_sequences}")
        if self._packed is None:
            assert self._stream is not None
            sequences = self._stream.unit(epoch, position)[start:stop]
        else:
            first = self._unit(epoch, position) * self._data.unit_sequences
            sequences = self._packed[first + start : first + stop].astype(np.int64)
        tokens.check_range(sequences, self._vocabulary)
        return sequences

    def close(self) -> None:
        """End the stream's thread. Reading on is then an error."""
        if self._stream is not None:
            self._stream.close()

    def _unit(self, epoch: int, position: int) -> int:
        if epoch != self._epoch:
            self._permutation = Permutation(run=self._run, epoch=epoch, units=self._data.units)
            self._epoch = epoch
        return self._permutation[position]


def validation_sequences(
    manifest: Manifest, artifacts_directory: Path, *, data_directory: Path | None = None
) -> Sequences:
    """The run's fixed validation sequences [V, T], the same on every peer. Raises as `UnitReader` does."""
    validation = manifest.validation
    if validation.artifact is not None:
        held: Sequences = _open(manifest, validation.artifact, artifacts_directory)[: validation.sequences].astype(
            np.int64
        )
    else:
        held = _head_of_split(manifest, artifacts_directory, data_directory)
    tokens.check_range(held, _vocabulary(manifest))
    return held


class _Source:
    """Documents of a run whose data each peer fetches itself, as lists of tokens, in an order that `seed` makes."""

    def __init__(
        self,
        manifest: Manifest,
        artifacts_directory: Path,
        allow_functions: Sequence[str],
        data_directory: Path | None,
    ) -> None:
        self.data = manifest.data
        self._share = manifest.validation.share
        self._allow_functions = allow_functions
        self._directory = data_directory or documents.data_directory()
        self._tokenizer = None
        if manifest.tokenizer is not None:
            path = artifacts.verified(manifest.artifacts[manifest.tokenizer], artifacts_directory)
            self._tokenizer = tokens.load_tokenizer(path)

    def training(self, seed: int, epoch: int) -> Iterator[Sequence[int]]:
        """One pass over all documents but validation's."""
        chosen = (text for text in self._documents(seed, epoch) if not tokens.held_out(text, self._share))
        return self.encoded(chosen)

    def encoded(self, chosen: Iterator[Document]) -> Iterator[Sequence[int]]:
        end = self.data.end_token_id
        for document in chosen:
            if not isinstance(document, str):
                yield document
                continue
            if self._tokenizer is None or end is None:
                raise DataError("the run's function yields text and the run has no tokenizer: create the run with one")
            # The rest of a batch is text too, or it is encoded one by one: functions yield one kind.
            batch = [document, *(text for text in islice(chosen, 63) if isinstance(text, str))]
            yield from tokens.encode_documents(self._tokenizer, batch, end)

    def _documents(self, seed: int, epoch: int) -> Iterator[Document]:
        if self.data.kind == "function":
            yield from documents.function_documents(self.data, self._allow_functions, seed=seed + epoch)
            return
        assert self.data.text_field is not None, "a valid manifest"
        rows = documents.dataset(self.data, self._directory)
        if rows.num_shards < _RESHARD_BELOW:
            rows = rows.reshard()
        # One shard at a time: reading several at once holds all of them, and the library sleeps when its threads end.
        rows = rows.shuffle(seed=seed, buffer_size=documents.SHUFFLE_DOCUMENTS, max_buffer_input_shards=1)
        rows.set_epoch(epoch)
        yield from documents.texts(rows, self.data.text_field)


class _Stream:
    """Units made of one peer's own shuffle, ahead of need, in a thread.

    The first unit that is asked for seeds the shuffle: no two peers, and no two lives of one peer, are leased the same,
    while the processes of one machine that read the same unit get the same bytes.
    """

    def __init__(self, source: _Source, *, run: bytes, unit_sequences: int) -> None:
        self._source = source
        self._run = run
        self._unit_sequences = unit_sequences
        self._made: OrderedDict[tuple[int, int], Sequences] = OrderedDict()
        self._ahead: queue.Queue[Sequences | Exception] = queue.Queue(_AHEAD_UNITS)
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    def unit(self, epoch: int, position: int) -> Sequences:
        """[S, T]; the last few can be asked for again."""
        made = self._made.get((epoch, position))
        if made is not None:
            return made
        if self._closed.is_set():
            raise DataError("the run's data was closed: open it again")
        if self._thread is None:
            seed = digest(b"atoll/stream", self._run, encode_integer(epoch), encode_integer(position))
            arguments = (int.from_bytes(seed[:4], "little"),)
            self._thread = threading.Thread(target=self._run_ahead, args=arguments, name="data", daemon=True)
            self._thread.start()
        # No deadline of its own: the dataset's library retries and gives up, and that arrives here as an error.
        item = self._ahead.get()
        if isinstance(item, Exception):
            self._closed.set()
            raise item
        self._made[epoch, position] = item
        if len(self._made) > _KEPT_UNITS:
            self._made.popitem(last=False)
        return item

    def close(self) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join(_END_WAIT_S)

    def _run_ahead(self, seed: int) -> None:
        try:
            for unit in self._units(seed):
                if not self._put(unit):
                    return
        except Exception as error:  # noqa: BLE001  (it is raised where the unit is asked for)
            self._put(error if isinstance(error, AtollError) else _as_data_error(error))

    def _put(self, item: Sequences | Exception) -> bool:
        while not self._closed.is_set():
            try:
                self._ahead.put(item, timeout=0.2)
            except queue.Full:
                continue
            return True
        return False

    def _units(self, seed: int) -> Iterator[Sequences]:
        packer = Packer(self._source.data.sequence_tokens)
        for epoch in count():
            empty = True
            for document in self._source.training(seed, epoch):
                empty = False
                packer.add(document)
                while len(packer) >= self._unit_sequences:
                    yield packer.take(self._unit_sequences)
            if empty:
                raise DataError("the run's dataset has no document to train on: check its split and text_field")


def _head_of_split(manifest: Manifest, artifacts_directory: Path, data_directory: Path | None) -> Sequences:
    data = msgspec.structs.replace(manifest.data, split=manifest.validation.split)
    source = _Source(manifest, artifacts_directory, (), data_directory)
    assert data.text_field is not None, "a valid manifest"
    rows = documents.dataset(data, data_directory or documents.data_directory())
    packer = Packer(data.sequence_tokens)
    for document in source.encoded(documents.texts(rows, data.text_field)):
        packer.add(document)
        if len(packer) >= manifest.validation.sequences:
            break
    return packer.take(min(len(packer), manifest.validation.sequences))


def _open(manifest: Manifest, name: str, artifacts_directory: Path) -> tokens.TokenArray:
    path = artifacts.verified(manifest.artifacts[name], artifacts_directory)
    return tokens.open_tokens(path, sequence_tokens=manifest.data.sequence_tokens)


def _vocabulary(manifest: Manifest) -> int | None:
    size = manifest.model.config.get("vocab_size")
    return size if isinstance(size, int) else None


def _as_data_error(error: Exception) -> DataError:
    return DataError(f"the run's data cannot be read on ({' '.join(str(error).split())[:200] or type(error).__name__})")
