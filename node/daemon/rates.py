"""What a line or a link carries, from observations that each prove only a part of it; and figures that hold still.

A transfer is as fast as the slowest thing in it: the line here, the line there, whoever else shared them, or a sum that
was not ready. So the rate of one is a lower bound of what the link carries: more is believed at once, less only by half
(in the logarithm) an observation, and only from transfers that kept the link busy for long (`sure`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

HALVED_S = 600.0
"""The weight of what is known against what is new halves in this time."""
FORGOTTEN_S = 2 * 3600.0
"""What was not seen again by then says nothing any more."""
NOISE = 1.25
"""Figures that differ by less are the same figure."""


class RateEstimate:
    """Of one direction."""

    def __init__(self) -> None:
        self._bytes_s = 0.0
        self._seen_at_s = -math.inf

    def observe(self, bytes_s: float, *, sure: bool, now_s: float) -> None:
        known = self.at(now_s)
        if known is None or bytes_s >= known:
            self._bytes_s = bytes_s
        elif sure:
            weight = 0.5 ** (1.0 + self.age_s(now_s) / HALVED_S)
            self._bytes_s = known**weight * bytes_s ** (1.0 - weight)
        else:
            return  # it neither says more nor less: what is known grows older
        self._seen_at_s = now_s

    def at(self, now_s: float) -> float | None:
        """Bytes per second; None: nothing is known."""
        return self._bytes_s if self.age_s(now_s) < FORGOTTEN_S else None

    def age_s(self, now_s: float) -> float:
        """Since the newest observation that said anything; infinity: there was none."""
        return now_s - self._seen_at_s


@dataclass(slots=True)
class Steady:
    """A figure that others are told: it stays what it was until what is measured has left it by more than noise."""

    least_change: float = 0.0
    told: float | None = None

    def settle(self, measured: float | None) -> float | None:
        """What to tell now, in two digits."""
        if measured is None or self.told is None:
            self.told = None if measured is None else two_digits(measured)
            return self.told
        low, high = sorted((self.told, measured))
        if high > NOISE * low and high - low >= self.least_change:
            self.told = two_digits(measured)
        return self.told


def two_digits(value: float) -> float:
    """`value` rounded to two significant digits."""
    return float(f"{value:.2g}")
