"""How long answers of one peer take, and how many do not come: pings on the control stream (design section 7)."""

from __future__ import annotations

from collections import deque

WINDOW = 16
"""Newest pings that count: 80 s of them."""
LOST_AFTER_S = 5.0
"""An answer that has not come by then counts as lost, and as one that took so long."""


class RoundTrips:
    """The mean of the middle half of the newest pings.

    What waited behind a round's bytes or for a busy machine lies in the upper quarter and moves nothing; the mean of
    what is left wanders less than a median would: with times that jitter by ± 30 %, by 5 % (one standard deviation). A
    link that really changed is beyond any such noise after six to ten pings.
    """

    def __init__(self) -> None:
        self._samples: deque[float | None] = deque(maxlen=WINDOW)
        """None: lost."""
        self.answered_at_s: float | None = None
        """When the newest answer came."""

    def answered(self, seconds: float, now_s: float) -> None:
        self._samples.append(min(seconds, LOST_AFTER_S))
        self.answered_at_s = now_s

    def lost(self) -> None:
        self._samples.append(None)

    @property
    def smoothed_s(self) -> float | None:
        """None: no answer yet, and none missed."""
        times = sorted(LOST_AFTER_S if sample is None else sample for sample in self._samples)
        aside = len(times) // 4
        middle = times[aside : len(times) - aside]
        return sum(middle) / len(middle) if middle else None

    @property
    def lost_share(self) -> float:
        """Of the newest pings, 0 to 1."""
        return sum(1 for sample in self._samples if sample is None) / max(1, len(self._samples))
