"""The model to and from the flat vector, and what a run may make a machine build."""

from __future__ import annotations

import sys
import types

import msgspec
import numpy as np
import pytest
import torch
from run_samples import VALID

from node.manifest import Artifact, Manifest, Model, flat_layout, stored_layout
from node.run_state import pinned
from node.trainer import models
from node.trainer.models import ModelError

SMALL = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}
GPT2 = {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}


class WithBuffers(torch.nn.Module):
    """A float buffer that is averaged, an integer one that is not, one that is not persistent, a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(5, 3)
        self.norm = torch.nn.BatchNorm1d(3)
        self.last = torch.nn.Linear(5, 3, bias=False)
        self.last.weight = self.first.weight
        self.register_buffer("scratch", torch.zeros(4), persistent=False)
        self.frozen = torch.nn.Parameter(torch.zeros(2), requires_grad=False)


def built(architecture: str, **changes: object) -> torch.nn.Module:
    values = {**(GPT2 if architecture.startswith("GPT2") else SMALL), **changes}
    torch.manual_seed(3)
    return models.initialised(architecture, models.model_config(architecture, values))


def manifest_of(architecture: str, **changes: object) -> Manifest:
    values = {**(GPT2 if architecture.startswith("GPT2") else SMALL), **changes}
    layout = models.layout_of(built(architecture, **changes))
    return msgspec.structs.replace(
        VALID,
        model=Model(architecture=architecture, config=pinned(models.model_config(architecture, values))),
        layout=stored_layout(layout),
        artifacts={**VALID.artifacts, "initial-state": Artifact(hash="00" * 32, length=4 * layout.elements)},
    )


def test_layout_is_named_parameters_in_order_a_tied_weight_once() -> None:
    model = built("LlamaForCausalLM", tie_word_embeddings=True)
    layout = models.layout_of(model)
    assert [entry.name for entry in layout.parameters] == [name for name, _ in model.named_parameters()]
    assert "lm_head.weight" not in {entry.name for entry in layout.parameters}
    assert layout.buffers == ()  # rotary frequencies are not persistent
    untied = models.layout_of(built("LlamaForCausalLM", tie_word_embeddings=False))
    assert untied.elements == layout.elements + 64 * 16


def test_layout_leaves_out_what_is_not_trained_or_not_float() -> None:
    layout = models.layout_of(WithBuffers())
    assert [entry.name for entry in layout.parameters] == ["first.weight", "first.bias", "norm.weight", "norm.bias"]
    assert [entry.name for entry in layout.buffers] == ["norm.running_mean", "norm.running_var"]
    assert (layout.elements, layout.buffer_elements) == (6 * 256, 2 * 256)
    with pytest.raises(ModelError, match="no trained floating-point parameters"):
        models.layout_of(torch.nn.ReLU())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method.:DeprecationWarning")
def test_layout_ignores_what_compile_adds() -> None:
    model = built("LlamaForCausalLM")
    assert models.layout_of(torch.compile(model)) == models.layout_of(model)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "architecture", ["LlamaForCausalLM", "GPT2LMHeadModel", "Qwen3ForCausalLM", "BloomForCausalLM"]
)
def test_flatten_and_load_are_inverses(architecture: str) -> None:
    source, target = built(architecture), built(architecture)
    layout = models.layout_of(source)
    vector = torch.full((layout.elements,), float("nan"))
    models.flatten(source, vector)
    covered = torch.zeros(layout.elements, dtype=torch.bool)
    for entry in layout.parameters:
        covered[entry.offset : entry.stop] = True
    assert torch.equal(vector[~covered], torch.zeros(int((~covered).sum())))
    changed = torch.where(covered, torch.randn(layout.elements), vector)
    models.load_flat(target, changed)
    back = np.full(layout.elements, np.nan, np.float32)
    models.flatten(target, back)
    assert back.tobytes() == changed.numpy().tobytes()


def test_buffers_take_part() -> None:
    model = WithBuffers()
    vector = torch.arange(6 * 256, dtype=torch.float32)
    models.load_flat(model, vector)
    assert model.first.weight.flatten().tolist() == list(range(15))
    assert model.last.weight is model.first.weight
    assert model.norm.running_var.tolist() == [1280.0, 1281.0, 1282.0]
    assert model.frozen.tolist() == [0.0, 0.0]


def test_a_sealed_vector_is_read_and_a_model_of_another_type_is_converted() -> None:
    model = built("LlamaForCausalLM").to(torch.bfloat16)
    layout = models.layout_of(model)
    sealed = np.linspace(-1, 1, layout.elements, dtype=np.float32)
    sealed.flags.writeable = False
    models.load_flat(model, sealed)
    out = torch.empty(layout.elements)
    models.flatten(model, out)
    entry = layout.parameters[1]
    expected = torch.tensor(sealed[entry.offset : entry.stop]).bfloat16().float()
    assert torch.equal(out[entry.offset : entry.stop], expected)


def test_a_vector_of_another_length_or_type_is_refused() -> None:
    model = built("LlamaForCausalLM")
    elements = models.layout_of(model).elements
    for vector in (torch.zeros(elements + 1), torch.zeros(elements, dtype=torch.float64), torch.zeros(1, elements)):
        with pytest.raises(ValueError, match=rf"torch.float32 \[{elements}\]"):
            models.load_flat(model, vector)
        with pytest.raises(ValueError, match="the flat vector is"):
            models.flatten(model, vector)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_parameters_on_a_gpu() -> None:
    model = built("LlamaForCausalLM")
    expected = torch.empty(models.layout_of(model).elements)
    models.flatten(model, expected)
    model.cuda()
    found = torch.empty_like(expected)
    models.flatten(model, found)
    assert torch.equal(found, expected)
    models.load_flat(model, expected * 2)
    models.flatten(model, found)
    assert torch.equal(found, expected * 2)


@pytest.mark.parametrize("tied", [True, False])
def test_the_built_model_computes_as_the_creators(tied: bool) -> None:
    creators = built("LlamaForCausalLM", tie_word_embeddings=tied)
    manifest = manifest_of("LlamaForCausalLM", tie_word_embeddings=tied)
    theta = torch.empty(manifest.layout.elements)
    models.flatten(creators, theta)
    model = models.build_model(manifest)
    models.load_flat(model, theta)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    batch = torch.arange(32).view(2, 16)
    with torch.no_grad():
        assert torch.equal(model(input_ids=batch).logits, creators(input_ids=batch).logits)


def test_another_layout_is_refused_before_memory_is_allocated() -> None:
    manifest = manifest_of("LlamaForCausalLM")
    # A stranger's config of 3 TB beside a small layout: only the meta device sees it.
    huge = msgspec.structs.replace(
        manifest, model=Model(architecture="LlamaForCausalLM", config={**manifest.model.config, "vocab_size": 1 << 36})
    )
    with pytest.raises(ModelError, match=r"'model.embed_tokens.weight' has shape \[64, 16\] and the model built here"):
        models.build_model(huge)
    fewer = msgspec.structs.replace(
        manifest, model=Model(architecture="LlamaForCausalLM", config={**manifest.model.config, "num_hidden_layers": 1})
    )
    with pytest.raises(ModelError, match="none of that name: install the versions"):
        models.build_model(fewer)
    more = msgspec.structs.replace(
        manifest, model=Model(architecture="LlamaForCausalLM", config={**manifest.model.config, "num_hidden_layers": 3})
    )
    with pytest.raises(ModelError, match="the model built here has"):
        models.build_model(more)


@pytest.mark.parametrize("name", ["Trainer", "LlamaModel", "os", "CLIPModel", "pipeline"])
def test_only_language_models_of_transformers(name: str) -> None:
    with pytest.raises(ModelError, match=f"{name!r} is not a causal language model"):
        models.model_config(name, {})


def test_a_config_that_does_not_suit_is_one_sentence() -> None:
    with pytest.raises(ModelError, match=r"model\.config does not suit LlamaConfig") as caught:
        models.model_config("LlamaForCausalLM", {**SMALL, "hidden_size": "wide"})
    assert "\n" not in str(caught.value)
    with pytest.raises(ModelError, match=r"model\.config does not suit LlamaForCausalLM: "):
        built("LlamaForCausalLM", intermediate_size=-4)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> str:
    module = types.ModuleType("users_models")
    module.small = lambda width: torch.nn.Linear(width, 2)  # type: ignore[attr-defined]
    module.text = lambda: "no module"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "users_models", module)
    return "users_models"


def function_manifest(name: str, **config: object) -> Manifest:
    layout = models.layout_of(torch.nn.Linear(4, 2))
    return msgspec.structs.replace(VALID, model=Model(function=name, config=config), layout=stored_layout(layout))


def test_a_users_function_runs_only_when_allowed_by_its_exact_name(installed: str) -> None:
    manifest = function_manifest("users_models:small", width=4)
    for allowed in ((), ("users_models",), ("users_models:text",)):
        with pytest.raises(ModelError, match="allow it with --allow-function users_models:small"):
            models.build_model(manifest, allowed)
    model = models.build_model(manifest, ("users_models:small",))
    assert models.layout_of(model) == flat_layout(manifest.layout)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("users_models:text", "returned str: make it return a torch.nn.Module"),
        ("users_models:missing", "'users_models:missing' is not installed here"),
        ("no_such_module:small", "'no_such_module:small' is not installed here"),
    ],
)
def test_a_function_that_gives_no_model(installed: str, name: str, sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        models.build_model(function_manifest(name), (name,))
