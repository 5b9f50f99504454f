"""Rejected input, counted by reason and logged once a reason (design section 12)."""

from __future__ import annotations

import logging
from collections import Counter

log = logging.getLogger("atoll.engine")

MAX_REASONS = 100
"""Reasons are constant texts; should one ever carry a stranger's, it cannot fill the memory."""


class Drops:
    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def count(self, reason: str, sender: str = "") -> None:
        """`reason` may carry details behind a colon; they are logged, not counted."""
        kind = reason.partition(":")[0]
        if kind not in self._counts:
            if len(self._counts) >= MAX_REASONS:
                kind = "other reasons"
            log.warning("dropped%s: %s", f" from {sender}" if sender else "", reason)
        self._counts[kind] += 1

    def add(self, counts: Counter[str]) -> None:
        """What an exchange dropped that is over; it was logged then."""
        for reason, count in counts.items():
            known = reason in self._counts or len(self._counts) < MAX_REASONS
            self._counts[reason if known else "other reasons"] += count

    def __add__(self, counts: Counter[str]) -> dict[str, int]:
        return dict(self._counts + counts)
