"""Nodes behind routers that masquerade: they take part, and nobody waits for a dial that no router lets in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from scripts.wanlab.router import HOME_NETWORK, RouterError, behind_router
from scripts.wanlab.wan import Host, Wan, unavailable
from tests.chaos.lab import LARGER
from tests.swarm.daemons import PATIENCE, ROUND_S, Daemon, assert_agreed, daemons, wait_all, wait_counted

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.swarm,
    pytest.mark.slow,
    pytest.mark.skipif(unavailable() is not None, reason=unavailable() or "a lab can be made"),
]

KNOWN_S = 40.0 * PATIENCE
"""For a node to be told twice that nobody can dial it."""


@contextlib.contextmanager
def places(
    reachable: int, homes: int, *, forwards: bool = False
) -> Iterator[tuple[list[Host], list[Host], list[Host]]]:
    """Hosts that all can dial; machines behind routers; those routers."""
    with Wan(reachable + homes) as wan, contextlib.ExitStack() as stack:
        routers = list(wan.hosts[reachable:])
        try:
            behind = [stack.enter_context(behind_router(router, forwards=forwards)) for router in routers]
        except RouterError as error:
            pytest.skip(f"this kernel makes no routers: {error}")
        yield list(wan.hosts[:reachable]), behind, routers


def arguments(*more: str) -> Sequence[str]:
    return ("--threads", "1", "--listen", "/ip4/0.0.0.0/tcp/4001", "--data-port", "4002", *more)


def assert_nobody_was_left_out(nodes: Sequence[Daemon], since: int) -> None:
    for node in nodes:
        for number, line in node.rounds.items():
            assert number < since or not line.excluded, f"{node.name} saw in round {number}: {line.excluded}"


def test_a_node_behind_a_router_takes_part(tmp_path: Path) -> None:
    """Two nodes, one of which nobody can dial: the short form, which CI runs."""
    with places(1, 1) as ((street,), (home,), (router,)), daemons(tmp_path) as make:
        a, b = make("a", namespace=street.namespace), make("b", namespace=home.namespace)
        a.start("--run", "micro", "--set", "rounds.steps=4", *arguments()).wait_listening()
        b.start(*arguments("--join", a.address))
        wait_counted([a, b], 1, "both are counted")
        assert b.last is not None
        assert b.address.split("/")[2].startswith(HOME_NETWORK)
        assert b.last.reach.seen_at in (None, router.address)
        assert_agreed(a, b, at_least=1)


@pytest.mark.chaos_long
def test_one_of_three_behind_a_router_learns_what_to_do(tmp_path: Path) -> None:
    with places(2, 1) as (streets, (home,), (router,)), daemons(tmp_path) as make:
        a, b = (make(name, namespace=host.namespace) for name, host in zip("ab", streets, strict=True))
        c = make("c", namespace=home.namespace)
        a.start("--run", "micro", *arguments()).wait_listening()
        for node in (b, c):
            node.start(*arguments("--join", a.address))
        wait_counted([a, b, c], 2, "all three are counted", 3 * ROUND_S)

        def known() -> bool:
            assert a.last is not None
            assert b.last is not None
            assert c.last is not None
            reach = c.last.reach
            return (
                (reach.control, reach.data) == (False, False)
                and (a.last.reach.control, a.last.reach.data) == (True, True)
                and (b.last.reach.control, b.last.reach.data) == (True, True)
            )

        wait_all([a, b, c], known, "each knows whether it can be dialled", KNOWN_S)
        assert c.last is not None
        assert c.last.reach.seen_at == router.address
        assert f"forward TCP ports 4001 and 4002 of the router at {router.address}" in c.last.reach.advice
        assert f"--announce /ip4/{router.address}/tcp/4001" in c.last.reach.advice
        since = c.last.round + 1
        wait_counted([a, b, c], 3, "rounds go on", 3 * ROUND_S)
        assert_nobody_was_left_out([a, b, c], since)
        assert_agreed(a, b, c, at_least=3)


@pytest.mark.chaos_long
def test_a_forwarded_port_is_found_and_can_be_announced(tmp_path: Path) -> None:
    """The advice works: the router leads to the node, which peers then dial at the router's address."""
    with places(2, 1, forwards=True) as (streets, (home,), (router,)), daemons(tmp_path) as make:
        a, b = (make(name, namespace=host.namespace) for name, host in zip("ab", streets, strict=True))
        c = make("c", namespace=home.namespace)
        a.start("--run", "micro", *arguments()).wait_listening()
        c.start(*arguments("--join", a.address))
        outside = f"/ip4/{router.address}/tcp/4001/p2p/"
        c.wait(
            lambda status: status.reach.control is True and status.reach.data is True, "it is reachable", 3 * ROUND_S
        )
        c.wait(lambda status: any(one.startswith(outside) for one in status.addresses), "its outer address is told")
        assert c.last is not None
        assert not c.last.reach.advice
        c.terminate()
        announced = arguments(
            "--announce", f"/ip4/{router.address}/tcp/4001", "--announce-data", f"{router.address}:4002"
        )
        c.start("--join", a.address, *announced).wait_listening()
        assert c.address.startswith(outside)
        b.start(*arguments("--join", c.address))
        wait_counted([a, b, c], 2, "all three are counted", 3 * ROUND_S)
        c.wait(lambda status: status.reach.control is True and status.reach.data is True, "it is reachable", KNOWN_S)
        assert_agreed(a, b, c, at_least=2)


@pytest.mark.chaos_long
def test_two_behind_routers_are_joined_by_a_volunteer_and_by_another_when_it_dies(tmp_path: Path) -> None:
    with places(2, 2) as (streets, homes, _), daemons(tmp_path) as make:
        a, b = (make(name, namespace=host.namespace) for name, host in zip("ab", streets, strict=True))
        c, d = (make(name, namespace=host.namespace) for name, host in zip("cd", homes, strict=True))
        nodes = [a, b, c, d]
        a.start("--run", "micro", *arguments()).wait_listening()
        for node in (b, c, d):
            node.start(*arguments("--join", a.address))
        wait_counted(nodes, 1, "all four are counted", 4 * ROUND_S)

        def joined() -> bool:
            assert c.last is not None
            assert d.last is not None
            return d.peer_id in c.last.reach.through and c.peer_id in d.last.reach.through

        wait_all(nodes, joined, "c and d are joined", KNOWN_S)
        assert c.last is not None
        since = c.last.round + 2
        wait_counted(nodes, 4, "rounds go on", 4 * ROUND_S)
        assert_nobody_was_left_out(nodes, since)
        volunteer = next(node for node in (a, b) if c.last and node.peer_id == c.last.reach.through[d.peer_id])
        assert volunteer.last is not None
        assert volunteer.last.reach.relayed_bytes > 0
        assert volunteer.last.reach.relayed_pairs == 1

        volunteer.kill()
        others = [node for node in nodes if node is not volunteer]
        (other,) = (node for node in (a, b) if node is not volunteer)

        def joined_by_the_other() -> bool:
            assert c.last is not None
            return c.last.reach.through.get(d.peer_id) == other.peer_id

        wait_all(others, joined_by_the_other, "the other volunteer joins them", ROUND_S)
        wait_counted(others, 2, "rounds go on without the first", 4 * ROUND_S)
        assert_agreed(*others, at_least=2)


@pytest.mark.chaos_long
def test_a_joiner_behind_a_router_downloads_the_state(tmp_path: Path) -> None:
    """And gives it to the next one, who can only have it of whom it cannot dial."""
    with places(2, 1) as (streets, (home,), _), daemons(tmp_path) as make:
        a, b = (make(name, namespace=host.namespace) for name, host in zip("ab", streets, strict=True))
        joiner = make("joiner", namespace=home.namespace)
        larger = [word for one in LARGER for word in ("--set", one)]
        a.start("--run", "micro", *larger, *arguments()).wait_listening()
        a.wait(lambda status: status.round >= 2, "there is a state to download", 3 * ROUND_S)
        joiner.start(*arguments("--join", a.address))
        wait_counted([a, joiner], 1, "the joiner is counted", 4 * ROUND_S)
        b.start(*arguments("--join", a.address))
        wait_counted([a, b, joiner], 2, "all three are counted", 4 * ROUND_S)
        assert_agreed(a, b, joiner, at_least=2)
