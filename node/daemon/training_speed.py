"""Tokens per second that others may count on: of whole rounds, and without the one in which the machine stood still."""

from __future__ import annotations

import statistics
from collections import deque

from node.daemon.rates import Steady

ROUNDS = 5


class TrainingSpeed:
    """The median of the newest rounds' speeds, told in two digits that only a real change moves."""

    def __init__(self) -> None:
        self._rounds: deque[tuple[int, float]] = deque(maxlen=ROUNDS)
        self._told = Steady()

    def saw(self, number: int, tokens_per_s: float) -> None:
        """The trainer's own measure of round `number` so far; the newest of each round counts."""
        if tokens_per_s <= 0.0:
            return
        if self._rounds and self._rounds[-1][0] == number:
            self._rounds.pop()
        self._rounds.append((number, tokens_per_s))

    def tell(self) -> float:
        """0: no step was measured yet."""
        speeds = [speed for _, speed in self._rounds]
        return self._told.settle(statistics.median(speeds) if speeds else None) or 0.0
