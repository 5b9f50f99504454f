"""The public surface with real daemons: started by hand, asked, stopped, resumed, exported; and whole local swarms."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from node.cli.local_swarm import LocalSwarm
from node.home import Home
from node.supervisor import lock

pytestmark = [pytest.mark.swarm, pytest.mark.slow]

START_S = 90.0
DESIGN_FIELDS = {
    "peer_id", "addresses", "run_id", "phase", "reason", "round", "state_hash", "lineage", "members", "group",
    "tokens_total", "tokens_per_s", "loss", "last_round", "uptime_s", "version",
}  # fmt: skip
DESIGN_ROUND_FIELDS = {
    "round", "contributors", "excluded", "seconds", "bytes_sent", "bytes_received", "assemble_s", "exchange_s",
    "commit_s",
}  # fmt: skip


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", "node.cli.main", *arguments]


def atoll(home: Home, *arguments: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments, "--home", str(home.path)), capture_output=True, text=True, timeout=timeout_s, check=False
    )


_started: list[subprocess.Popen[bytes]] = []


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    yield Home(tmp_path / "home")
    while _started:  # also those that a failed test left running
        daemon = _started.pop()
        if daemon.poll() is None:
            daemon.kill()
            daemon.wait(10)


def start(home: Home, output: Path, *arguments: str) -> subprocess.Popen[bytes]:
    with output.open("ab") as file:
        daemon = subprocess.Popen(
            command("daemon", "--home", str(home.path), *arguments), stdout=file, stderr=subprocess.STDOUT
        )
    _started.append(daemon)
    return daemon


def wait_for_round(home: Home, number: int, daemon: subprocess.Popen[bytes]) -> dict[str, object]:
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s:
        assert daemon.poll() is None, home.log_file.read_text()
        done = atoll(home, "status", "--json")
        if done.returncode == 0:
            status: dict[str, object] = json.loads(done.stdout)
            if int(str(status["round"])) >= number:
                return status
        time.sleep(0.2)
    pytest.fail(f"round {number} was not reached within {START_S} s: {atoll(home, 'status').stdout}")


def test_a_node_by_hand(home: Home, tmp_path: Path) -> None:
    output = tmp_path / "output"
    daemon = start(home, output, "--run", "micro", "--listen", "/ip4/127.0.0.1/tcp/0", "--http", "127.0.0.1:0")
    status = wait_for_round(home, 1, daemon)
    assert set(status) >= DESIGN_FIELDS
    last_round = status["last_round"]
    assert isinstance(last_round, dict)
    assert set(last_round) >= DESIGN_ROUND_FIELDS
    assert status["reason"]
    resident = status["resident_bytes"]
    assert isinstance(resident, dict)
    assert resident["supervisor"] + resident["daemon"] < 240e6

    with urllib.request.urlopen(f"http://{status['http']}/metrics", timeout=10) as answer:
        assert b"atoll_round " in answer.read()
    peers = json.loads(atoll(home, "peers", "--json").stdout)
    assert [peer["peer_id"] for peer in peers["peers"]] == [status["peer_id"]]
    assert atoll(home, "id").stdout.split() == [status["peer_id"], *status["addresses"]]  # type: ignore[misc]
    shown = atoll(home, "status").stdout
    assert re.search(rf"^peer id       {status['peer_id']} *$", shown, re.MULTILINE), shown

    second = atoll(home, "daemon", "--run", "micro")
    assert (second.returncode, second.stdout) == (2, "")
    assert second.stderr.startswith(f"a daemon (process {daemon.pid}) already runs on the home {home.path}")

    live = atoll(home, "export", str(tmp_path / "live"))
    assert live.returncode == 0, live.stderr
    assert (tmp_path / "live" / "model.safetensors").exists()

    started_s = time.monotonic()
    assert atoll(home, "stop").returncode == 0
    assert time.monotonic() - started_s < 11
    assert daemon.wait(5) == 0
    assert not home.daemon_file.exists()
    assert not home.control_socket.exists()
    story = output.read_text()
    assert "listening on /ip4/127.0.0.1/tcp/" in story
    assert "round committed" in story

    again = start(home, output, "--listen", "/ip4/127.0.0.1/tcp/0")
    resumed = wait_for_round(home, int(str(status["round"])), again)
    assert resumed["run_id"] == status["run_id"]
    again.send_signal(signal.SIGTERM)
    assert again.wait(11) == 0
    exported = atoll(home, "export", str(tmp_path / "cold"))
    assert exported.returncode == 0, exported.stderr
    assert (tmp_path / "cold" / "config.json").exists()


def test_a_swarm_in_one_command(tmp_path: Path) -> None:
    done = subprocess.run(
        command(
            "swarm", "--nodes", "2", "--rounds", "3", "--run", "micro", "--json", "--directory", str(tmp_path),
            "--timeout", "150",
        ),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["ok"]
    assert [one["contributors"] for one in report["rounds"]] == [2, 2, 2]
    assert len(set(report["state_hashes"].values())) == 1
    assert report["final_rounds"] == {"node-0": 3, "node-1": 3}
    assert report["loss_end"] < report["loss_start"]
    assert report["validation_loss_end"] < report["validation_loss_start"]
    assert 0.9 < report["bytes_per_parameter_round"] < 1.6
    assert (Path(report["model"]) / "model.safetensors").exists()
    assert not (tmp_path / "node-0").exists(), "homes go unless --keep"


@pytest.mark.chaos_long  # the demonstration kills one too
def test_a_killed_node_comes_back_and_all_end_equal(tmp_path: Path) -> None:
    with LocalSwarm(tmp_path, nodes=3, run="micro", rounds=40) as swarm:
        swarm.start_all()
        swarm.wait_round(2, timeout_s=START_S)
        swarm.kill(2)
        swarm.wait_round(4, timeout_s=START_S)
        swarm.restart(2)
        swarm.wait_finished(timeout_s=2 * START_S)
        finals = swarm.poll()
    assert {status.round for status in finals if status} == {40}
    assert len({status.state_hash for status in finals if status}) == 1
    assert all(status is not None for status in finals)


def test_no_node_outlives_a_killed_swarm(tmp_path: Path) -> None:
    arguments = ["swarm", "--nodes", "2", "--rounds", "1000", "--run", "micro", "--directory", str(tmp_path)]
    swarm = subprocess.Popen(command(*arguments), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    home = Home(tmp_path / "node-1")
    deadline_s = time.monotonic() + START_S
    while lock.holder(home) is None:
        assert time.monotonic() < deadline_s
        assert swarm.poll() is None
        time.sleep(0.1)
    swarm.kill()
    swarm.wait(10)
    deadline_s = time.monotonic() + 15
    while any(lock.holder(Home(tmp_path / f"node-{index}")) is not None for index in range(2)):
        assert time.monotonic() < deadline_s, "nodes outlived their swarm"
        time.sleep(0.1)
