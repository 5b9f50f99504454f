"""The inner learning rate as a function of the run's step, so that a joiner enters the schedule in the middle."""

from __future__ import annotations

import math

from node.manifest import Inner


def learning_rate(inner: Inner, run_step: int, *, fresh_steps: int | None = None) -> float:
    """The rate of the inner step number `run_step` of the run (from 0).

    Linear warm-up over `warmup_steps`; then, until `total_steps`, `cosine` or `linear` down to `final_lr_ratio · lr`,
    where it stays. `constant` stays at `lr`.

    `fresh_steps`: steps that the inner optimizer has made since it was created in the middle of the run (a joiner's, or
    one whose checkpoint was lost); None: it is as old as the run. Its moments are estimates from few gradients, so the
    rate rises linearly over `rejoin_warmup_steps`.
    """
    if run_step < 0:
        raise ValueError(f"run_step = {run_step}: a run's steps count from 0")
    rate = inner.lr * _shape(inner, run_step)
    if fresh_steps is not None and fresh_steps < inner.rejoin_warmup_steps:
        rate *= (fresh_steps + 1) / inner.rejoin_warmup_steps
    return rate


def _shape(inner: Inner, run_step: int) -> float:
    if run_step < inner.warmup_steps:
        return (run_step + 1) / inner.warmup_steps
    if inner.schedule == "constant" or inner.total_steps <= inner.warmup_steps:
        return 1.0
    progress = min(1.0, (run_step - inner.warmup_steps) / (inner.total_steps - inner.warmup_steps))
    match inner.schedule:
        case "cosine":
            descent = 0.5 * (1.0 + math.cos(math.pi * progress))
        case "linear":
            descent = 1.0 - progress
        case other:
            raise ValueError(f"inner.schedule = {other!r}: choose cosine, linear or constant")
    return inner.final_lr_ratio + (1.0 - inner.final_lr_ratio) * descent
