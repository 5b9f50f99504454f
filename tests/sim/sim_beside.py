"""The schedules that CI plays, and playing them beside tests that mostly wait for real processes.

The players are of the scheduler's idle class: they get what the other tests leave of the cores and disturb none of
their times, which on two cores saves CI minutes. `python tests/sim/sim_beside.py FILE` is the process of their own
that plays; it writes a tally a line, and an empty line at the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import asdict
from pathlib import Path

from sim_batch import Cell, Tally, cores, play_cells, spread
from sim_profiles import PROFILES

WITHIN_S = 1200.0
"""Deadline of all schedules together, on a machine that has other things to do."""

SMALL = [3, 4, 5, 6, 7]
FEW = [("calm", 1, 10), ("lossy", 1, 10), ("lossy", 2, 20), ("crashy", 1, 10), ("crashy", 2, 20), ("torn", 1, 10)]
FEW += [
    ("torn", 2, 20),
    ("partition", 2, 20),
    ("halves", 2, 10),
    ("unable", 2, 10),
    ("pair", 2, 20),
    ("finishers", 2, 10),
]
"""(profile, peers, schedules) below three peers, where one decides alone."""
LONG = "lineages"
"""The profile whose schedules last long enough for lineages to lose: a third as many of them take as long."""
LARGE = ["calm", "lossy", "crashy", "exchanges", "vanishing", "hostile"]
HUGE = ["calm", "lossy", "crashy"]


def cells() -> list[Cell]:
    few = [Cell(profile=profile, peers=peers, first=0, count=count) for profile, peers, count in FEW]
    fifty = [Cell(profile=profile, peers=50, first=0, count=5) for profile in LARGE]
    two_hundred = [Cell(profile=profile, peers=200, first=0, count=1) for profile in HUGE]
    quick = [profile for profile in PROFILES if profile != LONG]
    return [*spread(quick, SMALL, 2965), *spread([LONG], SMALL, 35), *few, *fifty, *two_hundred]


def play_now() -> list[Tally]:
    return list(play_cells(cells(), jobs=cores(), within_s=WITHIN_S))


class Beside:
    """The schedules in a process of their own, from now until `result` or `close`."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="atoll-schedules-")
        self._file = Path(self._folder.name) / "tallies"
        self._errors = (Path(self._folder.name) / "errors").open("w+")
        # It plays for as long as its standard input is open: that ends with this process, however this one ends.
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(self._file)],
            stdin=subprocess.PIPE,
            stdout=self._errors,
            stderr=self._errors,
            start_new_session=True,  # the players end with it
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )

    def result(self) -> list[Tally]:
        """Waits for the end. Raises `RuntimeError` when it failed, or took `WITHIN_S` from now on."""
        try:
            status = self._process.wait(WITHIN_S)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"the schedules were not played within another {WITHIN_S:.0f} s") from None
        lines = self._file.read_text().split("\n") if self._file.exists() else []
        if status != 0 or lines[-2:] != ["", ""]:
            self._errors.seek(0)
            raise RuntimeError(f"the process that plays schedules ended with {status}: {self._errors.read()[-4000:]}")
        return [_tally(line) for line in lines[:-2]]

    def close(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._errors.close()
        self._folder.cleanup()


def _tally(line: str) -> Tally:
    fields = json.loads(line)
    return Tally(**{**fields, "failures": tuple((seed, what) for seed, what in fields["failures"])})


def _end_with_parent() -> None:
    sys.stdin.read()
    os.killpg(0, signal.SIGKILL)


def main(path: str) -> None:
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # the players inherit it
    with contextlib.suppress(OSError):
        # Where the kernel shares the processor out by sessions, a class counts only within one.
        Path("/proc/self/autogroup").write_text("19")
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with Path(path).open("w") as out:
        for tally in play_cells(cells(), jobs=cores()):
            out.write(json.dumps(asdict(tally)) + "\n")
            out.flush()
        out.write("\n")


if __name__ == "__main__":
    main(sys.argv[1])
