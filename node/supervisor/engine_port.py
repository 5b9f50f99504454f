"""Between daemons and engines that come and go: the outer state's memory, and the newest connection of the two."""

from __future__ import annotations

import socket

from node.supervisor import link
from node.supervisor.segments import NotEnoughMemory, Segments, allocate


class EnginePort:
    """Keeps the segments for as long as the supervisor lives, and one connection until an engine has taken it."""

    def __init__(self) -> None:
        self._segments: Segments | None = None
        self._waiting: socket.socket | None = None
        """The engine's end of the newest connection."""

    @property
    def has_waiting_connection(self) -> bool:
        return self._waiting is not None

    def connect(self, sizes: tuple[int, int, int]) -> tuple[bool, tuple[int, ...]]:
        """A new connection for a daemon: (fresh, [its end of the connection, θ, momentum, Δ, θ read-only]).

        `sizes` are the bytes of θ, momentum and Δ. The first descriptor is the caller's, the others stay ours. `fresh`
        says that the segments were allocated just now. Raises `NotEnoughMemory`.
        """
        fresh = self._segments is None
        if self._segments is None:
            self._segments = allocate(*sizes)
        elif self._segments.sizes != sizes:
            raise NotEnoughMemory(
                f"vectors of {self._segments.sizes} bytes are held and {sizes} are wanted: restart `atoll daemon`"
            )
        for_daemon, for_engine = socket.socketpair()
        self._drop_waiting()
        self._waiting = for_engine
        return fresh, (for_daemon.detach(), *self._segments.descriptors)

    def hand_over(self, engine: socket.socket) -> None:
        """Give the waiting connection to the engine behind `engine`.

        Should that engine die before it takes it, the daemon sees its end closed and asks again.
        """
        assert self._waiting is not None
        try:
            link.send(engine, {"op": "daemon"}, (self._waiting.fileno(),))
        finally:
            self._drop_waiting()

    def close(self) -> None:
        self._drop_waiting()
        if self._segments is not None:
            self._segments.close()
            self._segments = None

    def _drop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.close()
            self._waiting = None
