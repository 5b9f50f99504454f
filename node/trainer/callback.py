"""Hugging Face Trainer in a swarm (design section 11).

    trainer = Trainer(model=model, args=args, train_dataset=dataset, callbacks=[SwarmCallback(node.attach())])
    trainer.train()

The Trainer keeps its own data loader, so no units of the run's data are reported as done; its tokens count all the
same.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from node.trainer.attach import Swarm
from node.trainer.outer_optimizer import OuterOptimizer


class SwarmCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not typed here
    """Drives an `OuterOptimizer`: one `step` after each optimizer step, and the end of training when the run ends."""

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm
        self._loss: float | None = None
        self._tokens_seen = 0
        self.outer: OuterOptimizer | None = None
        """From the beginning of training on."""

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        **others: Any,
    ) -> None:
        """Raises `LayoutMismatch` when the Trainer's model is not the run's."""
        if args.include_num_input_tokens_seen == "no":
            args.include_num_input_tokens_seen = "all"
        self._tokens_seen = state.num_input_tokens_seen
        self.outer = self._swarm.optimizer(model, optimizer)
        control.should_training_stop = self.outer.done

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        assert self.outer is not None, "on_train_begin comes first"
        # The Trainer counts the tokens of all ranks; `step` wants this rank's.
        tokens = (state.num_input_tokens_seen - self._tokens_seen) // self._swarm.ranks.world
        self._tokens_seen = state.num_input_tokens_seen
        self.outer.step(tokens=tokens, loss=self._loss)
        control.should_training_stop = control.should_training_stop or self.outer.done

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **others: Any,
    ) -> None:
        """The Trainer tells its loss only here: the newest logged one stands for the steps after it."""
        if logs is not None and "loss" in logs:
            self._loss = float(logs["loss"])
