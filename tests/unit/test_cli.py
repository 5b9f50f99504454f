"""The command line without a daemon: what it refuses and how, what it creates, and that it starts fast."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from node import memory
from node.cli import launch
from node.cli.launch import prepare
from node.cli.main import app
from node.cli.options import OperatorSettings, resolve
from node.daemon.identity import ensure_identity
from node.errors import OperatorError
from node.home import Home

PEER = "12D3KooWRRLrcyfVkJ5X5kSnLeyHCC7jn3mCBEYDFYgc2LV6MTwC"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    for key in [key for key in os.environ if key.startswith("ATOLL_")]:
        monkeypatch.delenv(key)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    (tmp_path / "runtime").mkdir(mode=0o700)
    return Home(tmp_path / "home")


def run(home: Home, *arguments: str) -> tuple[int, str, str]:
    """(exit status, standard output, standard error)."""
    result = CliRunner().invoke(app, [*arguments, "--home", str(home.path)])
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["status"], "no daemon runs on the home {home}: start one by `atoll daemon`"),
        (["status", "--json"], "no daemon runs on the home {home}: start one by `atoll daemon`"),
        (["status", "--watch"], "no daemon runs on the home {home}: start one by `atoll daemon`"),
        (["peers"], "no daemon runs on the home {home}: start one by `atoll daemon`"),
        (["stop"], "no daemon runs on the home {home}: there is nothing to stop"),
        (["id"], "the home {home} has no identity yet: make one by `atoll init`"),
        (["export", "out"], "the home {home} has no run: join one, or name another home by --home"),
        (
            ["daemon"],
            "the home {home} has no run yet: start one by `atoll daemon --run tiny`, "
            "or join one by `atoll join MULTIADDR`",
        ),
        (["daemon", "--set", "end.rounds=3"], "--set changes a run that is being created: name that run by --run"),
        (["daemon", "--run", "no.toml"], "no.toml does not exist: give a TOML file or one of the presets {presets}"),
        (["daemon", "--run", "ab" * 32], f"the home {{home}} has no run {'ab' * 32}: join it by one member's address"),
        (["daemon", "--device", "tpu"], "--device cannot be 'tpu': use auto, cpu, cuda, cuda:N or none"),
        (["join", "203.0.113.5:4001"], "The address '203.0.113.5:4001' cannot be used: it must look like {example}."),
        (
            ["daemon", "--join", "/ip4/203.0.113.5/tcp/4001"],
            "The address '/ip4/203.0.113.5/tcp/4001' names no peer: append /p2p/PEER_ID (`atoll id` on that machine "
            "prints it).",
        ),
        (
            ["daemon", "--listen", "/dns4/a.example/tcp/1"],
            "--listen '/dns4/a.example/tcp/1' cannot be used: listening needs an ip4 or ip6 address of this machine.",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_sentence_and_status_2(home: Home, arguments: list[str], sentence: str) -> None:
    code, output, errors = run(home, *arguments)
    expected = sentence.format(
        home=home.path, presets="tiny, micro, gpu-150m", example="/ip4/203.0.113.5/tcp/4001/p2p/PEER_ID"
    )
    assert (code, output, errors) == (2, "", expected + "\n")


@pytest.mark.parametrize(
    ("flag", "value", "busy"),
    [
        (
            "listen",
            "/ip4/127.0.0.1/tcp/{port}",
            "Cannot listen on 127.0.0.1:{port} (Address already in use): stop what",
        ),
        ("http", "127.0.0.1:{port}", "--http 127.0.0.1:{port} cannot be listened on (Address already in use); choose"),
        (
            "data_port",
            "{port}",
            "--data-port {port} cannot be listened on (Address already in use); choose another one",
        ),
    ],
)
def test_a_busy_port_is_found_before_anything_starts(home: Home, flag: str, value: str, busy: str) -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        flags = {flag: (value.format(port=port),) if flag == "listen" else value.format(port=port)}
        with pytest.raises(OperatorError) as caught:
            prepare(home, resolve(home, flags), lambda _: None)
    assert str(caught.value).startswith(busy.format(port=port))


def test_init_makes_an_identity_once_and_a_config_that_changes_nothing(home: Home) -> None:
    code, output, _ = run(home, "init")
    peer_id = ensure_identity(home).peer_id
    assert (code, output.split()) == (0, ["peer", "id", peer_id, "home", str(home.path)])
    assert resolve(home, {}).model_dump() == OperatorSettings().model_dump()
    home.config_file.write_text("threads = 5\n")
    assert run(home, "init")[1] == output
    assert home.config_file.read_text() == "threads = 5\n", "the operator's file stays"
    assert run(home, "id") == (0, f"{peer_id}\n", "")


def test_every_line_of_the_config_template_is_a_setting(home: Home) -> None:
    run(home, "init")
    lines = home.config_file.read_text().splitlines()
    home.config_file.write_text("\n".join(line.removeprefix("# ") for line in lines if " = " in line))
    assert resolve(home, {}).data_port == 4002
    assert set(OperatorSettings.model_fields) - resolve(home, {}).model_fields_set == {"set", "max_rounds"}


def test_joining_needs_no_run(home: Home) -> None:
    address = f"/ip4/203.0.113.5/tcp/4001/p2p/{PEER}"
    settings = prepare(home, resolve(home, {"join": (address,), "http": "127.0.0.1:0"}), lambda _: None)
    assert (settings.run_id, settings.resume_run_id, settings.join) == (None, None, (address,))
    assert home.identity_file.exists()


def test_the_port_of_last_time_is_used_again_unless_it_is_taken(home: Home) -> None:
    operator = resolve(home, {"join": (f"/ip4/203.0.113.5/tcp/4001/p2p/{PEER}",)})
    (first,) = prepare(home, operator, lambda _: None).listen
    assert prepare(home, operator, lambda _: None).listen == (first,)
    assert first.startswith("/ip4/0.0.0.0/tcp/")
    with socket.create_server(("0.0.0.0", int(first.rpartition("/")[2]))):
        (other,) = prepare(home, operator, lambda _: None).listen
    assert other != first
    assert prepare(home, operator, lambda _: None).listen == (other,)


@pytest.mark.slow
def test_a_run_is_created_once_and_resumed(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    named = {"run": "micro", "set": ("end.rounds=3",)}
    created = prepare(home, resolve(home, named), said.append)
    assert said[0] == "creating the run 'micro'"
    assert created.run_id is not None
    run_id = bytes.fromhex(created.run_id)
    assert home.manifest_file(run_id).exists()
    assert len(list((home.engine_directory(run_id) / "artifacts").iterdir())) >= 3

    said.clear()
    started_s = time.perf_counter()
    assert prepare(home, resolve(home, named), said.append).run_id == created.run_id
    assert time.perf_counter() - started_s < 0.5
    assert said == []
    assert prepare(home, resolve(home, {}), said.append).run_id == created.run_id, "plain `atoll daemon` goes on"
    assert prepare(home, resolve(home, {"run": created.run_id}), said.append).run_id == created.run_id
    other = prepare(home, resolve(home, {"run": "micro", "set": ("end.rounds=4",)}), said.append)
    assert other.run_id != created.run_id
    joining = prepare(home, resolve(home, {"join": (f"/ip4/203.0.113.5/tcp/4001/p2p/{PEER}",)}), said.append)
    assert (joining.run_id, joining.resume_run_id) == (None, other.run_id)

    monkeypatch.setattr(memory, "available_memory", lambda: 10 << 20)
    with pytest.raises(OperatorError, match=r"does not fit on this machine: 7.* MiB of memory needed, 10\.0 MiB avail"):
        prepare(home, resolve(home, {}), said.append)
    monkeypatch.undo()
    monkeypatch.setattr(launch, "disk_needed", lambda *_, **__: 1 << 60)
    with pytest.raises(OperatorError, match=r"of disk at .* needed, .* available; free disk, or choose another home"):
        prepare(home, resolve(home, {}), said.append)


def test_a_damaged_home_is_named(home: Home) -> None:
    home.path.mkdir()
    home.current_run_file.write_text("nonsense\n")
    sentence = f"{home.current_run_file} holds 'nonsense', not a run id; remove it, and join the run again\n"
    assert run(home, "daemon")[2] == sentence, "there is no run here that it could have been"


@pytest.mark.slow
@pytest.mark.parametrize("damage", [b"", b"torn", b"\xff\xfe", b"00" * 32], ids=["empty", "torn", "binary", "another"])
def test_a_damaged_run_file_is_set_aside_where_there_is_one_run(home: Home, damage: bytes) -> None:
    said: list[str] = []
    created = prepare(home, resolve(home, {"run": "micro"}), said.append)
    home.current_run_file.write_bytes(damage)
    said.clear()
    assert prepare(home, resolve(home, {}), said.append).run_id == created.run_id
    assert "it is set aside as run.damaged" in said[0]
    assert home.current_run_file.read_text().strip() == created.run_id
    # With two of them nobody knows which it was.
    prepare(home, resolve(home, {"run": "micro", "set": ("end.rounds=4",)}), said.append)
    home.current_run_file.write_bytes(damage)
    with pytest.raises(OperatorError, match="remove it, and join the run again"):
        prepare(home, resolve(home, {}), said.append)


@pytest.mark.slow
def test_a_damaged_manifest_is_set_aside_and_comes_from_the_peers(home: Home) -> None:
    said: list[str] = []
    created = prepare(home, resolve(home, {"run": "micro"}), said.append)
    assert created.run_id is not None
    path = home.manifest_file(bytes.fromhex(created.run_id))
    path.write_bytes(path.read_bytes()[:-1])
    said.clear()
    settings = prepare(home, resolve(home, {}), said.append)
    assert (settings.run_id, settings.resume_run_id) == (created.run_id, None), "the same run, from whoever has it"
    assert "is damaged" in said[0]
    assert not path.exists()
    assert path.with_name("manifest.msgpack.damaged").exists()


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["--help"], ["status"]], ids=["help", "status"])
def test_the_command_line_starts_fast(home: Home, arguments: list[str]) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "node.cli.main", *arguments]
    done = subprocess.run(
        command,
        env=os.environ | {"ATOLL_HOME": str(home.path)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    heavy = {
        "torch",
        "numpy",
        "libp2p",
        "trio",
        "pydantic_settings",
        "httpx",
        "transformers",
        "starlette",
        "scipy",
        "cryptography",
    }
    assert not imported & heavy


@pytest.mark.slow
def test_run_create_prints_the_id_and_nothing_else(home: Home) -> None:
    code, output, _ = run(home, "run", "create", "micro", "--set", "end.rounds=3", "--founder", PEER)
    run_id = bytes.fromhex(output.strip())
    assert (code, home.manifest_file(run_id).exists()) == (0, True)
    assert not home.current_run_file.exists(), "defining a run does not start it"
    wrong = run(home, "run", "create", "micro", "--set", "end.rounds")
    assert wrong == (2, "", "the override 'end.rounds' is not of the form KEY=VALUE, such as limits.min_peers=2\n")
