"""What strangers send: garbage, half sentences, too much, and connections that stay, for every port of a node."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import time
from collections.abc import Iterator

from tests.swarm.daemons import PATIENCE, Daemon

IN_A_ROW = 300
HALF_OPEN = 100
"""Connections that stay, on each port, while the others come."""
GROWTH_BYTES = 12e6
"""Of one process, from after a first flood to after a second: caches, allocator, the node's own history."""
FLOOD_S = 60.0 * PATIENCE
ANY = "/ip4/127.0.0.1/tcp/0"

_RANDOM = random.Random(2)
_HELLO = b"\x13/multistream/1.0.0\n"
ANYWHERE = [
    b"",
    b"\x00" * 1000,
    b"\xff" * 1000,
    _RANDOM.randbytes(100_000),
    *(_RANDOM.randbytes(length) for length in (1, 7, 64, 1500)),
]
PORTS = {
    "control": [
        _HELLO,
        _HELLO + b"\x04\xff\xfe\xfd\n",  # a protocol's name that is not UTF-8
        _HELLO + b"\x07/noise\n" + b"\xff\xff" + bytes(500),  # a Noise message of 64 KiB that never comes
        _HELLO + b"\x07/noise\n" + bytes(40),
        _HELLO + b"\xff\xff\xff\xff\xff\xff\xff\xff\x7f" + b"x" * 10_000,  # a name of 2^62 bytes
        _HELLO * 500,
    ],
    "data": [
        b"\x16\x03\x01\xff\xff" + bytes(1000),  # a TLS record that is too long
        b"\x16\x03\x01\x00\xf4\x01\x00\xff\xff\xff" + bytes(200),  # a ClientHello of 16 MiB
        b"\x15\x03\x03\x00\x02\x02\x28",  # an alert, before anything
        struct.pack(">Q", 2**62),
    ],
    "http": [
        b"GET /status HTTP/1.1\r\nHost: " + b"h" * 200_000,
        b"GET /\xff\xfe\xfd HTTP/1.1\r\nHost: a\r\n\r\n",
        b"POST /status HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999999999999\r\n\r\n" + bytes(1000),
        b"GET /status HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\nx",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\xff\xff\x04\x00\x00\x00\x00\x00",
        b"GET /status HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n",
    ],
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def send(port: int, data: bytes) -> None:
    """As rude as it gets: send, look whether something comes at once, and leave with a reset."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 5.0 * PATIENCE) as stranger:
        stranger.settimeout(2.0)
        stranger.sendall(data)
        stranger.settimeout(0.002)
        with contextlib.suppress(OSError):
            stranger.recv(4096)
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def flood(port: int, kind: str) -> None:
    """300 connections in a row, each with something else."""
    deadline_s = time.monotonic() + FLOOD_S
    inputs = ANYWHERE + PORTS[kind]
    for index in range(IN_A_ROW):
        send(port, inputs[index % len(inputs)])
        assert time.monotonic() < deadline_s, f"the {kind} port took only {index} connections in {FLOOD_S:.0f} s"


@contextlib.contextmanager
def half_open(ports: dict[str, int]) -> Iterator[None]:
    """Connections that say the beginning of something, or nothing, and stay."""
    with contextlib.ExitStack() as stack:
        for kind, port in ports.items():
            for index in range(HALF_OPEN):
                with contextlib.suppress(OSError):
                    held = stack.enter_context(socket.create_connection(("127.0.0.1", port), 5.0 * PATIENCE))
                    if index % 2:
                        held.sendall(PORTS[kind][0][:10])
        yield


def resident_and_descriptors(node: Daemon) -> dict[str, tuple[int, int]]:
    found = node.whole_node()
    return {role: (found[role].memory_info().rss, found[role].num_fds()) for role in ("daemon", "engine", "supervisor")}
