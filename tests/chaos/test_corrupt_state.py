"""An outer state with one wrong bit: found by its hash, set aside, fetched anew, and the node contributes again."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemons import ROUND_S, Daemon, Trio, assert_agreed, daemons, reasons, trio_of, wait_counted

pytestmark = [pytest.mark.swarm, pytest.mark.slow]


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


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    """One swarm for all: each test leaves it whole."""
    with daemons(tmp_path_factory.mktemp("corrupt")) as make:
        yield trio_of(make, counted=2)


def assert_it_is_back(a: Daemon, b: Daemon, c: Daemon) -> None:
    """C is counted again by everybody, and from then on holds what the others hold."""
    wait_counted([a, b, c], 2, f"C is counted again ({reasons([a, b, c])})", 2 * ROUND_S)
    assert_agreed(a, b, at_least=3)
    newest = sorted(a.rounds.keys() & b.rounds.keys() & c.rounds.keys())[-2:]
    for number in newest:
        assert c.rounds[number].state_hash == a.rounds[number].state_hash


def set_aside(node: Daemon) -> list[str]:
    """Why, of each state that lies aside on its disk."""
    return [why.read_text() for why in (node.home.path / "runs").glob("*/engine/snapshots/corrupt/*/why")]


@pytest.mark.parametrize("vector", ["theta", "momentum"])
def test_a_bit_that_flips_in_memory_while_the_node_runs(trio: Trio, vector: str) -> None:
    a, b, c = trio.nodes
    before = c.status()
    times = before.problems.get("corrupt state set aside", 0)
    flip_bit(memory_of(c, vector), 4 * 1000 + 2)
    seen = c.wait(
        lambda status: status.problems.get("corrupt state set aside", 0) > times, "C sees that its state is corrupt"
    )
    assert seen.round >= before.round
    assert_it_is_back(a, b, c)
    assert "another state" not in c.status().reason
    assert all("electors hold" in why for why in set_aside(c))


def test_a_bit_that_flips_on_disk_while_the_node_is_down(trio: Trio) -> None:
    """The snapshot that it would load is corrupt: by its chunks' hashes, before anything is computed from it."""
    a, b, c = trio.nodes
    code, _ = c.terminate()
    assert code == 0, c.output[-2000:]
    snapshots = sorted((c.home.path / "runs").glob("*/engine/snapshots/*-*/data"))
    assert snapshots, "leaving saves one"
    for data in snapshots:
        flip_bit(data, 4 * 1000 + 2)
    trio.start_again(c)
    assert_it_is_back(a, b, c)
    status = c.status()
    assert status.problems.get("snapshot set aside", 0) >= 1, status.problems
    assert any("chunk 0" in why for why in set_aside(c))
