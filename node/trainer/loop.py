"""The training that we ship: the run's model, AdamW, schedule and data, on the public library and nothing private.

B: sequences of an inner step, T: tokens of a sequence.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch

from node.errors import OperatorError
from node.manifest import Inner
from node.trainer.attach import Swarm
from node.trainer.checkpoint import CheckpointStore, Description, Place, optimizer_tensors, restore_optimizer
from node.trainer.errors import TrainerError
from node.trainer.models import build_model
from node.trainer.schedule import learning_rate
from node.trainer.units import validation_sequences

logger = logging.getLogger(__name__)


def choose_device(name: str) -> torch.device:
    """`auto` takes a GPU if there is one. Raises `OperatorError` for a device that this machine does not have."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise OperatorError(f"the device {name!r} is not one: choose auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise OperatorError(
            f"the device {name!r} is not here ({torch.cuda.device_count()} GPUs found): choose --device auto or cpu, "
            "or install the CUDA build of PyTorch and a driver"
        )
    return device


def inner_optimizer(model: torch.nn.Module, inner: Inner) -> torch.optim.AdamW:
    """The manifest's AdamW. Weight decay holds for matrices (two dimensions or more), not for norms and biases."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if parameter.dim() >= 2], "weight_decay": inner.weight_decay},
        {"params": [parameter for parameter in trained if parameter.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=inner.lr,
        betas=(inner.beta1, inner.beta2),
        eps=inner.epsilon,
        fused=True,
    )


class TrainingLoop:
    """Trains until the run ends. Raises `OperatorError` or `TrainerError`, never for the network."""

    def __init__(self, swarm: Swarm) -> None:
        self._inner_config = swarm.manifest.inner
        self._device = choose_device(swarm.device)
        if swarm.threads:
            torch.set_num_threads(swarm.threads)
        self._model = build_model(swarm.manifest, swarm.allow_functions).to(self._device)
        self._model.train()
        self._inner = inner_optimizer(self._model, self._inner_config)
        self._parameters = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        self._outer = swarm.optimizer(self._model, self._inner)
        self._validation_sequences = validation_sequences(swarm.manifest, swarm.artifacts_directory)
        self._micro_batch = self._inner_config.micro_batch_sequences or self._inner_config.batch_sequences
        self._run_id = swarm.run_id
        self._store = CheckpointStore(swarm.directory, run_id=swarm.run_id)
        self._inner_steps = 0
        self._joined_late = swarm.start.schedule_step > 0
        self._resume()
        self._round = self._outer.round

    def run(self) -> None:
        outer = self._outer
        logger.info(
            "training on %s from round %d (run step %d)%s",
            self._device,
            outer.round,
            outer.schedule_step,
            f", the inner optimizer has made {self._inner_steps} steps" if self._inner_steps else "",
        )
        self._validate()
        for batch in outer.batches(batch_size=self._inner_config.batch_sequences):
            self._turn()  # the lease may have been used up before this batch
            loss = self._inner_step(batch)
            outer.step(tokens=batch["input_ids"].numel(), loss=loss)
            self._turn()
        self._validate()
        logger.info("the run is over after %d rounds and %d tokens", outer.round, outer.tokens_total)

    def _turn(self) -> None:
        """After a new round began."""
        if self._outer.round == self._round:
            return
        self._round = self._outer.round
        if not self._outer.done:
            self._save()
        self._validate()

    # ------------------------------------------------------------ inner steps

    def _inner_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Forward, backward, clip, AdamW. Returns the batch's mean loss [], on the device."""
        inner = self._inner_config
        if self._inner_steps and not self._inner.state:
            # Its work was not finite and `outer` cleared it: as fresh as a joiner's.
            self._inner_steps, self._joined_late = 0, True
        sequences = len(batch["input_ids"])
        total = torch.zeros((), device=self._device)
        for piece in self._pieces(batch, self._micro_batch):
            loss = self._loss(piece) * (len(piece["input_ids"]) / sequences)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(self._parameters, inner.clip_norm)
        rate = learning_rate(
            inner, self._outer.schedule_step, fresh_steps=self._inner_steps if self._joined_late else None
        )
        for group in self._inner.param_groups:
            group["lr"] = rate
        self._inner.step()
        self._inner.zero_grad(set_to_none=True)
        self._inner_steps += 1
        return total

    def _pieces(self, batch: dict[str, torch.Tensor], sequences: int) -> Iterator[dict[str, torch.Tensor]]:
        pieces = {name: torch.split(tensor, sequences) for name, tensor in batch.items()}
        for index in range(len(pieces["input_ids"])):
            yield {name: split[index].to(self._device, non_blocking=True) for name, split in pieces.items()}

    def _loss(self, piece: dict[str, torch.Tensor]) -> torch.Tensor:
        autocast = self._device.type == "cuda" and self._inner_config.autocast == "bfloat16"
        with torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=autocast):
            outputs: Any = self._model(**piece)
        loss = outputs["loss"] if isinstance(outputs, dict) else getattr(outputs, "loss", None)
        if not isinstance(loss, torch.Tensor):
            raise TrainerError(
                f"the model returned {type(outputs).__name__} without `loss`: make it return one, as the models of "
                "transformers do"
            )
        return loss

    # ------------------------------------------------------------ between rounds

    def _validate(self) -> None:
        """θ's mean loss over the run's validation sequences, when the run wants it now."""
        outer = self._outer
        if not outer.wants_validation:
            return
        sequences = torch.from_numpy(self._validation_sequences)
        total = torch.zeros((), device=self._device)
        self._model.eval()
        with outer.global_state(), torch.no_grad():
            for piece in self._pieces({"input_ids": sequences, "labels": sequences}, self._micro_batch):
                total += self._loss(piece) * len(piece["input_ids"])
        self._model.train()
        loss = float(total) / len(sequences)
        outer.report_validation(loss, sequences.numel())
        logger.info("round %d: validation loss %.4f", outer.round, loss)

    def _save(self) -> None:
        description = Description(
            run_id=self._run_id,
            round=self._outer.round,
            inner_steps=self._inner_steps,
            joined_late=self._joined_late,
            places=tuple(
                Place(epoch=epoch, unit=unit, sequences=sequences)
                for (epoch, unit), sequences in self._outer.cursor.counted_units().items()
            ),
        )
        self._store.save(description, optimizer_tensors(self._model, self._inner))

    def _resume(self) -> None:
        restored = self._store.load(self._outer.round)
        if restored is None:
            return
        description = restored.description
        if not restore_optimizer(self._model, self._inner, restored.tensors):
            logger.warning("the trainer's checkpoint is of another optimizer: the inner optimizer starts fresh")
            return
        self._inner_steps = description.inner_steps
        self._joined_late = description.joined_late
        self._outer.resume_lease({(place.epoch, place.unit): place.sequences for place in description.places})
        logger.info("resumed the inner optimizer of round %d", description.round)
