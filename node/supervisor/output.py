"""Where the children's words go: a bounded log file, and the operator's terminal. Neither may ever block a child."""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Callable
from pathlib import Path

MAX_LOG_BYTES = 10 * 1024 * 1024
MAX_LINE_BYTES = 2_000
"""Longer lines are cut: a pipe with room for a page takes such a line without blocking."""
READ_BYTES = 64 * 1024
MAX_LAST_READS = 64


class BoundedLog:
    """Appends lines to `path`; at `MAX_LOG_BYTES` the file becomes `path.1`, whose former content is dropped.

    A full disk loses lines, never a process.
    """

    def __init__(self, path: Path, max_bytes: int = MAX_LOG_BYTES) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._fd: int | None = None
        self._size = 0

    def line(self, text: bytes) -> None:
        with contextlib.suppress(OSError):
            if self._fd is None:
                self._open()
            elif self._size + len(text) + 1 > self._max_bytes:
                self._rotate()
            if self._fd is not None:
                self._size += os.write(self._fd, text + b"\n")

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _open(self) -> None:
        self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._size = os.fstat(self._fd).st_size

    def _rotate(self) -> None:
        self.close()
        os.replace(self.path, self.path.with_name(self.path.name + ".1"))
        self._open()


class Terminal:
    """Lines to a descriptor of the operator's (standard output or error). A reader that does not read loses lines."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.lost = 0

    @property
    def interactive(self) -> bool:
        return os.isatty(self._fd)

    def line(self, text: bytes) -> None:
        # poll() calls a pipe or a terminal writable only while a whole page fits, so the write below cannot block.
        try:
            poller = select.poll()
            poller.register(self._fd, select.POLLOUT)
            if any(events & select.POLLOUT for _, events in poller.poll(0)):
                os.write(self._fd, text[:MAX_LINE_BYTES] + b"\n")
            else:
                self.lost += 1
        except OSError:
            self.lost += 1


class PipeReader:
    """The lines that a child writes into one pipe; `on_line` gets each without its end, cut at `MAX_LINE_BYTES`."""

    def __init__(self, descriptor: int, on_line: Callable[[bytes], None]) -> None:
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self.ended = False
        self._on_line = on_line
        self._rest = b""

    def read(self) -> bool:
        """Take what is there, at most one buffer of it; False when there is nothing. At its end, sets `ended`."""
        try:
            data = os.read(self.descriptor, READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        self.ended = not data
        *lines, self._rest = (self._rest + data).split(b"\n")
        while len(self._rest) > MAX_LINE_BYTES:
            lines.append(self._rest[:MAX_LINE_BYTES])
            self._rest = self._rest[MAX_LINE_BYTES:]
        for line in lines:
            self._on_line(line.rstrip(b"\r")[:MAX_LINE_BYTES])
        return bool(data)

    def finish(self) -> None:
        """The child is dead: what it said last is still in the pipe, which a grandchild may hold open for ever."""
        for _ in range(MAX_LAST_READS):
            if not self.read():
                break
        if self._rest:
            self._on_line(self._rest)
            self._rest = b""
