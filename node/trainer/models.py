"""The run's model, and its way to and from the flat vector (design section 5).

Shapes: the flat vector is fp32 [N], on the CPU; each tensor lies in it at its layout's offset, in C order. The model
itself may live on any device and in any floating-point type; a copy goes tensor by tensor, so no second flat vector
is ever made.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from node.errors import OperatorError
from node.manifest import Manifest, flat_layout
from protocol.layout import Layout, build_layout

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FlatVector: TypeAlias = torch.Tensor | npt.NDArray[np.float32]
"""fp32 [N] on the CPU; NumPy arrays are taken by reference, such as views of a memfd."""


class ModelError(OperatorError):
    """The run's model cannot be built here: one sentence with the fix."""


def build_model(manifest: Manifest, allow_functions: Sequence[str] = ()) -> torch.nn.Module:
    """The run's model on the CPU, fp32, with arbitrary parameters: load the state with `load_flat`.

    A `module:function` runs only when `allow_functions` has that exact name. The model's layout must be the
    manifest's; for an architecture of transformers that is checked before memory is allocated.

    Raises `ModelError`.
    """
    model = manifest.model
    if model.function is not None:
        built = call_function(model.function, model.config, allow_functions)
        if not isinstance(built, torch.nn.Module):
            raise ModelError(f"{model.function} returned {type(built).__name__}: make it return a torch.nn.Module")
        built = built.float()
    else:
        assert model.architecture is not None, "a valid manifest"
        config = model_config(model.architecture, model.config)
        with torch.device("meta"):
            _check_layout(manifest, initialised(model.architecture, config))
        built = _uninitialised(model.architecture, config)
    _check_layout(manifest, built)
    return built


def model_config(architecture: str, values: Mapping[str, object]) -> PretrainedConfig:
    """The config object of a causal language model class of transformers. Raises `ModelError`."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    # A list, not `getattr`: transformers exports much that is no model, and models that fetch a backbone.
    if architecture not in _class_names(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        raise ModelError(
            f"model.architecture = {architecture!r} is not a causal language model of the installed transformers: "
            "choose one such as 'LlamaForCausalLM'"
        )
    config_class = _transformers_class(architecture).config_class
    try:
        config: PretrainedConfig = config_class(**values)
    except Exception as error:
        raise ModelError(f"model.config does not suit {config_class.__name__}: {_one_line(error)}") from error
    # Decided here and never by a run: the values may otherwise name code on the hub.
    config._attn_implementation = "sdpa"
    config.dtype = torch.float32
    return config


def initialised(architecture: str, config: PretrainedConfig) -> torch.nn.Module:
    """A new model with the library's own initialisation, from PyTorch's current seed. Raises `ModelError`."""
    model_class = _transformers_class(architecture)
    try:
        if not model_class._supports_sdpa:
            config._attn_implementation = "eager"
        model = model_class._from_config(config, dtype=torch.float32)
    except Exception as error:  # any class of any library, on any values: the sentence says which
        raise ModelError(f"model.config does not suit {architecture}: {_one_line(error)}") from error
    assert isinstance(model, torch.nn.Module)
    return model


def call_function(name: str, arguments: Mapping[str, object], allow_functions: Sequence[str]) -> Any:
    """What the user's `module:function` returns. Raises `ModelError` unless the operator allowed exactly this name."""
    if name not in allow_functions:
        raise ModelError(
            f"the run wants to call {name!r} on this machine: if you trust that function of your own installation, "
            f"allow it with --allow-function {name}"
        )
    module_name, _, function_name = name.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise ModelError(f"{name!r} is not installed here: {_one_line(error)}") from error
    return function(**arguments)


def layout_of(model: torch.nn.Module) -> Layout:
    """Trained floating-point parameters in `named_parameters` order, a tied weight once, then persistent buffers.

    Raises `ModelError` for a model that has no such parameters.
    """
    try:
        return build_layout(
            [(name, tuple(tensor.shape)) for name, tensor in _parameters(model)],
            [(name, tuple(tensor.shape)) for name, tensor in _buffers(model)],
        )
    except ValueError as error:
        raise ModelError(f"the model cannot be laid out: {error}") from error


def load_flat(model: torch.nn.Module, theta: FlatVector) -> None:
    """Copy the flat vector [N] into the model's parameters and persistent float buffers, wherever they live."""
    source = _as_tensor(theta)
    layout = layout_of(model)
    _check_length(source, layout)
    with torch.no_grad():
        for entry, tensor in _places(model, layout):
            tensor.copy_(source[entry.offset : entry.stop].view(entry.shape))


def flatten(model: torch.nn.Module, out: FlatVector) -> None:
    """The inverse of `load_flat`: write the model into `out` [N]; the gaps between tensors become zero."""
    target = _as_tensor(out)
    layout = layout_of(model)
    _check_length(target, layout)
    stop = 0
    with torch.no_grad():
        for entry, tensor in _places(model, layout):
            target[stop : entry.offset].zero_()
            target[entry.offset : entry.stop].view(entry.shape).copy_(tensor)
            stop = entry.stop
        target[stop:].zero_()


def parameter_count(model: torch.nn.Module) -> int:
    """Trained parameters, a tied weight once."""
    return sum(tensor.numel() for _, tensor in _parameters(model))


def _check_layout(manifest: Manifest, model: torch.nn.Module) -> None:
    expected, found = flat_layout(manifest.layout), layout_of(model)
    if found == expected:
        return
    ours = {entry.name: entry.shape for entry in (*found.parameters, *found.buffers)}
    for entry in (*expected.parameters, *expected.buffers):
        if ours.get(entry.name) != entry.shape:
            raise ModelError(
                f"the run's tensor {entry.name!r} has shape {list(entry.shape)} and the model built here has "
                f"{list(ours[entry.name]) if entry.name in ours else 'none of that name'}: install the versions of "
                "transformers and torch that the run's creator used"
            )
    raise ModelError(
        f"the model built here has {len(ours)} tensors and the run {len(expected.parameters + expected.buffers)}, or "
        "in another order: install the versions of transformers and torch that the run's creator used"
    )


def _check_length(vector: torch.Tensor, layout: Layout) -> None:
    if vector.shape != (layout.elements,) or vector.dtype != torch.float32:
        raise ValueError(
            f"the flat vector is {vector.dtype} {list(vector.shape)}; this model's is torch.float32 [{layout.elements}]"
        )


def _places(model: torch.nn.Module, layout: Layout) -> Iterator[tuple[Any, torch.Tensor]]:
    yield from zip(layout.parameters, (tensor for _, tensor in _parameters(model)), strict=True)
    yield from zip(layout.buffers, (tensor for _, tensor in _buffers(model)), strict=True)


def _parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.is_floating_point():
            yield _plain(name), parameter


def _buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    seen: set[torch.Tensor] = set()
    for module_name, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None or name in module._non_persistent_buffers_set or buffer in seen:
                continue
            if buffer.is_floating_point():
                seen.add(buffer)
                yield _plain(f"{module_name}.{name}" if module_name else name), buffer


def _plain(name: str) -> str:
    """`torch.compile` wraps a module without changing what it is."""
    return name.replace("_orig_mod.", "")


def _as_tensor(vector: FlatVector) -> torch.Tensor:
    if isinstance(vector, torch.Tensor):
        return vector
    with warnings.catch_warnings():
        # A state that is sealed read-only is only read.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(vector)


def _uninitialised(architecture: str, config: PretrainedConfig) -> torch.nn.Module:
    from transformers.initialization import no_init_weights

    # Non-persistent buffers (rotary frequencies) need their values, so the model cannot be made on the meta device.
    with no_init_weights():
        model: Any = initialised(architecture, config)
    model.tie_weights()  # part of the initialisation that was left out
    assert isinstance(model, torch.nn.Module)
    return model


def _class_names(mapping: Mapping[str, str | tuple[str, ...]]) -> set[str]:
    names: set[str] = set()
    for value in mapping.values():
        names.update((value,) if isinstance(value, str) else value)
    return names


def _transformers_class(name: str) -> Any:
    import transformers

    return getattr(transformers, name)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
