"""Nodes on a wide-area network (`scripts.wanlab`): real processes, each on a host of its own, all founders of one run.

What the rows 5 to 8 and 17 of docs/faults.md share. Nothing outlives `with`: the nodes end with it, the hosts too.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from node.cli import runs
from node.cli.runs import HomeRun
from node.daemon.identity import ensure_identity
from node.home import Home
from node.status import HistoryRound, Status
from scripts.wanlab.wan import Host, Wan
from tests.swarm.daemons import PATIENCE, ROUND_S, Daemon, wait_all

CONTROL_PORT = 4001
END_S = 30.0 * PATIENCE
"""For all nodes to end together; the promise of 10 s each is another test's."""


@dataclass(kw_only=True)
class Node(Daemon):
    """A node whose peer id and address are known before it starts."""

    host: Host
    known_peer_id: str
    joins: tuple[Node, ...] = ()
    """Those whose addresses it is started with."""
    arguments: tuple[str, ...] = ()

    @property
    def peer_id(self) -> str:
        return self.known_peer_id

    @property
    def listen(self) -> str:
        return f"/ip4/{self.host.address}/tcp/{CONTROL_PORT}"

    @property
    def address(self) -> str:
        return f"{self.listen}/p2p/{self.known_peer_id}"

    def begin(self) -> Node:
        """Start it, for the first time or again."""
        joins = [word for other in self.joins for word in ("--join", other.address)]
        self.start("--listen", self.listen, "--threads", "1", "--name", self.name, *joins, *self.arguments)
        return self

    @property
    def now(self) -> Status:
        """The newest status that was seen."""
        assert self.last is not None, f"{self.name} has not answered yet"
        return self.last


@dataclass(kw_only=True)
class WideArea:
    """Made by `wide_area`."""

    wan: Wan
    nodes: tuple[Node, ...]
    run: HomeRun
    say: Callable[[str], None]
    started_s: float = field(default_factory=time.monotonic)

    # ------------------------------------------------------------ making

    def begin(self, nodes: Sequence[Node] | None = None) -> None:
        """Start these (None: all). The first node of all has the run; the others get it by its address."""
        for node in self.nodes if nodes is None else nodes:
            node.begin()

    def settle(self, rounds: int = 2, within_s: float = 2 * ROUND_S) -> None:
        """Until all nodes have been counted in `rounds` rounds that all have seen."""
        self.wait_counted(self.nodes, rounds, "the swarm works", within_s)
        self.say(f"{len(self.nodes)} nodes are counted {time.monotonic() - self.started_s:.1f} s after their start")

    def hosts(self, nodes: Collection[Node]) -> list[Host]:
        return [node.host for node in nodes]

    def cut(self, some: Collection[Node], others: Collection[Node] | None = None, *, one_way: bool = False) -> None:
        """Nothing passes from `some` to `others` (None: all others) nor, unless `one_way`, back."""
        self.wan.cut(self.hosts(some), None if others is None else self.hosts(others), one_way=one_way)

    # ------------------------------------------------------------ seeing

    def look(self, nodes: Sequence[Node] | None = None) -> None:
        for node in self.nodes if nodes is None else nodes:
            node.glance()

    def reached(self, nodes: Sequence[Node]) -> int:
        """The round that the foremost of `nodes` works on."""
        self.look(nodes)
        return max((node.last.round for node in nodes if node.last is not None), default=0)

    def wait(
        self, nodes: Sequence[Node], condition: Callable[[], bool], what: str, within_s: float = 2 * ROUND_S
    ) -> float:
        """Until `condition`, looking at `nodes`; the seconds it took. Raises `TooLate`."""
        started_s = time.monotonic()
        wait_all(list(nodes), condition, what, within_s)
        return time.monotonic() - started_s

    def wait_counted(
        self, nodes: Sequence[Node], times: int, what: str, within_s: float = 2 * ROUND_S, *, since: int | None = None
    ) -> float:
        """Until each of `nodes` has seen each of them counted in `times` rounds from `since` (None: the next) on."""
        start = self.reached(nodes) if since is None else since
        return self.wait(
            nodes, lambda: all(seer.counted(seen, start) >= times for seer in nodes for seen in nodes), what, within_s
        )

    def wait_rounds(self, nodes: Sequence[Node], rounds: int, what: str, within_s: float = 2 * ROUND_S) -> float:
        """Until each of `nodes` has committed `rounds` more; the seconds it took."""
        target = self.reached(nodes) + rounds
        return self.wait(nodes, lambda: all(node.now.round >= target for node in nodes), what, within_s)

    def wait_forked(self, nodes: Sequence[Node], lineage: str, since_s: float, within_s: float = 2 * ROUND_S) -> float:
        """Until all of `nodes` are on another lineage than `lineage`, one and the same; the seconds since `since_s`."""

        def forked() -> bool:
            found = {node.now.lineage for node in nodes}
            return len(found) == 1 and lineage not in found

        self.wait(nodes, forked, f"{len(nodes)} nodes that are no quorum go on by REFORM", within_s)
        return time.monotonic() - since_s

    def wait_one_lineage(self, nodes: Sequence[Node], what: str, within_s: float = 2 * ROUND_S) -> float:
        """Until all of `nodes` are on one lineage, at rounds that differ by one at most, and count each other."""
        started_s = time.monotonic()

        def one() -> bool:
            rounds = [node.now.round for node in nodes]
            return len({node.now.lineage for node in nodes}) == 1 and max(rounds) - min(rounds) <= 1

        self.wait(nodes, one, what, within_s)
        self.wait_counted(nodes, 1, f"{what}, and all count", within_s)
        return time.monotonic() - started_s

    def lines(self, since: int) -> list[HistoryRound]:
        """The rounds from `since` on, as the first node has seen them."""
        return [line for number, line in sorted(self.nodes[0].rounds.items()) if number >= since]

    def median_round_s(self, since: int) -> float:
        return statistics.median(line.seconds for line in self.lines(since))

    def excluded(self, since: int) -> dict[str, int]:
        """`name: why` of everyone who was not counted in a round from `since` on, and how often."""
        names = {node.peer_id: node.name for node in self.nodes}
        found: dict[str, int] = {}
        for line in self.lines(since):
            for peer, why in line.excluded.items():
                sentence = f"{names.get(peer, peer)}: {why}"
                found[sentence] = found.get(sentence, 0) + 1
        return found

    def expect_agreement(self, nodes: Sequence[Node], since: int, *, at_least: int = 1) -> int:
        """Equal state hashes in every round from `since` on that two of `nodes` saw; in how many rounds all did."""
        common = set.intersection(*({number for number in node.rounds if number >= since} for node in nodes))
        assert len(common) >= at_least, f"{len(common)} rounds from {since} on were seen by all, {at_least} are needed"
        for number in {number for node in nodes for number in node.rounds if number >= since}:
            hashes = {node.rounds[number].state_hash for node in nodes if number in node.rounds}
            assert len(hashes) == 1, f"round {number} led to {len(hashes)} different states"
        return len(common)

    def expect_nothing_left(self) -> None:
        """End all nodes at once, as operators do: exit 0, and no process is left on any host."""
        running = [node for node in self.nodes if node.running]
        for node in running:
            node.whole_node()
            os.kill(node.pid, signal.SIGTERM)
        for node in running:
            assert node.process is not None
            code = node.process.wait(END_S)
            assert code == 0, f"{node.name} ended with {code}: {node.output[-1000:]}"
        for node in self.nodes:
            assert not (left := node.survivors()), f"{node.name} left processes: {left}"
        spaces = {os.stat(node.host.namespace).st_ino for node in self.nodes}
        assert not (found := processes_in(spaces)), f"processes are left on the hosts: {found}"


@contextlib.contextmanager
def wide_area(
    directory: Path,
    count: int,
    *,
    overrides: Sequence[str] = (),
    run: str = "micro",
    congestion_control: str | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Iterator[WideArea]:
    """`count` nodes, not started yet, on hosts that nothing hinders yet. `overrides`: as `--set` takes them."""
    with Wan(count, congestion_control=congestion_control) as wan:
        nodes: list[Node] = []
        try:
            for index, host in enumerate(wan.hosts):
                home = Home(directory / f"node-{index}")
                identity = ensure_identity(home)
                nodes.append(Node(home=home, namespace=host.namespace, host=host, known_peer_id=identity.peer_id))
            first, *others = nodes
            founders = sorted(node.peer_id for node in nodes)
            made = runs.obtain(first.home, run, overrides=tuple(overrides), founders=founders)
            runs.make_current(first.home, made.run_id)
            for node in others:
                node.joins = (first,)
            yield WideArea(wan=wan, nodes=tuple(nodes), run=made, say=say)
        finally:
            for node in nodes:
                node.close()


def processes_in(namespaces: set[int]) -> list[str]:
    """Command lines of processes in these network namespaces (inodes)."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                if os.stat(process / "ns/net").st_ino in namespaces:
                    found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
            except OSError:
                continue  # it has ended
    return found
