"""What rounds have shown of the two kinds of plan (design section 7).

Rates of nodes and pairs do not tell that a whole site shares one line: a grouped plan's gain is then in no prediction.
So the other kind is tried now and then, and what two rounds next to each other took is believed. Every peer of a round
sees its plan and how long its own parts took, so whoever leads next knows as much; it is kept in memory only, since a
new life learns it in two rounds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

TRIAL_AFTER = 16
"""Rounds from the last one of a kind until it is tried again, …"""
TRIAL_AFTER_MOST = 128
"""… doubled up to so many while trials change nothing."""
NEIGHBOURS = 4
"""Rounds so near to each other are compared."""
TRIAL_COST = 3.0
"""A kind that is predicted to take longer than the other by this factor is not tried."""
CLEAR = math.log(1.05)
"""Gains below it are no gains."""


class Kind(StrEnum):
    FLAT = "flat"
    GROUPED = "grouped"

    @property
    def other(self) -> Kind:
        return Kind.GROUPED if self is Kind.FLAT else Kind.FLAT


@dataclass(slots=True)
class Experience:
    gain: float | None = None
    """Logarithm of what a flat round took over what a grouped one took next to it, smoothed; None: never compared."""
    _took: dict[Kind, tuple[int, float]] = field(default_factory=dict)
    """Newest round of each kind that missed nobody, and its seconds."""
    _used: dict[Kind, int] = field(default_factory=dict)
    """Newest round of each kind."""
    _trial_after: int = TRIAL_AFTER

    def saw(self, kind: Kind, round_number: int) -> None:
        """A ROSTER came, whatever will come of it: a kind that fails is not tried again at once."""
        self._used[kind] = round_number

    def learn(self, kind: Kind, round_number: int, took_s: float | None) -> None:
        """After a commit. `took_s`: from the ROSTER to the last part here; None where a contribution is missing."""
        if took_s is None:
            return
        self._took[kind] = (round_number, max(took_s, 1e-6))
        near = self._took.get(kind.other)
        if near is None or round_number - near[0] > NEIGHBOURS:
            return
        flat, grouped = self._took[Kind.FLAT][1], self._took[Kind.GROUPED][1]
        before, shown = self._preferred(), math.log(flat / grouped)
        self.gain = shown if self.gain is None else (self.gain + shown) / 2
        self._trial_after = min(2 * self._trial_after, TRIAL_AFTER_MOST) if self._preferred() is before else TRIAL_AFTER
        self._took.clear()

    def forget(self) -> None:
        """The groups are others now."""
        self.gain, self._trial_after = None, TRIAL_AFTER
        self._took.clear()
        self._used.pop(Kind.GROUPED, None)

    def _preferred(self) -> Kind | None:
        if self.gain is None or abs(self.gain) < CLEAR:
            return None
        return Kind.GROUPED if self.gain > 0 else Kind.FLAT

    def choose(self, predicted_s: Mapping[Kind, float], round_number: int, *, may_try: bool) -> Kind:
        """Of the kinds that are predicted. `may_try`: False in later attempts of a round, which have failed once."""
        best = min(predicted_s, key=lambda kind: (predicted_s[kind], kind))
        if len(predicted_s) < 2:
            return best
        best = self._preferred() or best
        other = best.other
        due = other not in self._used or round_number - self._used[other] >= self._trial_after
        # Only beside a round of the kind in use there is something to compare with.
        comparable = best in self._took and round_number - self._took[best][0] <= NEIGHBOURS
        affordable = predicted_s[other] <= TRIAL_COST * predicted_s[best]
        return other if may_try and due and comparable and affordable else best
