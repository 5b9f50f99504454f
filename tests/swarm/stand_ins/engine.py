"""An engine that tells each daemon its process id, and keeps the connection open."""

from __future__ import annotations

import json
import os
import socket

supervisor = socket.socket(fileno=int(os.environ["ATOLL_SUPERVISOR_FD"]))
kept = []
while True:
    data, descriptors, _, _ = socket.recv_fds(supervisor, 4096, 8)
    if not data:
        break
    assert json.loads(data) == {"op": "daemon"}
    (descriptor,) = descriptors
    daemon = socket.socket(fileno=descriptor)
    daemon.sendall(str(os.getpid()).encode())
    kept.append(daemon)
