"""The short comparison, with real nodes: the swarm computes what one process computes from the same work."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.comparison.report import QUICK_AGREEMENT_PERCENT

pytestmark = [pytest.mark.swarm, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
LIMIT_S = 400.0


def test_the_swarm_trains_as_one_process_does(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "scripts.comparison", "--quick", "--output", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "compare.json").read_text())
    assert (result["nodes"], result["rounds"], result["steps_per_round"]) == (4, 4, 30)
    assert abs(result["difference_percent"]) <= result["agreement_percent"] == QUICK_AGREEMENT_PERCENT
    assert max(result["contributors"]) == 4
    if not result["guessed_rounds"]:
        assert result["identical_states"], f"rounds {result['different_rounds']} differ: {done.stdout}"
    for series in result["series"]:
        assert series["losses"][-1] < series["losses"][0] - 0.3, "it learns"
    assert (tmp_path / "compare.png").stat().st_size < 100_000
    assert "written to" in done.stdout
