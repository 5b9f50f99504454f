"""`python -m node.engine`: the engine process, started by the supervisor (design section 2, `node.supervisor.link`).

`ATOLL_SUPERVISOR_FD` names the inherited stream socket on which the supervisor hands over connections of daemons; its
end ends the engine. When a daemon's connection ends, everything that served it stops and the engine waits for the next
one. θ, momentum and Δ live in the supervisor's memory objects and come anew with each `Open`.
"""

from __future__ import annotations

import os

# Before NumPy is imported: its linear algebra would start a thread per core and keep a buffer for each.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import logging
import signal
import sys

import trio

from node.engine.service import serve
from node.supervisor.link import SUPERVISOR_VARIABLE
from protocol.outer import flushes_subnormals


def main() -> int:
    supervisor_fd = os.environ.get(SUPERVISOR_VARIABLE, "")
    if not supervisor_fd.isdigit():
        print(f"{SUPERVISOR_VARIABLE} is not set: run `atoll daemon`, which starts the engine", file=sys.stderr)  # noqa: T201
        return 2
    # Ctrl-C goes to the whole foreground group; the supervisor decides when the engine ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if flushes_subnormals():
        print("this processor rounds subnormal numbers to zero, so this node would leave the others", file=sys.stderr)  # noqa: T201
        return 2
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    trio.run(serve, int(supervisor_fd))
    return 0


if __name__ == "__main__":
    sys.exit(main())
