"""Whether a node that catches up comes nearer: its rounds a minute beside the run's, and a sentence if it does not."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import trio

WINDOW_S = 300.0
"""What is further back says nothing of now."""
JUDGED_AFTER_S = 20.0
"""From less than this no pace is told; and who took part in rounds for as long was not too slow for them."""
MARGIN = 1.1
"""Nearer than this to the run's pace is as good as never."""
_MARKS = 256


@dataclass(frozen=True, slots=True)
class _Mark:
    at_s: float
    mine: int
    """The round that the state here is of."""
    tip: int
    """The round that the run works on."""


class Pace:
    """Told where the node and the run are, every now and then."""

    def __init__(self) -> None:
        self._marks: deque[_Mark] = deque(maxlen=_MARKS)
        self._told = False

    def begin(self) -> None:
        """Catching up, for the first time or again."""
        if self._marks and trio.current_time() - self._marks[-1].at_s > JUDGED_AFTER_S:
            self._marks.clear()

    def saw(self, mine: int, tip: int) -> None:
        now_s = trio.current_time()
        self._marks.append(_Mark(now_s, mine, tip))
        while now_s - self._marks[0].at_s > WINDOW_S:
            self._marks.popleft()

    def restart(self) -> None:
        """The state here is another one, which no replay led to."""
        self._marks.clear()

    def due(self, every_s: float) -> bool:
        """Whether nothing was seen for so long."""
        return not self._marks or trio.current_time() - self._marks[-1].at_s >= every_s

    def news(self) -> str | None:
        """`too_slow`, once while it lasts; for the log."""
        sentence = self.too_slow
        told, self._told = self._told, sentence is not None
        return None if told else sentence

    @property
    def too_slow(self) -> str | None:
        """A sentence when the run goes on as fast as this node follows, or faster; None: it comes nearer, or is there.

        With it goes what is done about it, and what the operator can do.
        """
        if len(self._marks) < 2:
            return None
        first, last = self._marks[0], self._marks[-1]
        minutes = (last.at_s - first.at_s) / 60
        behind = last.tip - last.mine
        if minutes * 60 < JUDGED_AFTER_S or behind < 2:
            return None
        mine, run = (last.mine - first.mine) / minutes, (last.tip - first.tip) / minutes
        if mine > MARGIN * run:
            return None
        return (
            f"replay makes {mine:.1f} rounds/min while the run makes {run:.1f}, {behind} rounds behind: the newest "
            "snapshot is fetched instead; if that does not help, this machine's link or disk is too slow for the run: "
            "give it a faster one, or ask for longer rounds (rounds.steps)"
        )
