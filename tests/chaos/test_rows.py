"""Rows of the fault table: those of CI, and by `pytest -m chaos_long` the others and the long forms of all."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.chaos.lab import Lab
from tests.chaos.rows import Row, rows

pytestmark = [pytest.mark.swarm, pytest.mark.slow]
ROWS = rows()


def named(row: Row) -> str:
    return f"row-{row.number}"


def run(row: Row, directory: Path, *, thorough: bool) -> None:
    lacking = row.needs()
    if lacking is not None:
        pytest.skip(lacking)
    with Lab(directory, thorough=thorough, say=lambda text: sys.stdout.write(f"{text}\n")) as lab:
        sys.stdout.write(f"{row.run(lab)}\n")


@pytest.mark.chaos
@pytest.mark.parametrize("row", [row for row in ROWS.values() if row.in_ci], ids=named)
def test_row(row: Row, tmp_path: Path) -> None:
    run(row, tmp_path, thorough=False)


@pytest.mark.chaos_long
@pytest.mark.parametrize("row", ROWS.values(), ids=named)
def test_row_at_length(row: Row, tmp_path: Path) -> None:
    run(row, tmp_path, thorough=True)
