"""The TOML of a run: presets, overrides, and each mistake as one sentence."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from pydantic import BaseModel
from run_samples import RUN, write_run

from node import manifest, run_config
from node.errors import OperatorError
from node.run_config import load, override, parse_override


@pytest.mark.parametrize("name", run_config.PRESETS)
def test_presets_load(name: str) -> None:
    config = load(name)
    assert config.name == name
    assert config.source == f"the preset '{name}'"


def sections() -> list[type[BaseModel]]:
    return [
        value
        for value in vars(run_config).values()
        if isinstance(value, type) and issubclass(value, BaseModel) and value.__module__ == run_config.__name__
    ]


def test_every_key_has_a_doc() -> None:
    undocumented = [
        f"{section.__name__}.{name}"
        for section in sections()
        for name, field in section.model_fields.items()
        if not field.description
    ]
    assert undocumented == []


@pytest.mark.parametrize(
    ("section", "struct", "different"),
    [
        (run_config.LimitsConfig, manifest.Limits, {"lease_units"}),
        (run_config.RoundsConfig, manifest.Rounds, {"steps_least", "steps_most"}),
        (run_config.InnerConfig, manifest.Inner, set()),
        (run_config.EndConfig, manifest.End, set()),
    ],
)
def test_sections_match_the_manifest(section: type[BaseModel], struct: type, different: set[str]) -> None:
    defaults = {field.name: field.default for field in msgspec.structs.fields(struct)}
    assert set(section.model_fields) == set(defaults)
    for name, field in section.model_fields.items():
        if not field.is_required() and name not in different:
            assert field.default == defaults[name], name


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("[limits]\nmin_peers = 0", "limits.min_peers = 0 is out of bounds: set at least 1"),
        ("[limits]\nheartbeats_s = 1.0", "limits.heartbeats_s is not a key: did you mean limits.heartbeat_s"),
        ("[limits]\nzzz = 1", "limits.zzz is not a key: remove it, or use one of min_peers, "),
        ("[outer]\nmin_peers = 2", "outer.min_peers is not a key: did you mean limits.min_peers"),
        ("[outer]\nmomentum = 1.0", "outer.momentum = 1.0 is out of bounds: set less than 1"),
        ("[outer]\nmomentum = 'high'", "outer.momentum = 'high' is not a number: write one"),
        ("[outer]\nmomentum = nan", "outer.momentum = nan is not a finite number: write one"),
        ("[outer]\nlr = [[1, 0.4], [2]]", "outer.lr.1.1 is missing: add it"),
        ("[outer]\nlr = 0.4", "outer.lr = 0.4 is not a list: write one"),
        ("[admission]\nquorum = 'all'", "admission.quorum = 'all' is unknown: choose 'majority' or 'two_thirds'"),
        ("[admission]\nfounders = 'me'", "admission.founders = 'me' is not a list: write one"),
        ("[limits]\nmin_peers = 1.5", "limits.min_peers = 1.5 is not a whole number: write one"),
        ("[limits]\nmin_peers = true", "limits.min_peers = True is not a whole number: write one"),
        ("limits = 3", "limits = 3 is not a table: write one"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path: Path, line: str, sentence: str) -> None:
    # A key of the document itself comes before the first table.
    definition = f"{RUN}\n{line}\n" if line.startswith("[") else f"{line}\n{RUN}"
    path = write_run(tmp_path, documents=1, definition=definition)
    with pytest.raises(OperatorError) as caught:
        load(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: {sentence}")
    assert "\n" not in message


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ('name = "sample"', "", "name is missing: add it"),
        ('architecture = "LlamaForCausalLM"', "", "model: set either architecture or function"),
        ('architecture = "LlamaForCausalLM"', 'architecture = "llama"', "model.architecture = 'llama' has the wrong"),
        ('files = ["corpus/*.txt"]', "", "data: source = 'files' needs the key 'files'"),
        ('source = "files"', 'source = "package"', "data: source = 'package' needs the key 'package'"),
        ('source = "train"', 'source = "file"', "tokenizer: source = 'file' needs the key 'file'"),
        (
            "part_elements = 512",
            "part_elements = 500",
            "rounds.part_elements = 500 is out of bounds: set a multiple of",
        ),
    ],
)
def test_what_is_missing_or_malformed(tmp_path: Path, old: str, new: str, sentence: str) -> None:
    assert old in RUN
    path = write_run(tmp_path, documents=1, definition=RUN.replace(old, new))
    with pytest.raises(OperatorError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}: {sentence}")


def test_files_that_are_no_definition(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match="does not exist: give a TOML file or one of the presets tiny, micro, gpu"):
        load(tmp_path / "missing.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("name = ", encoding="utf-8")
    with pytest.raises(OperatorError, match=r"broken\.toml is not valid TOML: invalid value \(at "):
        load(broken)
    broken.write_bytes(b"\xff\xfe")
    with pytest.raises(OperatorError, match="is not UTF-8 text"):
        load(broken)
    broken.write_bytes(b"#" * (run_config.MAX_TOML_BYTES + 1))
    with pytest.raises(OperatorError, match="too many for a run's definition"):
        load(broken)
    with pytest.raises(OperatorError, match="cannot be read"):
        load(tmp_path)


def test_overrides_replace_keys_and_are_checked_alike() -> None:
    config = load("micro", {"end.rounds": 3})
    assert config.end.rounds == 3
    changed = override(config, {"limits.min_peers": 4, "rounds.steps": 7})
    assert (changed.limits.min_peers, changed.rounds.steps, changed.end.rounds) == (4, 7, 3)
    assert changed.inner == config.inner
    assert config.limits.min_peers == 1
    with pytest.raises(OperatorError, match=r"'micro': limits\.min_pers is not a key: did you mean limits\.min_peers"):
        override(config, {"limits.min_pers": 4})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("limits.min_peers=2", ("limits.min_peers", 2)),
        ("inner.lr = 1e-3", ("inner.lr", 1e-3)),
        ("admission.founders=['a', 'b']", ("admission.founders", ["a", "b"])),
        ("tokenizer.file=a/b.json", ("tokenizer.file", "a/b.json")),
    ],
)
def test_overrides_are_toml_values(text: str, expected: tuple[str, object]) -> None:
    assert parse_override(text) == expected


@pytest.mark.parametrize("text", ["limits.min_peers", "=2"])
def test_malformed_overrides(text: str) -> None:
    with pytest.raises(OperatorError, match="is not of the form KEY=VALUE"):
        parse_override(text)
