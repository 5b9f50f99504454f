"""What a node may cost (the figures are printed: `pytest -s`): time to listen, and memory beside the engine's.

The time holds on a quiet machine; `ATOLL_TEST_PATIENCE` stretches it on a busy one.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from daemons import LISTEN_S, PATIENCE, Daemon, atoll, command, daemons, environment, wait_counted

pytestmark = [pytest.mark.swarm, pytest.mark.slow]

LISTENING_S = 3.0 * PATIENCE
SMALL_PROCESSES_BYTES = 240e6
"""Supervisor and daemon together."""
ANY = "/ip4/127.0.0.1/tcp/0"


def seconds_to_listening(node: Daemon, *arguments: str) -> tuple[float, float]:
    """From the command to its line "listening on ADDRESS": by the clock, and of processor time."""
    started_s = time.monotonic()
    process = subprocess.Popen(
        command("daemon", "--home", str(node.home.path), "--listen", ANY, *arguments),
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        seconds = time.monotonic() - started_s
        supervisor = psutil.Process(process.pid)
        processor_s = sum(sum(one.cpu_times()[:2]) for one in (supervisor, *supervisor.children()))
        assert line.startswith("listening on /ip4/127.0.0.1/tcp/"), line
    finally:
        process.terminate()
        process.communicate(timeout=LISTEN_S)
    assert process.returncode == 0
    return seconds, processor_s


def test_listening_within_three_seconds(tmp_path: Path, record_property: pytest.RecordProperty) -> None:
    """Of a home with its run: creating one, which tokenises and initialises, is not starting a node."""
    with daemons(tmp_path) as make:
        node = make("node")
        assert atoll("run", "create", "micro", "--home", str(node.home.path), timeout_s=120).returncode == 0
        arguments = ("--run", "micro", "--no-trainer")
        taken = [seconds_to_listening(node, *arguments) for _ in range(3)]
        record_property("seconds_to_listening", taken)
        words = ", ".join(f"{seconds:.2f} s ({processor_s:.2f} s of a processor)" for seconds, processor_s in taken)
        sys.stdout.write(f"\nlistening after {words}\n")
        assert min(seconds for seconds, _ in taken) <= LISTENING_S


def test_supervisor_and_daemon_are_small(tmp_path: Path, record_property: pytest.RecordProperty) -> None:
    """With two peers, in the middle of rounds."""
    with daemons(tmp_path) as make:
        a, b = make("a"), make("b")
        a.start("--run", "micro", "--listen", ANY, "--threads", "1", "--http", "127.0.0.1:0").wait_listening()
        b.start("--join", a.address, "--listen", ANY, "--threads", "1").wait_listening()
        wait_counted([a, b], 3, "both are counted")
        for node in (a, b):
            sizes = {role: process.memory_info().rss / 1e6 for role, process in node.whole_node().items()}
            record_property(f"resident_mb_{node.name}", sizes)
            words = ", ".join(f"{role} {size:.0f} MB" for role, size in sizes.items())
            sys.stdout.write(f"\n{node.name}: {words}\n")
            assert node.resident_bytes("supervisor", "daemon") <= SMALL_PROCESSES_BYTES, sizes
            told = node.status().resident_bytes
            assert abs(told["daemon"] - node.resident_bytes("daemon")) < 20e6, "status says what the kernel says"
