"""`scripts/chaos` with several rows: one that fails stops no other, and each is written as soon as it has ended."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.chaos import chaos_cli
from tests.chaos.lab import Lab
from tests.chaos.rows import Measured


def test_a_failing_row_stops_no_other_and_each_is_written_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "results.json"
    written: list[list[str]] = []

    def outcomes() -> list[str]:
        return [line["outcome"] for line in json.loads(file.read_text())] if file.exists() else []

    def holds(lab: Lab) -> Measured:
        written.append(outcomes())
        return Measured()

    def fails(lab: Lab) -> Measured:
        written.append(outcomes())
        raise subprocess.TimeoutExpired("ip", 1)

    known = {
        number: SimpleNamespace(number=number, fault="", shares=False, needs=lambda: None, run=run)
        for number, run in ((1, holds), (2, fails), (3, holds))
    }
    monkeypatch.setattr(chaos_cli, "rows", lambda: known)
    monkeypatch.setattr(chaos_cli, "in_order", lambda wanted, thorough: wanted)
    monkeypatch.setattr(chaos_cli.signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(
        sys, "argv", ["chaos", "1", "2", "3", "--json", str(file), "--directory", str(tmp_path / "homes")]
    )

    assert chaos_cli.main() == 1
    assert written == [[], ["held"], ["held", "FAILED"]]
    assert outcomes() == ["held", "FAILED", "held"]
