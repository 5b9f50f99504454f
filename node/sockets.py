"""What every TCP connection of a node is told, in daemon and engine alike."""

from __future__ import annotations

import contextlib
import socket
from typing import Protocol

_TCP_RTO_MAX_MS = 44
"""Linux 6.15 and later, `linux/tcp.h`; this Python does not name it."""
MAX_RETRANSMISSION_GAP_S = 5.0
"""More than a round trip over the slowest links (2.5 s) with its spread: less would repeat what is still on its way."""


class Options(Protocol):
    """A socket of the standard library, or trio's."""

    def setsockopt(self, level: int, option: int, value: int, /) -> None: ...


def keep_trying(tcp: Options) -> None:
    """Have the kernel repeat what was not acknowledged every few seconds, however long that has been going on.

    It would double the gap up to two minutes: a network that was away for 20 s came back up to 20 s late. Kernels
    without the option keep their ways; the connection is then given up after its own silence limit and made anew.
    """
    with contextlib.suppress(OSError):
        tcp.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, int(MAX_RETRANSMISSION_GAP_S * 1000))
