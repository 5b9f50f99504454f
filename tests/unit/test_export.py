"""The exported model is the trained one, for anyone's transformers."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from run_samples import Created, created, text, write_run
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from node import run_config
from node.trainer import models, tokens
from node.trainer.export import export
from node.trainer.models import ModelError, build_model
from node.trainer.units import UnitReader, validation_sequences


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Created:
    return created(tmp_path_factory.mktemp("run"))


def trained(run: Created) -> tuple[Any, torch.Tensor]:
    """A few steps of training and the flat vector of their result."""
    model: Any = build_model(run.manifest)
    models.load_flat(model, load_file(run.artifacts / run.manifest.artifacts["initial-state"].hash)["theta"])
    reader = UnitReader(run.manifest, run.artifacts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(10):
        batch = torch.from_numpy(reader.read(0, step))
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    theta = torch.empty(run.manifest.layout.elements)
    models.flatten(model, theta)
    return model, theta


@pytest.mark.slow
def test_it_loads_has_the_same_loss_and_generates(
    run: Created, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model, theta = trained(run)
    export(run.manifest, run.artifacts, theta.numpy(), tmp_path / "deep" / "model")
    assert capfd.readouterr() == ("", "")
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "deep" / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "deep" / "model")
    held = torch.from_numpy(validation_sequences(run.manifest, run.artifacts))
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=held, labels=held).loss, model.eval()(input_ids=held, labels=held).loss)
    files = {path.name for path in (tmp_path / "deep" / "model").iterdir()}
    assert files >= {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    prompt = tokenizer(text(5, words=4), return_tensors="pt")
    codec = tokens.load_tokenizer(run.artifacts / run.manifest.artifacts["tokenizer"].hash)
    assert prompt["input_ids"][0].tolist() == codec.encode(text(5, words=4)).ids
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|endoftext|>", 0)
    generated = loaded.generate(**prompt, max_new_tokens=8, do_sample=False)
    assert generated.shape[1] > prompt["input_ids"].shape[1]
    assert tokenizer.decode(generated[0]).startswith(text(5, words=4))


def test_a_users_model_is_exported_as_its_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Tied(torch.nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(300, width)
            self.head = torch.nn.Linear(width, 300, bias=False)
            self.head.weight = self.embedding.weight

    module = types.ModuleType("users_export")
    module.tied = Tied  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "users_export", module)
    overrides = {"model": {"function": "users_export:tied", "config": {"width": 8}}}
    run = Created(tmp_path, run_config.load(write_run(tmp_path), overrides), allow_functions=("users_export:tied",))
    theta = torch.randn(run.manifest.layout.elements)
    with pytest.raises(ModelError, match="--allow-function"):
        export(run.manifest, run.artifacts, theta, tmp_path / "model")
    export(run.manifest, run.artifacts, theta, tmp_path / "model", allow_functions=("users_export:tied",))
    state = load_file(tmp_path / "model" / "model.safetensors")
    assert torch.equal(state["head.weight"], theta[:2400].view(300, 8))
    assert torch.equal(state["head.weight"], state["embedding.weight"])
    description = json.loads((tmp_path / "model" / "atoll.json").read_text())
    assert description["function"] == "users_export:tied"
    assert description["run"] == run.manifest.run_id().hex()
    assert (tmp_path / "model" / "tokenizer.json").is_file()
