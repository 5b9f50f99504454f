"""What rows have measured: `docs/faults.json`, the newest result of each, and `docs/faults.md`, made of it."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Mapping
from datetime import date
from pathlib import Path
from typing import Any, Literal

import msgspec

from node.artifacts import write_atomically
from tests.chaos.rows import Measured, Row

DOCS = Path(__file__).parents[2] / "docs"
RECORD = DOCS / "faults.json"
DOCUMENT = DOCS / "faults.md"

Outcome = Literal["held", "FAILED", "skipped"]


class Result(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    outcome: Outcome
    why: str = ""
    """Of a failure, or why it was skipped."""
    seconds: float
    short: bool = False
    """In the form of CI, not at length."""
    measured: Measured | None = None
    date: str
    machine: str


def here() -> str:
    """The machine, and how much else it did (load average of five minutes): most of a recovery is a start."""
    return f"{os.cpu_count()} cores {platform.machine()}, no GPU; load average {os.getloadavg()[1]:.0f}"


def result(
    row: Row, outcome: Outcome, seconds: float, *, short: bool, why: str = "", measured: Measured | None = None
) -> Result:
    return Result(
        number=row.number,
        outcome=outcome,
        why=why,
        seconds=round(seconds, 1),
        short=short,
        measured=measured,
        date=date.today().isoformat(),
        machine=here(),
    )


def recorded(path: Path = RECORD) -> dict[int, Result]:
    """By row. Nothing is recorded yet: empty."""
    try:
        listed = msgspec.json.decode(path.read_bytes(), type=list[Result])
    except FileNotFoundError:
        return {}
    return {one.number: one for one in listed}


def write(results: Iterable[Result], path: Path) -> None:
    plain: list[dict[str, Any]] = [msgspec.to_builtins(one) for one in sorted(results, key=lambda one: one.number)]
    # After every row, of a run of an hour: ended at that very moment it must not leave half a record.
    write_atomically((json.dumps(plain, indent=1) + "\n").encode(), path)


def record(results: Iterable[Result], rows: Mapping[int, Row]) -> None:
    """The newest that held takes the place of an older one, and the document is made anew."""
    known = recorded() | {one.number: one for one in results if one.outcome == "held"}
    write(known.values(), RECORD)
    write_atomically(document(rows, known).encode(), DOCUMENT)


# ---------------------------------------------------------------- the document

HEAD = """\
# Faults: what is done to real nodes, and what they do

Each row is harm done to real processes on one machine by one command, and checked; nothing is simulated here (what is:
`scripts/simulate`). This file is made by `scripts/chaos ROW … --record` from the rows themselves (`tests/chaos/rows`)
and from the newest figures of each (`faults.json`).

```
scripts/chaos --list           # what each row does and checks
scripts/chaos 1 24             # these, at length
scripts/chaos ci               # the six of CI as CI runs them (`pytest -m chaos`)
scripts/chaos all --json FILE  # everything (`pytest -m chaos_long`)
```

*Recovers*: from the harm until a committed round counts the harmed node's work again, the median if it was harmed more
than once. *Rounds lost*: rounds of the others that were not committed, or needed more attempts than the row allows.
*Work lost*: tokens that the harmed node reports as discarded. Rounds of the run `micro` take about a second when nobody
is harmed; nodes start in ten to twenty seconds on a machine of two cores, which is most of a recovery by restart.

"""


def document(rows: Mapping[int, Row], results: Mapping[int, Result]) -> str:
    lines = [
        "| row | fault | must | held | recovers | rounds lost | work lost |",
        "|---|---|---|---|---|---|---|",
    ]
    for number, row in rows.items():
        one = results.get(number)
        measured = (one.measured if one is not None else None) or Measured()
        cells = (
            f"[{number}](#row-{number}){' CI' if row.in_ci else ''}",
            row.fault,
            row.must,
            one.date if one is not None else "not measured",
            "" if measured.recover_s is None else f"{measured.recover_s:.1f} s",
            "" if measured.rounds_lost is None else str(measured.rounds_lost),
            "" if measured.work_lost_tokens is None else f"{measured.work_lost_tokens} tokens",
        )
        lines.append(f"| {' | '.join(cells)} |")
    parts = [HEAD + "\n".join(lines) + "\n"]
    parts += [_section(row, results.get(number)) for number, row in rows.items()]
    return "\n".join(parts)


def _section(row: Row, one: Result | None) -> str:
    text = f"## Row {row.number}\n\n{(row.checks or '').strip()}\n\n`scripts/chaos {row.number}`"
    text += f" · `pytest -m chaos_long -k 'row-{row.number}]'`" + (" · in CI, in short\n" if row.in_ci else "\n")
    if one is None:
        return text
    form = "in short" if one.short else "at length"
    text += f"\nHeld on {one.date} {form} in {one.seconds:.0f} s ({one.machine}).\n"
    notes = one.measured.notes if one.measured is not None else {}
    return text + ("\n" + "\n".join(f"- {name} = {value}" for name, value in notes.items()) + "\n" if notes else "")
