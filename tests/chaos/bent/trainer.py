"""The trainer's place and lies.

The place: `step`, before each inner step.

Lies in the difference that it hands over: `delta-nan`, `delta-inf`, `delta-huge` (× 10⁴). The trainer's own check does
not see them: it is as if memory went bad behind it.
"""

from __future__ import annotations

import torch

from node.trainer.loop import TrainingLoop
from node.trainer.vector import ModelVector, SharedVectors
from tests.chaos.bent import bends
from tests.chaos.bent.strikes import Striker


def bend() -> None:
    striker = Striker()
    inner_step = TrainingLoop._inner_step
    write_difference = ModelVector.write_difference

    def bent_inner_step(self: TrainingLoop, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        striker.passing("step", self._round)
        return inner_step(self, batch)

    def bent_write_difference(self: ModelVector, vectors: SharedVectors | None) -> bool:
        finite = write_difference(self, vectors)
        lies = bends.active()
        if vectors is not None:
            if "delta-nan" in lies:
                vectors.delta[7] = float("nan")
            if "delta-inf" in lies:
                vectors.delta[7] = float("inf")
            if "delta-huge" in lies:
                vectors.delta.mul_(1e4)
        return finite

    TrainingLoop._inner_step = bent_inner_step  # type: ignore[method-assign]
    ModelVector.write_difference = bent_write_difference  # type: ignore[method-assign]
