"""The run's model as others load it: Hugging Face format, from the flat vector (design section 11)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from node import artifacts
from node.manifest import Manifest
from node.trainer import models, tokens
from node.trainer.models import FlatVector


def export(
    manifest: Manifest,
    artifacts_directory: Path,
    theta: FlatVector,
    directory: Path,
    *,
    allow_functions: Sequence[str] = (),
) -> None:
    """Write the model of parameters `theta` [N] into `directory`, which is made.

    A transformers architecture: config.json, generation_config.json, model.safetensors and the tokenizer's files, as
    `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained` load them. A user's function:
    model.safetensors with the module's state dict, and atoll.json, which names the function. Raises `ModelError`,
    `ArtifactError`.
    """
    model: Any = models.build_model(manifest, allow_functions)
    models.load_flat(model, theta)
    directory.mkdir(parents=True, exist_ok=True)
    if manifest.model.function is not None:
        _save_module(manifest, model, directory)
    else:
        with _no_progress_bar():
            model.save_pretrained(directory)
    if manifest.tokenizer is not None:
        _save_tokenizer(manifest, artifacts_directory, directory)


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """The library would draw one over the caller's terminal."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _save_module(manifest: Manifest, model: torch.nn.Module, directory: Path) -> None:
    # Copies: a tied weight would share its memory, which the format does not have.
    state = {name: tensor.detach().clone().contiguous() for name, tensor in model.state_dict().items()}
    save_file(state, directory / "model.safetensors")
    description = {"function": manifest.model.function, "config": manifest.model.config, "run": manifest.run_id().hex()}
    (directory / "atoll.json").write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")


def _save_tokenizer(manifest: Manifest, artifacts_directory: Path, directory: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    assert manifest.tokenizer is not None
    path = artifacts.verified(manifest.artifacts[manifest.tokenizer], artifacts_directory)
    codec = tokens.load_tokenizer(path)
    special: dict[str, Any] = {}
    for role in ("bos", "eos", "pad"):
        token_id = manifest.model.config.get(f"{role}_token_id")
        token = codec.id_to_token(token_id) if isinstance(token_id, int) else None
        if token is not None:
            special[f"{role}_token"] = token
    length = manifest.model.config.get("max_position_embeddings")
    if isinstance(length, int):
        special["model_max_length"] = length
    PreTrainedTokenizerFast(tokenizer_object=codec, **special).save_pretrained(directory)
