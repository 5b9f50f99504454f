"""An outer state with one wrong bit: found by its hash, set aside, fetched anew, and the node contributes again."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from daemons import ROUND_S, Daemon, assert_agreed, daemons, reasons, wait_all, wait_counted

pytestmark = [pytest.mark.chaos_long, pytest.mark.swarm, pytest.mark.slow]

LOOPBACK = ("--listen", "/ip4/127.0.0.1/tcp/0", "--threads", "1")


def flip_bit(path: Path, offset: int) -> None:
    with path.open("r+b", buffering=0) as file:
        old = os.pread(file.fileno(), 1, offset)
        os.pwrite(file.fileno(), bytes([old[0] ^ 0x10]), offset)


def memory_of(node: Daemon, name: str) -> Path:
    """The descriptor in the supervisor through which this test reaches a vector that all processes share."""
    for link in Path(f"/proc/{node.pid}/fd").iterdir():
        if re.match(rf"/memfd:atoll-{name}\b", os.readlink(link)):
            return link
    raise AssertionError(f"{node.name} has no memory named {name}")


def three(make: object, *, rounds: int) -> tuple[Daemon, Daemon, Daemon]:
    assert callable(make)
    a, b, c = make("a"), make("b"), make("c")
    a.start("--run", "micro", *LOOPBACK).wait_listening()
    for joiner in (b, c):
        joiner.start("--join", a.address, *LOOPBACK)
    wait_all([a, b, c], lambda: all(node.last is not None and node.last.members == 3 for node in (a, b, c)), "all met")
    wait_counted([a, b, c], rounds, "all three are counted")
    return a, b, c


def assert_it_is_back(a: Daemon, b: Daemon, c: Daemon) -> None:
    """C is counted again by everybody, and from then on holds what the others hold."""
    wait_counted([a, b, c], 2, f"C is counted again ({reasons([a, b, c])})", 2 * ROUND_S)
    assert_agreed(a, b, at_least=3)
    newest = sorted(a.rounds.keys() & b.rounds.keys() & c.rounds.keys())[-2:]
    for number in newest:
        assert c.rounds[number].state_hash == a.rounds[number].state_hash


@pytest.mark.parametrize("vector", ["theta", "momentum"])
def test_a_bit_that_flips_in_memory_while_the_node_runs(tmp_path: Path, vector: str) -> None:
    with daemons(tmp_path) as make:
        a, b, c = three(make, rounds=2)
        before = c.status()
        flip_bit(memory_of(c, vector), 4 * 1000 + 2)
        seen = c.wait(lambda status: "corrupt state set aside" in status.problems, "C sees that its state is corrupt")
        assert seen.round >= before.round
        assert_it_is_back(a, b, c)
        assert "another state" not in c.status().reason
        aside = list((c.home.path / "runs").glob("*/engine/snapshots/corrupt/*/why"))
        for why in aside:
            assert "electors hold" in why.read_text()


def test_a_bit_that_flips_on_disk_while_the_node_is_down(tmp_path: Path) -> None:
    """The snapshot that it would load is corrupt: by its chunks' hashes, before anything is computed from it."""
    with daemons(tmp_path) as make:
        a, b, c = three(make, rounds=2)
        code, _ = c.terminate()
        assert code == 0, c.output[-2000:]
        snapshots = sorted((c.home.path / "runs").glob("*/engine/snapshots/*-*/data"))
        assert snapshots, "leaving saves one"
        for data in snapshots:
            flip_bit(data, 4 * 1000 + 2)
        c.start(*LOOPBACK)
        assert_it_is_back(a, b, c)
        status = c.status()
        assert status.problems.get("snapshot set aside", 0) >= 1, status.problems
        why = list((c.home.path / "runs").glob("*/engine/snapshots/corrupt/*/why"))
        assert why
        assert "chunk 0" in why[0].read_text()
        assert_agreed(a, b, c, at_least=3)
