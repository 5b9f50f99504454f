"""The rows of the fault table, each a function that does the harm and checks what must hold.

A module here per row, `row_NN_words.py`, with `ROW = Row(…)`. Tests (`test_rows.py`) and `scripts/chaos` find them all
by themselves.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tests.chaos.lab import Lab

Note = str | int | float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a row that held has cost. None: the question does not arise there."""

    recover_s: float | None = None
    """From the harm to the next counted contribution of whoever was harmed; the median if there were several."""
    rounds_lost: int | None = None
    """Rounds of the others that were not committed, or not in the attempts allowed."""
    work_lost_tokens: int | None = None
    """Reported as discarded, or gone with a process; of whoever was harmed."""
    notes: dict[str, Note] = field(default_factory=dict)
    """Whatever else is worth knowing, with units in the names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    number: int
    fault: str
    must: str
    checks: str | None
    """What this row does and checks, for people: its module's docstring."""
    run: Callable[[Lab], Measured]
    """Raises AssertionError or `TooLate` for what did not hold."""
    in_ci: bool = False
    shares: bool = False
    """In its short form it can run on a swarm of four that served other rows before, and leaves it whole."""
    within_s: float = 300.0
    """The row's own deadline, on a quiet machine of two cores."""
    needs: Callable[[], str | None] = lambda: None
    """Why it cannot run on this machine; None: it can."""


def in_order(wanted: Iterable[Row], *, thorough: bool) -> list[Row]:
    """As they run: in the short form those that share a swarm first, one after another."""
    return sorted(wanted, key=lambda row: (not row.shares and not thorough, row.number))


def rows() -> dict[int, Row]:
    """All rows here, by number."""
    found = {}
    for module in pkgutil.iter_modules(__path__):
        if module.name.startswith("row_"):
            row: Row = importlib.import_module(f"{__name__}.{module.name}").ROW
            assert row.number not in found, f"two modules for row {row.number}"
            found[row.number] = row
    return dict(sorted(found.items()))
