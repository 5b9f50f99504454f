"""Chosen faults with exact expectations: who goes on, how soon, and what it costs."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from sim_engine import Engine
from sim_hostile import without
from sim_model import make_rules
from sim_node import Node
from sim_profiles import peer_names
from sim_weather import Weather
from sim_world import World

from protocol import chain, wire
from protocol.candidates import roots_of
from protocol.chain import ChainState
from protocol.events import Effect, LinksChanged, Received, Send, StartExchange
from protocol.judging import Judge
from protocol.messages import NIL, Heartbeat, Join, Proposal, Ready, Roster, Vote
from protocol.names import digest

STILL = Weather(delay_s=(0.0, 0.0), apply_s=(0.0, 0.0))


def swarm(
    founders: int,
    *,
    joiners: int = 0,
    seed: int = 1,
    weather: Weather = STILL,
    min_peers: int = 1,
    rounds: int | None = None,
) -> World:
    names = peer_names(founders + joiners)
    rules = make_rules(names[:founders], min_peers=min_peers, final_round=rounds)
    world = World(seed=seed, rules=rules, weather=weather, joiners=names[founders:], trace=True)
    for name in names[:founders]:
        world.nodes[name].start()
    return world


def run_to(world: World, round_: int, within_s: float, nodes: Sequence[Node] | None = None) -> float:
    """Lets `nodes` (default: all that are up) reach `round_`; the seconds that it took."""
    start_s = world.now_s
    wanted = nodes if nodes is not None else world.up()

    def there() -> bool:
        return all(node.state.base.round >= round_ for node in wanted)

    world.run(start_s + within_s, stop=there)
    where = [(node.peer, node.state.base.round, node.machine and node.machine.reason) for node in wanted]
    assert there(), f"round {round_} not reached within {within_s} s: {where}"
    return world.now_s - start_s


@pytest.mark.parametrize("peers", [1, 2, 3, 4, 5])
def test_a_round_ends_the_moment_its_last_contribution_is_there(peers: int) -> None:
    """With links that take no time, agreement takes none either, and nobody is left out."""
    world = swarm(peers)
    run_to(world, 5, 30.0)
    for round_ in range(5):
        last_s = max(node.trained_s[round_] for node in world.up())
        for node in world.up():
            assert node.committed_s[round_] == pytest.approx(last_s, abs=1e-9)
            commit = node.committed[round_]
            assert commit.roster.message.attempt == 0
            assert chain.counted_bits(commit.headers) == (1 << peers) - 1


@pytest.mark.parametrize("elector_dies", [True, False])
def test_a_swarm_of_two_survives_the_death_of_either(elector_dies: bool) -> None:
    world = swarm(2)
    run_to(world, 3, 30.0)
    (elector,) = world.nodes["PeerA"].state.electors
    dead = world.nodes[elector] if elector_dies else next(n for n in world.up() if n.peer != elector)
    (survivor,) = [node for node in world.up() if node is not dead]
    dead.kill()
    took_s = run_to(world, survivor.state.base.round + 2, 60.0, [survivor])
    rules = world.rules
    assert len(world.oracle.births) - 1 == (1 if elector_dies else 0)
    assert took_s < rules.heartbeat_timeout_s + rules.fork_timeout_s + 3 * world.weather.training_s[1] + 1.0
    # Back again: both on one lineage, both contributing.
    dead.start()
    world.expect_progress(3, 120.0)
    run_to(world, world.furthest() + 2, 30.0)
    last = survivor.committed[-1]
    assert len(last.roster.message.readys) == 2
    assert chain.counted_bits(last.headers) == 0b11


def test_a_limit_of_one_byte_stops_nobody() -> None:
    """It is counted like the others, and the root of nothing; before, every roster that it stood in was refused."""
    world = swarm(5)
    miser = world.nodes["PeerC"]
    miser.feed(LinksChanged(upload_limit_bytes=1, download_limit_bytes=1, failed_edges=()))
    run_to(world, 3, 30.0)
    for commit in miser.committed:
        readys = [ready.sender for ready in commit.roster.message.readys]
        assert readys == sorted(world.nodes)
        assert commit.roster.message.readys[2].message.upload_limit_bytes == 1
        assert commit.roster.message.attempt == 0
        assert chain.counted_bits(commit.headers) == 0b11111
        assert miser.peer not in roots_of(commit.roster.message, world.rules)


def test_a_root_that_died_is_not_waited_for_until_down_is_due() -> None:
    """Only its neighbours notice at once. The leader goes ahead when it is silent and nothing comes any more."""
    names = peer_names(5)
    rules = replace(make_rules(names), level_min_s=60.0)
    world = World(seed=1, rules=rules, weather=STILL)
    for name in names:
        world.nodes[name].start()
    world.run(30.0, stop=lambda: any(engine_of(node).running for node in world.up()))
    (exchange,) = next(engine_of(node).running.values() for node in world.up() if engine_of(node).running)
    roster = exchange.effect.roster
    victim = world.nodes[next(root for root in roots_of(roster.message, rules) if root != roster.sender)]
    # Its own contribution reaches the others, then it dies without a result.
    engine_of(victim)._close = lambda exchange, part: exchange.closed.add(part)  # type: ignore[method-assign]
    world.after(0.1, victim.kill)
    survivors = [node for node in world.up() if node is not victim]
    took_s = run_to(world, 1, 120.0, survivors)
    assert took_s < rules.heartbeat_timeout_s + rules.progress_s + 1.0
    for header, root in zip(survivors[0].committed[0].headers, roots_of(roster.message, rules), strict=True):
        assert (header is None) == (root == victim.peer)
        assert header is None or header.message.bitmap == 0b11111


def engine_of(node: Node) -> Engine:
    assert node.engine is not None
    return node.engine


@pytest.mark.slow
def test_down_to_one_and_up_again() -> None:
    world = swarm(1, joiners=2)
    world.nodes["PeerB"].start()
    world.nodes["PeerC"].start()
    world.run(40.0, stop=lambda: len(world.nodes["PeerA"].state.electors) == 3)
    assert len(world.nodes["PeerA"].state.electors) == 3
    for victim in ("PeerA", "PeerB"):
        world.nodes[victim].kill()
        run_to(world, world.furthest() + 3, 120.0)
    last = world.nodes["PeerC"]
    assert last.state.electors == ("PeerC",)
    for victim in ("PeerA", "PeerB"):
        world.nodes[victim].start()
    world.expect_progress(6, 180.0)
    assert len(last.state.members) == 3


@pytest.mark.parametrize("role", ["coordinator", "other"])
@pytest.mark.parametrize("moment", ["ready", "exchange"])
def test_one_of_four_dies_in_the_middle_of_a_round(role: str, moment: str) -> None:
    """The survivors commit the same round, at most two attempts on."""
    world = swarm(4)
    run_to(world, 2, 30.0)
    state = world.nodes["PeerA"].state
    coordinator = chain.coordinator(state, 0)
    victim = coordinator if role == "coordinator" else next(peer for peer in state.electors if peer != coordinator)
    node = world.nodes[victim]

    def mortal(perform: Callable[..., None]) -> Callable[..., None]:
        def dying(effect: object, before: object) -> None:
            if moment == "exchange" and isinstance(effect, StartExchange):
                node.kill()
            else:
                perform(effect, before)

        return dying

    node._perform = mortal(node._perform)  # type: ignore[method-assign]
    if moment == "ready":
        machine = node.machine
        assert machine is not None
        world.run(world.now_s + 30.0, stop=lambda: machine.round.my_ready is not None)
        node.kill()
    rest = [other for other in world.nodes.values() if other is not node]
    took_s = run_to(world, 3, 60.0, rest)
    (attempt,) = {other.committed[2].roster.message.attempt for other in rest}
    assert attempt <= 2
    assert took_s < 40.0
    assert len(world.oracle.births) == 1


def test_all_die_and_come_back() -> None:
    """The lineage continues, without a REFORM."""
    world = swarm(3)
    run_to(world, 3, 30.0)
    for node in world.up():
        node.kill()
    world.run(world.now_s + 100.0)
    for node in world.nodes.values():
        node.start()
    world.expect_progress(2, 60.0)
    assert len(world.oracle.births) == 1


def test_a_founder_alone_waits_for_a_second_contributor() -> None:
    """`min_peers` 2: nothing commits alone, a roster without parts admits the second, and no work is lost."""
    world = swarm(1, joiners=1, min_peers=2)
    founder = world.nodes["PeerA"]
    world.run(60.0)
    assert founder.state.base.round == 0
    assert founder.machine is not None
    assert founder.machine.phase == "paused"
    assert "min_peers" in founder.machine.reason
    world.nodes["PeerB"].start()
    run_to(world, 3, 60.0)
    assert founder.committed[0].roster.message.plan is None
    assert chain.counted_bits(founder.committed[1].headers) == 0b11
    assert founder.account.carried == [0, 0, 0] or founder.state.base.round == 3


def test_the_run_ends_for_all_together() -> None:
    world = swarm(3, rounds=4)
    run_to(world, 4, 30.0)
    world.run(world.now_s + 10.0)
    assert all(node.finished for node in world.nodes.values())
    assert {node.state.base.round for node in world.nodes.values()} == {4}
    assert {node.machine.phase for node in world.up() if node.machine is not None} == {"finished"}


@pytest.mark.parametrize("peers", [2, 4])
def test_a_leaver_is_not_waited_for(peers: int) -> None:
    world = swarm(peers)
    run_to(world, 2, 30.0)
    leaver = world.nodes[world.nodes["PeerA"].state.electors[0]]
    leaver.leave()
    world.run(world.now_s + 3.0)
    leaver.kill()
    rest = [node for node in world.nodes.values() if node is not leaver]
    took_s = run_to(world, rest[0].state.base.round + 2, 60.0, rest)
    assert took_s < 15.0
    assert all(chain.member(node.state, leaver.peer) is None for node in rest)


@pytest.mark.slow
def test_bad_bytes_and_hostile_members_harm_nobody() -> None:
    """Noise, damaged messages, and well-signed nonsense of a member: dropped, named, and the rounds go on."""
    world = swarm(4)
    world.switches.accuse = False
    run_to(world, 2, 30.0)
    hostile, chance = world.nodes["PeerD"], random.Random(5)
    heard: list[bytes] = []
    original = world.send

    def listening(sender: str, to: str | None, data: bytes) -> None:
        heard.append(data)
        original(sender, to, data)

    world.send = listening  # type: ignore[method-assign]
    run_to(world, 3, 30.0)
    hostile.kill()
    honest = world.up()
    for number in range(3000):
        data = bytearray(chance.choice(heard)) if heard and chance.random() < 0.5 else bytearray(chance.randbytes(40))
        for _ in range(chance.randrange(1, 4)):
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        base = chance.choice(honest).state.base
        match number % 6:
            case 0:
                message = Vote(base=base, attempt=chance.randrange(2**20), phase=chance.randrange(1, 3), value=NIL)
            case 1:
                message = Vote(base=base, attempt=chance.randrange(4), phase=1, value=digest(chance.randbytes(4)))
            case 2:
                message = Ready(base=base, tokens=((3, chance.randrange(1, 2**40)),), norm=1.0)
            case 3:
                message = Proposal(
                    base=base, attempt=chance.randrange(4), roster_id=digest(b"none"), headers=(None,) * 3
                )
            case 4:
                message = Join(base=base, units_wanted=chance.randrange(2**30))
            case _:
                message = Heartbeat(base=base, attempt=0, able=True, incarnation=bytes(16))
        signed = wire.encode(wire.sign(hostile.keyring, hostile.peer, message))
        for node in honest:
            node.feed(Received(data=bytes(data), from_peer=hostile.peer))
            node.feed(Received(data=signed, from_peer=hostile.peer))
        if number % 100 == 0:
            world.run(world.now_s + 0.2)
    run_to(world, world.furthest() + 2, 120.0, honest)


def lead_with(world: World, change: Callable[[Roster], Roster], to: Sequence[str]) -> Node:
    """Makes the coordinator of the next round sign a changed roster too, for the peers `to`; returns it."""
    leader = world.nodes[chain.coordinator(world.nodes["PeerA"].state, 0)]
    original = leader._perform

    def two_faced(effect: Effect, before: ChainState) -> None:
        if isinstance(effect, Send) and isinstance(wire.decode(effect.data).message, Roster):
            roster = wire.decode(effect.data).message
            other = wire.encode(wire.sign(leader.keyring, leader.peer, change(roster)))
            for peer in world.nodes:
                if peer != leader.peer:
                    world.send(leader.peer, peer, other if peer in to else effect.data)
        else:
            original(effect, before)

    leader._perform = two_faced  # type: ignore[method-assign]
    return leader


def test_a_two_faced_coordinator_decides_nothing() -> None:
    """Two rosters for one attempt: whoever sees both votes NIL, and another attempt commits the same round for all."""
    world = swarm(4)
    world.switches.accuse = False
    run_to(world, 2, 30.0)
    leader = chain.coordinator(world.nodes["PeerA"].state, 0)
    others = [peer for peer in world.nodes if peer != leader]
    lead_with(world, without(others[0], world.rules), others[1:])
    run_to(world, 3, 90.0)
    assert len({node.committed[2].roster.body for node in world.up()}) == 1
    # The attempt that decides is another, whether or not it proposes what one of the two rosters came to.
    assert all(node.committed[2].certificate.votes[0].message.attempt > 0 for node in world.up())


def test_a_coordinator_that_leaves_out_a_ready_peer_is_outvoted() -> None:
    world = swarm(4)
    world.switches.accuse = False
    run_to(world, 2, 30.0)
    leader = chain.coordinator(world.nodes["PeerA"].state, 0)
    others = [peer for peer in world.nodes if peer != leader]
    victim = others[0]

    node = world.nodes[leader]
    assert node.machine is not None
    assembly = node.machine.round.assembly
    original = assembly.add_ready
    assembly.add_ready = (  # type: ignore[method-assign]
        lambda signed, now_s: None if signed.sender == victim else original(signed, now_s)
    )
    # The victim is ready first and long before the others, so that everyone has held its READY beyond the grace period.
    for other in world.up():
        if other.peer != victim:
            other._trained_s += 8.0
    run_to(world, 3, 120.0)
    commit = world.nodes[victim].committed[2]
    assert victim in [ready.sender for ready in commit.roster.message.readys]
    assert commit.roster.message.attempt == 1


def test_three_of_seven_vanish_right_after_ready() -> None:
    """A quorum is left: the round commits over what came, without a REFORM."""
    world = swarm(7)
    run_to(world, 2, 30.0)
    doomed = [node for node in world.up() if node.peer != chain.coordinator(node.state, 0)][:3]
    watched = doomed[0].machine
    assert watched is not None
    world.run(
        world.now_s + 30.0,
        stop=lambda: all(node.machine is not None and node.machine.round.my_ready is not None for node in doomed),
    )
    for node in doomed:
        node.kill()
    rest = world.up()
    took_s = run_to(world, 4, 120.0, rest)
    assert took_s < 60.0
    assert len(world.oracle.births) == 1
    assert {other.committed[2].roster.body for other in rest} == {rest[0].committed[2].roster.body}


@pytest.mark.parametrize("peers", [1, 3])
def test_attempts_that_all_refuse_at_once_grow_further_apart(peers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault that all voters share fails every attempt within milliseconds: it must not become a storm of votes."""
    monkeypatch.setattr(Judge, "refuses", lambda self, proposal, candidate: "a fault that all share")
    world = swarm(peers)
    world.run(60.0)
    for node in world.up():
        assert node.machine is not None
        assert 3 <= node.machine.attempt <= 7
    monkeypatch.undo()
    run_to(world, 2, 60.0)
