"""The soak in its short form, with its own verdict; and that nothing is left of one that is interrupted or killed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from daemons import PATIENCE, interruptible

pytestmark = [pytest.mark.swarm, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
SHORT = ["--nodes", "3", "--guests", "0", "--steps", "60", "--no-namespaces"]
WHOLE_S = 200.0 * PATIENCE
END_S = 20.0


def soak(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "scripts.soaking", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def of_homes(directory: Path) -> list[psutil.Process]:
    """Processes that belong to nodes whose homes lie in `directory`."""
    found = []
    for process in psutil.process_iter():
        try:
            if str(directory) in process.environ().get("ATOLL_HOME", ""):
                found.append(process)
        except psutil.Error:
            continue
    return found


def any_is_frozen(directory: Path) -> bool:
    for process in of_homes(directory):
        with contextlib.suppress(psutil.Error):
            if process.status() == psutil.STATUS_STOPPED:
                return True
    return False


def test_the_short_soak_passes(tmp_path: Path) -> None:
    report_file = tmp_path / "report.json"
    options = [*SHORT, "--minutes", "0.5", "--every", "6", "--seed", "5", "--json", str(report_file)]
    process = soak(*options, "--directory", str(tmp_path / "soak"))
    try:
        output, _ = process.communicate(timeout=WHOLE_S)
    finally:
        process.kill()
    assert process.returncode == 0, output
    report = json.loads(report_file.read_text())
    assert report["failures"] == []
    assert sum(report["events"].values()) >= 3
    assert report["rounds"] >= 3
    assert not (tmp_path / "soak").exists()


@pytest.mark.chaos_long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_of_a_soak_that_is_ended(tmp_path: Path, number: signal.Signals) -> None:
    """With a node frozen at that moment, which can notice nothing by itself."""
    directory = tmp_path / "soak"
    with interruptible():
        process = soak(*SHORT, "--every", "1", "--only", "freeze", "--minutes", "5", "--directory", str(directory))
    try:
        deadline_s = time.monotonic() + 120 * PATIENCE
        while not any_is_frozen(directory):
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline_s, "no node was ever frozen"
            time.sleep(0.1)
        process.send_signal(number)
        process.communicate(timeout=END_S + 10)
        deadline_s = time.monotonic() + END_S
        while left := of_homes(directory):
            assert time.monotonic() < deadline_s, [one.pid for one in left]
            time.sleep(0.1)
        if number is signal.SIGINT:
            assert process.returncode == 130
            assert not directory.exists()
    finally:
        process.kill()


@pytest.mark.chaos_long
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="network namespaces need root and `ip`")
def test_cables_are_pulled_in_namespaces_that_are_removed(tmp_path: Path) -> None:
    before = namespaces()
    options = ["--nodes", "3", "--guests", "0", "--steps", "60", "--minutes", "0.4", "--every", "8", "--seed", "7"]
    process = soak(*options, "--only", "cut", "--directory", str(tmp_path / "soak"), "--json", str(tmp_path / "report"))
    try:
        output, _ = process.communicate(timeout=WHOLE_S)
    finally:
        process.kill()
    if "ip netns add" in output:
        pytest.skip(f"this kernel makes no such namespaces: {output}")
    assert process.returncode == 0, output
    assert json.loads((tmp_path / "report").read_text())["events"]["cut"] >= 1
    assert namespaces() == before


def namespaces() -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=20, check=True).stdout
    return {line.split()[0] for line in listed.splitlines() if line.startswith("soak-")}
