"""Rows of the fault table: those of CI, and by `pytest -m chaos_long` all of them at length."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.lab import Lab, Labs
from tests.chaos.rows import Row, in_order, rows

pytestmark = [pytest.mark.swarm, pytest.mark.slow]
ROWS = rows()


def named(row: Row) -> str:
    return f"row-{row.number}"


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def skip_if_impossible(row: Row) -> None:
    lacking = row.needs()
    if lacking is not None:
        pytest.skip(lacking)


@pytest.fixture(scope="module")
def labs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Labs]:
    made = Labs(tmp_path_factory.mktemp("rows"), thorough=False)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.chaos
@pytest.mark.parametrize("row", in_order((row for row in ROWS.values() if row.in_ci), thorough=False), ids=named)
def test_row(row: Row, labs: Labs) -> None:
    skip_if_impossible(row)
    with labs.lab(named(row), shared=row.shares, say=say) as lab:
        say(str(row.run(lab)))


@pytest.mark.chaos_long
@pytest.mark.parametrize("row", ROWS.values(), ids=named)
def test_row_at_length(row: Row, tmp_path: Path) -> None:
    skip_if_impossible(row)
    with Lab(tmp_path, thorough=True, say=say) as lab:
        say(str(row.run(lab)))
