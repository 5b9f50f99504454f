"""Real nodes of the network layer on loopback, several in one process, for the tests beside this file."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from node.daemon.identity import Identity
from node.daemon.network import Network, open_network
from node.home import Home

RUN = b"r" * 32
OTHER_RUN = b"o" * 32


def run(main: Callable[[], Awaitable[None]], within_s: float = 30.0) -> None:
    """Each test has its deadline."""

    async def bounded() -> None:
        with trio.fail_after(within_s):
            await main()

    trio.run(bounded)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def until(condition: Callable[[], bool], within_s: float = 15.0) -> None:
    """What several nodes do has no single event; it is looked at until it is so."""
    with trio.fail_after(within_s):
        while not condition():  # noqa: ASYNC110 - see above
            await trio.sleep(0.02)


class Node:
    """A running node, and how to end it."""

    def __init__(self, network: Network, identity: Identity, home: Home) -> None:
        self.network = network
        self.identity = identity
        self.home = home
        self.stopping = trio.Event()
        self.stopped = trio.Event()

    @property
    def address(self) -> str:
        return self.network.addresses[0]

    async def stop(self) -> None:
        self.stopping.set()
        await self.stopped.wait()


class Nodes:
    """Starts nodes; all end with the context."""

    def __init__(self, nursery: trio.Nursery, folder: Path) -> None:
        self._nursery = nursery
        self._folder = folder
        self.all: list[Node] = []

    async def start(
        self,
        *bootstrap: str,
        run_id: bytes | None = RUN,
        identity: Identity | None = None,
        home: Home | None = None,
        port: int = 0,
        version: str = "0.1.0",
        incarnation: bytes | None = None,
        announce: Sequence[str] = (),
    ) -> Node:
        identity = identity or Identity.generate()
        home = home or Home(self._folder / f"home-{len(self.all)}")
        home.path.mkdir(parents=True, exist_ok=True)
        incarnation = incarnation or os.urandom(16)
        node: Node = await self._nursery.start(
            self._live, identity, home, bootstrap, run_id, port, version, incarnation, announce
        )
        self.all.append(node)
        return node

    async def _live(
        self,
        identity: Identity,
        home: Home,
        bootstrap: Sequence[str],
        run_id: bytes | None,
        port: int,
        version: str,
        incarnation: bytes,
        announce: Sequence[str],
        task_status: trio.TaskStatus[Node],
    ) -> None:
        async with open_network(
            identity=identity,
            home=home,
            listen=[f"/ip4/127.0.0.1/tcp/{port}"],
            announce=announce,
            bootstrap=bootstrap,
            run_id=run_id,
            version=version,
            incarnation=incarnation,
        ) as network:
            node = Node(network, identity, home)
            task_status.started(node)
            await node.stopping.wait()
        node.stopped.set()


@asynccontextmanager
async def nodes(folder: Path) -> AsyncIterator[Nodes]:
    async with trio.open_nursery() as nursery:
        made = Nodes(nursery, folder)
        yield made
        for node in made.all:
            node.stopping.set()


def meshed(some: Sequence[Node]) -> bool:
    """Whether all are connected to all, and believe in all."""
    everyone = {node.network.peer_id for node in some}
    return all(
        set(node.network.peers) | {node.network.peer_id} == everyone
        and set(node.network.membership.records) == everyone
        for node in some
    )
