"""Inner steps (forward, backward, clip, AdamW) and the loss on held-out data: shared by our loop and `scripts/compare`.

B: sequences of an inner step, V: validation sequences, T: tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from node.manifest import Inner
from node.trainer.errors import TrainerError
from node.trainer.schedule import learning_rate


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


class InnerTraining:
    """A model on its device with the run's inner optimizer. Raises `TrainerError` for a model without a loss."""

    def __init__(self, model: torch.nn.Module, inner: Inner, device: torch.device) -> None:
        self.model = model.to(device)
        self.model.train()
        self.optimizer = inner_optimizer(self.model, inner)
        self._inner = inner
        self._device = device
        self._parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._micro_batch = inner.micro_batch_sequences or inner.batch_sequences

    def step(self, batch: dict[str, torch.Tensor], *, run_step: int, fresh_steps: int | None = None) -> torch.Tensor:
        """One inner step on `batch` [B, T], at the schedule's rate. Returns its mean loss [], on the device."""
        sequences = len(batch["input_ids"])
        total = torch.zeros((), device=self._device)
        for piece in self._pieces(batch):
            loss = self._loss(piece) * (len(piece["input_ids"]) / sequences)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(self._parameters, self._inner.clip_norm)
        rate = learning_rate(self._inner, run_step, fresh_steps=fresh_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total

    @torch.no_grad()
    def mean_loss(self, sequences_vt: torch.Tensor) -> float:
        """Of the model as it is, over validation sequences [V, T], int64."""
        total = torch.zeros((), device=self._device)
        self.model.eval()
        for piece in self._pieces({"input_ids": sequences_vt, "labels": sequences_vt}):
            total += self._loss(piece) * len(piece["input_ids"])
        self.model.train()
        return float(total) / len(sequences_vt)

    def _pieces(self, batch: dict[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
        pieces = {name: torch.split(tensor, self._micro_batch) for name, tensor in batch.items()}
        for index in range(len(pieces["input_ids"])):
            yield {name: split[index].to(self._device, non_blocking=True) for name, split in pieces.items()}

    def _loss(self, piece: dict[str, torch.Tensor]) -> torch.Tensor:
        autocast = self._device.type == "cuda" and self._inner.autocast == "bfloat16"
        with torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=autocast):
            outputs: Any = self.model(**piece)
        loss = outputs["loss"] if isinstance(outputs, dict) else getattr(outputs, "loss", None)
        if not isinstance(loss, torch.Tensor):
            raise TrainerError(
                f"the model returned {type(outputs).__name__} without `loss`: make it return one, as the models of "
                "transformers do"
            )
        return loss
