"""The path that trainers attach through: in a folder of the operator's alone, one per home."""

from __future__ import annotations

import os
import socket
import stat
import struct

import trio

from node.errors import OperatorError
from node.home import Home

_MAX_PATH_BYTES = 107
_CREDENTIALS = struct.Struct("3i")
"""pid, uid, gid."""


def listen(home: Home, backlog: int) -> trio.socket.SocketType:
    """A listening socket at `home.attach_socket`, mode 0600 in a folder of mode 0700. A dead daemon's is removed.

    The identity's lock must be held: it is what says that no other daemon of this home lives. Raises `OperatorError`.
    """
    path = home.attach_socket
    if len(os.fsencode(path)) > _MAX_PATH_BYTES:
        raise OperatorError(
            f"the socket path {path} is longer than {_MAX_PATH_BYTES} bytes: set XDG_RUNTIME_DIR to a shorter folder"
        )
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        _make_private(home)
        path.unlink(missing_ok=True)
        listener.bind(os.fspath(path))
        path.chmod(0o600)
        listener.listen(backlog)
    except OSError as error:
        listener.close()
        raise OperatorError(
            f"the socket {path} cannot be made ({error.strerror}): make its folder writable for you, or set "
            "XDG_RUNTIME_DIR to one that is"
        ) from error
    except OperatorError:
        listener.close()
        raise
    return trio.socket.from_stdlib_socket(listener)


def is_same_user(connection: trio.socket.SocketType) -> bool:
    """Whether the other end runs as this user: what the folder's mode promises, asked of the kernel."""
    _, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return bool(uid == os.getuid())


def _make_private(home: Home) -> None:
    directory = home.socket_directory
    for folder in (directory.parent, directory):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
        # In a folder that others can write to, they may have put something in our place first.
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            raise OperatorError(
                f"{folder} belongs to user {status.st_uid}, not to you: remove it, or set XDG_RUNTIME_DIR to a folder "
                "of yours"
            )
    directory.chmod(0o700)
