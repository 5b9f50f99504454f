"""What a host's processes cost: CPU time, memory, and bytes at its interface. Linux only, as the lab is."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]

TICK_NS = 10**9 // os.sysconf("SC_CLK_TCK")

INTERFACE = "wan0"
"""Of every host of a lab."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Of one host, since its processes started."""

    cpu_ns: int
    system_ns: int
    """The kernel's part of it, in steps of 10 ms."""
    sent_bytes: int
    """Whole packets: headers, acknowledgements and retransmissions count."""
    received_bytes: int

    def since(self, earlier: Account) -> Account:
        return Account(
            cpu_ns=self.cpu_ns - earlier.cpu_ns,
            system_ns=self.system_ns - earlier.system_ns,
            sent_bytes=self.sent_bytes - earlier.sent_bytes,
            received_bytes=self.received_bytes - earlier.received_bytes,
        )


def family(pid: int) -> list[int]:
    """The process and all that descend from it."""
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


def account(pids: Iterable[int]) -> Account:
    """Of one host's processes, the first of which lives."""
    members = list(pids)
    sent, received = interface_bytes(members[0])
    return Account(
        cpu_ns=sum(cpu_ns(pid) for pid in members),
        system_ns=sum(system_ns(pid) for pid in members),
        sent_bytes=sent,
        received_bytes=received,
    )


def cpu_ns(pid: int) -> int:
    """CPU time of a process so far, threads that have ended included; 0 when it is gone.

    The kernel's own clock of that process (clock_getcpuclockid(3)): /proc would say it in steps of 10 ms.
    """
    try:
        return time.clock_gettime_ns((~pid << 3) | 2)
    except OSError:
        return 0


def system_ns(pid: int) -> int:
    """CPU time that the kernel has spent for a process; 0 when it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    # Behind the command's name, which may hold anything: state, ..., utime, stime.
    return int(text.rpartition(")")[2].split()[12]) * TICK_NS


def interface_bytes(pid: int) -> tuple[int, int]:
    """Sent and received at the interface of the host on which `pid` runs. Raises `OSError` when it is gone."""
    for line in Path(f"/proc/{pid}/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == INTERFACE:
            fields = counters.split()
            return int(fields[8]), int(fields[0])
    raise OSError(f"process {pid} sees no interface {INTERFACE}")


def forget_peaks(pids: Iterable[int]) -> None:
    """Peak memory counts from now."""
    for pid in pids:
        with contextlib.suppress(OSError):
            Path(f"/proc/{pid}/clear_refs").write_text("5")


def peak_bytes(pid: int) -> int:
    """Peak resident memory since `forget_peaks`, memory shared with others included; 0 when it is gone."""
    return _status_bytes(pid, "VmHWM")


def _status_bytes(pid: int, field: str) -> int:
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        if name == field:
            return int(rest.split()[0]) * 1024
    return 0
