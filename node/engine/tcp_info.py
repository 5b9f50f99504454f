"""The kernel's own account of a TCP connection (`struct tcp_info` of linux/tcp.h, since Linux 4.18)."""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from typing import Protocol

_SIZE = 196
_COUNT = struct.Struct("=I")
_IN_FLIGHT_AT = 24
_BYTES = struct.Struct("=QQ")
_BYTES_AT = 120
_NOT_SENT_AT = 144
_PACKETS_RECEIVED_AT = 152
_PACKETS_DELIVERED_AT = 192
_TIMES = struct.Struct("=QQ")
_TIMES_AT = 168


class Gettable(Protocol):
    """A socket of the standard library, or trio's."""

    def getsockopt(self, level: int, option: int, size: int, /) -> bytes: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpInfo:
    acked_bytes: int
    """That the other end's kernel has confirmed."""
    received_bytes: int
    """In order, read by us or not."""
    acked_packets: int
    """That the other end's kernel has confirmed, in any order."""
    received_packets: int
    """With data, in any order."""
    in_flight: bool
    """Something is sent and not confirmed yet."""
    not_sent: bool
    """Something was handed over that may not be sent yet."""
    held_s: float
    """In which the other end's receive window was full: it did not read, or its buffer is small."""


def tcp_info(connection: Gettable) -> TcpInfo | None:
    """None: it is no TCP connection any more, or this kernel does not tell."""
    try:
        data = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SIZE)
    except OSError:
        return None
    if len(data) < _SIZE:
        return None
    acked, received = _BYTES.unpack_from(data, _BYTES_AT)
    (in_flight,) = _COUNT.unpack_from(data, _IN_FLIGHT_AT)
    (delivered,) = _COUNT.unpack_from(data, _PACKETS_DELIVERED_AT)
    (arrived,) = _COUNT.unpack_from(data, _PACKETS_RECEIVED_AT)
    (not_sent,) = _COUNT.unpack_from(data, _NOT_SENT_AT)
    _, held_us = _TIMES.unpack_from(data, _TIMES_AT)
    return TcpInfo(
        acked_bytes=acked,
        received_bytes=received,
        acked_packets=delivered,
        received_packets=arrived,
        in_flight=in_flight > 0,
        not_sent=not_sent > 0,
        held_s=held_us / 1e6,
    )
