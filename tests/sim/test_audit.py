"""Liars are caught and left out by all, the swarm goes on, and nobody honest is ever convicted (protocol section 7)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
from sim_hostile_audit import accuses_falsely, fabricates_means, sends_other_bytes, signs_two_results, two_faced
from sim_node import Node
from sim_profiles import PROFILES, build
from sim_sharing import shared_work
from sim_world import Violation, World

from protocol import chain, wire
from protocol.messages import Offence, Proposal, Ready, Roster, Vote
from protocol.names import digest

ROUNDS = 20
"""Within so many rounds a liar is out, however rarely it leads: most lies need its turn."""

LIES: dict[str, tuple[Callable[[Node], None], Offence]] = {
    "two READYs": (partial(two_faced, kind=Ready), Offence.TWO_READYS),
    "two ROSTERs": (partial(two_faced, kind=Roster), Offence.TWO_ROSTERS),
    "two PROPOSALs": (partial(two_faced, kind=Proposal), Offence.TWO_PROPOSALS),
    "two votes": (partial(two_faced, kind=Vote), Offence.TWO_VOTES),
    "two results": (signs_two_results, Offence.TWO_HEADERS),
    "a mean that is none": (fabricates_means, Offence.WRONG_MEAN),
}


def honest(world: World) -> list[Node]:
    return [node for node in world.nodes.values() if node.peer not in world.hostile]


def left_out(world: World) -> bool:
    return all(world.hostile <= set(node.state.banned) for node in honest(world) if node.machine is not None)


def begin(profile: str, seed: int, peers: int, lie: Callable[[Node], None]) -> World:
    """A swarm of `peers` founders in which one of them, after two rounds in fair weather, begins to lie."""
    world = build(profile, seed, peers + PROFILES[profile].joiners, trace=True)
    weather, world.weather = world.weather, world.calm
    world.start()
    world.run(60.0, stop=lambda: world.furthest() >= 2 and world.together(2))
    liars = sorted(world.nodes)[:peers]
    lie(world.nodes[liars[seed % peers]])
    world.weather = weather
    return world


def where(world: World) -> str:
    return "; ".join(
        f"{node.peer}: round {node.state.base.round}, banned {node.state.banned}, "
        f"{node.machine.reason if node.machine else 'down'}"
        for node in honest(world)
    )


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("peers", [3, 4, 5])
def test_a_liar_is_convicted_and_left_out_by_all(lie: str, peers: int) -> None:
    turn, offence = LIES[lie]
    with shared_work():
        world = begin("calm", peers, peers, turn)
        since = world.furthest()
        world.run(world.now_s + 400.0, stop=lambda: left_out(world))
        assert left_out(world), where(world)
        assert world.furthest() - since <= ROUNDS, where(world)
        assert {evidence.offence for _, evidence in world.convictions} == {offence}
        goal = world.furthest() + 3
        world.run(world.now_s + 120.0, stop=lambda: all(node.state.base.round >= goal for node in honest(world)))
    assert all(node.state.base.round >= goal for node in honest(world)), where(world)
    (liar,) = (world.nodes[peer] for peer in world.hostile)
    world.run(world.now_s + 60.0, stop=lambda: liar.machine is not None and liar.peer in liar.machine.state.banned)
    assert liar.machine is not None
    assert (liar.machine.phase, "evidence" in liar.machine.reason) == ("paused", True), "it is told why, and follows"
    for node in honest(world):
        assert all(chain.member(node.state, liar) is None for liar in world.hostile)
        assert len({other.state.base.lineage for other in honest(world)}) == 1


def test_bytes_that_ready_does_not_bind_are_dropped_and_cost_their_sender_the_round() -> None:
    """No evidence comes of it, since nothing of it is signed: its parts are missing, and the rounds go on."""
    world = begin("calm", 1, 4, sends_other_bytes)
    (liar,) = world.hostile
    goal = world.furthest() + 3
    world.run(world.now_s + 200.0, stop=lambda: all(node.state.base.round >= goal for node in honest(world)))
    assert all(node.state.base.round >= goal for node in honest(world)), where(world)
    assert any(f"of {liar}: not what its READY binds" in line for line in world.trace or ())
    assert not world.convictions
    newest = honest(world)[0].committed[-1]
    bit = [ready.sender for ready in newest.roster.message.readys].index(liar)
    others = [header for header in newest.headers if header is not None and header.sender != liar]
    assert others
    assert not any(header.message.bitmap >> bit & 1 for header in others)


@pytest.mark.parametrize("peers", [3, 5])
def test_false_accusations_convict_nobody_and_cost_their_author_its_attempts(peers: int) -> None:
    with shared_work():
        world = begin("calm", 1, peers, accuses_falsely)
        goal = world.furthest() + 8
        world.run(world.now_s + 400.0, stop=lambda: all(node.state.base.round >= goal for node in honest(world)))
    assert all(node.state.base.round >= goal for node in honest(world)), where(world)
    # It may be caught at two ROSTERs: what it sends is not what its own machine serves under the same attempt.
    assert all(evidence.offence is not Offence.WRONG_MEAN for _, evidence in world.convictions)
    assert all(set(node.state.banned) <= world.hostile for node in honest(world))


@pytest.mark.parametrize("lie", ["two votes", "a mean that is none"])
def test_a_pair_whose_sole_elector_lies_goes_on_without_it(lie: str) -> None:
    """Nobody can vote the only voter out: who has found out listens to it no more, and a REFORM makes a lineage of its
    own after `T_fork`.
    """
    turn, offence = LIES[lie]
    with shared_work():
        world = build("calm", 3, 2, trace=True)
        world.start()
        world.run(60.0, stop=lambda: world.together(2))
        elector = honest(world)[0].state.electors[0]
        other = next(node for node in world.nodes.values() if node.peer != elector)
        turn(world.nodes[elector])
        if lie == "two votes":
            # Alone with it, the other sees one face only; both come by whoever was there.
            for number in range(2):
                other.receive(a_vote(world.nodes[elector], number), elector)
        born = other.state.base.lineage
        goal = world.furthest() + 3
        world.run(
            world.now_s + 200.0,
            stop=lambda: other.state.base.lineage != born and other.state.base.round >= goal,
        )
    assert [found.offence for who, found in world.convictions if who == other.peer] == [offence]
    assert [peer for peer, _ in other.state.members] == [other.peer], where(world)
    assert other.state.base.round >= goal, where(world)


def test_who_is_locked_on_evidence_takes_along_those_who_cannot_recompute_it_any_more() -> None:
    """One is locked, the liar dies, the others restart and have forgotten the commit: no fork, and no round is lost."""
    with shared_work():
        world = begin("calm", 4, 4, fabricates_means)
        world.run(world.now_s + 400.0, stop=lambda: any(locked_on_evidence(node) for node in honest(world)))
        (locked,) = (node for node in honest(world) if locked_on_evidence(node))
        (liar,) = world.hostile
        world.nodes[liar].kill()
        for node in honest(world):
            if node is not locked:
                node.kill()
                world.after(1.0, node.start)
        goal = locked.state.base.round + 2
        world.run(world.now_s + 200.0, stop=lambda: all(node.state.base.round >= goal for node in honest(world)))
    assert all(node.state.base.round >= goal for node in honest(world)), where(world)
    assert len({node.state.base.lineage for node in honest(world)}) == 1, where(world)
    assert left_out(world), where(world)


@pytest.mark.parametrize(("lie", "seed"), [("two votes", 3), ("two votes", 6), ("a mean that is none", 3)])
def test_who_missed_a_conviction_and_who_made_it_do_not_stay_apart(
    lie: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two honest convicts the sole elector and goes on without it; the other was down, and stays with it.

    The one does not hear the elector that the other counts as live. What shows by itself is told across lineages; a
    wrong mean, which the other cannot recompute, is held against the elector only as long as anybody could.
    """
    monkeypatch.setitem(PROFILES, "sole", replace(PROFILES["calm"], max_electors=1))
    with shared_work():
        world = build("sole", seed, 3, trace=True)
        world.start()
        world.run(60.0, stop=lambda: world.furthest() >= 2 and world.together(2))
        (elector,) = honest(world)[0].state.electors
        liar = world.nodes[elector]
        judge, absent = (node for node in world.nodes.values() if node is not liar)
        world.hostile.add(elector)
        boot = liar._boot
        if lie == "two votes":
            absent.kill()
            for number in range(2):
                judge.receive(a_vote(liar, number), elector)
        else:
            fabricates_means(liar)
            world.run(world.now_s + 100.0, stop=lambda: bool(world.convictions))
            absent.kill()
            # From now on it is honest: nothing new shows to the other what it was.
            liar.kill()
            liar._boot = boot  # type: ignore[method-assign]
            liar.start()
        assert [who for who, _ in world.convictions] == [judge.peer]
        born = judge.state.base.lineage
        world.run(world.now_s + 200.0, stop=lambda: judge.state.base.lineage != born)
        assert judge.state.base.lineage != born, where(world)
        absent.start()
        together = lambda: judge.state.base.lineage == absent.state.base.lineage  # noqa: E731
        world.run(world.now_s + 600.0, stop=together)
        assert together(), where(world)
        goal = world.furthest() + 3
        world.run(world.now_s + 200.0, stop=lambda: all(node.state.base.round >= goal for node in (judge, absent)))
    assert all(node.state.base.round >= goal for node in (judge, absent)), where(world)
    assert together(), where(world)
    if lie == "two votes":
        assert chain.member(judge.state, elector) is None


def locked_on_evidence(node: Node) -> bool:
    if node.machine is None or node.machine.round.commit is not None:
        return False
    round_ = node.machine.round
    if round_.agreement.lock is None or round_.valid is None:
        return False
    candidate = round_.candidates.get(round_.contents[round_.valid[1]][0])
    return candidate is not None and bool(candidate.roster.evidence)


def a_vote(node: Node, number: int) -> bytes:
    vote = Vote(base=node.state.base, attempt=9, phase=1, value=digest(bytes([number])))
    return wire.encode(wire.sign(node.keyring, node.peer, vote))


WEATHERS = [("lossy", 4), ("crashy", 4), ("partition", 5), ("churn", 4), ("open", 5)]


@pytest.mark.slow
@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize(("profile", "peers"), WEATHERS)
def test_in_bad_weather_only_liars_are_convicted(profile: str, peers: int, lie: str) -> None:
    """Whoever is down, cut off or restarted meanwhile; and when the weather clears, the liar is left out."""
    for seed in range(2):
        with shared_work():
            world = begin(profile, seed, peers, LIES[lie][0])
            try:
                world.run(world.now_s + min(40.0, PROFILES[profile].weather_s))
                world.clear()
                world.run(world.now_s + 400.0, stop=lambda world=world: left_out(world))  # type: ignore[misc]
                if not left_out(world):
                    raise Violation(f"a liar stays: {where(world)}")
            except Violation as violation:
                pytest.fail(f"{violation} (profile {profile}, {peers} peers, seed {seed}, {lie})", pytrace=False)
