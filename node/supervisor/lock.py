"""One supervisor a home: a lock that lives exactly as long as the process, and the short-lived files beside it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import tempfile
from pathlib import Path

from node.errors import OperatorError
from node.home import Home

LOCK_VARIABLE = "ATOLL_HOME_LOCK_FD"


def lock_file(home: Home) -> Path:
    return home.path / "supervisor.lock"


def acquire(home: Home) -> int:
    """Lock the home for this process; the descriptor holds it. Raises `OperatorError` when another process has it."""
    try:
        home.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(lock_file(home), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise OperatorError(
            f"the home {home.path} cannot be written ({error.strerror}); choose another by --home"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(descriptor, 32).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise OperatorError(
            f"a daemon (process {holder}) already runs on the home {home.path}: stop it by `atoll stop`, "
            "or choose another home by --home"
        ) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def holder(home: Home) -> int | None:
    """Process id of the supervisor that runs on this home; None: none does."""
    try:
        descriptor = os.open(lock_file(home), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        text = os.read(descriptor, 32).strip()
        return int(text) if text.isdigit() else 0
    else:
        return None
    finally:
        os.close(descriptor)


def prepare_socket_directory(home: Home) -> None:
    """Create it for this user alone. Raises `OperatorError` when somebody else could put sockets there."""
    directory = home.socket_directory
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise OperatorError(
            f"the socket directory {directory} cannot be made ({error.strerror}); "
            "set XDG_RUNTIME_DIR to a directory of yours"
        ) from error
    for path in (directory, directory.parent):
        status = path.stat(follow_symlinks=False)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise OperatorError(
                f"the socket directory {path} is not yours alone; remove it, "
                "or set XDG_RUNTIME_DIR to a directory of yours"
            )


def write_daemon_file(home: Home, content: dict[str, object]) -> None:
    """Replace `daemon.json` atomically."""
    descriptor, temporary = tempfile.mkstemp(dir=home.path, prefix=".daemon.")
    with os.fdopen(descriptor, "w") as file:
        json.dump(content, file)
    os.replace(temporary, home.daemon_file)


def remove_live_files(home: Home) -> None:
    """What must not outlive the processes: `daemon.json` and the sockets."""
    for path in (home.daemon_file, home.control_socket, home.attach_socket):
        with contextlib.suppress(OSError):
            path.unlink()
    for directory in (home.socket_directory, home.socket_directory.parent):
        with contextlib.suppress(OSError):
            directory.rmdir()
