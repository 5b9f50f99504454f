"""Hostile and slow peers beside honest ones: what they cost does not grow with their number (invariant I5)."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from sim_model import make_rules
from sim_node import Node
from sim_profiles import peer_names
from sim_sharing import shared_work
from sim_weather import Weather
from sim_world import World

from protocol import chain

HONEST = 5
LONGEST_ROUND_S = 120.0
"""However many silent coordinators follow one another (each is an attempt, and then comes last for eight rounds), and
however many roots crawl."""
TEN_ROUNDS_S = 200.0


def beside(count: int, kind: str, seed: int) -> World:
    """Five honest peers, and `count` that do mischief of `kind`, or whose transfers drip."""
    names = peer_names(HONEST + count)
    others = names[HONEST:]
    hostile = {} if kind == "drips" else {peer: frozenset({kind}) for peer in others}
    world = World(seed=seed, rules=make_rules(names), weather=Weather(), hostile=hostile)
    world.start()
    if kind == "drips":
        world.faults.dripping = set(others)
    return world


@pytest.mark.slow
@pytest.mark.parametrize("count", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", ["silent", "slow", "hasty", "two_faced", "absurd", "corrupts", "drips"])
def test_rounds_take_no_longer_than_a_bound_whatever_the_others_do(kind: str, count: int) -> None:
    with shared_work():
        world = beside(count, kind, seed=count)
        honest = [node for node in world.nodes.values() if node.peer in peer_names(HONEST)]
        world.run(2 * TEN_ROUNDS_S, stop=lambda: all(node.state.base.round >= 10 for node in honest))
    assert all(node.state.base.round >= 10 for node in honest), [node.state.base.round for node in honest]
    assert world.now_s <= TEN_ROUNDS_S
    for node in honest:
        ends_s = [0.0, *(node.committed_s[round_] for round_ in sorted(node.committed_s))]
        assert max(after - before for before, after in itertools.pairwise(ends_s)) <= LONGEST_ROUND_S
        assert chain.member(node.state, node.peer) is not None, f"{node.peer} is honest, and no member any more"


def dies_at(world: World, victim: Node, number: int, round_: int) -> Callable[[Node], None]:
    """In place of `Faults.step`: `victim` dies after its step `number` of the exchanges of `round_`."""
    steps = 0

    def step(node: Node) -> None:
        nonlocal steps
        if node is victim and node.state.base.round == round_:
            steps += 1
            if steps == number:
                node.later(0.0, node.crash)

    return step


@pytest.mark.slow
@pytest.mark.parametrize("peers", [3, 4])
@pytest.mark.parametrize("number", range(1, 9))
def test_death_at_any_step_of_an_exchange_costs_no_reform(peers: int, number: int) -> None:
    """Whoever it is: root of a part, leaf, coordinator. It comes back, contributes again, and no work is lost."""
    names = peer_names(peers)
    for victim in names:
        with shared_work():
            world = World(seed=number, rules=make_rules(names), weather=Weather(down_s=(0.5, 6.0)))
            world.start()
            world.faults.step = dies_at(world, world.nodes[victim], number, 1)  # type: ignore[method-assign]
            world.run(60.0, stop=lambda world=world: world.furthest() >= 3)
            world.expect_progress(2, 60.0)
        assert len(world.oracle.births) == 1
        attempts = [commit.roster.message.attempt for node in world.nodes.values() for commit in node.committed]
        assert max(attempts) <= 2
