"""Connections that have not yet shown a token: few, short, never in the way of real peers (design section 12).

A newcomer beyond the bounds takes the place of the oldest one if that had its fair time, else it is refused. A real
peer needs milliseconds on a LAN and two round trips at most; refused, it tries again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import trio

MAX_TOTAL = 256
MAX_PER_HOST = 64
FAIR_TIME_S = 2.0


@dataclass(slots=True, eq=False)
class Stranger:
    host: str
    since: float
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)


class Strangers:
    def __init__(self) -> None:
        self._waiting: dict[Stranger, None] = {}  # in order of arrival

    def __len__(self) -> int:
        return len(self._waiting)

    def admit(self, host: str) -> Stranger | None:
        """A place for a connection from `host`, whose scope may be cancelled at any time; None: refuse it."""
        same_host = [stranger for stranger in self._waiting if stranger.host == host]
        if len(same_host) >= MAX_PER_HOST:
            oldest = same_host[0]
        elif len(self._waiting) >= MAX_TOTAL:
            oldest = next(iter(self._waiting))
        else:
            oldest = None
        now = trio.current_time()
        if oldest is not None:
            if now - oldest.since < FAIR_TIME_S:
                return None
            oldest.scope.cancel()
            self.leave(oldest)
        stranger = Stranger(host, now)
        self._waiting[stranger] = None
        return stranger

    def leave(self, stranger: Stranger) -> None:
        self._waiting.pop(stranger, None)
