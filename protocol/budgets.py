"""How many inner steps a peer makes in a round, so that all are done at the same time (design section 6)."""

from __future__ import annotations

import math
from collections.abc import Collection


def usual_speed(speeds: Collection[float]) -> float:
    """The median of the known speeds (above 0), of an even number the geometric mean of the middle two; 0: none known.

    Two peers of which one is four times as fast then meet in the middle: half and twice the usual steps.
    """
    known = sorted(speed for speed in speeds if speed > 0.0)
    if not known:
        return 0.0
    return math.sqrt(known[(len(known) - 1) // 2] * known[len(known) // 2])


def budget_steps(steps: int, mine: float, others: Collection[float], *, least: int, most: int) -> int:
    """Inner steps of one peer's round.

    Args:
        steps: what a peer of the usual speed makes.
        mine, others: training speeds of this peer and of the other members, in the same unit (tokens/s); 0 is unknown.
        least, most: bounds; `least ≤ steps ≤ most`.
    """
    usual = usual_speed([mine, *others])
    if mine <= 0.0 or usual <= 0.0:
        return steps
    return min(max(round(steps * mine / usual), least), most)
