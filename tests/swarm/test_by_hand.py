"""A swarm as its operators run it: started by hand, joined by one address, killed, joined again, stopped.

One story in one test, since each act needs the state that the one before it has left.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from daemons import (
    LEAVE_S,
    PATIENCE,
    ROUND_S,
    Daemon,
    assert_agreed,
    assert_sensible,
    daemons,
    reasons,
    wait_all,
    wait_counted,
)

pytestmark = [pytest.mark.swarm, pytest.mark.slow]

LOOPBACK = ("--listen", "/ip4/127.0.0.1/tcp/0", "--threads", "1")


def test_three_strangers_train_lose_all_but_one_and_meet_again(tmp_path: Path) -> None:
    with daemons(tmp_path) as make:
        a, b, c = make("a"), make("b"), make("c")
        three_are_counted_twice(a, b, c)
        lineage = the_first_is_killed(a, b, c)
        one_is_left(b, c, lineage)
        all_come_back(a, b, c)
        they_leave(a, b, c)


def three_are_counted_twice(a: Daemon, b: Daemon, c: Daemon) -> None:
    """B joins by A's address; C, in the middle of the run, by B's and knows nothing of A."""
    a.start("--run", "micro", *LOOPBACK).wait_listening()
    b.start("--join", a.address, *LOOPBACK).wait_listening()
    wait_counted([a, b], 2, "A and B are counted twice")
    c.start("--join", b.address, *LOOPBACK).wait_listening()
    wait_counted([a, b, c], 2, "all three are counted twice")
    joined = max(c.rounds)
    for daemon in (a, b, c):
        status = daemon.status()
        assert_sensible(status)
        assert status.run_id == a.status().run_id
        assert sorted(status.group) == sorted([a.peer_id, b.peer_id, c.peer_id])
        assert status.members == 3
        assert status.loss is not None
        assert status.tokens_per_s > 0
        assert status.trainer.attached
    assert_agreed(a, b, c, at_least=2)
    assert min(c.rounds) > 0, "C came into the middle of the run"
    assert joined >= min(c.rounds)


def the_first_is_killed(a: Daemon, b: Daemon, c: Daemon) -> str:
    """The rounds go on without the founder; nothing of it is left on its machine. Returns the run's lineage."""
    before = b.status()
    assert before.lineage is not None
    assert set(a.whole_node()) >= {"supervisor", "daemon", "engine", "trainer"}
    a.kill()
    assert not a.survivors()
    wait_counted([b, c], 2, "B and C go on without A")
    for daemon in (b, c):
        status = daemon.wait(lambda status: status.members == 2, "A counts as dead")
        assert_sensible(status)
        assert status.round > before.round
        assert status.lineage == before.lineage, "two of three electors are a quorum: no fork"
        seen = daemon.peer(a)
        assert seen is not None
        assert not seen.alive
    assert_agreed(b, c, at_least=3)
    return before.lineage


def one_is_left(b: Daemon, c: Daemon, lineage: str) -> None:
    """C goes on alone, in a lineage that says so."""
    b.kill()
    assert not b.survivors()
    wait_counted([c], 2, "C goes on alone", 1.5 * ROUND_S)
    status = c.status()
    assert_sensible(status)
    assert status.members == 1
    assert status.last_round is not None
    assert status.last_round.contributors == 1
    assert status.lineage != lineage or status.group == (c.peer_id,), "alone either by REFORM or as the sole elector"


def all_come_back(a: Daemon, b: Daemon, c: Daemon) -> None:
    """Plain `atoll daemon`: each home knows its run, and whom it met there."""
    alone = c.status()
    a.start("--threads", "1")
    b.start("--threads", "1")
    wait_all(
        [a, b, c],
        lambda: all(
            daemon.last is not None and daemon.last.lineage == alone.lineage and daemon.last.round > alone.round
            for daemon in (a, b, c)
        ),
        "A and B are on C's lineage",
        2 * ROUND_S,
    )
    wait_counted([a, b, c], 2, "A and B are counted again", 2 * ROUND_S)
    for daemon in (a, b, c):
        status = daemon.status()
        assert_sensible(status)
        assert status.run_id == alone.run_id
        assert status.members == 3, reasons([a, b, c])
    now = min(max(daemon.rounds) for daemon in (a, b, c))
    after = {n for n in range(alone.round, now + 1) if all(n in daemon.rounds for daemon in (a, b, c))}
    assert len(after) >= 2
    for number in after:
        assert len({daemon.rounds[number].state_hash for daemon in (a, b, c)}) == 1, number


def they_leave(a: Daemon, b: Daemon, c: Daemon) -> None:
    """SIGTERM: exit 0 within 10 s; no process, no socket; and who stays is not held up by who goes."""
    for leaving, staying in ((a, [b, c]), (b, [c]), (c, [])):
        address = leaving.home.control_socket
        assert address.exists()
        code, seconds = leaving.terminate()
        assert code == 0, leaving.output[-2000:]
        assert seconds <= LEAVE_S
        assert not leaving.survivors()
        assert not leaving.home.control_socket.exists()
        assert not leaving.home.attach_socket.exists()
        assert not leaving.home.daemon_file.exists()
        if staying:
            wait_counted(staying, 1, f"{len(staying)} go on after a farewell", 20.0 * PATIENCE)
    listening = subprocess.run(["ss", "-Htlnp"], capture_output=True, text=True, check=False).stdout
    for daemon in (a, b, c):
        for pid in daemon.processes:
            assert f"pid={pid}," not in listening
