"""Leased units to sequences: the same bytes everywhere, any place in any order; and streams, which promise less."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from run_samples import Created, created, text, write_run

from node import run_config
from node.artifacts import ArtifactError
from node.manifest import Data, Manifest
from node.trainer import documents, tokens
from node.trainer.documents import DataError
from node.trainer.models import ModelError
from node.trainer.tokens import TokensError
from node.trainer.units import UnitReader, validation_sequences


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Created:
    return created(tmp_path_factory.mktemp("run"))


def packed(run: Created) -> np.ndarray:
    artifact = run.manifest.artifacts["tokens"]
    return np.asarray(tokens.open_tokens(run.artifacts / artifact.hash, sequence_tokens=16))


def test_an_epoch_is_every_unit_once(run: Created) -> None:
    reader = UnitReader(run.manifest, run.artifacts)
    units = run.manifest.data.units
    assert reader.assignment == "leased"
    epoch = np.stack([reader.read(0, position) for position in range(units)])
    assert epoch.dtype == np.int64
    assert epoch.shape == (units, 4, 16)
    expected = packed(run)[: units * 4].reshape(units, 4, 16)
    assert sorted(map(bytes, epoch.astype(np.uint16))) == sorted(map(bytes, expected))
    assert not np.array_equal(epoch, expected)
    following = np.stack([reader.read(1, position) for position in range(units)])
    assert not np.array_equal(epoch, following)


def test_order_of_reading_does_not_matter(run: Created) -> None:
    one, other = UnitReader(run.manifest, run.artifacts), UnitReader(run.manifest, run.artifacts)
    places = [(0, 3), (1, 0), (0, 3), (2, 5), (0, 0)]
    expected = {place: one.read(*place).tolist() for place in places}
    for place in reversed(places):
        assert other.read(*place).tolist() == expected[place]


def test_any_sequence_of_a_unit(run: Created) -> None:
    reader = UnitReader(run.manifest, run.artifacts)
    whole = reader.read(0, 2)
    assert reader.read(0, 2, 1, 3).tolist() == whole[1:3].tolist()
    assert reader.read(0, 2, 3).tolist() == whole[3:].tolist()
    assert reader.read(0, 2, 4).shape == (0, 16)
    whole[:] = 0  # a caller's own copy
    assert reader.read(0, 2).any()
    for place in ((0, run.manifest.data.units), (0, -1), (0, 0, 0, 5), (0, 0, 3, 2), (0, 0, -1)):
        with pytest.raises(IndexError):
            reader.read(*place)


def test_validation_is_fixed_and_apart_from_training(run: Created) -> None:
    held = validation_sequences(run.manifest, run.artifacts)
    assert held.shape == (run.manifest.validation.sequences, 16)
    assert held.dtype == np.int64
    training = {bytes(row) for row in packed(run).astype(np.int64)}
    assert not any(bytes(row) in training for row in held)


def test_artifacts_are_verified(run: Created, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="is not in"):
        UnitReader(run.manifest, tmp_path)
    artifact = run.manifest.artifacts["tokens"]
    data = bytearray((run.artifacts / artifact.hash).read_bytes())
    data[-1] ^= 1
    (tmp_path / artifact.hash).write_bytes(data)
    with pytest.raises(ArtifactError, match="does not have the hash of its name: remove it and fetch it again"):
        UnitReader(run.manifest, tmp_path)


def test_tokens_outside_the_models_vocabulary_are_named(run: Created) -> None:
    config = {**run.manifest.model.config, "vocab_size": 40}
    manifest = msgspec.structs.replace(run.manifest, model=msgspec.structs.replace(run.manifest.model, config=config))
    with pytest.raises(TokensError, match="the model's vocabulary has 40"):
        UnitReader(manifest, run.artifacts).read(0, 0)


def test_an_artifact_smaller_than_the_units_it_should_hold(run: Created) -> None:
    data = msgspec.structs.replace(run.manifest.data, units=10_000)
    with pytest.raises(DataError, match="its units need 40000"):
        UnitReader(msgspec.structs.replace(run.manifest, data=data), run.artifacts)


# ---------------------------------------------------------------- streams


@pytest.fixture
def streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of text as `json`, `parquet` and `text` files, named in `ATOLL_DATA`; the cache apart from it."""
    import pyarrow
    import pyarrow.parquet

    folder = tmp_path / "data"
    folder.mkdir()
    texts = [text(1000 + seed) for seed in range(60)]
    lines = "".join(json.dumps({"text": one, "number": 1}) + "\n" for one in texts)
    (folder / "some.jsonl").write_text(lines)
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), folder / "some.parquet", row_group_size=10)
    for index, one in enumerate(texts):
        (folder / f"{index}.txt").write_text(one)
    monkeypatch.setenv("ATOLL_DATA", str(folder))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    return folder


def stream_run(tmp_path: Path, path: str, files: str, **changes: object) -> Created:
    config = run_config.load(
        write_run(tmp_path, documents=1),
        {
            "data.source": "huggingface",
            "data.files": [],
            "data.path": path,
            "data.data_files": [files],
            "validation.share": 0.3,
            **changes,
        },
    )
    return Created(tmp_path, config)


def spelt(manifest: Manifest, artifacts: Path, sequences: np.ndarray) -> str:
    codec = tokens.load_tokenizer(artifacts / manifest.artifacts["tokenizer"].hash)
    decoded: str = codec.decode(sequences.reshape(-1).tolist(), skip_special_tokens=False)
    return decoded


@pytest.mark.slow
@pytest.mark.parametrize(("path", "files"), [("json", "*.jsonl"), ("parquet", "*.parquet"), ("text", "*.txt")])
def test_a_dataset_is_streamed(tmp_path: Path, streamed: Path, path: str, files: str) -> None:
    run = stream_run(tmp_path, path, files)
    data = run.manifest.data
    assert (data.kind, data.units, data.data_files) == ("huggingface", 0, (files,))
    texts = {text(1000 + seed) for seed in range(60)}
    held = {one for one in texts if tokens.held_out(one, 0.3)}
    reader = UnitReader(run.manifest, run.artifacts)
    try:
        assert reader.assignment == "local"
        units = [reader.read(0, 7 + step) for step in range(80)]
        assert {unit.shape for unit in units} == {(4, 16)}
        stream = spelt(run.manifest, run.artifacts, np.concatenate(units))
        whole = set(stream.split("<|endoftext|>")[1:-1])
        assert len(whole) > 5
        assert whole <= texts - held
        # What was read lately can be read again, in slices.
        assert reader.read(0, 86, 1, 2).tolist() == units[-1][1:2].tolist()
    finally:
        reader.close()
    kept = validation_sequences(run.manifest, run.artifacts)
    assert set(spelt(run.manifest, run.artifacts, kept).split("<|endoftext|>")[1:-1]) <= held


@pytest.mark.slow
def test_peers_draw_in_other_orders_and_a_stream_never_ends(tmp_path: Path, streamed: Path) -> None:
    run = stream_run(tmp_path, "json", "*.jsonl")
    readers = [UnitReader(run.manifest, run.artifacts) for _ in range(3)]
    try:
        first, same, other = (
            np.stack([reader.read(0, start + step) for step in range(120)])
            for reader, start in zip(readers, (0, 0, 500), strict=True)
        )
    finally:
        for reader in readers:
            reader.close()
    assert np.array_equal(first, same)
    assert not np.array_equal(first, other)
    # 120 units are more than one pass over 60 documents: each pass is shuffled anew.
    documents_read = spelt(run.manifest, run.artifacts, first).split("<|endoftext|>")[1:-1]
    assert len(documents_read) > 2 * len(set(documents_read)) - 20
    passes = len(set(documents_read))
    assert documents_read[:passes] != documents_read[passes : 2 * passes]


@pytest.mark.slow
def test_validation_of_a_split_when_the_run_ships_none(tmp_path: Path, streamed: Path) -> None:
    run = stream_run(tmp_path, "json", "*.jsonl", **{"validation.split": "train"})
    assert run.manifest.validation.share == 0
    shipped = validation_sequences(run.manifest, run.artifacts)
    without = msgspec.structs.replace(
        run.manifest, validation=msgspec.structs.replace(run.manifest.validation, artifact=None, split="train")
    )
    assert validation_sequences(without, run.artifacts).tolist() == shipped.tolist()
    assert spelt(run.manifest, run.artifacts, shipped).startswith(text(1000)[:40])


HUB = Data(
    kind="huggingface",
    sequence_tokens=16,
    unit_sequences=4,
    units=0,
    path="json",
    split="train",
    text_field="text",
    data_files=("*.jsonl",),
    end_token_id=0,
)


@pytest.mark.slow
def test_a_dataset_that_cannot_be_opened_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"files \*\.jsonl of .* cannot be opened .*: check ATOLL_DATA"):
        documents.dataset(HUB, tmp_path)
    absent = msgspec.structs.replace(HUB, path="no-owner/no-dataset", data_files=())
    with pytest.raises(DataError, match="the dataset 'no-owner/no-dataset' of the hub cannot be opened"):
        documents.dataset(absent, tmp_path)
    # A folder of that name would be read in the hub's place.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "no-owner" / "no-dataset").mkdir(parents=True)
    with pytest.raises(DataError, match="start Atoll in another folder"):
        documents.dataset(absent, tmp_path)


@pytest.mark.slow
def test_errors_of_a_stream_arrive_where_it_is_read(tmp_path: Path, streamed: Path) -> None:
    run = stream_run(tmp_path, "json", "*.jsonl")
    data = msgspec.structs.replace(run.manifest.data, text_field="body")
    reader = UnitReader(msgspec.structs.replace(run.manifest, data=data), run.artifacts)
    with pytest.raises(DataError, match="'body' is not a column of the dataset: choose of text, number"):
        reader.read(0, 0)
    with pytest.raises(DataError, match="was closed"):
        reader.read(0, 1)


@pytest.fixture
def users_data(monkeypatch: pytest.MonkeyPatch) -> str:
    def ids(seed: int) -> Iterator[list[int]]:
        generator = np.random.default_rng(seed)
        for _ in range(50):
            yield generator.integers(0, 30, 40).tolist()

    module = types.ModuleType("users_data")
    module.ids = ids  # type: ignore[attr-defined]
    module.text = lambda seed: (text(seed * 1000 + index) for index in range(50))  # type: ignore[attr-defined]
    module.odd = lambda seed: iter([3])  # type: ignore[attr-defined]
    module.none = lambda seed: iter(())  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "users_data", module)
    return "users_data"


def function_manifest(run: Created, name: str, **changes: object) -> Manifest:
    data = Data(
        kind="function", sequence_tokens=16, unit_sequences=4, units=0, function=f"users_data:{name}", end_token_id=0
    )
    return msgspec.structs.replace(run.manifest, data=msgspec.structs.replace(data, **changes))


@pytest.mark.parametrize("name", ["ids", "text"])
def test_a_users_function(run: Created, users_data: str, name: str) -> None:
    manifest = function_manifest(run, name)
    reader = UnitReader(manifest, run.artifacts, allow_functions=(f"users_data:{name}",))
    try:
        units = np.stack([reader.read(0, position) for position in range(60)])
    finally:
        reader.close()
    assert units.shape == (60, 4, 16)
    assert units.max() < (30 if name == "ids" else 300)


@pytest.mark.parametrize(("name", "sentence"), [("odd", "yielded int: make it yield"), ("none", "has no document")])
def test_a_users_function_that_gives_no_documents(run: Created, users_data: str, name: str, sentence: str) -> None:
    reader = UnitReader(function_manifest(run, name), run.artifacts, allow_functions=(f"users_data:{name}",))
    with pytest.raises(DataError, match=sentence):
        reader.read(0, 0)


def test_a_users_function_that_is_not_allowed(run: Created, users_data: str) -> None:
    reader = UnitReader(function_manifest(run, "ids"), run.artifacts)
    with pytest.raises(ModelError, match="--allow-function users_data:ids"):
        reader.read(0, 0)
