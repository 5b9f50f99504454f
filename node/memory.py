"""How much memory and disk is really free, and what a node of a given size needs (design section 2).

A memfd has no limit of its own: what does not fit must be refused before it is allocated. Standard library only, since
the supervisor asks too.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from node.engines import ATOLL, HIVEMIND
from node.errors import OperatorError

if TYPE_CHECKING:
    from node.manifest import Manifest

MIB = 1 << 20

OUTER_BYTES_PER_PARAMETER = 12
"""θ, momentum and Δ, fp32."""
AVERAGER_BYTES_PER_PARAMETER = 8
"""Of the engine `hivemind`: a decoded contribution, and the means that it makes (all of them when it is alone)."""
AVERAGER_BYTES = 350 * MIB
"""hivemind's averager and its p2pd, without anything that grows with the model."""
CPU_TRAINER_BYTES_PER_PARAMETER = 16
"""A trainer on the CPU: parameters, gradients and AdamW's two moments, fp32."""
PROCESSES_BYTES = 700 * MIB
"""The four processes themselves, PyTorch included, without anything that grows with the model."""
TRAINER_CHECKPOINT_BYTES_PER_PARAMETER = 16
"""On disk: AdamW's two moments, the newest checkpoint and the one being written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """What is missing, in bytes."""

    what: str
    needed: int
    available: int

    def __str__(self) -> str:
        return f"{human(self.needed)} of {self.what} needed, {human(self.available)} available"


def human(count: int) -> str:
    """`count` bytes for people, with binary units: `1.5 GiB`."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def memory_needed(elements: int, *, trains_on_cpu: bool, engine: str = ATOLL) -> int:
    """Bytes of RAM of one node whose model has `elements` parameters, without activations."""
    per_parameter = OUTER_BYTES_PER_PARAMETER + (CPU_TRAINER_BYTES_PER_PARAMETER if trains_on_cpu else 0)
    if engine == HIVEMIND:
        return elements * (per_parameter + AVERAGER_BYTES_PER_PARAMETER) + PROCESSES_BYTES + AVERAGER_BYTES
    return elements * per_parameter + PROCESSES_BYTES


def disk_needed(elements: int, *, keep_snapshots: int, keep_rounds: int, bytes_per_part_element: float = 1.02) -> int:
    """Bytes of disk of one node: S_0, kept snapshots and one being written, the round log, a trainer's checkpoint."""
    snapshots = elements * 8 * (keep_snapshots + 1)
    parts = int(elements * bytes_per_part_element) * (keep_rounds + 2)
    return elements * 4 + snapshots + parts + elements * TRAINER_CHECKPOINT_BYTES_PER_PARAMETER


def check_memory_for(manifest: Manifest) -> None:
    """Raises `OperatorError` for a model that this machine can never hold, whatever else runs on it.

    What is free now is checked where it is taken: by the supervisor, before it allocates.
    """
    needed = memory_needed(manifest.layout.elements, trains_on_cpu=False, engine=manifest.rounds.engine)
    total = total_memory()
    if needed > total:
        raise OperatorError(
            f"the run {manifest.name!r} needs {human(needed)} of memory and this machine has {human(total)}: "
            "join it from a larger machine"
        )


def total_memory() -> int:
    """Bytes of this machine, or of the smallest cgroup around this process."""
    return min([_meminfo("MemTotal"), *(limit for limit, _ in _cgroup_limits())])


def available_memory() -> int:
    """Bytes that can be taken without swapping: the kernel's estimate, bounded by every cgroup above this process."""
    available = [_meminfo("MemAvailable")]
    for limit, used in _cgroup_limits():
        available.append(max(0, limit - used))
    return min(available)


def available_disk(path: Path) -> int:
    """Free bytes for this user on the file system of `path` (or of its nearest existing parent)."""
    existing = path
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    return shutil.disk_usage(existing).free


def memory_shortage(needed: int) -> Shortage | None:
    available = available_memory()
    return Shortage(what="memory", needed=needed, available=available) if needed > available else None


def disk_shortage(path: Path, needed: int) -> Shortage | None:
    available = available_disk(path)
    return Shortage(what=f"disk at {path}", needed=needed, available=available) if needed > available else None


def resident_bytes(pid: int) -> int:
    """Resident memory of one process, shared pages included; 0 when it is gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _meminfo(key: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == key:
            return int(rest.split()[0]) * 1024
    raise ValueError(f"/proc/meminfo has no {key}")


def _cgroup_limits(
    root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> list[tuple[int, int]]:
    """(limit, used without reclaimable cache) of each memory cgroup around this process, versions 1 and 2."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    limits = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            base, names = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        directory = base / path.lstrip("/")
        # In a container the path is the host's and the folder does not exist: the limits then lie at the mount's root.
        while True:
            found = _cgroup_limit(directory, *names)
            if found is not None:
                limits.append(found)
            if directory == base or base not in directory.parents:
                break
            directory = directory.parent
    return limits


def _cgroup_limit(directory: Path, limit_name: str, usage_name: str, cache_key: str) -> tuple[int, int] | None:
    try:
        text = (directory / limit_name).read_text().strip()
        if text == "max":
            return None
        used = int((directory / usage_name).read_text())
        for line in (directory / "memory.stat").read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == cache_key:
                used -= int(value)
        return int(text), max(0, used)
    except (OSError, ValueError):
        return None
