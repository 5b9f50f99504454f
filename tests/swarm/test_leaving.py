"""SIGTERM, Ctrl-C and `atoll stop` end a node within 10 s, whatever it is doing, and leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
from daemons import (
    COMMAND_S,
    LEAVE_S,
    ROUND_S,
    Daemon,
    command,
    daemons,
    environment,
    interruptible,
    loopback,
    reasons,
    wait_all,
    wait_counted,
)

from node.daemon.catch_up import SNAPSHOT_COSTS_ROUNDS
from node.supervisor import lock
from scripts.soaking.accounts import read_account
from tests.chaos.bent.strikes import PROGRAM, Strike, Struck, armed_file, struck_file

pytestmark = [pytest.mark.swarm, pytest.mark.slow]

Make = Callable[..., Daemon]
FAR_BEHIND_ROUNDS = SNAPSHOT_COSTS_ROUNDS + 4


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


def ended_at(node: Daemon, point: str, after: int) -> float:
    """It runs with a strike armed: SIGTERM when it passes that place; the seconds from there until it was gone."""
    deadline_s = time.monotonic() + 3 * ROUND_S
    while not struck_file(node.home.path).exists():
        assert node.running, node.output
        assert time.monotonic() < deadline_s, f"{node.name} never came to {point} {after}; {reasons([node])}"
        node.whole_node()
        if node.last is None:
            node.glance()  # who it is, for `told`
        time.sleep(0.02)
    assert node.process is not None
    code = node.process.wait(LEAVE_S + 5)
    ended_s = time.monotonic()
    assert code == 0, (code, node.output)
    struck = msgspec.json.decode(struck_file(node.home.path).read_bytes(), type=Struck)
    struck_file(node.home.path).unlink()
    assert not armed_file(node.home.path).exists()
    return ended_s - struck.at_s


def arm(node: Daemon, point: str, after: int) -> None:
    strike = Strike(point=point, round=None, after=after, target="supervisor", signal=signal.SIGTERM)
    armed_file(node.home.path).write_bytes(msgspec.json.encode(strike))


def accounted_for(node: Daemon) -> None:
    """All that it trained, when it left: counted, carried to its next life, or reported."""
    account = read_account(node.home)
    assert account is not None
    assert account.work.missing == 0, account.work
    assert account.work.counted == account.chain.get(account.peer, 0), "what is counted is what the chain says"


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


@pytest.fixture(scope="module")
def guest(pair: tuple[Daemon, Make]) -> Daemon:
    """One home for all the lives that end in a round; each goes on from what the last one left on disk."""
    host, make = pair
    node = make("guest", program=PROGRAM)
    node.start("--join", host.address, *loopback()).wait_listening()
    wait_counted([host, node], 1, "the guest is counted", 3 * ROUND_S)
    node.terminate()
    return node


@pytest.mark.parametrize(
    ("point", "after"),
    [
        pytest.param("step", 3, id="training"),
        pytest.param("ready", 1, id="assembling", marks=pytest.mark.chaos_long),
        pytest.param("up", 1, id="exchanging, up", marks=pytest.mark.chaos_long),
        pytest.param("down-received", 1, id="exchanging, down"),
        pytest.param("vote-1", 1, id="agreeing"),
        pytest.param("vote-2", 1, id="agreeing, locked", marks=pytest.mark.chaos_long),
        pytest.param("committed", 1, id="applying"),
    ],
)
def test_in_a_round(pair: tuple[Daemon, Make], guest: Daemon, point: str, after: int) -> None:
    host, _ = pair
    arm(guest, point, after)
    guest.start("--join", host.address, *loopback())
    left_without_a_trace(guest, ended_at(guest, point, after))
    told(host, guest)
    before = host.wait(lambda _: True, "a look").round
    host.wait(lambda status: status.round >= before + 2, "the host goes on alone", 2 * ROUND_S)
    accounted_for(guest)


def test_while_it_downloads_a_state(pair: tuple[Daemon, Make]) -> None:
    """In the middle of a snapshot: what was got is kept, and its donor is not held up."""
    host, make = pair
    host.wait(
        lambda status: status.round >= FAR_BEHIND_ROUNDS, "a newcomer would not replay from the beginning", ROUND_S
    )
    node = make("downloading", program=PROGRAM)
    node.home.path.mkdir()
    arm(node, "chunk-got", 1)
    node.start("--join", host.address, *loopback())
    left_without_a_trace(node, ended_at(node, "chunk-got", 1))
    told(host, node)
    before = host.wait(lambda _: True, "a look").round
    host.wait(lambda status: status.round >= before + 1, "the donor's rounds go on", ROUND_S)


def test_by_the_stop_command_and_by_ctrl_c(pair: tuple[Daemon, Make]) -> None:
    host, _ = pair
    node = counted(pair, "commanded")
    node.whole_node()
    stop = subprocess.Popen(command("stop", "--home", str(node.home.path)), env=environment())
    try:
        node.wait_output("\nleaving\n")  # from here on: what the command's own start takes is another matter
        began_s = time.monotonic()
        assert node.process is not None
        assert node.process.wait(LEAVE_S + 5) == 0, node.output
        seconds = time.monotonic() - began_s
        assert stop.wait(COMMAND_S) == 0
    finally:
        stop.kill()
        stop.wait()
    left_without_a_trace(node, seconds)
    told(host, node)

    with interruptible():
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
