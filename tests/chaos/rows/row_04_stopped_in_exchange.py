"""A node is asked to end (SIGTERM) in the middle of an exchange, of a vote, and of its training.

It exits with status 0 within 10 s. Nothing of it is left: no process, no listening port, no socket, no shared memory,
no unfinished file in its home. The others commit the round that it left in, and are not held up by the rounds after.
It comes back on the same home and is counted.
"""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

from tests.chaos.lab import OUTAGE_ROUND_S, Lab, Node
from tests.chaos.rows import Measured, Note, Row
from tests.swarm.daemons import LEAVE_S, assert_agreed

NODES = 3
PLACES = (("up", 3), ("up-received", 2), ("vote-1", 1), ("exchange", 1))
SHARED_MEMORY = Path("/dev/shm")
UNFINISHED = ("*.part", "*.tmp", ".daemon.*", "daemon.json")


def run(lab: Lab) -> Measured:
    nodes = lab.swarm(NODES)
    notes: dict[str, Note] = {}
    recovered, ended = [], []
    for index, (place, after) in enumerate(PLACES):
        seconds, back_s = stop(lab, nodes, place, after, coordinator=index % 2 == 1)
        notes[f"{place}: ended_s"] = round(seconds, 1)
        ended.append(seconds)
        recovered.append(back_s)
    notes["worst_ended_s"] = round(max(ended), 1)
    notes["undisturbed_round_s"] = round(lab.usual_s(nodes), 1)
    return Measured(recover_s=sorted(recovered)[len(recovered) // 2], rounds_lost=0, notes=notes)


def stop(lab: Lab, nodes: list[Node], place: str, after: int, *, coordinator: bool) -> tuple[float, float]:
    lab.wait_counted(nodes, 1, "all are counted")
    usual_s = lab.usual_s(nodes)
    shared = set(SHARED_MEMORY.iterdir())
    leaver, struck = lab.strike(
        nodes,
        lambda status: next(node for node in nodes if (node.peer_id == status.coordinator) is coordinator),
        place,
        after=after,
        target="supervisor",
        number=signal.SIGTERM,
    )
    others = [node for node in nodes if node is not leaver]
    assert leaver.process is not None
    code = leaver.process.wait(LEAVE_S + 5)
    took_s = time.monotonic() - struck.at_s
    assert code == 0, f"{leaver.name} exited with {code}: {leaver.output[-500:]}"
    assert took_s <= LEAVE_S, f"{leaver.name} took {took_s:.1f} s to end"
    nothing_is_left(leaver, set(struck.processes), shared)
    number = struck.strike.round
    lab.wait_round(others, number + 2, "the others go on", 2 * OUTAGE_ROUND_S)
    assert_agreed(*others, at_least=1)
    for passed in range(number, number + 3):
        attempt = lab.means(passed, others[0]).attempt
        assert attempt <= 1, f"round {passed} took {attempt + 1} attempts after a farewell"
        seconds = max(node.rounds[passed].seconds for node in others)
        bound_s = usual_s + lab.attempt_s(attempt + 1)
        assert seconds < bound_s, f"round {passed} took {seconds:.1f} s; its deadlines allow {bound_s:.1f}"
    again_s, reached = time.monotonic(), lab.reached(others)
    leaver.begin()
    _, back_s = lab.wait_counted_again(leaver, others, again_s, reached)
    lab.say(f"  ended in {took_s:.1f} s; counted again {back_s:.1f} s after its start")
    return took_s, back_s


def nothing_is_left(node: Node, processes: set[int], shared: set[Path]) -> None:
    node.expect_nothing_left()
    listening = subprocess.run(["ss", "-Htlnp"], capture_output=True, text=True, check=False).stdout
    held = [pid for pid in processes if f"pid={pid}," in listening]
    assert not held, f"processes {held} of {node.name} still listen"
    home = node.home
    for path in (home.control_socket, home.attach_socket, home.socket_directory):
        assert not path.exists(), f"{path} outlived {node.name}"
    ours = [path for path in set(SHARED_MEMORY.iterdir()) - shared if "atoll" in path.name]
    assert not ours, f"shared memory outlived {node.name}: {ours}"
    unfinished = [path for pattern in UNFINISHED for path in home.path.rglob(pattern)]
    assert not unfinished, f"unfinished files of {node.name}: {unfinished}"


ROW = Row(
    number=4,
    fault="cancel (SIGTERM) mid-exchange",
    must="exit 0 within 10 s; no orphan process, socket or shared memory",
    checks=__doc__,
    run=run,
)
