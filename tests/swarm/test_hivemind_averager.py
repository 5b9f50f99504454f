"""Our code around hivemind's averager, checked where hivemind is (`hivemind_checks.py`).

Under that environment's NumPy and under this one's: from 2.4 on hivemind's own 8-bit codec delivers a quarter.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from node.engine.hivemind import environment

pytestmark = [pytest.mark.slow, pytest.mark.swarm]

SCRIPT = Path(__file__).with_name("hivemind_checks.py")
CHECKS = re.findall(r"^    (\w+),", SCRIPT.read_text().partition("CHECKS = (")[2].partition("\n)")[0], re.MULTILINE)
PYTHON = os.environ.get(environment.VARIABLE, "")
WHY_NOT = environment.why_missing(PYTHON)
LIMIT_S = 120.0 * float(os.environ.get("ATOLL_TEST_PATIENCE", "1"))


def numpy_of_ours(folder: Path) -> str:
    """A folder in which nothing but this environment's NumPy is found."""
    for name in ("numpy", "numpy.libs"):
        target = Path(np.__file__).parents[1] / name
        if target.exists():
            (folder / name).symlink_to(target)
    return str(folder)


@cache
def outcomes(*more: str) -> dict[str, str]:
    """Check → why it failed."""
    command = [PYTHON or sys.executable, "-I", str(SCRIPT), str(environment.PROGRAM.parent), *more]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    said = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    return {one["check"]: one["why"] for one in said} | ({"": ran.stderr[-2000:]} if ran.returncode else {})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return numpy_of_ours(tmp_path_factory.mktemp("numpy"))


@pytest.mark.skipif(WHY_NOT is not None, reason=f"hivemind's averager is not checked: {WHY_NOT}")
@pytest.mark.parametrize("numpy", ["its-own", "of-this-environment"])
@pytest.mark.parametrize("check", CHECKS)
def test_with_numpy(check: str, numpy: str, folder: str) -> None:
    found = outcomes() if numpy == "its-own" else outcomes(folder)
    assert found.get(check, f"it was not reached: {found.get('')}") == ""
