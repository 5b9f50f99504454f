"""`scripts/chaos`: any row of the fault table with real processes, and what it measured."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from datetime import date
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.chaos.lab import Labs
from tests.chaos.results import Result, record, result, write
from tests.chaos.rows import Measured, Row, in_order, rows


def run_row(row: Row, labs: Labs, console: Console, *, thorough: bool) -> Result:
    """Its outcome."""
    started_s = time.monotonic()

    def passed_s() -> float:
        return time.monotonic() - started_s

    def say(text: str) -> None:
        console.print(f"{passed_s():6.1f} s  {text}", highlight=False, soft_wrap=True, markup=False)

    console.print(f"\nrow {row.number}: {row.fault}", style="bold", highlight=False)
    lacking = row.needs()
    if lacking is not None:
        say(f"skipped: {lacking}")
        return result(row, "skipped", 0.0, short=not thorough, why=lacking)
    try:
        with labs.lab(f"row-{row.number}", shared=row.shares, say=say) as lab:
            measured = row.run(lab)
    except Exception as error:  # noqa: BLE001 - one row stops no other; Ctrl-C and SIGTERM are no Exception
        say(f"FAILED: {type(error).__name__}: {error}\n{''.join(traceback.format_tb(error.__traceback__)[-2:])}")
        return result(row, "FAILED", passed_s(), short=not thorough, why=str(error) or type(error).__name__)
    say("held")
    return result(row, "held", passed_s(), short=not thorough, measured=measured)


def show(results: list[Result], console: Console) -> None:
    made = Table(title=f"{date.today()}, {os.cpu_count()} cores", title_justify="left")
    for title in ("row", "outcome", "took", "recovers in", "rounds lost", "work lost"):
        made.add_column(title, no_wrap=True)
    for one in results:
        measured = one.measured or Measured()
        made.add_row(
            str(one.number),
            one.outcome,
            f"{one.seconds:.0f} s",
            "-" if measured.recover_s is None else f"{measured.recover_s:.1f} s",
            "-" if measured.rounds_lost is None else str(measured.rounds_lost),
            "-" if measured.work_lost_tokens is None else f"{measured.work_lost_tokens} tokens",
        )
    console.print()
    console.print(made)
    for one in results:
        notes = {} if one.measured is None else one.measured.notes
        for line in [one.why] if one.why else [f"{name} = {value}" for name, value in notes.items()]:
            console.print(f"row {one.number}: {line}", highlight=False, soft_wrap=True)


def chosen(words: list[str], known: dict[int, Row]) -> list[Row]:
    """Raises ValueError with one sentence."""
    picked: dict[int, Row] = {}
    for word in words:
        if word == "all":
            picked |= known
        elif word == "ci":
            picked |= {number: row for number, row in known.items() if row.in_ci}
        elif word.isdigit() and int(word) in known:
            picked[int(word)] = known[int(word)]
        else:
            raise ValueError(f"there is no row {word!r}: choose of {', '.join(map(str, known))}, or `ci`, or `all`")
    return [picked[number] for number in sorted(picked)]


def main() -> int:
    known = rows()
    parser = argparse.ArgumentParser(
        prog="scripts/chaos",
        description="Does harm to real nodes on this machine, row by row of docs/faults.md, and checks what must hold. "
        "Exit status 0: every row held.",
    )
    parser.add_argument("rows", nargs="*", metavar="ROW", help="numbers; `ci`: the six that CI runs; `all`")
    parser.add_argument("--short", action="store_true", help="as CI runs them, not with all variants")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there, too")
    parser.add_argument("--record", action="store_true", help="put what held into docs/faults.json and docs/faults.md")
    parser.add_argument("--list", action="store_true", help="say what each row does and checks")
    parser.add_argument("--directory", type=Path, help="for the homes (a temporary directory)")
    given = parser.parse_args()
    console = Console()
    # Ended from outside, it still takes down what it put up: nodes, namespaces, mounts.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    if given.record and not given.rows:
        record([], known)
        return 0
    if given.list or not given.rows:
        for row in known.values():
            console.print(
                f"{row.number:2}  {row.fault}{' (in CI)' if row.in_ci else ''}", style="bold", highlight=False
            )
            console.print(f"{row.must}\n\n{row.checks}", highlight=False, soft_wrap=True)
        return 0
    try:
        wanted = chosen(given.rows, known)
    except ValueError as error:
        parser.error(str(error))
    place: Path = (given.directory or Path(tempfile.mkdtemp(prefix="atoll-chaos-"))).absolute()
    thorough = not (given.short or "ci" in given.rows)
    labs = Labs(place, thorough=thorough)
    try:
        results: list[Result] = []
        for row in in_order(wanted, thorough=thorough):
            results.append(run_row(row, labs, console, thorough=thorough))
            # At once: a run of an hour that is ended half-way keeps what it has measured.
            if given.json is not None:
                write(results, given.json)
            if given.record:
                record(results[-1:], known)
    finally:
        labs.close()
    show(results, console)
    failed = any(one.outcome == "FAILED" for one in results)
    if failed:
        console.print(f"the homes and logs are in {place}", soft_wrap=True, highlight=False)
    elif given.directory is None:
        shutil.rmtree(place)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
