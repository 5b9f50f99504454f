"""The operator's settings: precedence, shapes, and what a mistake reads like."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from node import settings
from node.cli.options import OperatorSettings, resolve
from node.errors import OperatorError
from node.home import Home
from node.settings import DaemonSettings


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    for key in OperatorSettings.model_fields:
        monkeypatch.delenv(f"ATOLL_{key.upper()}", raising=False)
    return Home(tmp_path)


def test_flag_before_environment_before_file_before_default(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve(home, {}).threads == 0
    home.config_file.write_text('threads = 1\nname = "garage"\n')
    assert resolve(home, {}).threads == 1
    monkeypatch.setenv("ATOLL_THREADS", "2")
    assert resolve(home, {}).threads == 2
    resolved = resolve(home, {"threads": 3})
    assert (resolved.threads, resolved.name) == (3, "garage")


def test_lists_come_from_all_three(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    home.config_file.write_text('join = ["/ip4/192.0.2.1/tcp/1"]\n')
    assert resolve(home, {}).join == ("/ip4/192.0.2.1/tcp/1",)
    monkeypatch.setenv("ATOLL_JOIN", "/ip4/192.0.2.2/tcp/1,/ip4/192.0.2.3/tcp/1 /ip4/192.0.2.4/tcp/1")
    assert len(resolve(home, {}).join) == 3
    assert resolve(home, {"join": ("x",)}).join == ("x",)


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("250MB", 250_000_000), ("2GiB", 2 << 30), ("1.5k", 1500), ("10", 10), ("3 TB", 3 * 10**12)],
)
def test_sizes(home: Home, text: str, size: int) -> None:
    assert resolve(home, {"max_disk": text}).max_disk == size


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"device": "tpu"}, "--device cannot be 'tpu': use auto, cpu, cuda, cuda:N or none"),
        ({"http": "8080"}, "--http cannot be '8080': write HOST:PORT such as 127.0.0.1:8080, or off"),
        ({"http": "a:99999"}, "--http cannot be 'a:99999': write HOST:PORT such as 127.0.0.1:8080, or off"),
        ({"data_port": 70_000}, "--data-port cannot be 70000: input should be less than or equal to 65535"),
        ({"max_rounds": 0}, "--max-rounds cannot be 0: input should be greater than or equal to 1"),
        ({"max_disk": "much"}, "--max-disk cannot be 'much': write a size such as 250MB or 2GiB"),
        ({"name": "a\x1b[31m"}, "--name cannot be 'a\\x1b[31m': use printable characters"),
        ({"log_level": "loud"}, "--log-level cannot be 'loud': input should be 'debug', 'info', 'warning' or 'error'"),
    ],
)
def test_a_mistake_names_the_flag_the_value_and_the_fix(home: Home, flags: dict[str, Any], sentence: str) -> None:
    with pytest.raises(OperatorError) as caught:
        resolve(home, flags)
    assert str(caught.value) == sentence


def test_a_mistake_elsewhere_names_the_place(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    home.config_file.write_text('device = "tpu"\n')
    with pytest.raises(OperatorError, match=rf"^device in {home.config_file} cannot be 'tpu'"):
        resolve(home, {})
    monkeypatch.setenv("ATOLL_DEVICE", "gpu")
    with pytest.raises(OperatorError, match=r"^ATOLL_DEVICE cannot be 'gpu'"):
        resolve(home, {})
    monkeypatch.delenv("ATOLL_DEVICE")
    home.config_file.write_text("listen_adress = 3\n")
    with pytest.raises(
        OperatorError, match=r"config\.toml has the unknown key 'listen_adress'; remove it, or use one of"
    ):
        resolve(home, {})
    home.config_file.write_text("listen = [\n")
    with pytest.raises(OperatorError, match=r"config\.toml is not valid TOML"):
        resolve(home, {})


def test_the_children_get_what_was_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = DaemonSettings(home="/srv/atoll", run_id="ab" * 32, join=("a", "b"), threads=3, device="none")
    monkeypatch.setenv(settings.SETTINGS_VARIABLE, sent.to_json())
    received = settings.from_environment()
    assert received == sent
    assert received.run_digest == bytes.fromhex("ab" * 32)
    assert not received.starts_trainer
    monkeypatch.delenv(settings.SETTINGS_VARIABLE)
    with pytest.raises(OperatorError, match="started by `atoll daemon`"):
        settings.from_environment()
    with pytest.raises(OperatorError, match="do not decode"):
        settings.from_json('{"home": 3}')


def test_every_setting_of_the_operator_reaches_the_daemon() -> None:
    """The two lists differ only where launching resolves something."""
    daemon = set(DaemonSettings.__struct_fields__)
    renamed = {
        "max_disk": "max_disk_bytes",
        "max_relay": "max_relay_bytes_s",
        "allow_function": "allow_functions",
    }
    operator = {renamed.get(key, key) for key in OperatorSettings.model_fields}
    assert operator - daemon == {"run", "set"}
    assert daemon - operator == {"home", "run_id", "resume_run_id"}
