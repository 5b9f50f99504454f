"""The outer state's memory: three memfds that outlive the daemon and the engine (design section 2).

N: elements of the flat vector. `theta` and `delta` hold N fp32, `momentum` holds one for each element that has it.
"""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass

from node.memory import MIB, human, memory_shortage

ENGINE_BYTES = 250 * MIB
"""What an engine needs besides the vectors."""


class NotEnoughMemory(Exception):
    """One sentence that names what is needed and what there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """Descriptors of the three vectors, and one of theta that cannot write (for the trainer)."""

    theta: int
    momentum: int
    delta: int
    theta_read: int
    sizes: tuple[int, int, int]
    """Bytes of theta, momentum, delta."""

    @property
    def descriptors(self) -> tuple[int, int, int, int]:
        return self.theta, self.momentum, self.delta, self.theta_read

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)


def allocate(theta_bytes: int, momentum_bytes: int, delta_bytes: int) -> Segments:
    """Reserve all three at once, zeroed and of fixed size. Raises `NotEnoughMemory`, and then nothing is held."""
    sizes = (theta_bytes, momentum_bytes, delta_bytes)
    shortage = memory_shortage(sum(sizes) + ENGINE_BYTES)
    if shortage is not None:
        raise NotEnoughMemory(
            f"the model's outer state does not fit: {shortage}; free memory, or join a run with a smaller model"
        )
    opened: list[int] = []
    try:
        for name, size in zip(("atoll-theta", "atoll-momentum", "atoll-delta"), sizes, strict=True):
            opened.append(_memfd(name, size))
        # A new description, opened for reading: a mapping of it can never be made writable.
        opened.append(os.open(f"/proc/self/fd/{opened[0]}", os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        for descriptor in opened:
            os.close(descriptor)
        raise NotEnoughMemory(
            f"the kernel refused {human(sum(sizes))} for the model's outer state ({error.strerror}); free memory"
        ) from error
    theta, momentum, delta, theta_read = opened
    return Segments(theta=theta, momentum=momentum, delta=delta, theta_read=theta_read, sizes=sizes)


def _memfd(name: str, size: int) -> int:
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        if size:
            # Pages now, not at first touch: several nodes that start together must not all count on the same memory.
            os.posix_fallocate(descriptor, 0, size)
        # A vector that shrank under a mapping would kill whoever touches it.
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
