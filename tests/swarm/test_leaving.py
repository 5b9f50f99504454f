"""SIGTERM, Ctrl-C and `atoll stop` end a node within 10 s, whatever it is doing, and leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from daemons import LEAVE_S, ROUND_S, Daemon, atoll, daemons, wait_all, wait_counted

from node.supervisor import lock

pytestmark = [pytest.mark.swarm, pytest.mark.slow]

Make = Callable[..., Daemon]


def loopback() -> tuple[str, ...]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return "--listen", f"/ip4/127.0.0.1/tcp/{probe.getsockname()[1]}", "--threads", "1"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemon, Make]]:
    """A node that stays, in a run with rounds of some seconds, and a maker of others that join it."""
    directory = tmp_path_factory.mktemp("leaving")
    with daemons(directory) as make:
        host = make("host")
        host.start("--run", "micro", "--set", "rounds.steps=100", *loopback()).wait_listening()
        host.wait(lambda status: status.round >= 1, "the first round", 2 * ROUND_S)
        yield host, make


def left_without_a_trace(node: Daemon, seconds: float) -> None:
    assert seconds <= LEAVE_S, node.output
    assert not node.survivors(), node.output
    assert lock.holder(node.home) is None
    for path in (node.home.control_socket, node.home.attach_socket, node.home.daemon_file):
        assert not path.exists(), path
    assert not node.home.socket_directory.exists()


def ended(node: Daemon, number: signal.Signals = signal.SIGTERM) -> float:
    """The signal, and the seconds until the node was gone."""
    node.whole_node()
    assert node.process is not None
    began_s = time.monotonic()
    node.process.send_signal(number)
    code = node.process.wait(LEAVE_S + 5)
    seconds = time.monotonic() - began_s
    assert code == 0, (code, node.output)
    return seconds


def joined(pair: tuple[Daemon, Make], name: str) -> Daemon:
    host, make = pair
    node = make(name)
    node.start("--join", host.address, *loopback()).wait_listening()
    return node


def counted(pair: tuple[Daemon, Make], name: str) -> Daemon:
    node = joined(pair, name)
    wait_counted([pair[0], node], 1, f"{name} is counted", 3 * ROUND_S)
    return node


def told(host: Daemon, node: Daemon) -> None:
    """The host knows that it left, from itself, and does not wait for it."""
    wait_all(
        [host],
        lambda: (seen := host.peer(node)) is None or not seen.connected,
        f"{host.name} knows that {node.name} left",
        5.0,
    )
    assert "it left" in (host.home.path / "daemon.log").read_text(errors="replace").rpartition("peer gone")[2]


def wait_phase(node: Daemon, *phases: str) -> None:
    """Caught in the act: phases of a round are short, so this looks often."""
    deadline_s = time.monotonic() + 2 * ROUND_S
    seen = ""
    while seen not in phases:
        assert time.monotonic() < deadline_s, f"{node.name} was never {phases}, but {seen}"
        status = node.glance()
        seen = status.phase if status is not None else seen
        time.sleep(0.01)


# ---------------------------------------------------------------- while it starts


@pytest.mark.parametrize("after_s", [0.0, 0.4, 1.2, 4.0])
def test_while_it_starts(pair: tuple[Daemon, Make], after_s: float) -> None:
    """At the command, at the supervisor, before the daemon listens, before there is a state."""
    host, make = pair
    node = make(f"starting-{after_s}")
    node.start("--join", host.address, *loopback())
    time.sleep(after_s)
    node.whole_node()
    assert node.process is not None
    began_s = time.monotonic()
    node.process.send_signal(signal.SIGTERM)
    # Before it has become the supervisor, the command dies of the signal like any other.
    assert node.process.wait(LEAVE_S + 5) in (0, -signal.SIGTERM), node.output
    left_without_a_trace(node, time.monotonic() - began_s)


def test_while_nobody_answers(tmp_path: Path) -> None:
    with daemons(tmp_path) as make:
        node = make("alone")
        nobody = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWSr5wQxp3VqtGtwXms3M5VUEUW79KCrGaeJbAHmc3L1Ud"
        node.start("--join", nobody, *loopback()).wait_listening()
        left_without_a_trace(node, ended(node))


# ---------------------------------------------------------------- in a round


# In the long suite until the phases are struck by events: on a quiet machine a look every 0.2 s can miss one for ever.
@pytest.mark.chaos_long
@pytest.mark.parametrize(
    "phases", [("training",), ("assembling",), ("exchanging",), ("exchanging", "voting", "applying")], ids="-".join
)
def test_in_a_round(pair: tuple[Daemon, Make], phases: tuple[str, ...]) -> None:
    host, _ = pair
    node = counted(pair, f"in-{'-'.join(phases)}")
    wait_phase(node, *phases)
    left_without_a_trace(node, ended(node))
    told(host, node)
    before = host.wait(lambda _: True, "a look").round
    host.wait(lambda status: status.round >= before + 2, "the host goes on alone", 2 * ROUND_S)


def test_by_the_stop_command_and_by_ctrl_c(pair: tuple[Daemon, Make]) -> None:
    host, _ = pair
    node = counted(pair, "commanded")
    node.whole_node()
    began_s = time.monotonic()
    done = atoll("stop", "--home", str(node.home.path))
    seconds = time.monotonic() - began_s
    assert done.returncode == 0, done.stderr
    assert node.process is not None
    assert node.process.wait(2) == 0
    left_without_a_trace(node, seconds - 1.0)  # the command's own imports
    told(host, node)

    again = joined(pair, "interrupted")
    again.whole_node()
    began_s = time.monotonic()
    os.killpg(again.pid, signal.SIGINT)  # as a terminal does, to the whole foreground group
    assert again.process is not None
    assert again.process.wait(LEAVE_S + 5) == 0, again.output
    left_without_a_trace(again, time.monotonic() - began_s)


def test_twice_is_at_once(pair: tuple[Daemon, Make]) -> None:
    node = joined(pair, "hurried")
    node.whole_node()
    assert node.process is not None
    node.process.send_signal(signal.SIGTERM)
    time.sleep(0.1)
    seconds = ended(node)
    left_without_a_trace(node, seconds)
    assert seconds < 4.0


# ---------------------------------------------------------------- with something broken


def test_with_a_dead_engine(pair: tuple[Daemon, Make]) -> None:
    node = counted(pair, "engineless")
    node.whole_node()["engine"].kill()
    left_without_a_trace(node, ended(node))


def test_with_a_stopped_engine_and_a_stopped_trainer(pair: tuple[Daemon, Make]) -> None:
    """They cannot answer, nor end by themselves."""
    node = counted(pair, "stiff")
    processes = node.whole_node()
    processes["engine"].suspend()
    processes["trainer"].suspend()
    left_without_a_trace(node, ended(node))


def test_all_children_are_signalled_at_once_as_systemd_does(pair: tuple[Daemon, Make]) -> None:
    node = counted(pair, "unit")
    processes = node.whole_node()
    began_s = time.monotonic()
    for process in processes.values():
        process.terminate()
    assert node.process is not None
    assert node.process.wait(LEAVE_S + 5) == 0, node.output
    left_without_a_trace(node, time.monotonic() - began_s)


def test_a_signal_to_the_trainer_or_the_engine_alone_ends_neither_for_good(pair: tuple[Daemon, Make]) -> None:
    host, _ = pair
    node = counted(pair, "poked")
    first = node.whole_node()
    for role in ("trainer", "engine"):
        first[role].terminate()
    psutil.wait_procs([first["trainer"], first["engine"]], timeout=20)

    def back() -> bool:
        with contextlib.suppress(psutil.Error):
            now = node.whole_node()
            return all(role in now and now[role].pid != first[role].pid for role in ("trainer", "engine"))
        return False

    wait_all([host, node], back, "both are started again", ROUND_S)
    wait_counted([host, node], 1, "it is counted again", 3 * ROUND_S)
    left_without_a_trace(node, ended(node))


def test_paused_for_want_of_peers(tmp_path: Path) -> None:
    with daemons(tmp_path) as make:
        node = make("waiting")
        node.start("--run", "micro", "--set", "limits.min_peers=2", *loopback()).wait_listening()
        node.wait(lambda status: status.trainer.attached, "its trainer is there", 2 * ROUND_S)
        left_without_a_trace(node, ended(node))
