"""A node whose disk is full: it says so and lives, the others' rounds go on, nothing is torn, and it comes back."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemons import LEAVE_S, ROUND_S, Daemon, assert_agreed, daemons, reasons, wait_all, wait_counted

pytestmark = [
    pytest.mark.swarm,
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="a disk of its own for one node is mounted by root only"),
]

LOOPBACK = ("--listen", "/ip4/127.0.0.1/tcp/0", "--threads", "1")
DISK_BYTES = 96 * 1024 * 1024


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, for the home of the node `full`."""
    place = tmp_path / "full"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "atoll-test", str(place)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(disk: Path) -> Path:
    """Take every block that is left, and again what is given up meanwhile."""
    filler = disk / "filler"
    with filler.open("ab", buffering=0) as file:
        block = bytes(4096)
        while True:
            try:
                file.write(block)
            except OSError:
                return filler


def keep_full(disk: Path, node: Daemon) -> bool:
    """What the node gives up to go on is taken too, until it has nothing left to give up."""
    fill(disk)
    return node.last is not None and not node.last.storage_able


def three(make: object) -> tuple[Daemon, Daemon, Daemon]:
    assert callable(make)
    a, full, c = make("a"), make("full"), make("c")
    a.start("--run", "micro", *LOOPBACK).wait_listening()
    for joiner in (full, c):
        joiner.start("--join", a.address, *LOOPBACK)
    nodes = [a, full, c]
    wait_all(nodes, lambda: all(node.last is not None and node.last.members == 3 for node in nodes), "all have met")
    wait_counted(nodes, 2, "all three are counted")
    return a, full, c


@pytest.mark.chaos_long
def test_the_others_go_on_and_it_comes_back_by_itself(tmp_path: Path, small_disk: Path) -> None:
    with daemons(tmp_path) as make:
        a, full, c = three(make)
        processes = full.whole_node()
        wait_all([a, full, c], lambda: keep_full(small_disk, full), "the disk is full")
        began = a.status().round

        assert full.last is not None
        assert "free some space" in full.last.reason
        assert any(problem.startswith("not stored") for problem in full.last.problems), full.last.problems
        assert "the disk refuses what must not be forgotten" in full.output
        wait_all(
            [a, full, c],
            lambda: min(node.last.round if node.last is not None else 0 for node in (a, c)) >= began + 4,
            f"A and C go on ({reasons([a, full, c])})",
            2 * ROUND_S,
        )
        seen = a.peer(full)
        assert seen is not None
        assert seen.alive, "its heartbeats go on"
        assert {role: process.pid for role, process in full.whole_node().items()} == {
            role: process.pid for role, process in processes.items()
        }, "no process died of it"

        (small_disk / "filler").unlink()
        full.wait(lambda status: status.storage_able, "the disk has room again")
        wait_counted([a, full, c], 2, "all three are counted again", 2 * ROUND_S)
        assert_agreed(a, full, c, at_least=2)
        assert "free some space" not in full.status().reason


@pytest.mark.chaos_long
def test_killed_on_a_full_disk_it_starts_from_what_it_had(tmp_path: Path, small_disk: Path) -> None:
    with daemons(tmp_path) as make:
        a, full, c = three(make)
        wait_all([a, full, c], lambda: keep_full(small_disk, full), "the disk is full")
        full.kill()
        assert not full.survivors()
        (small_disk / "filler").unlink()
        full.start(*LOOPBACK)
        wait_counted([a, full, c], 2, "all three are counted again", 2 * ROUND_S)
        assert_agreed(a, full, c, at_least=2)
        assert not list(small_disk.glob("runs/*/chain.log.torn-*")), "a refused record leaves nothing behind"


def test_it_leaves_in_time_and_says_so_on_a_full_disk(tmp_path: Path, small_disk: Path) -> None:
    with daemons(tmp_path) as make:
        a, full = make("a"), make("full")
        a.start("--run", "micro", *LOOPBACK).wait_listening()
        full.start("--join", a.address, *LOOPBACK)
        wait_counted([a, full], 1, "both are counted", 2 * ROUND_S)
        wait_all([a, full], lambda: keep_full(small_disk, full), "the disk is full")
        code, seconds = full.terminate()
        assert (code, seconds <= LEAVE_S) == (0, True), (seconds, full.output)
        assert not full.survivors()
        wait_all([a], lambda: (seen := a.peer(full)) is None or not seen.connected, "A knows that it left", 5.0)
        assert "it left" in a.home.log_file.read_text(errors="replace").rpartition("peer gone")[2]
        for path in (full.home.control_socket, full.home.attach_socket, full.home.daemon_file):
            assert not path.exists(), path
