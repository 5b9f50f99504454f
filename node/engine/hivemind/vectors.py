"""The vectors that the engine shares with hivemind's averager: this node's contribution, and the means it makes."""

from __future__ import annotations

import mmap
import os

import numpy as np

from protocol.codecs import Float32Array


class SharedVector:
    """[elements] float32 in nameless memory, zero at first."""

    def __init__(self, name: str, elements: int) -> None:
        self.fd = os.memfd_create(f"atoll-{name}", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, 4 * elements)
        self._memory = mmap.mmap(self.fd, 4 * elements)
        self.values: Float32Array = np.frombuffer(self._memory, np.float32)

    def empty(self) -> None:
        """Give its pages back; its values are zero."""
        self._memory.madvise(mmap.MADV_REMOVE)

    def close(self) -> None:
        """The mapping ends with the last array over it."""
        os.close(self.fd)
