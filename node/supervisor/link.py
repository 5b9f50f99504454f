"""What the supervisor, the daemon and the engine say to each other.

Requests of the daemon and their answers are JSON, one per datagram of a SOCK_SEQPACKET pair, in order; descriptors ride
beside an answer. Events come unasked:

    {"op": "start_engine", "bytes": {"theta": N, "momentum": N, "delta": N}}
        → {"ok": true, "fresh": bool, "life": N} + [engine socket, theta, momentum, delta, theta read-only]
    {"op": "start_trainer"} | {"op": "stop_trainer"}             → {"ok": true}
    {"op": "listening", "addresses": [...], "http": "…"}         → {"ok": true}
    {"op": "processes"}             → {"ok": true, "pids": {role: pid}, "resident_bytes": {role: bytes},
                                       "crashes": {role: times in a row}}
    {"op": "fatal", "error": "one sentence"}                     → {"ok": true}; the daemon then exits with status 2
    any of them, refused                                         → {"ok": false, "error": "one sentence"}
    {"event": "engine_restarted", "life": N}
    {"event": "trainer_exited", "code": N, "reason": "…", "restart_in_s": seconds or null,
     "crashes": times in a row}

`life` counts the engine's processes from 1: a connection is one to that process, started by then or about to be.

The engine gets, over a stream pair, one line of JSON, `{"op": "daemon"}`, and with it one descriptor: its end of a new
connection to a daemon. Both find their end of their pair in `ATOLL_SUPERVISOR_FD`.
"""

from __future__ import annotations

import array
import json
import socket
from collections.abc import Sequence
from typing import Any

SUPERVISOR_VARIABLE = "ATOLL_SUPERVISOR_FD"
MAX_MESSAGE_BYTES = 64 * 1024
MAX_DESCRIPTORS = 8


class BadRequest(Exception):
    """What arrived is none of the requests above."""


def send(link: socket.socket, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Raises `OSError` when the other end is gone, or so far behind that it would block."""
    data = json.dumps(message).encode() + b"\n"
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    link.sendmsg([data], ancillary)


def receive(link: socket.socket) -> dict[str, Any] | None:
    """The next request; None at the end. Raises `BlockingIOError` when there is none yet, and `BadRequest`."""
    try:
        data = link.recv(MAX_MESSAGE_BYTES)
    except BlockingIOError:
        raise
    except OSError:
        return None
    if not data:
        return None
    try:
        request = json.loads(data)
    except ValueError as error:
        raise BadRequest(f"a request is not JSON: {data[:80]!r}") from error
    if not isinstance(request, dict) or not isinstance(request.get("op"), str):
        raise BadRequest(f'a request has no "op": {data[:80]!r}')
    return request
