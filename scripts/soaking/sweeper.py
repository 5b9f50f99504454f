"""Clears away what a soak that was killed would leave: it reads what there is from its standard input, to the end.

namespace NAME     to be removed
stopped PID        SIGSTOP was sent: a stopped process cannot notice that its owner is gone
continued PID
done               all is cleared away already
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

NODES_END_S = 12.0
"""The nodes notice by themselves that their owner is gone, and end within 10 s."""


class Sweeper:
    """The soak's end of it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", os.path.abspath(__file__)],
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the soak
        )

    def tell(self, *words: object) -> None:
        """Raises `BrokenPipeError` if somebody has killed it."""
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(map(str, words)).encode() + b"\n")
        self._process.stdin.flush()

    def close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.tell("done")
            self._process.stdin.close()
        self._process.wait(NODES_END_S + 10)


def main() -> None:
    namespaces: list[str] = []
    stopped: dict[int, int] = {}
    for line in sys.stdin:
        word, _, rest = line.strip().partition(" ")
        if word == "done":
            return
        if word == "namespace":
            namespaces.append(rest)
        elif word == "stopped":
            with contextlib.suppress(ProcessLookupError):
                stopped[int(rest)] = os.pidfd_open(int(rest))  # that process, whoever has its number later
        elif word == "continued" and (descriptor := stopped.pop(int(rest), None)) is not None:
            os.close(descriptor)
    for descriptor in stopped.values():
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, signal.SIGCONT)
    if namespaces:
        time.sleep(NODES_END_S)  # their processes have no other deadline that this one could see
    for name in namespaces:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


if __name__ == "__main__":
    main()
