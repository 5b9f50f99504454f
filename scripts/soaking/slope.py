"""Does a process grow? One line through the samples of all processes of a role, and how sure one can be of it.

Every process has a level of its own, and its first minutes are left out: imports, first buffers, the first rounds.
Processes live as long as the soak lets them, so each counts by how long it was looked at, whatever it did: one that
stands still shall not outvote those that grow. How sure the common slope is follows from the larger of two spreads:
of the samples around each process's line, of which neighbours say the same, and of the processes' slopes around the
common one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

OLD_ENOUGH_S = 240.0
"""A process that was not looked at for so long says nothing."""
WARM_S = 120.0
"""Left out at the beginning of each process: on a busy machine half a minute of it is imports."""
T_975 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)
"""[degrees of freedom − 1] Student's t of a 95 % interval; beyond these, that of 15."""

Series = tuple[Sequence[float], Sequence[float]]
"""(times in seconds, ascending; values) of one process."""


class Slope(msgspec.Struct, frozen=True, kw_only=True):
    """Of all processes of one role together."""

    per_hour: float
    margin: float
    """Of a 95 % interval."""
    processes: int
    """That lived long enough to be looked at."""
    highest: float
    """Value of any of them at any time."""

    @property
    def within_noise(self) -> bool:
        return abs(self.per_hour) <= self.margin

    @property
    def surely(self) -> float:
        """What it grows by in an hour at least."""
        return max(0.0, self.per_hour - self.margin)

    @property
    def at_most(self) -> float:
        return self.per_hour + self.margin


class _Line:
    """A least-squares line through the samples of one process."""

    def __init__(self, times_s: Sequence[float], values: Sequence[float]) -> None:
        hours = np.asarray(times_s, np.float64) / 3600.0
        measured = np.asarray(values, np.float64)
        centred = hours - hours.mean()
        self.spread = float(np.square(centred).sum())
        self.slope = float((centred * measured).sum()) / self.spread
        rest = measured - measured.mean() - self.slope * centred
        self.independent = _independent(rest)
        power = float(np.square(rest).sum())
        freedom = max(self.independent - 2.0, 1.0)
        self.error = math.sqrt(power / freedom / self.spread * len(rest) / self.independent)


def _independent(rest: np.ndarray) -> float:  # type: ignore[type-arg]
    """How many samples say something of their own: neighbours of one process resemble each other."""
    power = float(np.square(rest).sum())
    if power == 0.0:
        return float(len(rest))
    correlation = min(0.99, max(0.0, float((rest[1:] * rest[:-1]).sum()) / power))
    return max(3.0, len(rest) * (1 - correlation) / (1 + correlation))


def together(lives: Iterable[Series]) -> Slope | None:
    """None: no process lived long enough."""
    lines, highest = [], -math.inf
    for times_s, values in lives:
        highest = max(highest, max(values, default=-math.inf))
        if not times_s or times_s[-1] - times_s[0] < OLD_ENOUGH_S:
            continue
        warm = [index for index, time_s in enumerate(times_s) if time_s - times_s[0] >= WARM_S]
        if len(warm) > 3:
            lines.append(_Line([times_s[index] for index in warm], [values[index] for index in warm]))
    if not lines:
        return None
    spread = sum(line.spread for line in lines)
    slope = sum(line.spread * line.slope for line in lines) / spread
    within = math.sqrt(sum((line.spread * line.error) ** 2 for line in lines)) / spread
    margin = within * _t(sum(line.independent - 2.0 for line in lines))
    if (count := len(lines)) > 1:
        apart = sum((line.spread * (line.slope - slope)) ** 2 for line in lines) * count / (count - 1)
        # As many processes as would tell the same if all had been looked at for the same time.
        alike = spread**2 / sum(line.spread**2 for line in lines)
        margin = max(margin, math.sqrt(apart) / spread * _t(alike - 1.0))
    return Slope(per_hour=slope, margin=margin, processes=len(lines), highest=highest)


def _t(freedom: float) -> float:
    return T_975[min(max(int(freedom), 1), len(T_975)) - 1]
