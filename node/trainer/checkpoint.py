"""The trainer's own state on disk: inner optimizer, random numbers, place in a started unit. Not the model: that is θ.

    checkpoint.json         what the state is and the hash of its tensors; replaced atomically: the commit point
    state-HASH.safetensors  the tensors

A torn or foreign checkpoint is set aside with one warning and training starts with a fresh optimizer (design section
12). Nothing is unpickled.

Which checkpoint fits (`CheckpointStore.load`): one of the same run, taken at the round that training resumes at or at
an earlier one. An older one has moments that lag the state by some rounds, which is better than none. A newer one was
trained on a state that this lineage does not have, and is set aside.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from blake3 import blake3
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

logger = logging.getLogger(__name__)

FORMAT = 1
INDEX = "checkpoint.json"
LARGEST_SHARE = 0.03
"""Saving may take this share of the time between two saves, no more."""
_RNG = "rng"
_CUDA_RNG = "rng.cuda"
_STATE = "inner."


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Sequences of a unit in the middle that commits have counted."""

    epoch: int
    unit: int
    sequences: int


class Description(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything of a checkpoint but its tensors."""

    run_id: str
    round: int
    inner_steps: int
    """Steps that the inner optimizer has made."""
    joined_late: bool
    """It was created in the middle of the run."""
    places: tuple[Place, ...]


class _Index(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: int
    description: Description
    file: str
    length: int
    hash: str
    """BLAKE3 of the file of tensors, hex."""
    self_hash: str = ""
    """BLAKE3 of this file's canonical JSON with an empty `self_hash`."""

    def sealed(self) -> _Index:
        return msgspec.structs.replace(self, self_hash=blake3(self.unsealed()).hexdigest())

    def unsealed(self) -> bytes:
        return msgspec.json.encode(msgspec.structs.replace(self, self_hash=""))


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    description: Description
    tensors: dict[str, torch.Tensor]


class _Unusable(Exception):
    """The message says why this checkpoint is set aside."""


class CheckpointStore:
    """One folder, one checkpoint. `save` is cheap to call: it declines while the last one's cost is not spread yet."""

    def __init__(self, directory: Path, *, run_id: str, largest_share: float = LARGEST_SHARE) -> None:
        self._directory = directory
        self._run_id = run_id
        self._largest_share = largest_share
        self._next_save_at = 0.0

    def save(self, description: Description, tensors: Mapping[str, torch.Tensor], *, now: bool = False) -> bool:
        """True: it is durable. False: it is too early (unless `now`), or the disk refused, which the log says."""
        began = time.monotonic()
        if not now and began < self._next_save_at:
            return False
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._write(description, tensors)
        except (OSError, SafetensorError) as error:
            logger.error("the trainer's checkpoint cannot be written to %s (%s): free disk", self._directory, error)
            self._next_save_at = time.monotonic() + 60.0
            return False
        ended = time.monotonic()
        self._next_save_at = ended + (ended - began) * (1.0 / self._largest_share - 1.0)
        return True

    def load(self, round: int) -> Restored | None:
        """The checkpoint to resume `round` with, or None. What cannot be used is set aside with a warning."""
        index_file = self._directory / INDEX
        if not index_file.exists():
            return None
        try:
            return self._read(index_file, round)
        except (OSError, _Unusable, SafetensorError) as error:
            aside = index_file.with_suffix(".unusable")
            logger.warning(
                "the trainer's checkpoint is set aside as %s (%s): the inner optimizer starts fresh", aside, error
            )
            with contextlib.suppress(OSError):
                index_file.replace(aside)
            return None

    def _read(self, index_file: Path, round: int) -> Restored:
        try:
            index = msgspec.json.decode(index_file.read_bytes(), type=_Index)
        except msgspec.DecodeError as error:
            raise _Unusable(f"it does not decode: {error}") from error
        if index.format != FORMAT:
            raise _Unusable(f"it has format {index.format}, this version writes {FORMAT}")
        if blake3(index.unsealed()).hexdigest() != index.self_hash:
            raise _Unusable("its hash differs from its content")
        if index.description.run_id != self._run_id:
            raise _Unusable(f"it belongs to the run {index.description.run_id}")
        if index.description.round > round:
            raise _Unusable(f"it is of round {index.description.round}, and training resumes at round {round}")
        if Path(index.file).name != index.file:
            raise _Unusable(f"it names {index.file!r} outside its folder")
        tensors_file = self._directory / index.file
        if not tensors_file.exists():
            raise _Unusable(f"{index.file} is missing")
        if tensors_file.stat().st_size != index.length or _hash_file(tensors_file) != index.hash:
            raise _Unusable(f"{index.file} is torn: its hash differs")
        return Restored(description=index.description, tensors=load_file(tensors_file))

    def _write(self, description: Description, tensors: Mapping[str, torch.Tensor]) -> None:
        temporary = self._directory / "state.writing"
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, temporary)
        _sync(temporary)
        file_hash = _hash_file(temporary)
        index = _Index(
            format=FORMAT,
            description=description,
            file=f"state-{file_hash[:16]}.safetensors",
            length=temporary.stat().st_size,
            hash=file_hash,
        )
        temporary.replace(self._directory / index.file)
        temporary = self._directory / "checkpoint.writing"
        temporary.write_bytes(msgspec.json.encode(index.sealed()))
        _sync(temporary)
        # The folder before the commit point as well: an index must never outlive the file it names.
        _sync(self._directory)
        temporary.replace(self._directory / INDEX)
        _sync(self._directory)
        for old in self._directory.glob("state-*.safetensors"):
            if old.name != index.file:
                old.unlink(missing_ok=True)


# ---------------------------------------------------------------- what is in it


def optimizer_tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The optimizer's state by parameter name, with the random states of the CPU and, where it is in use, the GPU."""
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    tensors = {_RNG: torch.get_rng_state()}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        tensors[_CUDA_RNG] = torch.cuda.get_rng_state()
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{_STATE}{key}.{names[parameter]}"] = value
    return tensors


def restore_optimizer(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor]
) -> bool:
    """The inverse of `optimizer_tensors`. False: the tensors are of another model or optimizer; nothing is changed."""
    state: dict[int, dict[str, torch.Tensor]] = {}
    names = {parameter: name for name, parameter in model.named_parameters()}
    places = {
        names[parameter]: (index, parameter)
        for index, parameter in enumerate(
            parameter for group in optimizer.param_groups for parameter in group["params"]
        )
    }
    for key, value in tensors.items():
        if not key.startswith(_STATE):
            continue
        kind, _, name = key.removeprefix(_STATE).partition(".")
        if name not in places:
            return False
        index, parameter = places[name]
        if value.dim() > 0 and value.shape != parameter.shape:
            return False
        state.setdefault(index, {})[kind] = value
    if len({frozenset(kinds) for kinds in state.values()}) > 1:
        return False
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    if _RNG in tensors:
        torch.set_rng_state(tensors[_RNG])
    if _CUDA_RNG in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors[_CUDA_RNG])
    return True


def _hash_file(path: Path) -> str:
    return blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
