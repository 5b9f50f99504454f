"""A swarm of real nodes on this machine: homes, one run whose founders they all are, and their processes.

For `atoll swarm`, the demo, tests and soaks: everything a node does here it does as on the internet, over loopback. The
first node has the run; the others know nothing but its address.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import msgspec

from node.cli import runs
from node.cli.control import Control
from node.cli.export import snapshots
from node.cli.runs import HomeRun
from node.daemon.identity import ensure_identity
from node.engine.hivemind.environment import VARIABLE, check_engine
from node.errors import AtollError, OperatorError
from node.home import Home
from node.memory import memory_needed, memory_shortage
from node.status import HistoryRound, Status
from node.supervisor.__main__ import END_WITH_VARIABLE

START_S = 60.0
"""From a node's start to its addresses."""
END_S = 12.0
POLL_S = 0.25


class SwarmFailed(AtollError):
    """A node ended, or nothing moved; one sentence with what each node was waiting for."""


@dataclass(kw_only=True)
class LocalNode:
    index: int
    home: Home
    peer_id: str
    address: str
    """Its multiaddr, known before it starts."""
    process: subprocess.Popen[bytes] | None = None
    ended: int | None = None
    """Exit status of its newest process; None while that runs, or before the first."""
    was_ended: bool = False
    """By `kill` or `stop`: then its end is no failure, whatever round it was in."""
    last: Status | None = None
    """Newest status seen; it outlives the process."""
    history: dict[int, HistoryRound] = field(default_factory=dict)
    """All rounds seen, over all its lives."""

    @property
    def running(self) -> bool:
        return self.process is not None and self.ended is None

    @property
    def pid(self) -> int:
        """Of its supervisor: SIGKILL to it takes the whole node."""
        assert self.process is not None
        return self.process.pid


class LocalSwarm:
    """`with LocalSwarm(directory, nodes=4, run="tiny", rounds=10) as swarm:`, then `start_all` and `wait_finished`.

    Nodes run in sessions of their own, and none outlives this process.
    """

    def __init__(
        self,
        directory: Path,
        *,
        nodes: int,
        run: str,
        rounds: int | None = None,
        overrides: Sequence[str] = (),
        device: str = "auto",
        threads: int | None = None,
        arguments: Sequence[str] = (),
        report: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`arguments` are further ones of `atoll daemon`; `threads` None: the cores divided among the nodes."""
        self.directory = directory.absolute()
        self.run: HomeRun | None = None
        self._run_named = run
        self._overrides = [*overrides, *([f"end.rounds={rounds}"] if rounds is not None else [])]
        self._device = device
        self._threads = threads if threads is not None else max(1, (os.cpu_count() or 1) // nodes)
        self._arguments = tuple(arguments)
        self._report = report
        self.nodes = [self._make_node(index) for index in range(nodes)]

    def __enter__(self) -> LocalSwarm:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------ making

    def _make_node(self, index: int) -> LocalNode:
        home = Home(self.directory / f"node-{index}")
        peer_id = ensure_identity(home).peer_id
        return LocalNode(
            index=index,
            home=home,
            peer_id=peer_id,
            address=f"/ip4/{self.host(index)}/tcp/{_free_port()}/p2p/{peer_id}",
        )

    def host(self, index: int) -> str:
        """Where node `index` listens. Swarms whose nodes live elsewhere than on loopback say so here."""
        return "127.0.0.1"

    def launcher(self, index: int) -> Sequence[str]:
        """What stands before the command of node `index`: for those that run it in a namespace of its own."""
        return ()

    def create_run(self) -> HomeRun:
        """Into the first node's home only: the others fetch it, and its artifacts, from their peers."""
        if self.run is None:
            first = self.nodes[0].home
            founders = sorted(node.peer_id for node in self.nodes)
            self.run = runs.obtain(
                first, self._run_named, overrides=self._overrides, founders=founders, report=self._report
            )
            check_engine(self.run.manifest, os.environ.get(VARIABLE, ""))
            self._check_memory(self.run)
            runs.make_current(first, self.run.run_id)
        return self.run

    def _check_memory(self, run: HomeRun) -> None:
        needed = len(self.nodes) * memory_needed(
            run.manifest.layout.elements,
            trains_on_cpu=self._device in {"cpu", "auto"},
            engine=run.manifest.rounds.engine,
        )
        if shortage := memory_shortage(needed):
            raise OperatorError(
                f"{len(self.nodes)} nodes do not fit on this machine: {shortage}; start fewer by --nodes"
            )

    # ------------------------------------------------------------ starting and ending

    def start_all(self) -> None:
        """All of them; the others start once the first can be joined."""
        self.create_run()
        self.start(0)
        self.wait_listening(0)
        for node in self.nodes[1:]:
            self.start(node.index)

    def start(self, index: int, *, join: int | None = None) -> None:
        """Start a node: the first with its run, another by the address of node `join` (default: the first)."""
        node = self.nodes[index]
        assert not node.running, f"node {index} runs already"
        endpoint = node.address.partition("/p2p/")[0]
        command = [*self.launcher(index), sys.executable, "-P", "-m", "node.cli.main", "daemon"]
        command += ["--home", str(node.home.path)]
        command += ["--listen", endpoint, "--device", self._device, "--threads", str(self._threads)]
        command += ["--name", f"node-{index}", *self._arguments]
        if index != 0 or join is not None:
            command += ["--join", self.nodes[join or 0].address]
        environment = {
            key: value for key, value in os.environ.items() if not key.startswith("ATOLL_") or key == VARIABLE
        }
        environment[END_WITH_VARIABLE] = str(os.getpid())
        with (self.directory / f"node-{index}.out").open("ab") as output:
            node.process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        node.ended = None
        node.was_ended = False

    def kill(self, index: int) -> None:
        """SIGKILL to its supervisor: what a power cut does."""
        node = self.nodes[index]
        assert node.process is not None
        node.was_ended = True
        node.process.kill()
        node.ended = node.process.wait(END_S)

    def stop(self, index: int) -> int:
        """SIGTERM, and its exit status."""
        node = self.nodes[index]
        assert node.process is not None
        node.was_ended = True
        node.process.send_signal(signal.SIGTERM)
        node.ended = node.process.wait(END_S)
        return node.ended

    def restart(self, index: int, *, join: int | None = None) -> None:
        """Start a node that has ended again, by another running member's address unless `join` says which."""
        if join is None:
            others = [node.index for node in self.nodes if node.running and node.index != index]
            join = others[0] if others else None
        self.start(index, join=join)

    def close(self) -> None:
        """End all nodes that still run, together."""
        running = [node for node in self.nodes if node.running]
        for node in running:
            assert node.process is not None
            node.process.send_signal(signal.SIGTERM)
        deadline_s = time.monotonic() + END_S
        for node in running:
            assert node.process is not None
            try:
                node.ended = node.process.wait(max(0.1, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                node.process.kill()
                node.ended = node.process.wait(END_S)

    # ------------------------------------------------------------ seeing

    def status(self, index: int) -> Status | None:
        """The newest status of a node: live, or how it ended; None before there was any."""
        node = self.nodes[index]
        if node.running:
            assert node.process is not None
            status = Control(node.home).status_now()
            if status is None:
                node.ended = node.process.poll()
            if status is None and node.ended is not None:
                status = self._final_status(node)
            if status is not None:
                node.last = status
                node.history.update({one.round: one for one in status.history})
        return node.last

    def _final_status(self, node: LocalNode) -> Status | None:
        """What a node that has just ended by itself left behind: its last words, and the last state on its disk."""
        status = node.last
        with contextlib.suppress(OSError, msgspec.DecodeError):
            written = msgspec.json.decode((node.home.path / "last_status.json").read_bytes(), type=Status)
            if status is None or written.round >= status.round:
                status = written
        if status is not None and self.run is not None:
            for snapshot in snapshots(node.home, self.run)[:1]:
                number, _, state_hash = snapshot.name.partition("-")
                if int(number) > status.round:
                    status = msgspec.structs.replace(status, round=int(number), state_hash=state_hash)
        return status

    def poll(self) -> list[Status | None]:
        """One look at every node."""
        return [self.status(node.index) for node in self.nodes]

    def wait_listening(self, index: int, timeout_s: float = START_S) -> None:
        self.wait(lambda: bool(self._live_addresses(index)), timeout_s, f"node {index} listens")

    def _live_addresses(self, index: int) -> tuple[str, ...]:
        status = self.status(index)
        return status.addresses if status is not None and self.nodes[index].running else ()

    def wait_round(self, number: int, *, nodes: Sequence[int] | None = None, timeout_s: float) -> None:
        """Until each of `nodes` (default: all that run) has applied `number` commits."""

        def reached() -> bool:
            chosen = nodes if nodes is not None else [node.index for node in self.nodes if node.running]
            statuses = [self.status(index) for index in chosen]
            return all(status is not None and status.round >= number for status in statuses)

        self.wait(reached, timeout_s, f"round {number}")

    def wait_finished(self, *, timeout_s: float) -> None:
        """Until every node's process has ended."""

        def finished() -> bool:
            self.poll()
            return not any(node.running for node in self.nodes)

        self.wait(finished, timeout_s, "the end of the run")

    def wait(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Poll until `condition()`. Raises `SwarmFailed` after `timeout_s`, or when a node fails."""
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            self.check()
            if time.monotonic() > deadline_s:
                raise SwarmFailed(f"{what}: not within {timeout_s:.0f} s; {self.reasons()}")
            time.sleep(POLL_S)

    def check(self) -> None:
        """Raises `SwarmFailed` when a node ended by itself with an error, or before the run did."""
        for node in self.nodes:
            if node.ended is None or node.was_ended:
                continue
            if node.ended != 0:
                output = (self.directory / f"node-{node.index}.out").read_text(errors="replace").splitlines()
                words = output[-1] if output else "it said nothing"
                raise SwarmFailed(
                    f"node {node.index} ended with status {node.ended}: {words}; see {node.home.log_file}"
                )
            if node.last is not None and node.last.final_round and node.last.round < node.last.final_round:
                raise SwarmFailed(
                    f"node {node.index} left in round {node.last.round} of {node.last.final_round}; "
                    f"see {node.home.log_file}"
                )

    def reasons(self) -> str:
        """What each node waits for, in one line."""
        words = []
        for node in self.nodes:
            seen = f"round {node.last.round}, {node.last.phase}, {node.last.reason}" if node.last else "no status yet"
            words.append(f"node {node.index}: {seen if node.running else f'ended ({node.ended})'}")
        return "; ".join(words)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
