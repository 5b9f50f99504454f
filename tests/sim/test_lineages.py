"""Partitions: both sides go on or pause, meet again, and end on one lineage (protocol section 10)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pytest
from sim_model import PARTS, CheapKeyring, make_rules
from sim_node import Node
from sim_profiles import peer_names
from sim_weather import Weather
from sim_world import World

from protocol import chain, wire
from protocol.meeting import COMPARED_SETTLES
from protocol.messages import Heartbeat
from protocol.names import Base, Digest, PeerId, digest, encode_integer
from protocol.rules import Quorum

MILD = Weather(delay_s=(0.005, 0.05))


def swarm(
    founders: int,
    *,
    joiners: int = 0,
    seed: int = 1,
    min_peers: int = 1,
    quorum: Quorum = Quorum.MAJORITY,
    weather: Weather = MILD,
) -> World:
    names = peer_names(founders + joiners)
    rules = make_rules(names[:founders], min_peers=min_peers, quorum=quorum)
    world = World(seed=seed, rules=rules, weather=weather, joiners=names[founders:], trace=True)
    nodes = [world.nodes[name] for name in names[:founders]]
    for node in nodes:
        node.start()
    world.run(60.0, stop=lambda: all(node.state.base.round >= 2 for node in nodes))
    assert world.furthest() >= 2
    return world


def split(world: World, *sides: str) -> list[list[Node]]:
    """Cuts the sides, named by the last letters of their peers ("AB"), off from each other."""
    groups = [[world.nodes[f"Peer{letter}"] for letter in side] for side in sides]
    world.cut = {
        (one.peer, other.peer)
        for number, group in enumerate(groups)
        for other_number, others in enumerate(groups)
        if number != other_number
        for one in group
        for other in others
    }
    return groups


def heal(world: World) -> None:
    world.cut = set()


def lineages(nodes: Iterable[Node]) -> set[Digest]:
    return {node.state.base.lineage for node in nodes}


def rounds(nodes: Iterable[Node]) -> int:
    return min(node.state.base.round for node in nodes)


def run_until(world: World, within_s: float, happened: Callable[[], bool]) -> float:
    """The seconds until `happened`."""
    start_s = world.now_s
    world.run(start_s + within_s, stop=happened)
    where = {node.peer: (node.state.base.round, node.machine and node.machine.reason) for node in world.nodes.values()}
    assert happened(), f"not within {within_s} s: {where}"
    return world.now_s - start_s


def apart(world: World, *sides: str, ahead: int = 4) -> list[list[Node]]:
    """Splits, and lets every side get `ahead` rounds on by itself."""
    groups = split(world, *sides)
    goal = world.furthest() + ahead
    run_until(world, 200.0, lambda: all(rounds(group) >= goal for group in groups))
    assert len(lineages(world.nodes.values())) == len(sides)
    return groups


def discarded(node: Node) -> list[int]:
    return list(node.account.discarded)


def counted_since(node: Node, round_: int) -> list[int]:
    """Work of `node` that commits of its chain behind `round_` counted, a part each."""
    places = [values for (_, at), values in node.counted_at.items() if at > round_]
    return [sum(values[part] for values in places) for part in range(PARTS)]


def settled(world: World, ahead: int = 2) -> Callable[[], bool]:
    goal = world.furthest() + ahead
    return lambda: world.together(goal) and all(node.kept is None for node in world.up())


def check_accounts(world: World) -> None:
    for node in world.nodes.values():
        world.oracle.check_account(node.peer, node.account)
        if node.kept is None:
            world.oracle.check_counted(node.peer, node.account, node.counted_at, node.course)


# ---------------------------------------------------------------- who wins


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [2, 30])
def test_halves_meet_and_the_one_with_more_work_counted_goes_on(ahead: int) -> None:
    world = swarm(4)
    branch = world.furthest()
    left, right = apart(world, "AB", "CD", ahead=ahead)
    # One side alone for a little longer: it has counted more.
    right[0].kill()
    right[1].kill()
    run_until(world, 60.0, lambda: rounds(left) >= rounds(right) + 3)
    for node in right:
        node.start()
    winner, lost = left[0].state.base.lineage, {node.peer: counted_since(node, branch) for node in right}
    heal(world)
    took_s = run_until(world, 120.0, settled(world))
    assert lineages(world.nodes.values()) == {winner}
    assert took_s < world.rules.settle_s + 40.0
    for node in right:
        assert all(have >= want > 0 for have, want in zip(discarded(node), lost[node.peer], strict=True))
    for node in left:
        assert discarded(node) == [0] * PARTS, "the winner loses nothing"
    check_accounts(world)


@pytest.mark.slow
def test_a_tie_pauses_new_rounds_only_while_it_is_compared() -> None:
    world = swarm(4)
    left, _ = apart(world, "AB", "CD")
    heal(world)
    run_until(world, 10.0, lambda: all(node.machine is not None and node.machine.standing.comparing for node in left))
    machine = left[0].machine
    assert machine is not None
    world.run(world.now_s + 4.0)
    assert machine.phase == "paused"
    assert any(node.machine is not None and "as well" in node.machine.reason for node in world.up())
    paused_at = world.furthest()
    took_s = run_until(world, 60.0, lambda: world.furthest() > paused_at)
    assert took_s < COMPARED_SETTLES * world.rules.settle_s
    run_until(world, 120.0, settled(world))
    check_accounts(world)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
def test_halves_whose_work_grows_alike_do_not_overtake_each_other_for_ever(seed: int) -> None:
    """Rounds that take longer than half of `T_settle`: each side is a round ahead of what it knows of the other."""
    slow = Weather(training_s=(5.0, 6.0), delay_s=(0.05, 0.2))
    world = swarm(4, seed=seed, weather=slow)
    apart(world, "AB", "CD")
    heal(world)
    took_s = run_until(world, 120.0, settled(world))
    assert took_s < 2 * COMPARED_SETTLES * world.rules.settle_s
    check_accounts(world)


@pytest.mark.slow
@pytest.mark.parametrize("sides", ["ABC DE", "ABCD E", "ABCDEF G", "ABCD EFG"])
def test_the_majority_goes_on_undisturbed_and_the_minority_follows(sides: str) -> None:
    world = swarm(len(sides) - 1)
    many, few = apart(world, *sides.split())
    lineage = many[0].state.base.lineage
    healed_round, healed_s = rounds(many), world.now_s
    heal(world)
    run_until(world, 120.0, settled(world))
    assert lineages(world.nodes.values()) == {lineage}
    times_s = [many[0].committed_s[number] for number in range(healed_round, rounds(many))]
    gaps_s = [later - sooner for sooner, later in zip([healed_s, *times_s], times_s, strict=False)]
    # Once the losers are members, the round waits for them as for anybody; until then nothing may change.
    assert gaps_s[0] < 2 * world.weather.training_s[1]
    assert max(gaps_s) < 2 * world.weather.training_s[1] + 2 * world.rules.grace_s
    assert all(discarded(node) == [0] * PARTS for node in many)
    assert all(min(discarded(node)) > 0 for node in few)
    check_accounts(world)


@pytest.mark.slow
@pytest.mark.parametrize("sides", ["AB CD EF", "A B C", "ABC DE F"])
def test_three_sides_end_on_one(sides: str) -> None:
    world = swarm(len(sides.replace(" ", "")))
    apart(world, *sides.split())
    heal(world)
    run_until(world, 200.0, settled(world))
    check_accounts(world)


@pytest.mark.slow
def test_three_sides_that_meet_one_after_another_end_on_one() -> None:
    world = swarm(6)
    apart(world, "AB", "CD", "EF")
    split(world, "ABCD", "EF")
    run_until(world, 200.0, lambda: len(lineages(world.nodes[f"Peer{letter}"] for letter in "ABCD")) == 1)
    world.run(world.now_s + 40.0)
    heal(world)
    run_until(world, 200.0, settled(world))
    check_accounts(world)


@pytest.mark.slow
def test_a_cut_in_one_direction_heals() -> None:
    world = swarm(4)
    world.cut = {("PeerA", other) for other in world.nodes if other != "PeerA"}
    world.run(world.now_s + 60.0)
    heal(world)
    run_until(world, 200.0, settled(world))
    check_accounts(world)


@pytest.mark.slow
def test_flapping_ends_on_one_lineage() -> None:
    world = swarm(5)
    apart(world, "ABC", "DE")
    for _ in range(8):
        heal(world)
        world.run(world.now_s + 7.0)
        split(world, "ABC", "DE")
        world.run(world.now_s + 8.0)
    heal(world)
    run_until(world, 200.0, settled(world))
    check_accounts(world)


@pytest.mark.parametrize("away_s", [1.0, 10.0, 24.0])
def test_a_short_cut_forks_nothing(away_s: float) -> None:
    world = swarm(4)
    split(world, "AB", "CD")
    world.run(world.now_s + away_s)
    heal(world)
    run_until(world, 60.0, settled(world))
    assert len(world.oracle.births) == 1
    check_accounts(world)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_healing_in_the_middle_of_a_reform(seed: int) -> None:
    world = swarm(4, seed=seed)
    groups = split(world, "AB", "CD")
    born = len(world.oracle.births)
    run_until(
        world,
        60.0,
        lambda: (
            any(node.machine is not None and node.machine.reforming.active for group in groups for node in group)
            if seed % 2
            else len(world.oracle.births) > born
        ),
    )
    heal(world)
    run_until(world, 200.0, settled(world))
    check_accounts(world)


# ---------------------------------------------------------------- between two lineages


def follow_and(world: World, few: Sequence[Node], then: Callable[[], None]) -> None:
    """Heals; at the moment when the first of the losers has left its lineage, `then` happens."""
    heal(world)
    run_until(world, 60.0, lambda: any(node.kept is not None for node in few))
    then()


@pytest.mark.slow
def test_the_winner_dies_after_the_verdict_and_the_loser_resumes_its_own_lineage() -> None:
    world = swarm(5)
    many, few = apart(world, "ABC", "DE")
    own = few[0].state.base.lineage
    follow_and(world, few, lambda: [node.kill() for node in many] and None)
    # The other one may follow it even now: an elector is heard on the winner's side yet. Each waits for `T_fork`.
    took_s = run_until(world, 120.0, lambda: all(node.kept is None and node.state.base.lineage == own for node in few))
    assert took_s < 2 * world.rules.fork_timeout_s + world.rules.heartbeat_timeout_s
    before = rounds(few)
    run_until(world, 60.0, lambda: rounds(few) >= before + 3)
    assert {node.returns for node in few} <= {0, 1}
    # Back again: the losers lose anyhow, a little later.
    for node in many:
        node.start()
    run_until(world, 300.0, settled(world))
    check_accounts(world)


@pytest.mark.slow
@pytest.mark.parametrize("delay_s", [0.0, 0.5, 3.0])
def test_a_loser_that_crashes_between_two_lineages_ends_on_one(delay_s: float) -> None:
    world = swarm(5)
    _, few = apart(world, "ABC", "DE")

    def crash() -> None:
        world.run(world.now_s + delay_s)
        for node in few:
            node.kill()

    follow_and(world, few, crash)
    world.run(world.now_s + 30.0)
    for node in few:
        node.start()
    run_until(world, 200.0, settled(world))
    check_accounts(world)


@pytest.mark.slow
def test_a_join_that_is_refused_brings_the_loser_back_to_its_own_lineage() -> None:
    world = swarm(5)
    many, few = apart(world, "ABC", "DE")
    own, theirs = few[0].state.base.lineage, many[0].state.base.lineage
    for node in many:
        assert node.machine is not None
        node.machine.round.on_join = lambda signed: None  # type: ignore[method-assign]
        original = node.machine._start_round

        def deaf(*given: object, machine: object = node.machine, start: Callable[..., None] = original) -> None:
            start(*given)
            machine.round.on_join = lambda signed: None  # type: ignore[attr-defined]

        node.machine._start_round = deaf  # type: ignore[method-assign]
    heal(world)
    run_until(world, 120.0, lambda: any(node.kept is not None for node in few))
    run_until(world, 120.0, lambda: all(node.returns > 0 for node in few))
    run_until(world, 60.0, lambda: lineages(few) == {own})
    before = rounds(few)
    run_until(world, 120.0, lambda: rounds(few) > before)
    assert lineages(many) == {theirs}
    check_accounts(world)


# ---------------------------------------------------------------- who has no voice


def beat(world: World, sender: PeerId, base: Base) -> None:
    message = Heartbeat(base=base, attempt=0, able=True, incarnation=bytes(16))
    data = wire.encode(wire.sign(CheapKeyring(sender), sender, message))
    for node in world.up():
        node.receive(data, sender)


@pytest.mark.slow
@pytest.mark.parametrize("liar", ["PeerD", "Stranger"])
def test_a_thousand_invented_lineages_stop_nobody(liar: PeerId) -> None:
    """Of a member and of a stranger: rounds go on as before, a joiner joins, and few questions are asked."""
    world = swarm(4)
    if liar in world.nodes:
        world.nodes[liar].kill()
    asked = []
    original = Node._learn
    for node in world.nodes.values():
        node._learn = lambda effect, node=node: (asked.append(world.now_s), original(node, effect))  # type: ignore[method-assign]
    start, lineage = world.furthest(), world.nodes["PeerA"].state.base.lineage
    for number in range(1000):
        base = world.nodes["PeerA"].state.base
        invented = digest(b"invented", encode_integer(number))
        beat(
            world,
            liar,
            Base(
                run=base.run,
                lineage=invented if number % 2 else lineage,
                round=base.round + number,
                prev=invented,
                state_hash=invented,
            ),
        )
        world.run(world.now_s + 0.1)
    honest = [node for node in world.up() if node.peer != liar]
    assert rounds(honest) >= start + 20
    assert lineages(honest) == {lineage}
    assert len(asked) <= 3 * 12, "a peer that proves nothing is asked ever more seldom"
    assert not any(node.machine is not None and node.machine.standing.comparing for node in honest)


@pytest.mark.slow
def test_strangers_on_a_lost_lineage_do_not_outvote_the_electors() -> None:
    """An open run: many keys name a lineage that lost, and is proven; none of them is an elector of the branching."""
    world = swarm(7, quorum=Quorum.TWO_THIRDS)
    many, few = apart(world, "ABCDE", "FG")
    lost = few[0].state.base
    winner = many[0].state.base.lineage
    heal(world)
    for number in range(600):
        for stranger in range(12):
            beat(world, f"Stranger{stranger}", lost)
        world.run(world.now_s + 0.2)
        if number > 300 and lineages(world.nodes.values()) == {winner}:
            break
    assert lineages(world.nodes.values()) == {winner}
    before = world.furthest()
    run_until(world, 60.0, lambda: rounds(many) > before + 3)
    check_accounts(world)


@pytest.mark.slow
def test_a_member_alone_cannot_take_the_run_with_it_by_a_reform_of_its_own() -> None:
    """One of four reforms at the very place where the others work: a quorum is heard there, and goes on."""
    world = swarm(4)
    groups = split(world, "A", "BCD")
    for node in groups[1]:
        node.kill()
    run_until(world, 60.0, lambda: len(world.oracle.births) > 1)
    own = groups[0][0].state.base.lineage
    for node in groups[1]:
        node.start()
    world.run(world.now_s + 0.2)
    heal(world)
    run_until(world, 120.0, settled(world))
    assert lineages(world.nodes.values()) != {own}
    check_accounts(world)


# ---------------------------------------------------------------- pauses


def test_a_side_below_min_peers_pauses_says_so_and_goes_on() -> None:
    world = swarm(4, min_peers=2)
    (alone,), others = split(world, "A", "BCD")
    world.run(world.now_s + 300.0)
    machine = alone.machine
    assert machine is not None
    assert machine.phase == "paused"
    assert "min_peers" in machine.reason
    assert "1 of 4 electors" in machine.reason or "1 of 3 electors" in machine.reason
    assert len(world.oracle.births) == 1
    assert machine.reforming.k == 0
    before = rounds(others)
    heal(world)
    run_until(world, 60.0, settled(world))
    assert rounds(others) > before
    assert discarded(alone) == discarded(alone)
    check_accounts(world)


def test_all_sides_below_min_peers_wait_for_each_other() -> None:
    world = swarm(4, min_peers=3)
    groups = split(world, "AB", "CD")
    world.run(world.now_s + 200.0)
    assert len(world.oracle.births) == 1
    for group in groups:
        for node in group:
            assert node.machine is not None
            assert node.machine.phase == "paused"
            assert "not for" in node.machine.reason
    heal(world)
    run_until(world, 30.0, settled(world))
    assert len(world.oracle.births) == 1
    assert chain.quorum(world.nodes["PeerA"].state, world.rules) == 3
    check_accounts(world)


# ---------------------------------------------------------------- who counts as heard, and who may be in E′


def test_electors_that_are_heard_but_never_vote_for_anything_are_reformed_away() -> None:
    """Two of four refuse every proposal: after four attempts of maximal length they count as not heard."""
    world = swarm(4)
    world.switches.accuse = False
    refusing = [world.nodes[name] for name in ("PeerC", "PeerD")]
    for node in refusing:
        assert node.machine is not None
        node.machine.standing.docket.refuted = lambda roster: "nothing is good enough"  # type: ignore[method-assign]
    able = [world.nodes[name] for name in ("PeerA", "PeerB")]
    before = rounds(able)
    born = len(world.oracle.births)
    took_s = run_until(world, 2000.0, lambda: rounds(able) >= before + 2)
    assert took_s > 4 * world.rules.attempt_timeout_max_s / 2
    assert len(world.oracle.births) == born + 1
    assert {peer for peer, _ in able[0].state.members} >= {"PeerA", "PeerB"}


@pytest.mark.parametrize("quorum", [Quorum.MAJORITY, Quorum.TWO_THIRDS])
def test_a_caught_up_joiner_may_be_in_the_new_lineage_of_a_closed_run(quorum: Quorum) -> None:
    """One of three is left, and `min_peers` is two: with a joiner that holds the state a closed run goes on."""
    world = swarm(3, joiners=1, min_peers=2, quorum=quorum)
    left, joiner = world.nodes["PeerA"], world.nodes["PeerD"]
    for name in ("PeerB", "PeerC"):
        world.nodes[name].kill()
    joiner.start()
    before = left.state.base.round
    if quorum is Quorum.TWO_THIRDS:
        world.run(world.now_s + 200.0)
        assert left.state.base.round <= before + 1
        assert left.machine is not None
        assert "min_peers" in left.machine.reason
        return
    run_until(world, 120.0, lambda: rounds([left, joiner]) >= before + 3)
    assert {peer for peer, _ in left.state.members} == {"PeerA", "PeerD"}
    for name in ("PeerB", "PeerC"):
        world.nodes[name].start()
    run_until(world, 200.0, settled(world))
    check_accounts(world)
