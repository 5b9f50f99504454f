"""A node joins in the middle of a round, then four at once.

The chain says in which commit each JOIN stands: nobody is counted in that round or an earlier one, all are in one
soon after. Meanwhile the rounds go on: none is given up, none takes more than the durations of one attempt beyond
what it takes undisturbed, and nobody who was there before is missing in any.
"""

from __future__ import annotations

import time

from tests.chaos.evidence import commits
from tests.chaos.lab import Lab, Node
from tests.chaos.rows import Measured, Row
from tests.swarm.daemons import ROUND_S, assert_agreed

FOUNDERS = 2
AT_ONCE = 4


def run(lab: Lab) -> Measured:
    founders = lab.swarm(FOUNDERS)
    usual_s = lab.usual_s(founders)
    began = lab.reached(founders)

    lab.next_round(founders, lambda status: status.trainer.step > 0)
    one_s = join(lab, founders, ["early"])
    four_s = join(lab, founders, [f"late-{index}" for index in range(AT_ONCE)])

    ended = lab.reached(founders)
    rounds = [founders[0].rounds[number] for number in range(began, ended)]
    longest_s = max(line.seconds for line in rounds)
    bound_s = usual_s + lab.attempt_s()
    assert longest_s < bound_s, f"a round took {longest_s:.1f} s while others joined, {usual_s:.1f} s usually"
    chain = commits(founders[0].home, lab.run) if lab.run is not None else {}
    attempts = max(chain[line.round].certificate.votes[0].message.attempt for line in rounds)
    assert attempts <= 1, f"a round took {attempts + 1} attempts while others joined"
    for line in rounds:
        missing = {node.peer_id for node in founders} - set(line.contributors)
        assert not missing, (
            f"round {line.round} did not count {missing}, which were there all the time: {line.excluded}"
        )
    return Measured(
        recover_s=four_s,
        rounds_lost=0,
        work_lost_tokens=0,
        notes={
            "one joiner: counted_s": round(one_s, 1),
            f"{AT_ONCE} joiners: counted_s": round(four_s, 1),
            "undisturbed_round_s": round(usual_s, 1),
            "longest_round_s": round(longest_s, 1),
            "rounds": len(rounds),
        },
    )


def join(lab: Lab, founders: list[Node], names: list[str]) -> float:
    """Seconds from their start until all of them are counted."""
    assert lab.run is not None
    started_s, started = time.monotonic(), lab.reached(founders)
    # By different members' addresses: a donor need not be whom one was told.
    joiners = [lab.joiner(name, founders[index % FOUNDERS]) for index, name in enumerate(names)]
    for joiner in joiners:
        joiner.wait_listening()
    lab.wait_counted([*founders, *joiners], 1, f"{len(names)} joiners are counted", 3 * ROUND_S, since=started)
    took_s = time.monotonic() - started_s
    assert_agreed(*founders, *joiners, at_least=1)
    chain = commits(founders[0].home, lab.run)
    for joiner in joiners:
        joined = [number for number, commit in chain.items() if joiner.peer_id in _joins(commit)]
        assert joined, f"no commit holds the JOIN of {joiner.name}"
        counted = [number for number, line in founders[0].rounds.items() if joiner.peer_id in line.contributors]
        assert min(counted) > min(joined) >= started, f"{joiner.name} joined by {joined}, is counted in {counted}"
    lab.say(f"{len(names)} joined, {took_s:.1f} s from their start to a round that counts them")
    return took_s


def _joins(commit: object) -> set[str]:
    return {signed.sender for signed in commit.roster.message.joins}  # type: ignore[attr-defined]


ROW = Row(
    number=12,
    fault="join mid-round; 4 joiners at once",
    must="they join at a round boundary; donors are shared; no round stalls",
    checks=__doc__,
    run=run,
    in_ci=True,
    within_s=150.0,
)
