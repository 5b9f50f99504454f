"""A whole node stands still for three rounds and more, and goes on.

One of four is stopped (SIGSTOP, all of its processes) when it is about to send its third part. The others commit that
round and at least three more without it, the first of them within its deadlines. When it goes on (SIGCONT) it must
catch up before it contributes: every round that it has seen led to the others' state, and in the first round that
counts it again every part is recomputed from the bytes that it froze for that very round. Nothing else of it is in
any commit.
"""

from __future__ import annotations

import signal
import time

from tests.chaos.lab import OUTAGE_ROUND_S, Lab
from tests.chaos.rows import Measured, Row
from tests.swarm.daemons import assert_agreed, wait_all

NODES = 4
ROUNDS_AWAY = 3


def run(lab: Lab) -> Measured:
    nodes = lab.swarm(NODES)
    measured = [freeze(lab, nodes, coordinator=False)]
    if lab.thorough:
        measured += [freeze(lab, nodes, coordinator=index % 2 == 0) for index in range(4)]
    back_s = sorted(seconds for seconds, _ in measured)
    return Measured(
        recover_s=back_s[len(back_s) // 2],
        rounds_lost=0,
        work_lost_tokens=max(lost for _, lost in measured),
        notes={"worst_recover_s": round(back_s[-1], 1), "undisturbed_round_s": round(lab.usual_s(nodes), 1)},
    )


def freeze(lab: Lab, nodes: list, *, coordinator: bool) -> tuple[float, int]:
    """Seconds from SIGCONT to the next counted contribution, and the tokens lost."""
    lab.wait_counted(nodes, 1, "all four are counted")
    usual_s = lab.usual_s(nodes)
    sleeper, struck = lab.strike(
        nodes,
        lambda status: next(node for node in nodes if (node.peer_id == status.coordinator) is coordinator),
        "up",
        after=3,
        target="all",
        number=signal.SIGSTOP,
    )
    others = [node for node in nodes if node is not sleeper]
    first = struck.strike.round
    lab.wait_round(others, first, f"the others commit round {first}", OUTAGE_ROUND_S)
    seconds = max(node.rounds[first].seconds for node in others)
    bound_s = usual_s + lab.attempt_s(2 if coordinator else 1)
    assert seconds < bound_s, f"round {first} took {seconds:.1f} s; its deadlines allow {bound_s:.1f}"
    means = lab.means(first, others[0])
    assert means.attempt <= coordinator, f"round {first} took {means.attempt + 1} attempts"
    lab.say(f"  round {first} took {seconds:.1f} s without {sleeper.name}")
    lab.wait_round(others, first + ROUNDS_AWAY, f"{ROUNDS_AWAY} more rounds without it")
    for number in range(first + 1, first + 1 + ROUNDS_AWAY):
        counted = others[0].rounds[number].contributors
        assert sleeper.peer_id not in counted, f"round {number} counted {sleeper.name}, which stood still"
        assert set(counted) >= {node.peer_id for node in others}, f"round {number} counted only {counted}"

    before = sleeper.last
    awake_s, awake_round = time.monotonic(), lab.reached(others)
    sleeper.thaw()
    back, back_s = lab.wait_counted_again(sleeper, others, awake_s, awake_round)
    wait_all(nodes, lambda: back in sleeper.rounds, f"{sleeper.name} has seen round {back}")
    assert_agreed(*nodes, at_least=1)
    again = lab.means(back, others[0])
    mine = sum(sleeper.peer_id in bitmap for bitmap in again.bitmaps)
    assert mine, f"round {back} counts {sleeper.name} in no part"
    assert sleeper.last is not None
    assert before is not None
    lost = sleeper.last.work.discarded_tokens - before.work.discarded_tokens
    lab.say(f"  {sleeper.name} is counted again in round {back}, {back_s:.1f} s after SIGCONT; {lost} tokens discarded")
    return back_s, lost


ROW = Row(
    number=3,
    fault="SIGSTOP; SIGCONT after 3 rounds",
    must="excluded at the progress deadline; catches up before it contributes; nothing stale is committed",
    checks=__doc__,
    run=run,
    in_ci=True,
    shares=True,
    within_s=120.0,
)
