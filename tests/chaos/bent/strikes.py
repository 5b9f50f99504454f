"""Signals at an exact place: written by a test into a node's home, carried out by the node's own processes there.

`strike.json` arms one strike. The process that comes to the place for the n-th time in that round takes the file away,
writes `struck.json` and sends the signal before it does anything else. Times are CLOCK_MONOTONIC, which all processes
of a machine share.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil

PROGRAM = (sys.executable, "-P", str(Path(__file__).with_name("program.py").resolve()))
"""What is started as `atoll` by a test that strikes."""


class Strike(msgspec.Struct, frozen=True, kw_only=True):
    point: str
    """Where; see `engine`, `daemon` and `trainer` beside this module."""
    round: int | None
    """None: whatever round it is."""
    after: int = 1
    """At which passing of that place in that round."""
    target: str = "node"
    """`node` (as a power cut), `all` (each of its processes), or one role: supervisor, daemon, engine, trainer."""
    signal: int = signal.SIGKILL

    def counts(self, round_number: int) -> bool:
        return self.round is None or self.round == round_number


class Struck(msgspec.Struct, frozen=True, kw_only=True):
    strike: Strike
    at_s: float
    processes: tuple[int, ...]
    """Of the node at that moment."""


def armed_file(home: Path) -> Path:
    return home / "strike.json"


def struck_file(home: Path) -> Path:
    return home / "struck.json"


class Striker:
    """One process's eyes on the armed strike."""

    def __init__(self) -> None:
        self._home = Path(os.environ["ATOLL_HOME"])
        self._passed: Counter[tuple[str, int]] = Counter()

    def passing(self, point: str, round_number: int) -> None:
        """This process is at `point`."""
        self._passed[point, round_number] += 1
        try:
            strike = msgspec.json.decode(armed_file(self._home).read_bytes(), type=Strike)
        except FileNotFoundError:
            return
        passed = sum(count for (name, number), count in self._passed.items() if name == point and strike.counts(number))
        if strike.point != point or not strike.counts(round_number) or passed < strike.after:
            return
        armed_file(self._home).unlink()
        self._carry_out(strike)

    def _carry_out(self, strike: Strike) -> None:
        roles = processes_of_node(os.getppid())
        struck = Struck(strike=strike, at_s=time.monotonic(), processes=tuple(roles.values()))
        unfinished = struck_file(self._home).with_suffix(".part")
        unfinished.write_bytes(msgspec.json.encode(struck))
        unfinished.replace(struck_file(self._home))
        if strike.target == "all":
            # Oneself last, or the others would be spared.
            for pid in sorted(roles.values(), key=lambda pid: pid == os.getpid()):
                os.kill(pid, strike.signal)
            return
        os.kill(roles["supervisor" if strike.target == "node" else strike.target], strike.signal)
        while strike.target == "node":  # the kernel ends this process with its supervisor: nothing more is done here
            signal.pause()


def processes_of_node(supervisor: int) -> dict[str, int]:
    """Role → process id."""
    return {"supervisor": supervisor, **dict(_children(supervisor))}


def _children(supervisor: int) -> Iterator[tuple[str, int]]:
    for child in psutil.Process(supervisor).children():
        with contextlib.suppress(psutil.Error):
            yield child.cmdline()[-1].removeprefix("node."), child.pid
