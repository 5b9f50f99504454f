"""A node comes back with an old state; another's state goes bad in memory while it trains.

The first is away for more rounds than its peers keep. It catches up from a snapshot: its first contribution that
counts is to a round whose state it holds. In the second a bit of θ flips in the shared memory, as a bad module would
do it: the next commit leads it to another hash than the others', which its own READY shows. It contributes nothing
from that state (every mean is recomputed), sets it aside, fetches it anew, and is counted. No round is lost by
either.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from tests.chaos.lab import Lab, Node
from tests.chaos.rows import Measured, Row
from tests.swarm.daemons import ROUND_S, assert_agreed, wait_all

NODES = 3
ROUNDS_AWAY = 10
OVERRIDES = ("limits.keep_rounds=4",)


def run(lab: Lab) -> Measured:
    nodes = lab.swarm(NODES, overrides=OVERRIDES)
    stale_s = stale(lab, nodes)
    diverged_s = diverged(lab, nodes)
    return Measured(
        recover_s=max(stale_s, diverged_s),
        rounds_lost=0,
        notes={
            "stale: recover_s": round(stale_s, 1),
            "diverged: recover_s": round(diverged_s, 1),
            "undisturbed_round_s": round(lab.usual_s(nodes), 1),
        },
    )


def stale(lab: Lab, nodes: list[Node]) -> float:
    *others, away = nodes
    away.power_cut()
    left = lab.reached(others)
    lab.wait_round(others, left + ROUNDS_AWAY, f"{ROUNDS_AWAY} rounds without {away.name}", 2 * ROUND_S)
    started_s, reached = time.monotonic(), lab.reached(others)
    away.begin()
    back, back_s = lab.wait_counted_again(away, others, started_s, left)
    assert back >= reached, f"{away.name} is counted in round {back}; it was away until {reached}"
    wait_all(nodes, lambda: back in away.rounds, f"{away.name} has seen round {back}")
    lab.means(back, others[0])
    assert_agreed(*nodes, at_least=1)
    lab.say(f"{away.name} missed the rounds {left} to {reached}; counted in {back}, {back_s:.1f} s after its start")
    return back_s


def diverged(lab: Lab, nodes: list[Node]) -> float:
    *others, bad = nodes
    lab.wait_counted(nodes, 1, "all are counted")
    status = lab.next_round([bad], lambda status: status.trainer.step > 0)
    flip_a_bit(bad)
    flipped_s, number = time.monotonic(), status.round
    lab.say(f"a bit of {bad.name}'s θ has flipped in round {number}")

    def corrupt_state_seen() -> bool:
        return any(bad.log_lines(word) for word in ("corrupt", "set aside"))

    wait_all(nodes, corrupt_state_seen, f"{bad.name} says that its state is corrupt")
    back, _ = lab.wait_counted_again(bad, others, flipped_s, number + 2)
    back_s = time.monotonic() - flipped_s
    wait_all(nodes, lambda: back in bad.rounds, f"{bad.name} has seen round {back}")
    for passed in range(number, back + 1):
        means = lab.means(passed, others[0])
        assert means.attempt <= 1, f"round {passed} took {means.attempt + 1} attempts"
        missing = {node.peer_id for node in others} - set(others[0].rounds[passed].contributors)
        assert not missing, f"round {passed} did not count {missing}, which were well"
        assert len({node.rounds[passed].state_hash for node in others}) == 1
    assert bad.rounds[back].state_hash == others[0].rounds[back].state_hash
    lab.say(f"{bad.name} is counted again in round {back}, {back_s:.1f} s after the flip")
    return back_s


def flip_a_bit(node: Node) -> None:
    """In the supervisor's memory object, which engine and trainer share."""
    for descriptor in Path(f"/proc/{node.pid}/fd").iterdir():
        if os.readlink(descriptor).startswith("/memfd:atoll-theta"):
            try:
                theta = os.open(descriptor, os.O_RDWR)
            except PermissionError:  # the trainer's, which cannot write
                continue
            # An exponent's bit of the first element: far beyond what rounding could hide.
            byte = os.pread(theta, 1, 3)
            os.pwrite(theta, bytes([byte[0] ^ 1]), 3)
            os.close(theta)
            return
    raise AssertionError(f"{node.name} has no memory object atoll-theta")


ROW = Row(
    number=11,
    fault="stale or diverged peer",
    must="detected by state hash before it contributes; re-synced",
    checks=__doc__,
    run=run,
)
