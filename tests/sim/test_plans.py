"""Plans from measured links, played by whole swarms: what is known of links changes plans, and no invariant."""

from __future__ import annotations

import pytest
from sim_model import make_rules
from sim_node import Node
from sim_profiles import peer_names
from sim_weather import Weather
from sim_world import World

from protocol import chain
from protocol.budgets import budget_steps
from protocol.candidates import roots_of
from protocol.clusters import Groups
from protocol.events import ExchangeEnded, ReportsChanged
from protocol.links import Report, Reports
from protocol.messages import Commit
from protocol.names import PeerId
from protocol.plan import Plan
from protocol.sites import in_groups
from protocol.standing import AVOIDED_ROUNDS

STILL = Weather(delay_s=(0.0, 0.0), apply_s=(0.0, 0.0))


def swarm(peers: int, reports: Reports | None = None) -> World:
    world = World(seed=1, rules=make_rules(peer_names(peers)), weather=STILL, trace=True)
    for node in world.nodes.values():
        node.start()
        if reports is not None:
            node.feed(ReportsChanged(reports=reports))
    return world


def run_to(world: World, round_: int) -> None:
    world.run(world.now_s + 120.0, stop=lambda: world.together(round_))
    assert world.together(round_)


def roots_by_round(world: World) -> list[set[PeerId]]:
    commits = world.nodes["PeerA"].committed
    return [set(roots_of(commit.roster.message, world.rules)) for commit in commits]


def test_a_slow_uplink_is_the_root_of_nothing_and_counted_like_the_others() -> None:
    reports = {peer: Report(up_bytes_s=1e4 if peer == "PeerC" else 1e6, down_bytes_s=1e6) for peer in peer_names(4)}
    world = swarm(4, reports)
    run_to(world, 4)
    for roots, commit in zip(roots_by_round(world), world.nodes["PeerA"].committed, strict=True):
        assert roots == {"PeerA", "PeerB", "PeerD"}
        assert commit.roster.message.attempt == 0
        assert chain.counted_bits(commit.headers) == 0b1111


def test_edges_that_failed_are_avoided_for_eight_rounds_and_then_tried_again() -> None:
    world = swarm(5)
    run_to(world, 1)
    # Nodes that have not applied the first commit yet say so in the round after it.
    for one, other in (("PeerA", "PeerB"), ("PeerB", "PeerA")):
        world.nodes[one].feed(ExchangeEnded(roster_id=b"gone by now", failed_edges=(other,)))
    run_to(world, AVOIDED_ROUNDS + 8)
    avoided = [not roots & {"PeerA", "PeerB"} for roots in roots_by_round(world)]
    first = avoided.index(True)
    assert 1 <= first <= 2
    assert all(avoided[first : first + AVOIDED_ROUNDS])
    assert not all(avoided[first + AVOIDED_ROUNDS :])
    for commit in world.nodes["PeerA"].committed:
        named = [ready.message.failed_edges for ready in commit.roster.message.readys]
        round_ = commit.roster.message.base.round
        assert any(named) == (first <= round_ <= first + AVOIDED_ROUNDS)
        assert chain.counted_bits(commit.headers) == 0b11111


def test_two_sites_with_a_line_each_end_on_plans_over_sites() -> None:
    """Nothing that is reported tells of the lines; measured rounds do, whoever leads."""
    world = World(
        seed=3, rules=make_rules(peer_names(6)), weather=Weather(delay_s=(0.0, 0.0), apply_s=(0.0, 0.0), sites=2)
    )
    world.start()
    run_to(world, 30)
    sites = ("PeerA", "PeerC", "PeerE"), ("PeerB", "PeerD", "PeerF")
    grouped = [in_groups(plan_of(commit)) for commit in world.nodes["PeerA"].committed]
    assert not any(grouped[:2]), "groups must win twice"
    assert sum(grouped[10:]) >= 18
    for node in world.up():
        assert node.machine is not None
        assert node.machine.standing.experience.gain is not None
        assert node.machine.standing.experience.gain > 0.1
        (mine,) = (site for site in sites if node.peer in site)
        if grouped[-1]:
            assert node.machine.group == mine
    for commit in world.nodes["PeerA"].committed:
        assert commit.roster.message.attempt == 0


def test_a_peer_that_moves_is_regrouped_within_three_rounds() -> None:
    """Round trips with 30 % of jitter all the time; then F's way to the others changes for good."""
    world = World(
        seed=4, rules=make_rules(peer_names(6)), weather=Weather(delay_s=(0.0, 0.0), apply_s=(0.0, 0.0), sites=2)
    )
    world.start()
    run_to(world, 20)
    groups = {node.peer: grouping_of(node) for node in world.up()}
    assert set(groups.values()) == {(("PeerA", "PeerC", "PeerE"), ("PeerB", "PeerD", "PeerF"))}
    assert world.links is not None
    world.links.site["PeerF"] = world.links.site["PeerA"]
    # What is in the records by then is what the next three rounds are planned with.
    for node in world.up():
        node.feed(ReportsChanged(reports=world.links.reports()))
    run_to(world, world.furthest() + 3)
    for node in world.up():
        assert grouping_of(node) == (("PeerA", "PeerC", "PeerE", "PeerF"), ("PeerB", "PeerD"))


def grouping_of(node: Node) -> Groups:
    assert node.machine is not None
    return node.machine.standing.grouping.groups


@pytest.mark.parametrize(("bounds", "least", "most"), [((40, 40), 0.35, 0.45), ((4, 160), 0.0, 0.03)])
def test_how_much_of_their_time_unequal_peers_wait_for_each_other(
    bounds: tuple[int, int], least: float, most: float
) -> None:
    """Speeds of 1:2:4 steps/s: with the same budget for all, and with budgets that follow the speeds."""
    speeds = {"PeerA": 1.0, "PeerB": 2.0, "PeerC": 4.0}
    world = World(seed=5, rules=make_rules(speeds), weather=STILL)
    for peer, speed in speeds.items():
        others = [value for other, value in speeds.items() if other != peer]
        steps = budget_steps(40, speed, others, least=bounds[0], most=bounds[1])
        world.nodes[peer].budget_s = steps / speed
        world.nodes[peer].start()
    world.run(2000.0, stop=lambda: world.together(8))
    assert world.together(8)
    idle_s = whole_s = 0.0
    for node in world.up():
        for round_ in range(1, 8):
            began_s, ended_s = node.committed_s[round_ - 1], node.committed_s[round_]
            idle_s += ended_s - node.trained_s[round_]
            whole_s += ended_s - began_s
    assert least <= idle_s / whole_s <= most
    for commit in world.nodes["PeerA"].committed[1:]:
        assert chain.counted_bits(commit.headers) == 0b111


def plan_of(commit: Commit) -> Plan:
    plan = commit.roster.message.plan
    assert plan is not None
    return plan
