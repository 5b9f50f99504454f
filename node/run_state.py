"""S_0: the initial outer state, made once by the run's creator (design section 4).

Initialising from a seed differs between CPUs and library versions, so the state travels, not the seed.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors.torch import save_file

from node import artifacts
from node.errors import OperatorError
from node.manifest import stored_layout
from node.manifest_checks import forbidden_config_key
from node.memory import memory_shortage
from node.run_config import RunConfig
from node.trainer import models
from protocol.state_hash import state_hash

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from node.run_create import InitialState

CREATION_BYTES_PER_PARAMETER = 12
"""The model, θ, and the momentum that is hashed with it, fp32."""


def build_initial_state(
    config: RunConfig, values: Mapping[str, object], folder: Path, allow_functions: Sequence[str]
) -> InitialState:
    """Initialise the model from the seed and write θ to `folder` as safetensors, one fp32 vector `theta`.

    Raises `OperatorError`.
    """
    from node.run_create import InitialState  # it imports this module only when it must

    try:
        if config.model.function is not None:
            torch.manual_seed(config.model.seed)
            model = models.call_function(config.model.function, values, allow_functions)
            stored = dict(values)
            if not isinstance(model, torch.nn.Module):
                raise models.ModelError(f"{config.model.function} did not return a torch.nn.Module: correct it")
        else:
            assert config.model.architecture is not None
            key = forbidden_config_key(values)
            if key is not None:
                raise models.ModelError(f"model.config.{key} may not be set by a run: remove it")
            model_config = models.model_config(config.model.architecture, values)
            stored = pinned(model_config)
            _check_memory(config.model.architecture, model_config)
            torch.manual_seed(config.model.seed)
            model = models.initialised(config.model.architecture, model_config)
        frozen = [name for name, tensor in model.named_parameters() if not tensor.requires_grad]
        if frozen:
            raise models.ModelError(f"the model's parameter {frozen[0]!r} is not trained: make it a buffer")
        layout = models.layout_of(model)
    except OperatorError as error:
        raise OperatorError(f"{config.source}: {error}") from error
    theta = torch.empty(layout.elements)
    models.flatten(model, theta)
    if not torch.isfinite(theta).all():
        raise OperatorError(f"{config.source}: the model's initial parameters are not all finite: correct model.config")
    temporary = folder / f".state.{secrets.token_hex(4)}"
    try:
        save_file({"theta": theta}, temporary)
        artifact = artifacts.adopt(temporary, folder)
    finally:
        temporary.unlink(missing_ok=True)
    momentum = np.zeros(layout.parameter_elements, np.float32)
    return InitialState(
        state=artifact,
        state_hash=state_hash(theta.numpy(), momentum).hex(),
        layout=stored_layout(layout),
        model_config=stored,
        parameters=models.parameter_count(model),
    )


def _check_memory(architecture: str, config: PretrainedConfig) -> None:
    """Before a parameter is allocated. Raises `ModelError`."""
    with torch.device("meta"):
        parameters = models.parameter_count(models.initialised(architecture, config))
    if shortage := memory_shortage(parameters * CREATION_BYTES_PER_PARAMETER):
        raise models.ModelError(
            f"a model of {parameters:,} parameters cannot be initialised on this machine: {shortage}; free memory, or "
            "choose smaller sizes in model.config"
        )


def pinned(config: PretrainedConfig) -> dict[str, object]:
    """A config's values with its class's defaults written out: another release may have other defaults."""
    from transformers import PretrainedConfig

    common = json.loads(PretrainedConfig().to_json_string(use_diff=False))
    values: dict[str, object] = json.loads(config.to_json_string(use_diff=False))
    dropped = {"architectures", "dtype", "model_type", "transformers_version"}
    return {
        key: value
        for key, value in values.items()
        if key not in dropped and not key.startswith("_") and (key not in common or common[key] != value)
    }
