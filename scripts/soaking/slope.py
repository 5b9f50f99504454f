"""Does a process grow? A line through its samples, and how sure one can be of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

OLD_ENOUGH_S = 300.0
WARM_S = 60.0
"""Left out at the beginning of each process: imports, first buffers."""
SURE = 1.96
"""Standard errors of a 95 % interval."""


class Slope(msgspec.Struct, frozen=True, kw_only=True):
    """Of all processes of one role together."""

    per_hour: float
    margin: float
    """Of a 95 % interval."""
    processes: int

    @property
    def within_noise(self) -> bool:
        return abs(self.per_hour) <= self.margin


def fit(times_s: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """(slope, its standard error), per hour, by least squares. Raises `ValueError` for fewer than three samples."""
    if len(times_s) < 3:
        raise ValueError(f"{len(times_s)} samples make no slope; give three")
    hours = np.asarray(times_s, np.float64) / 3600.0
    measured = np.asarray(values, np.float64)
    centred = hours - hours.mean()
    spread = float(np.square(centred).sum())
    slope = float((centred * measured).sum()) / spread
    rest = measured - measured.mean() - slope * centred
    # Samples of one process resemble their neighbours: count as many as are independent.
    independent = _independent(rest)
    error = math.sqrt(float(np.square(rest).sum()) / max(independent - 2.0, 1.0) / spread * len(rest) / independent)
    return slope, error


def _independent(rest: np.ndarray) -> float:  # type: ignore[type-arg]
    power = float(np.square(rest).sum())
    if power == 0.0:
        return float(len(rest))
    correlation = min(0.99, max(0.0, float((rest[1:] * rest[:-1]).sum()) / power))
    return max(3.0, len(rest) * (1 - correlation) / (1 + correlation))


def together(lives: Iterable[tuple[Sequence[float], Sequence[float]]]) -> Slope | None:
    """Processes of one role, each weighted by how sure its own slope is. None: none lived long enough."""
    fits = []
    for times_s, values in lives:
        if times_s and times_s[-1] - times_s[0] >= OLD_ENOUGH_S:
            kept = [index for index, time_s in enumerate(times_s) if time_s - times_s[0] >= WARM_S]
            fits.append(fit([times_s[index] for index in kept], [values[index] for index in kept]))
    if not fits:
        return None
    weights = [1.0 / max(error, 1e-9) ** 2 for _, error in fits]
    mean = sum(slope * weight for (slope, _), weight in zip(fits, weights, strict=True)) / sum(weights)
    return Slope(per_hour=mean, margin=SURE / math.sqrt(sum(weights)), processes=len(fits))
