"""Row 5: the network falls into two parts, and becomes whole again.

Three nodes in network namespaces. One is cut off from the two others: they go on in their lineage, it forks by
REFORM, and says so. The network becomes whole: one lineage is left, all are counted with equal states, the loser
reports what it discards, the winner's chain counts no unit twice. The long form also cuts a direction only, cuts four
and five nodes in two, lets the one wait by min_peers 2, and lets a node vanish in an exchange.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from node.status import Status
from scripts.wanlab.wan import unavailable
from tests.chaos.chain_evidence import read_chain
from tests.chaos.lab import Lab
from tests.chaos.rows import Measured, Row
from tests.chaos.wide_area import Node, WideArea, wide_area
from tests.swarm.daemons import PATIENCE, ROUND_S

LIMITS = (
    f"limits.fork_timeout_s={5 * PATIENCE}",
    f"limits.heartbeat_timeout_s={3 * PATIENCE}",
    "limits.reform_collect_s=1.5",
)
"""What an operator may shorten, so that a lone node goes on by itself after seconds."""
ROUNDS_APART = 2


def run(lab: Lab) -> Measured:
    notes: dict[str, str | int | float] = {}
    with wide_area(lab.directory / "one-of-three", 3, overrides=LIMITS, say=lab.say) as area:
        area.begin()
        area.settle()
        one_against_many(area, notes)
        healed_s = float(notes["1 of 3: whole again_s"])
        lost = int(notes["1 of 3: discarded_tokens"])
        if lab.thorough:
            one_way(area, notes)
        area.expect_nothing_left()
    if lab.thorough:
        with wide_area(lab.directory / "min-peers", 3, overrides=(*LIMITS, "limits.min_peers=2"), say=lab.say) as area:
            area.begin()
            area.settle()
            too_few_to_go_on(area, notes)
            vanishes_in_the_exchange(area, notes)
            area.expect_nothing_left()
        for count, left in ((4, 2), (5, 2)):
            with wide_area(lab.directory / f"{left}-of-{count}", count, overrides=LIMITS, say=lab.say) as area:
                area.begin()
                area.settle()
                halves(area, left, notes)
                area.expect_nothing_left()
    return Measured(recover_s=healed_s, rounds_lost=0, work_lost_tokens=lost, notes=notes)


def one_against_many(area: WideArea, notes: dict[str, str | int | float]) -> None:
    """The one forks and says so, the others go on as if it had died; it comes back to them."""
    alone, *others = area.nodes
    before = others[0].now
    area.cut([alone])
    cut_s = time.monotonic()
    area.wait_rounds(others, ROUNDS_APART, "those who are a quorum go on")
    apart = area.wait_forked([alone], str(before.lineage), cut_s)
    area.wait_rounds([alone], ROUNDS_APART, "the one goes on alone")
    assert all(node.now.lineage == before.lineage for node in others), "a quorum needs no new lineage"
    assert alone.now.members == 1, f"it says that {alone.now.members} members are alive"
    expect_alarm(alone, "goes on as a new lineage")
    lost = {node.name: node.now.work.discarded_tokens for node in area.nodes}
    heal(area, others, [alone], "1 of 3", notes)
    for node in others:
        assert node.now.work.discarded_tokens == lost[node.name], f"{node.name} won, and lost work"
        assert node.now.lineage == before.lineage
    notes["1 of 3: alone after_s"] = round(apart, 1)


def halves(area: WideArea, left: int, notes: dict[str, str | int | float]) -> None:
    """Both sides are seen; at 2 of 4 neither is a quorum, so both fork, and either may win."""
    name = f"{left} of {len(area.nodes)}"
    some, others = area.nodes[:left], area.nodes[left:]
    lineage = str(some[0].now.lineage)
    quorum = len(area.nodes) // 2 + 1
    area.cut(some)
    cut_s = time.monotonic()
    for side in (some, others):
        if len(side) < quorum:
            notes[f"{name}: fork after_s"] = round(area.wait_forked(side, lineage, cut_s), 1)
        area.wait_rounds(side, ROUNDS_APART, f"{len(side)} of {len(area.nodes)} go on", 2 * ROUND_S)
        area.look(side)
        assert len({node.now.lineage for node in side}) == 1, "a side is in two"
        if len(side) >= quorum:
            assert side[0].now.lineage == lineage, "a quorum needs no new lineage"
    branches = {node.name: node.now.lineage for node in area.nodes}
    heal(area, others, some, name, notes, branches=branches)


def heal(
    area: WideArea,
    expected: Sequence[Node],
    loser: Sequence[Node],
    name: str,
    notes: dict[str, str | int | float],
    *,
    branches: dict[str, str | None] | None = None,
) -> None:
    """The network is whole: one of the two lineages is left, all count, and what the others lose is reported.

    `expected` wins, unless `branches` (node → lineage) says that it is a tie: then either may.
    """
    since = min(area.reached([node]) for node in area.nodes)
    discarded = {node.name: node.now.work.discarded_tokens for node in area.nodes}
    area.wan.heal()
    area.say(f"{name}: the network is whole")
    seconds = area.wait_one_lineage(area.nodes, f"{name}: one lineage", 3 * ROUND_S)
    notes[f"{name}: whole again_s"] = round(seconds, 1)
    area.say(f"{name}: one lineage after {seconds:.1f} s")
    if branches is not None:
        assert area.nodes[0].now.lineage in branches.values(), "the lineage that is left is neither's"
        if area.nodes[0].now.lineage != branches[expected[0].name]:
            expected, loser = loser, expected
    merged = area.reached(area.nodes)
    area.wait_rounds(area.nodes, 2, f"{name}: rounds go on", 2 * ROUND_S)
    area.expect_agreement(area.nodes, merged, at_least=1)
    winners = [line for line in expected[0].rounds.values() if since <= line.round]
    notes[f"{name}: longest round of the winner_s"] = round(max(line.seconds for line in winners), 1)
    lost = 0
    for node in loser:
        work = node.now.work
        assert work.discarded_tokens > discarded[node.name], f"{node.name} lost its rounds and reports nothing"
        lost += work.discarded_tokens - discarded[node.name]
        expect_alarm(node, "lineage lost")
    notes[f"{name}: discarded_tokens"] = lost
    expect_counted_once(area, expected[0])


def one_way(area: WideArea, notes: dict[str, str | int | float]) -> None:
    """Nothing from the first to the others, but all to it: it hears them, they do not hear it."""
    deaf, *others = area.nodes
    lineage = deaf.now.lineage
    area.cut([deaf], others, one_way=True)
    area.wait_rounds(others, 3, "those who hear each other go on", 2 * ROUND_S)
    area.wan.heal()
    seconds = area.wait_one_lineage(area.nodes, "one-way: one lineage", 3 * ROUND_S)
    assert area.nodes[1].now.lineage == lineage, "the quorum's lineage has changed"
    notes["one-way, 1 of 3: whole again_s"] = round(seconds, 1)
    expect_counted_once(area, others[0])


def too_few_to_go_on(area: WideArea, notes: dict[str, str | int | float]) -> None:
    """With `min_peers` 2 the one that is cut off waits, and says for whom."""
    alone, *others = area.nodes
    lineage = alone.now.lineage
    area.cut([alone])
    area.wait_rounds(others, ROUNDS_APART, "those who are a quorum go on", 2 * ROUND_S)

    def waits() -> bool:
        return alone.now.members == 1 and "electors are" in alone.now.reason

    area.wait([alone], waits, "the one says what it waits for", 2 * ROUND_S)
    stopped = alone.now.round
    time.sleep(8 * PATIENCE)  # longer than `fork_timeout_s`: what must not happen would happen by now
    area.look([alone])
    assert (alone.now.round, alone.now.lineage) == (stopped, lineage), "it went on with fewer than min_peers"
    notes["min_peers 2: reason"] = alone.now.reason
    area.wan.heal()
    seconds = area.wait_one_lineage(area.nodes, "min_peers 2: whole again", 3 * ROUND_S)
    assert alone.now.lineage == lineage
    notes["min_peers 2: whole again_s"] = round(seconds, 1)
    expect_counted_once(area, alone)


def vanishes_in_the_exchange(area: WideArea, notes: dict[str, str | int | float]) -> None:
    """Its cable is out: no connection ends, nothing comes any more. The others exclude it at the progress deadline."""
    victim, *others = reversed(area.nodes)
    area.wan.rate(*area.wan.hosts, up_bytes_s=30_000, down_bytes_s=30_000)  # so that an exchange takes seconds
    area.wait_counted(area.nodes, 1, "all are counted on slow lines", 2 * ROUND_S)

    def exchanging(status: Status | None) -> bool:
        return status is not None and status.phase == "exchanging"

    deadline_s = time.monotonic() + 2 * ROUND_S
    while not exchanging(victim.glance()):
        assert time.monotonic() < deadline_s, "no exchange was seen"
        time.sleep(0.02)
    number = victim.now.round
    area.cut([victim])
    cut_s = time.monotonic()
    area.wait(others, lambda: all(node.now.round > number for node in others), f"round {number} commits", 2 * ROUND_S)
    seconds = time.monotonic() - cut_s
    line = others[0].rounds[number]
    notes["vanished mid-exchange: round commits after_s"] = round(seconds, 1)
    notes["vanished mid-exchange: why excluded"] = line.excluded.get(victim.peer_id, "counted in some parts")
    area.wait_rounds(others, 2, "the others go on", 2 * ROUND_S)
    area.wan.rate(*area.wan.hosts)
    area.wan.heal()
    back_s = area.wait_one_lineage(area.nodes, "the vanished one is back", 3 * ROUND_S)
    notes["vanished mid-exchange: counted again_s"] = round(back_s, 1)


def expect_counted_once(area: WideArea, winner: Node) -> None:
    """On the chain that is left each unit is done once, and each node's account agrees with it to the token."""
    chain = read_chain(winner.home, area.run)
    assert not chain.twice, f"counted twice: {', '.join(chain.twice[:5])}"
    for node in area.nodes:
        before = read_chain(node.home, area.run).part_tokens[node.peer_id]
        node.glance()
        after = read_chain(node.home, area.run).part_tokens[node.peer_id]
        account = node.now.work.exact
        assert account.missing == 0, f"{account.missing} part-tokens of {node.name} are nowhere"
        said = f"{node.name} says that {account.counted} part-tokens of it count; its chain says {before} to {after}"
        assert before <= account.counted <= after, said


def expect_alarm(node: Node, words: str) -> None:
    """The node's own output says so."""
    assert words in node.output, f"{node.name} did not say {words!r}: {node.output[-1500:]}"


ROW = Row(
    number=5,
    fault="partition into halves, 1 vs many; heal",
    must="minority pauses or forks visibly; one lineage wins; no token counted twice",
    checks=__doc__,
    run=run,
    in_ci=True,
    within_s=600.0,
    needs=unavailable,
)
