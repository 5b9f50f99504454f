"""The training that we ship: the run's model, AdamW, schedule and data, on the public library and nothing private."""

from __future__ import annotations

import logging

import torch

from node.errors import OperatorError
from node.trainer.attach import Swarm
from node.trainer.checkpoint import CheckpointStore, Description, Place, optimizer_tensors, restore_optimizer
from node.trainer.inner import InnerTraining
from node.trainer.models import build_model
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


class TrainingLoop:
    """Trains until the run ends. Raises `OperatorError` or `TrainerError`, never for the network."""

    def __init__(self, swarm: Swarm) -> None:
        self._inner_config = swarm.manifest.inner
        self._device = choose_device(swarm.device)
        if swarm.threads:
            torch.set_num_threads(swarm.threads)
        model = build_model(swarm.manifest, swarm.allow_functions)
        self._training = InnerTraining(model, self._inner_config, self._device)
        self._outer = swarm.optimizer(self._training.model, self._training.optimizer)
        self._validation_sequences = validation_sequences(swarm.manifest, swarm.artifacts_directory)
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
        """Returns the batch's mean loss [], on the device."""
        if self._inner_steps and not self._training.optimizer.state:
            # Its work was not finite and `outer` cleared it: as fresh as a joiner's.
            self._inner_steps, self._joined_late = 0, True
        loss = self._training.step(
            batch,
            run_step=self._outer.schedule_step,
            fresh_steps=self._inner_steps if self._joined_late else None,
        )
        self._inner_steps += 1
        return loss

    # ------------------------------------------------------------ between rounds

    def _validate(self) -> None:
        """θ's mean loss over the run's validation sequences, when the run wants it now."""
        outer = self._outer
        if not outer.wants_validation:
            return
        sequences = torch.from_numpy(self._validation_sequences)
        with outer.global_state():
            loss = self._training.mean_loss(sequences)
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
        self._store.save(description, optimizer_tensors(self._training.model, self._training.optimizer))

    def _resume(self) -> None:
        restored = self._store.load(self._outer.round)
        if restored is None:
            return
        description = restored.description
        if not restore_optimizer(self._training.model, self._training.optimizer, restored.tensors):
            logger.warning("the trainer's checkpoint is of another optimizer: the inner optimizer starts fresh")
            return
        self._inner_steps = description.inner_steps
        self._joined_late = description.joined_late
        self._outer.resume_lease({(place.epoch, place.unit): place.sequences for place in description.places})
        logger.info("resumed the inner optimizer of round %d", description.round)
