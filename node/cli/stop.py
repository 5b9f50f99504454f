"""`atoll stop`: ask the daemon to leave, and wait until its supervisor is gone."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
from pathlib import Path
from types import FrameType

from node.cli.control import Control
from node.errors import OperatorError
from node.home import Home
from node.supervisor import lock

GONE_S = 10.0


def stop(home: Home) -> None:
    """Raises `OperatorError` when no daemon runs, or when it is still there after `GONE_S`."""
    pid = lock.holder(home)
    if pid is None:
        raise OperatorError(f"no daemon runs on the home {home.path}: there is nothing to stop")
    if not _terminate(pid):
        Control(home).stop()  # its process id means nothing here: it runs in another container
    if not wait_until_released(home, GONE_S):
        raise OperatorError(f"the daemon of {home.path} (process {pid}) is still there after {GONE_S:.0f} s; kill it")


def _terminate(pid: int) -> bool:
    """SIGTERM to the supervisor. False when process `pid` is not one."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        # The descriptor pins the process: what is read now is what the signal reaches.
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        # The second and third while it still creates the run.
        if not any(name in command for name in (b"node.supervisor", b"node.cli", b"atoll")):
            return False
        signal.pidfd_send_signal(descriptor, signal.SIGTERM)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


class _TooLong(Exception):
    pass


def wait_until_released(home: Home, within_s: float) -> bool:
    """Wait for the home's lock, which lives exactly as long as the supervisor; main thread only."""

    def give_up(number: int, frame: FrameType | None) -> None:
        raise _TooLong

    descriptor = os.open(lock.lock_file(home), os.O_RDONLY | os.O_CLOEXEC)
    previous = signal.signal(signal.SIGALRM, give_up)
    try:
        with contextlib.suppress(_TooLong):
            signal.setitimer(signal.ITIMER_REAL, within_s)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            return True
        return False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        os.close(descriptor)
