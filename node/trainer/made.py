"""How many tokens the trainers of this machine have made: a counter that outlives whoever counts.

One number in a small file, mapped into memory, so that a step adds to it at the price of a store, and a trainer that is
killed leaves it exact to the last step that had ended. What the next trainer finds more in it than any daemon was told
is what was lost with the last one.
"""

from __future__ import annotations

import logging
import mmap
import os
from pathlib import Path

logger = logging.getLogger(__name__)

FILE = "made.tokens"
_MAGIC = int.from_bytes(b"ATOLLMT1", "little")
_BYTES = 16


class TokenCounter:
    """Never raises: where there is no such file to be had (a full disk), it counts in memory, from zero."""

    def __init__(self, directory: Path | None) -> None:
        """`directory` None: in memory."""
        self._words = memoryview(bytearray(_BYTES)).cast("Q")
        if directory is not None:
            try:
                self._words = memoryview(_map(directory / FILE)).cast("Q")
            except OSError as error:
                logger.warning(
                    "the count of trained tokens cannot be kept in %s (%s): what is lost if this program is killed "
                    "will be reported as of its last message only",
                    directory,
                    error.strerror or error,
                )
        if self._words[0] != _MAGIC:
            self._words[0], self._words[1] = _MAGIC, 0

    @property
    def tokens(self) -> int:
        """Over all programs that counted here."""
        return self._words[1]

    @tokens.setter
    def tokens(self, value: int) -> None:
        self._words[1] = value


def _map(path: Path) -> mmap.mmap:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        # Blocks now: a store into a page that a full disk has no room for would kill this process.
        os.posix_fallocate(descriptor, 0, _BYTES)
        return mmap.mmap(descriptor, _BYTES)
    finally:
        os.close(descriptor)
