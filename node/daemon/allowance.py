"""How often somebody may ask for something: so many at once, and so many a second after that."""

from __future__ import annotations

import trio

MAX_ASKERS = 1000
"""Remembered; who asked longest ago makes room."""


class Allowances:
    """By asker."""

    def __init__(self, *, at_once: float, per_s: float) -> None:
        self._at_once = at_once
        self._per_s = per_s
        self._left: dict[str, tuple[float, float]] = {}
        """What each may still ask for, and when that was reckoned."""

    def take(self, asker: str) -> bool:
        """Whether it may ask now; counted if so."""
        now_s = trio.current_time()
        left, since_s = self._left.pop(asker, (self._at_once, now_s))
        left = min(self._at_once, left + (now_s - since_s) * self._per_s)
        may = left >= 1
        self._left[asker] = (left - may, now_s)
        while len(self._left) > MAX_ASKERS:
            del self._left[next(iter(self._left))]
        return may
