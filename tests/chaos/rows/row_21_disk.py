"""A node's disk is full; then, after a power cut, each of its files is torn in turn.

Full: the home of one of three lies on a file system of its own, of which every block is taken. None of its processes
dies, its heartbeats go on, `status` and the operator's terminal say what is wrong and what to do, and the others'
rounds go on. With room again it is counted by itself. Torn: with the node down, its newest snapshot gets a flipped
bit, then the end of its chain is cut, then its vote journal, then its trainer's checkpoint. Each time it starts, says
so, sets aside what is damaged, uses what is older or fetches it, and is counted, on the others' states.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.chaos.lab import Lab, Node
from tests.chaos.rows import Measured, Note, Row
from tests.swarm.daemons import ROUND_S, assert_agreed, wait_all

NODES = 3
DISK_BYTES = 96 << 20
ROUNDS_WITHOUT = 4


def needs() -> str | None:
    return None if os.geteuid() == 0 else "a disk of its own for one node is mounted by root only"


def run(lab: Lab) -> Measured:
    with small_disk(lab.directory / f"node-{NODES - 1}") as disk:
        nodes = lab.swarm(NODES)
        notes: dict[str, Note] = {"undisturbed_round_s": round(lab.usual_s(nodes), 1)}
        notes["disk full: recover_s"] = round(fill_up(lab, nodes, disk), 1)
        for name, tear in TEARS.items():
            notes[f"{name}: recover_s"] = round(torn(lab, nodes, name, tear), 1)
        for node in nodes:
            if node.running:
                node.terminate()
    return Measured(rounds_lost=0, notes=notes)


# ---------------------------------------------------------------- full


@contextlib.contextmanager
def small_disk(place: Path) -> Iterator[Path]:
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "atoll-chaos", str(place)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"no tmpfs can be mounted: {done.stderr.strip()}"
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(disk: Path) -> None:
    """Take every block that is left; and again what is given up meanwhile."""
    block = bytes(4096)
    with (disk / "filler").open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(block)


def fill_up(lab: Lab, nodes: list[Node], disk: Path) -> float:
    *others, full = nodes
    processes = {role: process.pid for role, process in full.whole_node().items()}

    def is_full() -> bool:
        fill(disk)
        return full.last is not None and not full.last.storage_able

    wait_all(nodes, is_full, "the disk is full")
    began = lab.reached(others)
    lab.wait_round(others, began + ROUNDS_WITHOUT, "the others go on", 2 * ROUND_S)
    status = full.status()
    assert "free some space" in status.reason, status.reason
    assert any("not stored" in problem for problem in status.problems), status.problems
    assert "disk refuses" in full.output, full.output[-500:]
    assert {role: process.pid for role, process in full.whole_node().items()} == processes, "a process died of it"
    lab.say(f"full in round {began}; it says: {status.reason}")
    (disk / "filler").unlink()
    freed_s, reached = time.monotonic(), lab.reached(others)
    back, back_s = lab.wait_counted_again(full, others, freed_s, reached)
    wait_all(nodes, lambda: back in full.rounds, f"{full.name} has seen round {back}")
    assert_agreed(*nodes, at_least=1)
    lab.say(f"  counted again in round {back}, {back_s:.1f} s after there was room")
    return back_s


# ---------------------------------------------------------------- torn


def newest(directory: Path, pattern: str) -> Path:
    return max(directory.glob(pattern), key=lambda path: path.stat().st_mtime_ns)


def flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 0x10]))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size * 2 // 3)


def tear_snapshot(run: Path) -> None:
    def round_of(path: Path) -> int:
        return int(path.name.partition("-")[0])

    folder = max((run / "engine" / "snapshots").glob("*-*"), key=round_of)
    flip(max((path for path in folder.iterdir() if path.is_file()), key=lambda path: path.stat().st_size))


def tear_chain(run: Path) -> None:
    os.truncate(run / "chain.log", (run / "chain.log").stat().st_size - 7)


def tear_journal(run: Path) -> None:
    cut(run / "journal")


def tear_checkpoint(run: Path) -> None:
    cut(max((path for path in (run / "trainer").rglob("*") if path.is_file()), key=lambda path: path.stat().st_size))


TEARS: dict[str, Callable[[Path], None]] = {
    "torn snapshot": tear_snapshot,
    "torn chain": tear_chain,
    "torn journal": tear_journal,
    "torn trainer checkpoint": tear_checkpoint,
}


def torn(lab: Lab, nodes: list[Node], name: str, tear: Callable[[Path], None]) -> float:
    assert lab.run is not None
    *others, node = nodes
    lab.wait_counted(nodes, 1, "all are counted")
    node.power_cut()
    tear(node.home.run_directory(lab.run.run_id))
    started_s, reached = time.monotonic(), lab.reached(others)
    node.begin()
    back, back_s = lab.wait_counted_again(node, others, started_s, reached, 2 * ROUND_S)
    wait_all(nodes, lambda: back in node.rounds, f"{node.name} has seen round {back}")
    assert_agreed(*nodes, at_least=1)
    for passed in range(reached, back + 1):
        missing = {other.peer_id for other in others} - set(others[0].rounds[passed].contributors)
        assert not missing, f"round {passed} did not count {missing}, which were well"
    lab.say(f"{name}: counted again in round {back}, {back_s:.1f} s after its start")
    return back_s


ROW = Row(
    number=21,
    fault="disk full; torn checkpoint",
    must="training goes on, loud alarm; older valid state used",
    checks=__doc__,
    run=run,
    needs=needs,
    within_s=400.0,
)
