"""What runs in each role, with which environment, and how long its end may take."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Commands:
    """What runs in each role."""

    daemon: tuple[str, ...]
    engine: tuple[str, ...]
    trainer: tuple[str, ...]
    viewer: tuple[str, ...] = ()
    """Draws on a terminal; empty: plain lines everywhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long an end may take: less than 10 s in all (design section 11)."""

    leave_s: float = 6.5
    """The daemon's time to announce that it leaves, and to finish or hand over."""
    total_s: float = 9.0
    """From the first signal to SIGKILL for what is left; what the daemon did not need, the others have."""
    end_s: float = 2.0
    """The other processes' time after their SIGTERM, at least."""
    finish_s: float = 10.0
    """The same when the daemon ended by itself: nobody is waiting then."""
    reap_s: float = 0.5
    """After SIGKILL."""
    viewer_s: float = 0.3
    trainer_stop_s: float = 5.0
    failed_starts: int = 5
    """The daemon may die this often before it has ever listened; then the supervisor gives up."""


def python(module: str) -> tuple[str, ...]:
    """The command that runs one of our modules; `-P` keeps the operator's current directory out of the import path."""
    return sys.executable, "-P", "-m", module


def default_commands() -> Commands:
    return Commands(
        daemon=python("node.daemon"),
        engine=python("node.engine"),
        trainer=python("node.trainer"),
        viewer=python("node.cli.watch"),
    )


def trainer_process() -> dict[str, str]:
    """Threads that wait for each other must sleep, not spin: with three trainers on two cores, a step of a small model
    took 2 s with OpenMP's default and 15 ms so. An operator's own OMP_WAIT_POLICY counts.
    """
    return {"PYTHONUNBUFFERED": "1", "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE")}


def small_process() -> dict[str, str]:
    """The daemon and the engine use no BLAS: its threads would only cost memory, and so would an arena a thread."""
    return {
        "PYTHONUNBUFFERED": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "MALLOC_ARENA_MAX": "2",
    }
