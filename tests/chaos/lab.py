"""A swarm of real nodes to do harm to: made, watched, struck at exact places, and judged.

`with Lab(directory) as lab: nodes = lab.swarm(4)`. All nodes of `swarm` are founders, so all vote from the first round;
joiners come with `lab.joiner`. Nodes run `bent/program.py`: `atoll` as it is, with places where a strike can be armed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import psutil

from node.cli import runs
from node.cli.runs import HomeRun
from node.daemon.identity import ensure_identity
from node.home import Home
from node.manifest import rules_of
from node.status import Status
from tests.chaos.bent.bends import bends_file
from tests.chaos.bent.strikes import PROGRAM, Strike, Struck, armed_file, struck_file
from tests.chaos.evidence import Means, check_means, commits, leaders
from tests.swarm.daemons import PATIENCE, ROUND_S, Daemon, TooLate, reasons, wait_all

STRIKE_POLL_S = 0.02
STRIKE_TRIES = 12
"""Rounds in which a strike may come too late to be armed."""
FEW_ROUNDS_S = 2 * ROUND_S
LARGER = (
    "model.config.hidden_size=256",
    "model.config.intermediate_size=768",
    "model.config.num_hidden_layers=4",
    "model.config.num_attention_heads=4",
    "model.config.num_key_value_heads=4",
    "rounds.steps=6",
    "rounds.part_elements=65536",
)
"""Of `micro`: 3.5 million parameters, a state of 27 chunks."""
OUTAGE_ROUND_S = 45.0 * PATIENCE
"""For a round that somebody died in: all durations of `micro` for two attempts."""


@dataclass(kw_only=True)
class Node(Daemon):
    """A node whose peer id and address are known before it starts."""

    known_peer_id: str
    listen: str
    """Multiaddr without the peer id."""
    joins: Node | None = None
    arguments: tuple[str, ...] = ()

    @property
    def peer_id(self) -> str:
        return self.known_peer_id

    @property
    def address(self) -> str:
        return f"{self.listen}/p2p/{self.known_peer_id}"

    def begin(self) -> Node:
        """Start it, for the first time or again."""
        struck_file(self.home.path).unlink(missing_ok=True)
        join = () if self.joins is None else ("--join", self.joins.address)
        self.start("--listen", self.listen, "--threads", "1", "--name", self.name, *join, *self.arguments)
        return self

    # ------------------------------------------------------------ harm

    def arm(self, strike: Strike) -> None:
        _replace(armed_file(self.home.path), msgspec.json.encode(strike))

    def disarm(self) -> None:
        armed_file(self.home.path).unlink(missing_ok=True)

    @property
    def struck(self) -> Struck | None:
        """The strike that was carried out since it last began."""
        try:
            return msgspec.json.decode(struck_file(self.home.path).read_bytes(), type=Struck)
        except FileNotFoundError:
            return None

    def bend(self, *lies: str) -> None:
        """From now on the node tells these lies, and no others (`bent.engine`, `bent.daemon`, `bent.trainer`)."""
        _replace(bends_file(self.home.path), msgspec.json.encode(lies))

    def signal_role(self, role: str, number: signal.Signals = signal.SIGKILL) -> float:
        """To one of its processes; when, on the monotonic clock."""
        process = self.whole_node()[role]
        process.send_signal(number)
        return time.monotonic()

    def freeze(self) -> None:
        """SIGSTOP to all of its processes, the supervisor first: it cannot see the others stand still."""
        for process in self.whole_node().values():
            process.suspend()

    def thaw(self) -> None:
        for process in reversed(self.processes.values()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()

    def power_cut(self) -> float:
        """SIGKILL to the supervisor; returns when, after all of its processes have gone."""
        at_s = time.monotonic()
        self.kill()
        self.expect_nothing_left()
        return at_s

    def expect_nothing_left(self) -> None:
        left = self.survivors(within_s=5.0)
        assert not left, f"processes of {self.name} outlived it: {left}"

    def log_lines(self, *words: str) -> list[str]:
        """Lines of its log, all lives, that hold all of `words`."""
        lines = []
        for path in (self.home.path / "daemon.log.1", self.home.log_file):
            with contextlib.suppress(FileNotFoundError):
                lines += path.read_text(errors="replace").splitlines()
        return [line for line in lines if all(word in line for word in words)]


class Lab:
    """One place for one row; nothing that it started outlives it."""

    def __init__(self, directory: Path, *, thorough: bool = False, say: Callable[[str], None] = lambda _: None) -> None:
        """`thorough`: not the short form of CI but all variants, with repetitions."""
        self.directory = directory
        self.thorough = thorough
        self.say = say
        self.run: HomeRun | None = None
        self.nodes: list[Node] = []

    def __enter__(self) -> Lab:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End every node that still runs."""
        for node in self.nodes:
            if node.running:
                with contextlib.suppress(psutil.Error):
                    node.thaw()
                node.close()

    # ------------------------------------------------------------ making

    @contextlib.contextmanager
    def apart(self, name: str) -> Iterator[Lab]:
        """A lab of its own within this one, for a row that needs more than one run."""
        directory = self.directory / name
        directory.mkdir()
        with Lab(directory, thorough=self.thorough, say=self.say) as lab:
            yield lab

    def node(
        self,
        name: str,
        *,
        joins: Node | None = None,
        arguments: Sequence[str] = (),
        program: Sequence[str] = PROGRAM,
    ) -> Node:
        home = Home(self.directory / name)
        made = Node(
            home=home,
            program=program,
            known_peer_id=ensure_identity(home).peer_id,
            listen=f"/ip4/127.0.0.1/tcp/{free_port()}",
            joins=joins,
            arguments=tuple(arguments),
        )
        self.nodes.append(made)
        return made

    def swarm(
        self,
        count: int,
        *,
        run: str = "micro",
        overrides: Sequence[str] = (),
        arguments: Sequence[str] = (),
        first_arguments: Sequence[str] = (),
        programs: Sequence[Sequence[str]] = (),
        rounds: int = 3,
    ) -> list[Node]:
        """`count` founders of one run, each counted in `rounds` rounds by the time this returns.

        `first_arguments`: those of the first node alone. `programs`: what each is started as, instead of `PROGRAM`.
        """
        started_as = programs or [PROGRAM] * count
        nodes = [
            self.node(f"node-{index}", arguments=arguments, program=program) for index, program in enumerate(started_as)
        ]
        first, *others = nodes
        first.arguments += tuple(first_arguments)
        founders = sorted(node.peer_id for node in nodes)
        self.run = runs.obtain(first.home, run, overrides=tuple(overrides), founders=founders)
        runs.make_current(first.home, self.run.run_id)
        first.begin()
        first.wait_listening()
        for node in others:
            node.joins = first
            node.begin()
        first.joins = others[0] if others else None
        self.wait_counted(nodes, rounds, "the swarm works", 2 * ROUND_S)
        self.say(f"{count} nodes work; undisturbed rounds take {self.usual_s(nodes):.1f} s")
        return nodes

    def joiner(self, name: str, of: Node, *, arguments: Sequence[str] = ()) -> Node:
        return self.node(name, joins=of, arguments=arguments).begin()

    # ------------------------------------------------------------ seeing

    def wait_counted(
        self, nodes: Sequence[Node], times: int, what: str, within_s: float = FEW_ROUNDS_S, *, since: int | None = None
    ) -> None:
        """Until each of `nodes` has seen each of them counted in `times` rounds from `since` (default: now) on."""
        start = self.reached(nodes) if since is None else since

        def counted() -> bool:
            return all(seer.counted(seen, start) >= times for seer in nodes for seen in nodes)

        wait_all(nodes, counted, what, within_s)

    def reached(self, nodes: Sequence[Node]) -> int:
        """The round that the foremost of `nodes` works on."""
        for node in nodes:
            node.glance()
        return max((node.last.round for node in nodes if node.last is not None), default=0)

    def wait_round(self, nodes: Sequence[Node], number: int, what: str, within_s: float = FEW_ROUNDS_S) -> None:
        """Until each of `nodes` has applied the commit of round `number`."""
        wait_all(
            nodes, lambda: all(node.last is not None and node.last.round > number for node in nodes), what, within_s
        )

    def usual_s(self, nodes: Sequence[Node]) -> float:
        """Median seconds of a round, of those that counted all of `nodes` as did the round before."""
        rounds, everybody = nodes[0].rounds, {node.peer_id for node in nodes}
        full = {number for number, line in rounds.items() if everybody <= set(line.contributors)}
        seconds = [rounds[number].seconds for number in full if number - 1 in full]
        assert seconds, "no two rounds in a row have counted everybody yet"
        return statistics.median(seconds)

    def attempt_s(self, attempts: int = 1) -> float:
        """What a disturbed round may take beyond an undisturbed one: `attempts` exchanges and their timers."""
        assert self.run is not None
        rules = rules_of(self.run.manifest)
        exchange_s = 2 * rules.level_min_s + rules.slack_s + rules.progress_s
        return PATIENCE * (exchange_s + (attempts - 1) * (rules.attempt_timeout_s + 2 * rules.grace_s))

    def assembly_s(self) -> float:
        """What a round may take beyond an undisturbed one when a member does not become ready."""
        assert self.run is not None
        rules = rules_of(self.run.manifest)
        return PATIENCE * (rules.assembly_max_s + 2 * rules.grace_s + rules.heartbeat_timeout_s)

    def round_tokens(self) -> int:
        """Tokens of one node in the H steps of a round."""
        assert self.run is not None
        manifest = self.run.manifest
        return manifest.rounds.steps * manifest.inner.batch_sequences * manifest.data.sequence_tokens

    def means(self, round_number: int, holder: Node) -> Means:
        """All means of that commit, recomputed (`evidence`)."""
        assert self.run is not None
        return check_means(round_number, self.run, holder.home, [(node.peer_id, node.home) for node in self.nodes])

    def leader(self, round_number: int, holder: Node) -> str:
        """Peer id of who led that round's first attempt."""
        assert self.run is not None
        return leaders(holder.home, self.run)[round_number]

    def parts_of(self, round_number: int, root: Node, holder: Node) -> set[int]:
        """Parts of that commit which `root` reduced."""
        assert self.run is not None
        headers = commits(holder.home, self.run)[round_number].headers
        return {part for part, header in enumerate(headers) if header is not None and header.sender == root.peer_id}

    def next_round(self, nodes: Sequence[Node], condition: Callable[[Status], bool] = lambda _: True) -> Status:
        """A status of one of `nodes` in a round in which everybody trains still, with its coordinator known."""
        found: list[Status] = []

        def training() -> bool:
            found[:] = [
                node.last
                for node in nodes
                if node.last is not None
                and node.last.phase == "training"
                and node.last.coordinator is not None
                and node.last.round == max(other.last.round for other in nodes if other.last is not None)
                and condition(node.last)
            ]
            return bool(found)

        wait_all(nodes, training, "a round in which the nodes still train", FEW_ROUNDS_S)
        return found[0]

    def strike(
        self,
        nodes: Sequence[Node],
        choose: Callable[[Status], Node],
        point: str,
        *,
        after: int = 1,
        target: str = "node",
        number: signal.Signals = signal.SIGKILL,
    ) -> tuple[Node, Struck]:
        """Strike the node that `choose` takes, at `point` of the round that it is shown. In another round if armed too
        late: what is returned happened exactly there.
        """
        for _ in range(STRIKE_TRIES):
            status = self.next_round(nodes)
            victim = choose(status)
            strike = Strike(point=point, round=status.round, after=after, target=target, signal=number)
            struck_file(victim.home.path).unlink(missing_ok=True)
            victim.whole_node()
            victim.arm(strike)
            others = [node for node in nodes if node is not victim]
            deadline_s = time.monotonic() + OUTAGE_ROUND_S
            while victim.struck is None and self.reached(others) <= status.round and time.monotonic() < deadline_s:
                time.sleep(STRIKE_POLL_S)
            victim.disarm()
            # Taken away before it is carried out: a strike under way shows itself within moments.
            for _ in range(10):
                if (struck := victim.struck) is not None:
                    self.say(f"{victim.name}: {number.name} to {target} in round {status.round} at {point} {after}")
                    return victim, struck
                time.sleep(STRIKE_POLL_S)
        raise TooLate(f"{point} was never struck in {STRIKE_TRIES} rounds; {reasons(nodes)}")

    def wait_counted_again(
        self, node: Node, seers: Sequence[Node], since_s: float, from_round: int, within_s: float = FEW_ROUNDS_S
    ) -> tuple[int, float]:
        """Until a round from `from_round` on counts `node` again: that round, and the seconds since `since_s`."""
        seer = seers[0]
        wait_all(
            list(seers),
            lambda: seer.counted(node, from_round) > 0,
            f"{node.name} is counted again from round {from_round} on",
            within_s,
        )
        back = min(
            number for number, line in seer.rounds.items() if number >= from_round and node.peer_id in line.contributors
        )
        return back, time.monotonic() - since_s


class StandingLab(Lab):
    """One swarm of four for several rows, each of which leaves it whole. A row that fails spoils it: make another."""

    NODES = 4

    def swarm(self, count: int, **differing: Any) -> list[Node]:
        assert count <= self.NODES, f"{count} nodes are wanted of a standing swarm of {self.NODES}"
        assert not differing, f"a row that wants {differing} needs a swarm of its own"
        if not self.nodes:
            return super().swarm(self.NODES)
        for node in self.nodes:
            if not node.running:
                node.begin()
        self.wait_counted(self.nodes, 1, "the swarm is whole again")
        return list(self.nodes)


class Labs:
    """Where rows run, one after another: those that can share one swarm do, in their short form."""

    def __init__(self, directory: Path, *, thorough: bool) -> None:
        self._directory = directory
        self._thorough = thorough
        self._standing: StandingLab | None = None
        self._made = 0

    @contextlib.contextmanager
    def lab(self, name: str, *, shared: bool, say: Callable[[str], None]) -> Iterator[Lab]:
        if not shared or self._thorough:
            self.close()  # or it would train beside the next one
            with Lab(self._place(name), thorough=self._thorough, say=say) as lab:
                yield lab
            return
        if self._standing is None:
            self._standing = StandingLab(self._place("standing"))
        self._standing.say = say
        try:
            yield self._standing
        except BaseException:
            self.close()
            raise

    def _place(self, name: str) -> Path:
        self._made += 1
        place = self._directory / f"{self._made}-{name}"
        place.mkdir(parents=True)
        return place

    def close(self) -> None:
        if self._standing is not None:
            self._standing.close()
            self._standing = None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _replace(path: Path, data: bytes) -> None:
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_bytes(data)
    unfinished.replace(path)


@contextlib.contextmanager
def frozen(node: Node) -> Iterator[None]:
    node.freeze()
    try:
        yield
    finally:
        node.thaw()
