"""Files that are whole or not there: atomic replacement, durable folders, aligned reads."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from blake3 import blake3

HASH_READ_BYTES = 1 << 20


class SharedFile:
    """A descriptor for several threads: `close` waits for nobody, the last user closes it.

    So no number is ever used after it was given to another file.
    """

    def __init__(self, path: Path, flags: int) -> None:
        self._fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
        self._lock = threading.Lock()
        self._users = 1
        """Those in `use`, and the owner until `close`."""
        self._closing = False

    @contextmanager
    def use(self) -> Iterator[int]:
        """The descriptor. Raises `FileNotFoundError` after `close`."""
        with self._lock:
            if self._closing:
                raise FileNotFoundError("the file was closed")
            self._users += 1
        try:
            yield self._fd
        finally:
            self._leave()

    def close(self) -> None:
        with self._lock:
            if self._closing:
                return
            self._closing = True
        self._leave()

    def _leave(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                os.close(self._fd)


def write_atomic(path: Path, data: bytes) -> None:
    """Replace `path` by `data`, durably: after a crash it holds the old bytes or the new ones."""
    temporary = path.with_name(path.name + ".new")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        # On a full disk half a file would only take room from what comes next.
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def hash_file(path: Path) -> bytes:
    """BLAKE3 of a file. Raises `OSError`."""
    hasher = blake3()
    buffer = bytearray(HASH_READ_BYTES)
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            hasher.update(memoryview(buffer)[:size])
    return hasher.digest()


def write_at(fd: int, data: bytes | bytearray | memoryview, offset: int) -> None:
    """All of `data` at `offset`."""
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def read_at(fd: int, size: int, offset: int) -> bytes:
    """`size` bytes at `offset`; fewer when the file ends before."""
    data = os.pread(fd, size, offset)
    if len(data) == size or not data:
        return data
    pieces = [data]
    got = len(data)
    while got < size and (data := os.pread(fd, size - got, offset + got)):
        pieces.append(data)
        got += len(data)
    return b"".join(pieces)


def read_cached(fd: int, size: int, offset: int) -> bytes | None:
    """`size` bytes at `offset` if they lie in the page cache; None: read them in a thread, the disk would block."""
    buffer = bytearray(size)
    try:
        got = os.preadv(fd, [buffer], offset, os.RWF_NOWAIT)
    except OSError:
        return None
    return bytes(buffer) if got == size else None


def disk_bytes(path: Path) -> int:
    """Bytes that the files below `path` occupy (holes of sparse files do not count)."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
            except FileNotFoundError:
                continue
    return total


def remove_tree(path: Path) -> None:
    """Remove a folder that may be gone already."""
    shutil.rmtree(path, ignore_errors=True)
