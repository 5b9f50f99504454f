"""One of four is killed in the middle of an exchange.

It dies when it is about to send its third part, or has received the third: all of it, and in the long form each
process alone, at eight places of the round. The three others commit that very round: in the first attempt unless the
victim led it, then in the second at the latest. All three are counted and hold the same state; every part is
recomputed from the contributions on disk by arithmetic that is not the product's, bit for bit. The victim starts
again and is counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from node.status import Status
from tests.chaos.lab import OUTAGE_ROUND_S, Lab, Node
from tests.chaos.rows import Measured, Note, Row
from tests.swarm.daemons import assert_agreed

NODES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    name: str
    coordinator: bool
    """Whether the victim leads the attempt."""
    point: str
    after: int
    target: str = "node"


IN_CI = (
    # Every contributor is the root of a shard, so each of these also leaves a shard half reduced.
    Attack(name="member, two of its parts sent", coordinator=False, point="up", after=3),
    Attack(name="coordinator, some contributions received", coordinator=True, point="up-received", after=3),
)
MORE = (
    Attack(name="root, its first sum made", coordinator=False, point="reduced", after=1),
    Attack(name="member, before it sent anything", coordinator=False, point="exchange", after=1),
    Attack(name="coordinator, while parts come down", coordinator=True, point="down-received", after=2),
    Attack(name="engine of a member", coordinator=False, point="up", after=3, target="engine"),
    Attack(name="daemon of a member", coordinator=False, point="up", after=3, target="daemon"),
    Attack(name="trainer of a member", coordinator=False, point="up", after=3, target="trainer"),
    Attack(name="engine of the coordinator", coordinator=True, point="up", after=3, target="engine"),
    Attack(name="daemon of the coordinator", coordinator=True, point="up", after=3, target="daemon"),
    Attack(name="member, its first vote sent", coordinator=False, point="vote-1", after=1),
    Attack(name="coordinator, its proposal sent", coordinator=True, point="proposal", after=1),
)


def run(lab: Lab) -> Measured:
    nodes = lab.swarm(NODES)
    usual_s = lab.usual_s(nodes)
    notes: dict[str, Note] = {}
    recovered: list[float] = []
    for attack in (*IN_CI, *(MORE if lab.thorough else ())):
        seconds, attempts, back_s = strike(lab, nodes, attack, usual_s)
        notes[f"{attack.name}: round_s"] = round(seconds, 1)
        notes[f"{attack.name}: attempts"] = attempts
        recovered.append(back_s)
    notes["undisturbed_round_s"] = round(lab.usual_s(nodes), 1)
    return Measured(recover_s=sorted(recovered)[len(recovered) // 2], rounds_lost=0, notes=notes)


def strike(lab: Lab, nodes: list[Node], attack: Attack, usual_s: float) -> tuple[float, int, float]:
    """Seconds of the attacked round, its attempts, and the seconds until the victim was counted again."""

    def choose(status: Status) -> Node:
        return next(node for node in nodes if (node.peer_id == status.coordinator) is attack.coordinator)

    lab.wait_counted(nodes, 1, "all four vote")
    victim, struck = lab.strike(nodes, choose, attack.point, after=attack.after, target=attack.target)
    survivors = [node for node in nodes if node is not victim]
    number = struck.strike.round
    lab.wait_round(survivors, number, f"the survivors commit round {number}", OUTAGE_ROUND_S)
    assert_agreed(*survivors, at_least=1)
    seconds = max(node.rounds[number].seconds for node in survivors)
    for node in survivors:
        missing = {other.peer_id for other in survivors} - set(node.rounds[number].contributors)
        assert not missing, f"round {number} did not count {missing}, which were well"
    means = lab.means(number, survivors[0])
    allowed = 2 if attack.coordinator else 1
    assert means.attempt < allowed, f"{attack.name}: round {number} took {means.attempt + 1} attempts, not {allowed}"
    bound_s = usual_s + lab.attempt_s(means.attempt + 1)
    assert seconds < bound_s, f"{attack.name}: round {number} took {seconds:.1f} s, its deadlines allow {bound_s:.1f}"
    lab.say(
        f"  round {number}: {seconds:.1f} s, attempt {means.attempt}, {means.parts} means exact, {means.empty} EMPTY"
    )
    if attack.target == "node":
        victim.expect_nothing_left()
        victim.begin()
    back, back_s = lab.wait_counted_again(victim, survivors, struck.at_s, number + 1)
    lab.say(f"  {victim.name} is counted again in round {back}, {back_s:.1f} s after the strike")
    return seconds, means.attempt + 1, back_s


ROW = Row(
    number=1,
    fault="SIGKILL mid-exchange: member, root of a shard, coordinator",
    must="survivors commit the same round, at most two attempts on, within its deadlines; every mean is exact",
    checks=__doc__,
    run=run,
    in_ci=True,
    shares=True,
    within_s=120.0,
)
