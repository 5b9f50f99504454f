"""Nodes as an operator has them: `atoll` in processes of its own, judged by what it prints and by what is left of it.

Deadlines are for a quiet machine of two cores, times `ATOLL_TEST_PATIENCE` (default 1).
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import psutil

from node.cli.control import Control
from node.errors import AtollError
from node.home import Home
from node.status import HistoryRound, LastRound, MemberStatus, Status
from node.supervisor.__main__ import END_WITH_VARIABLE

PATIENCE = float(os.environ.get("ATOLL_TEST_PATIENCE", "1"))
LISTEN_S = 30.0 * PATIENCE
"""From the command to the addresses: here as a deadline, not as the budget."""
ROUND_S = 60.0 * PATIENCE
"""For anything that takes a few rounds, PyTorch's start included."""
COMMAND_S = 45.0 * PATIENCE
LEAVE_S = 10.0
"""From SIGTERM to the end (design section 11): a promise, so no patience."""
POLL_S = 0.2

DESIGN_FIELDS = frozenset({
    "peer_id", "addresses", "run_id", "phase", "reason", "round", "state_hash", "lineage", "members", "group",
    "tokens_total", "tokens_per_s", "loss", "last_round", "uptime_s", "version",
})  # fmt: skip
DESIGN_ROUND_FIELDS = frozenset({
    "round", "contributors", "excluded", "seconds", "bytes_sent", "bytes_received", "assemble_s", "exchange_s",
    "commit_s",
})  # fmt: skip


class TooLate(AtollError):
    """Something did not happen in time, or a node ended; one sentence with what the node was waiting for."""


ATOLL = (sys.executable, "-P", "-m", "node.cli.main")


def command(*arguments: str, namespace: str | None = None, program: Sequence[str] = ATOLL) -> list[str]:
    """`atoll ARGUMENTS`, in a network namespace when one is named, or given by the path of its file."""
    prefix: list[str] = []
    if namespace is not None:
        prefix = ["nsenter", f"--net={namespace}", "--"] if "/" in namespace else ["ip", "netns", "exec", namespace]
    return [*prefix, *program, *arguments]


def environment() -> dict[str, str]:
    """This one without the operator's settings; a node ends with this process, whatever becomes of the test."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("ATOLL_")}
    return kept | {END_WITH_VARIABLE: str(os.getpid())}


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """What is started within hears Ctrl-C, also where a shell runs the tests in its background and ignores it for them.

    A program that was started so keeps ignoring it, as it should (`node.supervisor.loop`).
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def atoll(*arguments: str, timeout_s: float = COMMAND_S) -> subprocess.CompletedProcess[str]:
    """The command, to its end. It counts as a failure when it does not end within `timeout_s`."""
    return subprocess.run(
        command(*arguments), env=environment(), capture_output=True, text=True, timeout=timeout_s, check=False
    )


@dataclass(kw_only=True)
class Daemon:
    """One home and, while it runs, the processes on it."""

    home: Home
    namespace: str | None = None
    program: Sequence[str] = ATOLL
    """What is started as `atoll`."""
    process: subprocess.Popen[bytes] | None = None
    last: Status | None = None
    rounds: dict[int, HistoryRound] = field(default_factory=dict)
    """All rounds that its `history` has shown, over all its lives."""
    processes: dict[int, psutil.Process] = field(default_factory=dict)
    """All of its processes that `whole_node` has seen."""

    @property
    def name(self) -> str:
        return self.home.path.name

    @property
    def output(self) -> str:
        """What the operator sees, all lives."""
        return self._output_file.read_text(errors="replace")

    @property
    def _output_file(self) -> Path:
        return self.home.path.with_suffix(".out")

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def pid(self) -> int:
        """Of the supervisor: the process that the command became."""
        assert self.process is not None
        return self.process.pid

    # ------------------------------------------------------------ starting and ending

    def start(self, *arguments: str) -> Daemon:
        """`atoll daemon --home HOME ARGUMENTS`. Returns at once."""
        assert not self.running
        with self._output_file.open("ab") as output:
            self.process = subprocess.Popen(
                command(
                    "daemon", "--home", str(self.home.path), *arguments, namespace=self.namespace, program=self.program
                ),
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.last = None
        return self

    def kill(self) -> None:
        """SIGKILL to the supervisor, as a power cut: nobody is told, and nothing must stay behind."""
        self.whole_node()
        os.kill(self.pid, signal.SIGKILL)
        self._reap(LEAVE_S)

    def terminate(self) -> tuple[int, float]:
        """SIGTERM; the exit status and the seconds it took."""
        self.whole_node()
        started_s = time.monotonic()
        os.kill(self.pid, signal.SIGTERM)
        code = self._reap(LEAVE_S + 2)
        return code, time.monotonic() - started_s

    def _reap(self, within_s: float) -> int:
        assert self.process is not None
        try:
            return self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            raise TooLate(f"{self.name} (process {self.pid}) did not end within {within_s:.0f} s") from None

    def close(self) -> None:
        if self.running:
            self.kill()

    # ------------------------------------------------------------ processes

    def whole_node(self) -> dict[str, psutil.Process]:
        """Role → process, of those that run now; remembered for `survivors`."""
        supervisor = psutil.Process(self.pid)
        found = {"supervisor": supervisor}
        for child in supervisor.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                words = child.cmdline()
                if not words:
                    continue  # it has just ended
                role = next((word.removeprefix("node.") for word in words if word.startswith("node.")), words[-1])
                found[role] = child
        self.processes |= {process.pid: process for process in found.values()}
        return found

    def survivors(self, within_s: float = 2.0) -> list[str]:
        """The command lines of processes that `whole_node` has seen and that are still there after `within_s`."""
        _, alive = psutil.wait_procs(list(self.processes.values()), timeout=within_s)
        left = []
        for process in alive:
            with contextlib.suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE:
                    left.append(f"{process.pid} {' '.join(process.cmdline())}")
        return left

    def resident_bytes(self, *roles: str) -> int:
        found = self.whole_node()
        return sum(found[role].memory_info().rss for role in roles)

    # ------------------------------------------------------------ seeing

    def status(self) -> Status:
        """What `atoll status --json` prints, with all that the design promises in it."""
        done = atoll("status", "--json", "--home", str(self.home.path))
        assert done.returncode == 0, done.stderr
        raw = msgspec.json.decode(done.stdout)
        assert raw.keys() >= DESIGN_FIELDS, f"missing: {DESIGN_FIELDS - raw.keys()}"
        if raw["last_round"] is not None:
            assert raw["last_round"].keys() >= DESIGN_ROUND_FIELDS
        status = msgspec.json.decode(done.stdout, type=Status)
        self._saw(status)
        return status

    def glance(self) -> Status | None:
        """The same over the control socket, without the price of a process; None while there is no answer."""
        status = Control(self.home).status_now()
        if status is not None:
            self._saw(status)
        return status

    def _saw(self, status: Status) -> None:
        self.last = status
        self.rounds.update({one.round: one for one in status.history})

    def peer(self, other: Daemon) -> MemberStatus | None:
        """What this node's newest status says of another."""
        assert self.last is not None
        assert other.last is not None
        return next((one for one in self.last.member_list if one.peer_id == other.last.peer_id), None)

    @property
    def peer_id(self) -> str:
        assert self.last is not None
        return self.last.peer_id

    @property
    def address(self) -> str:
        assert self.last is not None
        return self.last.addresses[0]

    def wait(self, condition: Callable[[Status], bool], what: str, within_s: float = ROUND_S) -> Status:
        """Poll until `condition`; then the whole status. Raises `TooLate`, with the node's own reason."""
        wait_all([self], lambda: self.last is not None and condition(self.last), what, within_s)
        assert self.last is not None
        return self.last

    def wait_output(self, words: str, within_s: float = COMMAND_S) -> None:
        """Until the operator has seen `words`. Raises `TooLate`."""
        deadline_s = time.monotonic() + within_s
        while words not in self.output:
            if time.monotonic() > deadline_s:
                raise TooLate(f"{self.name} did not say {words!r} within {within_s:.0f} s: {self.output[-2000:]}")
            time.sleep(0.02)

    def wait_listening(self) -> Status:
        return self.wait(lambda status: bool(status.addresses), "listening", LISTEN_S)

    def counted(self, other: Daemon, since: int = 0) -> int:
        """In how many rounds from `since` on the other was counted, as this node has seen."""
        return sum(1 for one in self.rounds.values() if one.round >= since and other.peer_id in one.contributors)


def wait_all(daemons: Sequence[Daemon], condition: Callable[[], bool], what: str, within_s: float = ROUND_S) -> None:
    """Look at all of them until `condition`. Raises `TooLate` after `within_s`, or when one of them has ended."""
    deadline_s = time.monotonic() + within_s
    while True:
        for daemon in daemons:
            daemon.glance()
            if not daemon.running:
                raise TooLate(f"{what}: {daemon.name} has ended; it said: {daemon.output[-2000:]}")
        if condition():
            return
        if time.monotonic() > deadline_s:
            raise TooLate(f"{what}: not within {within_s:.0f} s; {reasons(daemons)}")
        time.sleep(POLL_S)


def wait_counted(daemons: Sequence[Daemon], times: int, what: str, within_s: float = ROUND_S) -> None:
    """Until each has seen each counted in `times` more rounds than now."""
    for one in daemons:
        one.glance()
    since = max((daemon.last.round for daemon in daemons if daemon.last is not None), default=0)

    def all_counted() -> bool:
        return all(seer.last is not None for seer in daemons) and all(
            seer.counted(seen, since) >= times for seer in daemons for seen in daemons
        )

    wait_all(daemons, all_counted, what, within_s)


def reasons(daemons: Sequence[Daemon]) -> str:
    return "; ".join(
        f"{daemon.name}: round {daemon.last.round}, {daemon.last.phase}, {daemon.last.members} members, "
        f"{daemon.last.reason}"
        if daemon.last
        else f"{daemon.name}: no status yet, it said {daemon.output[-300:]!r}"
        for daemon in daemons
    )


def assert_agreed(*daemons: Daemon, at_least: int) -> None:
    """Equal rounds have equal state hashes wherever both saw them, in `at_least` common rounds of each pair."""
    for one in daemons:
        for other in daemons:
            common = one.rounds.keys() & other.rounds.keys()
            assert len(common) >= at_least or one is other, (one.name, other.name, sorted(common))
            differing = [n for n in common if one.rounds[n].state_hash != other.rounds[n].state_hash]
            assert not differing, f"{one.name} and {other.name} disagree about the rounds {sorted(differing)}"


def assert_sensible(status: Status) -> None:
    """What must hold of any status of a node that has committed a round."""
    assert status.reason.strip()
    assert "\n" not in status.reason
    assert status.phase
    assert status.run_id is not None
    assert len(bytes.fromhex(status.run_id)) == 32
    assert status.state_hash is not None
    assert len(bytes.fromhex(status.state_hash)) == 32
    assert status.lineage is not None
    assert status.peer_id in status.group
    assert 1 <= status.members <= len(status.group)
    assert status.uptime_s > 0
    assert all(address.endswith(f"/p2p/{status.peer_id}") for address in status.addresses)
    assert status.last_round is not None
    assert_sensible_round(status.last_round, status)


def assert_sensible_round(last: LastRound, status: Status) -> None:
    assert last.round == status.round - 1
    assert 1 <= last.contributors <= len(status.group) + len(last.excluded)
    assert last.seconds > 0
    assert min(last.assemble_s, last.exchange_s, last.commit_s) >= 0
    if last.contributors > 1:
        assert last.bytes_sent + last.bytes_received > 0


@contextlib.contextmanager
def daemons(directory: Path) -> Iterator[Callable[..., Daemon]]:
    """`with daemons(tmp_path) as make: a = make("a")`; whatever still runs at the end is killed."""
    made: list[Daemon] = []

    def make(name: str, *, namespace: str | None = None, program: Sequence[str] = ATOLL) -> Daemon:
        daemon = Daemon(home=Home(directory / name), namespace=namespace, program=program)
        made.append(daemon)
        return daemon

    try:
        yield make
    finally:
        for daemon in made:
            daemon.close()


def loopback() -> tuple[str, ...]:
    """A port that stays the node's over its lives: the others look for it there."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return "--listen", f"/ip4/127.0.0.1/tcp/{probe.getsockname()[1]}", "--threads", "1"


@dataclass(frozen=True, kw_only=True)
class Trio:
    """Three nodes of one run, each of which can be started again where it was before."""

    nodes: tuple[Daemon, Daemon, Daemon]
    listen: dict[str, tuple[str, ...]]
    addresses: dict[str, str]

    def start_again(self, node: Daemon, *friends: Daemon) -> None:
        """It is told the addresses of `friends`."""
        node.start(*(f"--join={self.addresses[friend.name]}" for friend in friends), *self.listen[node.name])


def trio_of(make: Callable[..., Daemon], *, counted: int) -> Trio:
    """Three that train `micro`; returns when each was counted `counted` times: after two, each is an elector."""
    a, b, c = nodes = (make("a"), make("b"), make("c"))
    made = Trio(nodes=nodes, listen={node.name: loopback() for node in nodes}, addresses={})
    a.start("--run", "micro", *made.listen["a"]).wait_listening()
    made.addresses["a"] = a.address
    for node in (b, c):
        made.start_again(node, a)
        node.wait_listening()
        made.addresses[node.name] = node.address
    wait_counted(nodes, counted, "all three are counted", (1 + counted) * ROUND_S)
    return made
