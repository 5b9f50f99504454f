"""The supervisor with real processes: who is restarted, what survives whom, and that an end leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from daemons import interruptible

from node.home import Home
from node.memory import available_memory
from node.supervisor import lock

pytestmark = [pytest.mark.swarm, pytest.mark.slow]

STAND_INS = Path(__file__).parent / "stand_ins"
DEADLINE_S = 20.0


class Supervised:
    """A supervisor under test and the story its stand-in daemon wrote."""

    def __init__(self, home: Home, daemon: str, trainer: str = "obedient", **patience: float) -> None:
        self.home = home
        commands = {
            "daemon": self._python("daemon.py", daemon),
            "engine": self._python("engine.py"),
            "trainer": self._python("trainer.py", trainer),
        }
        self.process = subprocess.Popen(
            [*self._python("supervise.py"), str(home.path), json.dumps(commands), json.dumps(patience)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    @staticmethod
    def _python(script: str, *arguments: str) -> list[str]:
        return [sys.executable, str(STAND_INS / script), *arguments]

    def story(self) -> list[dict[str, Any]]:
        try:
            text = (self.home.path / "story.jsonl").read_text()
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def wait_for(self, what: str, count: int = 1) -> dict[str, Any]:
        """The `count`-th entry of that kind."""
        deadline_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline_s:
            found = [entry for entry in self.story() if entry["what"] == what]
            if len(found) >= count:
                return found[count - 1]
            if self.process.poll() is not None:
                pytest.fail(f"the supervisor ended ({self.process.returncode}): {self.process.stderr.read()}")
            time.sleep(0.02)
        pytest.fail(f"no {what!r} within {DEADLINE_S} s: {self.story()}\n{self.log()}")

    def end(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, float]:
        """(exit status, seconds it took)."""
        started_s = time.monotonic()
        self.process.send_signal(number)
        return self.process.wait(DEADLINE_S), time.monotonic() - started_s

    def log(self) -> str:
        return self.home.log_file.read_text()

    def processes(self) -> list[int]:
        """All that ran under it, the loader of the trainer included."""
        pids = list(self.wait_for("ready")["pids"].values())
        return [*pids, self.loader()]

    def loader(self) -> int:
        path = self.home.path / "loader.pid"
        deadline_s = time.monotonic() + DEADLINE_S
        while not (path.exists() and path.read_text()):
            assert time.monotonic() < deadline_s, "the trainer started no loader"
            time.sleep(0.02)
        return int(path.read_text())


@pytest.fixture
def home(tmp_path: Path) -> Home:
    path = tmp_path / "home"
    path.mkdir()
    return Home(path)


@pytest.fixture
def started(home: Home) -> Iterator[list[Supervised]]:
    running: list[Supervised] = []
    yield running
    for supervised in running:
        supervised.process.kill()
        supervised.process.communicate()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pids: list[int], within_s: float = 5.0) -> None:
    deadline_s = time.monotonic() + within_s
    while remaining := [pid for pid in pids if alive(pid)]:
        assert time.monotonic() < deadline_s, f"processes {remaining} outlived their supervisor"
        time.sleep(0.02)


def test_a_node_starts_says_so_and_ends_without_a_trace(home: Home, started: list[Supervised]) -> None:
    node = Supervised(home, "full")
    started.append(node)
    first = node.wait_for("engine")
    assert first["fresh"]
    # EPERM: sealed against shrinking; EBADF: the trainer's descriptor of theta cannot write.
    assert first["refused"] == [1, 9]
    ready = node.wait_for("ready")
    assert set(ready["pids"]) == {"supervisor", "daemon", "engine", "trainer"}
    assert ready["pids"]["supervisor"] == node.process.pid
    assert 0 < ready["resident"]["supervisor"] < 30e6, "the supervisor must stay small"
    live = json.loads(home.daemon_file.read_text())
    assert live["pid"] == node.process.pid
    assert live["addresses"] == ["/ip4/127.0.0.1/tcp/4001/p2p/12D3"]
    assert lock.holder(home) == node.process.pid
    processes = node.processes()

    code, seconds = node.end()

    assert (code, seconds < 5) == (0, True)
    wait_until_gone(processes, within_s=0.5)
    assert not home.daemon_file.exists()
    assert not home.socket_directory.exists()
    assert lock.holder(home) is None
    lines = node.process.stdout.read().splitlines()
    assert lines == ["listening on /ip4/127.0.0.1/tcp/4001/p2p/12D3", "round 1: 2 contributors", "leaving"]


def test_a_killed_supervisor_takes_all_along(home: Home, started: list[Supervised]) -> None:
    node = Supervised(home, "full")
    started.append(node)
    processes = [pid for pid in node.processes() if pid != node.loader()]
    node.end(signal.SIGKILL)
    wait_until_gone(processes)
    os.kill(node.loader(), signal.SIGKILL)  # a real trainer's loaders watch their parent
    # The lock died with it, and what it left in the home does not hinder the next one.
    again = Supervised(home, "full")
    started.append(again)
    again.wait_for("ready", count=2)
    assert again.end()[0] == 0


def test_memory_and_trainer_outlive_daemon_and_engine(home: Home, started: list[Supervised]) -> None:
    node = Supervised(home, "full")
    started.append(node)
    pids = node.wait_for("ready")["pids"]

    os.kill(pids["engine"], signal.SIGKILL)
    again = node.wait_for("engine again")
    assert again["engine"] != pids["engine"]
    assert not again["fresh"]
    assert (again["life"], again["told"]) == (2, 2), "the news is of the life that the connection leads to"

    os.kill(pids["daemon"], signal.SIGKILL)
    second = node.wait_for("engine", count=2)
    assert second["pid"] != pids["daemon"]
    assert second["engine"] == again["engine"], "a new daemon finds the engine that is there"
    assert second["life"] == 2
    assert not second["fresh"]
    assert second["mark"] == "delta", "the vectors keep their content"
    assert node.wait_for("ready", count=2)["pids"]["trainer"] == pids["trainer"]
    assert node.end()[0] == 0
    assert "the daemon ended by signal SIGKILL; starting it again" in node.process.stderr.read()


def test_a_killed_trainer_is_reaped_with_its_loader_and_restarted(home: Home, started: list[Supervised]) -> None:
    node = Supervised(home, "full")
    started.append(node)
    pids = node.wait_for("ready")["pids"]
    loader = node.loader()
    os.kill(pids["trainer"], signal.SIGKILL)
    exited = node.wait_for("trainer exited")
    assert (exited["code"], exited["again"]) == (-9, True)
    wait_until_gone([loader])
    os.kill(pids["daemon"], signal.SIGKILL)
    assert node.wait_for("ready", count=2)["pids"]["trainer"] not in (None, pids["trainer"])


def test_a_trainer_that_refuses_is_not_started_again(home: Home, started: list[Supervised]) -> None:
    node = Supervised(home, "full", trainer="fails")
    started.append(node)
    exited = node.wait_for("trainer exited")
    assert exited["code"] == 2
    assert exited["reason"] == "the function corpus:load is not allowed; add --allow-function corpus:load"
    assert not exited["again"]


def test_the_daemons_sentence_is_the_operators(home: Home, started: list[Supervised]) -> None:
    node = Supervised(home, "refuse")
    started.append(node)
    assert node.process.wait(DEADLINE_S) == 2
    assert node.process.stderr.read() == "the port 4001 is busy; choose another by --listen\n"


def test_vectors_that_do_not_fit_are_refused_before_they_are_allocated(home: Home, started: list[Supervised]) -> None:
    before = available_memory()
    node = Supervised(home, "greedy")
    started.append(node)
    assert node.process.wait(DEADLINE_S) == 2
    (sentence,) = node.process.stderr.read().splitlines()
    assert sentence.startswith("the model's outer state does not fit: 3145728.2 GiB of memory needed, ")
    assert available_memory() > before / 2


def test_a_daemon_that_never_listens_is_given_up(home: Home, started: list[Supervised]) -> None:
    node = Supervised(home, "crash", failed_starts=2)
    started.append(node)
    assert node.process.wait(DEADLINE_S) == 1
    assert "the daemon died 2 times before it listened (no libp2p here)" in node.process.stderr.read()


def test_a_daemon_that_fell_is_not_started_again(home: Home, started: list[Supervised]) -> None:
    node = Supervised(home, "fall")
    started.append(node)
    assert node.process.wait(DEADLINE_S) == 3
    assert "is not started again (round 7 has two decisions)" in node.process.stderr.read()


def test_nobody_can_delay_the_end(home: Home, started: list[Supervised]) -> None:
    node = Supervised(home, "stubborn", trainer="patient", leave_s=0.5, end_s=0.5, total_s=1.0)
    started.append(node)
    processes = node.processes()
    code, seconds = node.end()
    assert code == 0
    assert 1.0 <= seconds < 3.0
    wait_until_gone(processes, within_s=0.5)


def test_asking_twice_ends_at_once(home: Home, started: list[Supervised]) -> None:
    with interruptible():
        node = Supervised(home, "stubborn")
    started.append(node)
    processes = node.processes()
    node.process.send_signal(signal.SIGINT)
    node.wait_for("signal")
    code, seconds = node.end(signal.SIGINT)
    assert (code, seconds < 4) == (0, True)
    wait_until_gone(processes, within_s=0.5)


def test_a_second_supervisor_on_the_home_refuses(home: Home, started: list[Supervised]) -> None:
    node = Supervised(home, "full")
    started.append(node)
    node.wait_for("ready")
    second = subprocess.run(
        [sys.executable, "-P", "-m", "node.supervisor"],
        env=os.environ | {"ATOLL_HOME": str(home.path)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert second.returncode == 2
    assert second.stderr == (
        f"a daemon (process {node.process.pid}) already runs on the home {home.path}: stop it by `atoll stop`, "
        "or choose another home by --home\n"
    )
    assert home.daemon_file.exists(), "the first one's files are left alone"


def test_a_reader_that_does_not_read_blocks_nobody(home: Home, started: list[Supervised]) -> None:
    """The operator's pipe is full: lines are lost, the daemon goes on."""
    node = Supervised(home, "full")
    started.append(node)
    node.wait_for("ready")
    pipe = node.process.stdout
    with contextlib.suppress(BlockingIOError), open(f"/proc/{node.process.pid}/fd/1", "wb", buffering=0) as writer:
        os.set_blocking(writer.fileno(), False)
        while writer.write(b"x" * 4096):
            pass
    os.kill(node.wait_for("ready")["pids"]["daemon"], signal.SIGKILL)
    node.wait_for("ready", count=2)
    assert node.end()[0] == 0
    assert pipe.read(8) == "listenin"
