"""What a round's steps amount to: tokens, loss, speed. Costs a step nothing and never waits for a device."""

from __future__ import annotations

import math
import time

import torch


class Meter:
    """Counts the steps of one round; `begin` starts the next one. Rates carry over until there are newer ones."""

    def __init__(self) -> None:
        self.steps = 0
        self._step_s = 0.0
        self._tokens_per_s = 0.0
        self._ended_at = 0.0
        self._late = _LateScalar()
        self.begin()

    def begin(self) -> None:
        self._measure()
        self._began_at = time.monotonic()
        self._reported_at = -math.inf
        self.steps = 0
        self.tokens = 0
        self._losses = 0
        self._loss_sum: torch.Tensor | float = 0.0
        self._newest: torch.Tensor | float | None = None
        self._first_ended_at = 0.0
        self._first_tokens = 0
        self._ended_at = self._began_at

    def count(self, tokens: int, loss: torch.Tensor | float | None) -> None:
        """A step ended."""
        self._ended_at = time.monotonic()
        self.steps += 1
        self.tokens += tokens
        if self.steps == 1:
            self._first_ended_at = self._ended_at
            self._first_tokens = tokens
        if loss is None:
            return
        if isinstance(loss, torch.Tensor):
            loss = loss.detach().float()
        self._newest = loss
        self._loss_sum = self._loss_sum + loss
        self._losses += 1

    def due(self, every_s: float) -> bool:
        """True at most once in `every_s`."""
        if self._ended_at - self._reported_at < every_s:
            return False
        self._reported_at = self._ended_at
        return True

    def mean_loss(self) -> float | None:
        """Over the round's steps; waits for the device. None: no loss was given, or it is not finite."""
        if not self._losses:
            return None
        return _finite(float(self._loss_sum) / self._losses)

    def recent_loss(self) -> float | None:
        """Of a recent step. On a GPU it is the one asked for last time: its copy has arrived by now."""
        if isinstance(self._newest, torch.Tensor) and self._newest.is_cuda:
            return _finite(self._late.exchange(self._newest))
        return _finite(float(self._newest)) if self._newest is not None else None

    def step_s(self) -> float:
        """Seconds of a step. The first step of a round is left out: before it come validation and checkpoints."""
        self._measure()
        return self._step_s

    def tokens_per_s(self) -> float:
        self._measure()
        return self._tokens_per_s

    def _measure(self) -> None:
        if self.steps > 1:
            elapsed_s = self._ended_at - self._first_ended_at
            self._step_s = elapsed_s / (self.steps - 1)
            self._tokens_per_s = (self.tokens - self._first_tokens) / elapsed_s if elapsed_s > 0 else 0.0
        elif self.steps == 1 and self._step_s == 0.0:
            # Nothing better yet: an upper bound, so that nobody takes this trainer for done at once.
            self._step_s = self._ended_at - self._began_at
            self._tokens_per_s = self.tokens / self._step_s if self._step_s > 0 else 0.0


class _LateScalar:
    """A scalar's way from the GPU without a wait: what is asked for now is read when asked again."""

    def __init__(self) -> None:
        self._host: torch.Tensor | None = None
        self._copied: torch.cuda.Event | None = None
        self._value: float | None = None

    def exchange(self, scalar: torch.Tensor) -> float | None:
        """Begin to copy `scalar`; returns the newest value that has arrived."""
        if self._host is None:
            self._host = torch.empty((), dtype=torch.float32, pin_memory=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        elif self._copied is not None and not self._copied.query():  # type: ignore[no-untyped-call]
            return self._value
        else:
            self._value = float(self._host)
        assert self._copied is not None
        self._host.copy_(scalar, non_blocking=True)
        self._copied.record()
        return self._value


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
