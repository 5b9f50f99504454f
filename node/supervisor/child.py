"""One child process: how it is started, tied to this process's life, restarted, and ended with all it started."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field

from node.supervisor.link import SUPERVISOR_VARIABLE
from node.supervisor.output import PipeReader

FIRST_BACKOFF_S = 0.5
"""Before the second start again in a row; the first follows at once."""
LAST_BACKOFF_S = 10.0
HEALTHY_S = 30.0
"""A child that lived this long is started again at once when it dies."""


_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(kw_only=True)
class Child:
    """The state of one role. `process` is None while it does not run."""

    name: str
    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    """Beside what the supervisor has."""
    wanted: bool = False
    process: subprocess.Popen[bytes] | None = None
    started_s: float = 0.0
    restart_at_s: float | None = None
    kill_at_s: float | None = None
    backoff_s: float = 0.0
    starts: int = 0
    crashes: int = 0
    """In a row: none of these lives was a healthy one."""
    link: socket.socket | None = None
    """Our end of the socket pair whose other end the child inherited."""
    last_words: str = ""
    """The newest line of its standard error: why it died, as a rule."""
    readers: list[PipeReader] = field(default_factory=list)

    @property
    def running(self) -> bool:
        return self.process is not None

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process else None

    def is_looping(self, now_s: float) -> bool:
        """It died young more than once in a row, and has not lived long since."""
        return self.crashes > 1 and not (self.running and now_s - self.started_s >= HEALTHY_S)

    def start(self, now_s: float, *, link_type: socket.SocketKind | None, stdout: int | None = subprocess.PIPE) -> None:
        """Start it in its own session, killed by the kernel when this process ends. Raises `OSError`."""
        assert self.process is None
        theirs: socket.socket | None = None
        environment = os.environ | self.environment
        if link_type is not None:
            self.link, theirs = socket.socketpair(socket.AF_UNIX, link_type)
            self.link.setblocking(False)
            environment[SUPERVISOR_VARIABLE] = str(theirs.fileno())
        try:
            self.process = subprocess.Popen(
                self.command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=subprocess.PIPE,
                pass_fds=(theirs.fileno(),) if theirs else (),
                # Its own session: Ctrl-C in the terminal is ours to forward, and its whole group can be ended.
                start_new_session=True,
                preexec_fn=_die_with(os.getpid()),
            )
        except OSError:
            self.close_link()
            raise
        finally:
            if theirs is not None:
                theirs.close()
        self.started_s = now_s
        self.restart_at_s = None
        self.kill_at_s = None
        self.last_words = ""
        self.starts += 1

    def signal(self, number: signal.Signals) -> None:
        """To the child alone; nothing happens when it is gone."""
        if self.process is not None:
            # Not `Popen.send_signal`: of a child that has just ended it takes the exit status, which `exited` then
            # misses. Until it is reaped, the process id is nobody else's.
            os.kill(self.process.pid, number)

    def kill_group(self) -> None:
        """SIGKILL to the child and to everything it started in its session."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def exited(self) -> bool:
        """Whether it has ended; it stays a zombie, so that its process id keeps naming its group."""
        assert self.process is not None
        return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def reap(self) -> int:
        """Collect the exit status (negative: the signal); what it left running in its group is killed first."""
        assert self.process is not None
        self.kill_group()
        code = self.process.wait()
        for reader in self.readers:
            reader.finish()
        self.readers.clear()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        self.process = None
        self.kill_at_s = None
        self.close_link()
        return code

    def close_link(self) -> None:
        if self.link is not None:
            self.link.close()
            self.link = None

    def schedule_restart(self, now_s: float) -> float:
        """Set the time of the next start, and return the delay in seconds: it doubles while the child keeps dying."""
        if now_s - self.started_s >= HEALTHY_S:
            self.backoff_s, self.crashes = 0.0, 0
        self.crashes += 1
        delay_s = self.backoff_s
        self.backoff_s = min(max(delay_s * 2, FIRST_BACKOFF_S), LAST_BACKOFF_S)
        self.restart_at_s = now_s + delay_s
        return delay_s


def describe_exit(code: int) -> str:
    """`exit status 3`, or `signal SIGKILL`."""
    if code >= 0:
        return f"exit status {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def _die_with(parent: int) -> Callable[[], None]:
    """For the moment between fork and exec. The supervisor has one thread, so running Python there is safe."""

    def prepare() -> None:
        if _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
        if os.getppid() != parent:  # it died before the request
            os._exit(1)

    return prepare
