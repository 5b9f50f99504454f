"""Trainer, engine and daemon of a node are killed, one at a time, in the middle of its training.

Of three nodes one loses a process. The others of that node keep theirs (the same process ids); the other nodes'
rounds go on without a second attempt; the node is counted again, and reports no more work as lost than the H steps of
a round. In the long form five times each, and a trainer that the kernel kills because its memory cgroup is too small:
it is started again and again while the rounds go on, and is counted once there is memory.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

from tests.chaos.lab import Lab, Node
from tests.chaos.rows import Measured, Note, Row
from tests.swarm.daemons import ROUND_S, TooLate, assert_agreed, wait_all

NODES = 3
ROLES = ("trainer", "engine", "daemon")
REPETITIONS = 5
MEBIBYTE = 1 << 20
TOO_LITTLE_BYTES = 120 * MEBIBYTE
"""PyTorch alone takes more."""
CGROUP_ROOT = Path("/sys/fs/cgroup")


def run(lab: Lab) -> Measured:
    nodes = lab.swarm(NODES)
    notes: dict[str, Note] = {}
    every_s: list[float] = []
    lost: list[int] = []
    for role in ROLES:
        took_s = []
        for repetition in range(REPETITIONS if lab.thorough else 1):
            back_s, tokens = kill(lab, nodes, nodes[repetition % NODES], role)
            took_s.append(back_s)
            lost.append(tokens)
        notes[f"{role}: median_recover_s"] = round(statistics.median(took_s), 1)
        every_s += took_s
    notes["worst_recover_s"] = round(max(every_s), 1)
    if lab.thorough:
        notes |= out_of_memory(lab, nodes)
    notes["undisturbed_round_s"] = round(lab.usual_s(nodes), 1)
    return Measured(recover_s=statistics.median(every_s), rounds_lost=0, work_lost_tokens=max(lost), notes=notes)


def kill(lab: Lab, nodes: list[Node], victim: Node, role: str) -> tuple[float, int]:
    """Seconds until the victim is counted again, and the tokens that it reports as lost."""
    lab.wait_counted(nodes, 1, "all are counted")
    others = [node for node in nodes if node is not victim]
    lab.next_round([victim], lambda status: status.trainer.step > 0)
    assert victim.last is not None
    before, number = victim.last.work, victim.last.round
    processes = victim.whole_node()
    killed_s = victim.signal_role(role)
    lab.say(f"{victim.name}: SIGKILL to its {role} in round {number}")
    # A READY may have left in that moment: what counts is work that came after the kill.
    back, back_s = lab.wait_counted_again(victim, others, killed_s, number + 1)
    wait_all(nodes, lambda: back in victim.rounds, f"{victim.name} has seen round {back}")
    assert_agreed(*nodes, at_least=1)
    after = victim.whole_node()
    for other in processes.keys() - {role}:
        assert after[other].pid == processes[other].pid, f"the {other} did not survive the {role}"
    assert after[role].pid != processes[role].pid
    for passed in range(number, back + 1):
        attempt = lab.means(passed, others[0]).attempt
        led = "the victim may have led it" if role != "trainer" else "nobody who votes was harmed"
        assert attempt <= (role != "trainer"), f"round {passed} took {attempt + 1} attempts; {led}"
        missing = {node.peer_id for node in others} - set(others[0].rounds[passed].contributors)
        assert not missing, f"round {passed} did not count {missing}, which were well"
    assert victim.last is not None
    lost = victim.last.work.discarded_tokens - before.discarded_tokens
    assert lost <= lab.round_tokens(), (
        f"{lost} tokens are lost with the {role}, more than the {lab.round_tokens()} of H"
    )
    lab.say(f"  counted again in round {back}, {back_s:.1f} s after the kill; {lost} tokens lost")
    return back_s, lost


def out_of_memory(lab: Lab, nodes: list[Node]) -> dict[str, Note]:
    """The kernel kills a trainer that does not fit, twice; then there is room."""
    victim, *others = nodes
    with memory_cgroup() as group:
        if group is None:
            return {"OOM": "not tried: no memory cgroup can be made here"}
        group.limit(TOO_LITTLE_BYTES)
        # What a process forks lives in its cgroup; what it has is charged elsewhere. So the next trainer is bounded.
        group.adopt(victim.pid)
        began = lab.reached(others)
        victim.signal_role("trainer")
        deadline_s = time.monotonic() + ROUND_S
        while group.kills() < 2:
            if time.monotonic() > deadline_s:
                raise TooLate(f"the kernel killed only {group.kills()} trainers within {ROUND_S:.0f} s")
            lab.reached(nodes)
            time.sleep(0.2)
        lab.wait_round(others, lab.reached(others) + 1, "the others' rounds go on meanwhile")
        kills, reached = group.kills(), lab.reached(others)
        freed_s = time.monotonic()
        group.release(victim.pid)
        back, back_s = lab.wait_counted_again(victim, others, freed_s, reached)
        lab.say(f"{victim.name}: {kills} trainers killed for memory in rounds {began} to {reached}; back in {back}")
        return {"OOM kills": kills, "OOM: recover_s from when there was memory": round(back_s, 1)}


class _Cgroup:
    """A memory cgroup, of version 1 or 2."""

    def __init__(self, parent: Path, version: int) -> None:
        self._parent = parent
        self._path = parent / f"atoll-chaos-{os.getpid()}"
        self._limit_name = "memory.max" if version == 2 else "memory.limit_in_bytes"
        self._events_name = "memory.events" if version == 2 else "memory.oom_control"
        self._path.mkdir()

    def limit(self, count: int) -> None:
        (self._path / self._limit_name).write_text(str(count))

    def adopt(self, pid: int) -> None:
        (self._path / "cgroup.procs").write_text(str(pid))

    def release(self, pid: int) -> None:
        (self._parent / "cgroup.procs").write_text(str(pid))
        self.limit(1 << 40)

    def kills(self) -> int:
        """By the kernel, for want of memory."""
        for line in (self._path / self._events_name).read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
        return 0

    def close(self) -> None:
        for pid in (self._path / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                self.release(int(pid))
        self._path.rmdir()


@contextlib.contextmanager
def memory_cgroup() -> Iterator[_Cgroup | None]:
    """None where none can be made."""
    parent, version = (CGROUP_ROOT / "memory", 1) if (CGROUP_ROOT / "memory").is_dir() else (CGROUP_ROOT, 2)
    try:
        group = _Cgroup(parent, version)
        group.limit(1 << 40)
    except OSError:
        yield None
        return
    try:
        yield group
    finally:
        group.close()


ROW = Row(
    number=24,
    fault="trainer OOM-killed; daemon killed; engine killed",
    must="the others survive and reconnect; no work is lost beyond the current H steps",
    checks=__doc__,
    run=run,
    in_ci=True,
    shares=True,
    within_s=150.0,
)
