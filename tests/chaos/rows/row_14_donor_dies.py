"""A donor dies in the middle of a download.

The state has some 27 MB; of three donors one is killed when it is asked for its third chunk. The joiner gets the rest
from the others: its state has the hash that the chain names, it becomes a member and is counted, and the round in
which the donor died is committed like any other. Then both other donors die in the same way, one after the other,
each while the one before it is back.
"""

from __future__ import annotations

import time

from tests.chaos.bent.strikes import Strike
from tests.chaos.lab import LARGER, Lab, Node
from tests.chaos.rows import Measured, Note, Row
from tests.swarm.daemons import LISTEN_S, ROUND_S, TooLate, assert_agreed, wait_all

DONORS = 3


def run(lab: Lab) -> Measured:
    donors = lab.swarm(DONORS, overrides=LARGER)
    notes: dict[str, Note] = {"undisturbed_round_s": round(lab.usual_s(donors), 1)}
    took_s = []
    for index in range(DONORS if lab.thorough else 1):
        seconds = die(lab, donors, donors[index - 1], f"joiner-{index}")
        took_s.append(seconds)
    notes["joiner has the state after the donor's death: worst_s"] = round(max(took_s), 1)
    return Measured(rounds_lost=0, notes=notes)


def die(lab: Lab, donors: list[Node], victim: Node, name: str) -> float:
    """Seconds from the donor's death until the joiner follows the rounds."""
    others = [donor for donor in donors if donor is not victim]
    victim.whole_node()
    victim.arm(Strike(point="chunk-served", round=None, after=3))
    joiner = lab.joiner(name, others[0], arguments=("--no-trainer",))
    deadline_s = time.monotonic() + 2 * LISTEN_S
    while (struck := victim.struck) is None:
        lab.reached(others)
        joiner.glance()
        if time.monotonic() > deadline_s:
            raise TooLate(f"{victim.name} was not asked for a third chunk; {name} said {joiner.output[-500:]}")
        time.sleep(0.02)
    died = lab.reached(others)
    lab.say(f"{victim.name} died while it served {name}, in round {died}")
    wait_all(
        [joiner, *others],
        lambda: joiner.last is not None and joiner.last.phase not in ("starting", "joining", "catching-up"),
        f"{name} has the state and follows the rounds",
        2 * ROUND_S,
    )
    seconds = time.monotonic() - struck.at_s
    reached = lab.reached(others)
    lab.wait_round([joiner, *others], reached, f"{name} commits round {reached}", 2 * ROUND_S)
    assert_agreed(joiner, *others, at_least=1)
    for number in range(died, reached + 1):
        missing = {node.peer_id for node in others} - set(others[0].rounds[number].contributors)
        assert not missing, f"round {number} did not count {missing}"
    lab.say(f"  {name} follows the rounds {seconds:.1f} s after that, on equal states")
    joiner.terminate()
    victim.expect_nothing_left()
    victim.begin()
    lab.wait_counted_again(victim, others, time.monotonic(), reached + 1)
    return seconds


ROW = Row(
    number=14,
    fault="donor dies mid-download",
    must="resumes from another, verified",
    checks=__doc__,
    run=run,
    within_s=400.0,
)
