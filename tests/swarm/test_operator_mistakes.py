"""What an operator gets wrong is one sentence on standard error that names the value and the fix; exit status 2."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import pytest
from daemons import COMMAND_S, PATIENCE, atoll, command, daemons, environment

pytestmark = [pytest.mark.swarm, pytest.mark.slow]

QUICK_S = 8.0 * PATIENCE
"""For a mistake that needs no network to be seen."""
JOIN_S = 45.0 * PATIENCE
"""A run is looked for during 30 s before its absence is a mistake."""

PROGRESS = ("creating the run ", "initialising the model")
"""What a run's creation says before it comes to the mistake."""

NOBODY = "12D3KooWGzBkbRWrqnCfLVbnhqTMQQvCFEJWFNVqJ3CqaFyAHsRX"
"""A well-formed peer id; nobody has its key."""
ANY = "/ip4/127.0.0.1/tcp/0"


def refused(*arguments: str, within_s: float = QUICK_S, names: tuple[str, ...]) -> str:
    """Run `atoll daemon ARGUMENTS`; all that must hold of any refusal. Returns the sentence."""
    started_s = time.monotonic()
    done = atoll("daemon", *arguments, timeout_s=COMMAND_S + within_s)
    seconds = time.monotonic() - started_s
    return judge(done.returncode, done.stdout, done.stderr, seconds, within_s, names)


def judge(code: int, stdout: str, stderr: str, seconds: float, within_s: float, names: tuple[str, ...]) -> str:
    assert code == 2, (code, stdout, stderr)
    assert "Traceback" not in stderr + stdout
    lines = [line for line in stderr.splitlines() if line.strip() and not line.startswith(PROGRESS)]
    assert len(lines) == 1, stderr
    sentence = lines[0]
    for name in names:
        assert name in sentence, f"{name!r} is not in: {sentence}"
    assert len(sentence) < 500, sentence
    assert seconds < within_s, f"{seconds:.1f} s until: {sentence}"
    return sentence


@pytest.fixture
def home(tmp_path: Path) -> Iterator[str]:
    with daemons(tmp_path) as make:
        yield str(make("home").home.path)


@dataclass(kw_only=True)
class Joiner:
    """A daemon that was sent to an address where no run is."""

    address: str
    why: str
    code: int = -1
    stdout: str = ""
    stderr: str = ""
    seconds: float = 0.0

    def join(self, home: Path) -> None:
        started_s = time.monotonic()
        done = atoll("daemon", "--home", str(home), "--listen", ANY, "--join", self.address, timeout_s=2 * JOIN_S)
        self.seconds = time.monotonic() - started_s
        self.code, self.stdout, self.stderr = done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module", autouse=True)
def joiners(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], list[Joiner]]]:
    """Both wait for 30 s beside the other tests of this module: a refused connection, and one that nobody answers."""
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        socket.socket() as closed,
        ThreadPoolExecutor(max_workers=2) as threads,
    ):
        closed.bind(("127.0.0.1", 0))
        made = [
            Joiner(address=f"/ip4/127.0.0.1/tcp/{one.getsockname()[1]}/p2p/{NOBODY}", why=why)
            for one, why in ((closed, "refused"), (silent, "no answer"))
        ]
        homes = tmp_path_factory.mktemp("joiners")
        waiting = [threads.submit(one.join, homes / str(index)) for index, one in enumerate(made)]

        def joined() -> list[Joiner]:
            for one in waiting:
                one.result()
            return made

        yield joined


# ---------------------------------------------------------------- the run's definition

MICRO = (resources.files("node") / "presets" / "micro.toml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        ('name = "micro"', "name = ", ("run.toml", "line 2")),
        ("steps = 30", 'steps = "many"', ("run.toml", "rounds.steps", "'many'", "whole number")),
        ("steps = 30", "steps = 0", ("run.toml", "rounds.steps", "0", "at least 1")),
        ("min_peers = 1", "min_pears = 1", ("run.toml", "limits.min_pears", "limits.min_peers")),
    ],
)
def test_a_bad_definition(home: str, tmp_path: Path, old: str, new: str, names: tuple[str, ...]) -> None:
    path = tmp_path / "run.toml"
    assert old in MICRO
    path.write_text(MICRO.replace(old, new), encoding="utf-8")
    refused("--home", home, "--run", str(path), names=names)


def test_an_unknown_preset(home: str) -> None:
    refused("--home", home, "--run", "gigantic", names=("gigantic", "tiny", "micro"))


def test_a_run_that_averages_by_hivemind_where_that_is_not_installed(home: str, tmp_path: Path) -> None:
    without = tmp_path / "python-without-it"
    without.write_text("#!/bin/sh\nexit 1\n")
    without.chmod(0o755)
    Path(home).mkdir(exist_ok=True)
    Path(home, "config.toml").write_text(f'hivemind_python = "{without}"\n')
    path = tmp_path / "run.toml"
    path.write_text(MICRO.replace("[rounds]\n", '[rounds]\nengine = "hivemind"\n'), encoding="utf-8")
    names = ("'micro'", "rounds.engine", str(without), "pip install 'atoll[hivemind]'", "ATOLL_HIVEMIND_PYTHON")
    refused("--home", home, "--run", str(path), names=names)


def test_no_run_at_all(home: str) -> None:
    refused("--home", home, names=(home, "atoll daemon --run tiny", "atoll join MULTIADDR"))


# ---------------------------------------------------------------- addresses and ports


@pytest.mark.parametrize(
    ("address", "names"),
    [
        ("203.0.113.5:4001", ("203.0.113.5:4001", "/ip4/203.0.113.5/tcp/4001/p2p/PEER_ID")),
        ("/ip4/127.0.0.1/tcp/7190", ("/ip4/127.0.0.1/tcp/7190", "/p2p/PEER_ID", "atoll id")),
        (f"/ip4/127.0.0.256/tcp/7190/p2p/{NOBODY}", ("127.0.0.256", "ip4")),
        ("/ip4/127.0.0.1/tcp/7190/p2p/Qm", ("'Qm'", "12D3KooW")),
    ],
)
def test_a_bad_address(home: str, address: str, names: tuple[str, ...]) -> None:
    refused("--home", home, "--join", address, names=names)


@pytest.mark.parametrize(
    ("flag", "value", "names"),
    [
        ("--listen", "/ip4/127.0.0.1/tcp/{port}", ("127.0.0.1:{port}", "--listen")),
        ("--http", "127.0.0.1:{port}", ("--http 127.0.0.1:{port}", "off")),
        ("--data-port", "{port}", ("--data-port {port}", "another")),
    ],
)
def test_a_busy_port(home: str, flag: str, value: str, names: tuple[str, ...]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        listen = () if flag == "--listen" else ("--listen", ANY)
        arguments = ("--home", home, "--run", "micro", *listen, flag, value.format(port=port))
        refused(*arguments, names=("in use", *(name.format(port=port) for name in names)))


def test_an_address_of_another_machine(home: str) -> None:
    listen = "/ip4/203.0.113.5/tcp/0"
    refused("--home", home, "--run", "micro", "--listen", listen, names=("203.0.113.5", "address of this machine"))


# ---------------------------------------------------------------- the home and the machine


def test_a_second_daemon_on_the_same_home(tmp_path: Path) -> None:
    with daemons(tmp_path) as make:
        first = make("home").start("--run", "micro", "--no-trainer", "--listen", ANY)
        first.wait_listening()
        home = str(first.home.path)
        refused("--home", home, names=(home, f"process {first.pid}", "atoll stop"))
        refused("--home", home, "--join", f"/ip4/127.0.0.1/tcp/1/p2p/{NOBODY}", names=(home, str(first.pid)))
        assert first.running
        assert first.status().peer_id


def test_an_identity_that_others_can_read(home: str) -> None:
    assert atoll("init", "--home", home).returncode == 0
    key = Path(home) / "identity.key"
    key.chmod(0o644)
    refused("--home", home, "--run", "micro", names=(str(key), "chmod 600"))


def test_too_little_memory_to_create_the_run(home: str) -> None:
    refused(
        "--home", home, "--run", "micro", "--set", "model.config.hidden_size=65536",
        within_s=3 * QUICK_S, names=("memory needed", "available", "model.config"),
    )  # fmt: skip


@contextmanager
def memory_limit(limit: str) -> Iterator[Path]:
    """A memory cgroup, of version 1 or 2; its processes are to be gone at the end. Skips where none can be made."""
    root = Path("/sys/fs/cgroup")
    parent, name = (root / "memory", "memory.limit_in_bytes") if (root / "memory").is_dir() else (root, "memory.max")
    group = parent / f"atoll-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here ({error.strerror})")
    try:
        try:
            (group / name).write_text(limit)
        except OSError as error:
            pytest.skip(f"no memory limit can be set here ({error.strerror})")
        yield group
    finally:
        group.rmdir()


def test_too_little_memory_for_a_node(home: str) -> None:
    with memory_limit("500M") as group:
        inside = f'echo $$ > {group}/cgroup.procs && exec "$@"'
        started_s = time.monotonic()
        done = subprocess.run(
            ["sh", "-c", inside, "sh", *command("daemon", "--home", home, "--run", "micro", "--listen", ANY)],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )
        seconds = time.monotonic() - started_s
        names = ("'micro'", "memory needed", "available", "smaller model")
        judge(done.returncode, done.stdout, done.stderr, seconds, 3 * QUICK_S, names)


@pytest.mark.skipif(os.geteuid() != 0, reason="a small file system is mounted by root only")
def test_too_little_disk(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "none", str(small)], check=False)
    if mounted.returncode != 0:
        pytest.skip("a tmpfs cannot be mounted here")
    try:
        home = small / "home"
        refused("--home", str(home), "--run", "micro", within_s=3 * QUICK_S, names=(str(home), "disk"))
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_nobody_and_somebody_else_at_the_address(joiners: Callable[[], list[Joiner]]) -> None:
    for one in joiners():
        judge(one.code, one.stdout, one.stderr, one.seconds, JOIN_S, (one.address, "30 s", "atoll id", one.why))
