"""The newest soak that passed, of each kind, in docs/soak.json, and the section of docs/results.md made of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from scripts.sections import DOCS, DOCUMENT, with_section
from scripts.soaking import show
from scripts.soaking.report import Report

RECORD = DOCS / "soak.json"
COMMAND = "scripts/soak --record"
INTRODUCTION = """\
## Soaks: real nodes under random faults

Nodes in network namespaces of one machine; kinds, targets and times of the events are drawn from the seed before
anything runs. What passed had no silent fork, no hash mismatch, no exclusion that no event explains, no process that
grows, and accounts that add up to the last part-token. A time to recover is from the moment the harmed process may
run again until a commit counts work of the node that was begun after that: it holds the start of the interpreter,
PyTorch's import (five seconds of CPU time), catching up, and a round of its own.\
"""


def recorded(path: Path = RECORD) -> list[Report]:
    """Nothing is recorded yet: empty."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[Report])
    except FileNotFoundError:
        return []


def record(report: Report) -> None:
    """It takes the place of an older one that drew the same kinds of events, and the section is made anew."""
    known = {one.only: one for one in recorded()} | {report.only: report}
    ordered = [known[only] for only in sorted(known)]
    RECORD.write_bytes(msgspec.json.format(msgspec.json.encode(ordered), indent=1) + b"\n")
    DOCUMENT.write_text(with_section(DOCUMENT.read_text(), COMMAND, section(ordered)))


def section(reports: Sequence[Report]) -> str:
    """Markdown."""
    lines = [INTRODUCTION]
    for report in reports:
        what = f"only {' and '.join(report.only)}" if report.only else "everything"
        lines += ["", f"### {report.planned_minutes:g} minutes, {what}", "", f"`{report.command}`, {report.date}.", ""]
        lines += ["| | |", "|---|---|", *(f"| {name} | {words} |" for name, words in show.summary(report)), ""]
        lines += [*_table(show.RECOVERY_HEADINGS, show.recovery_rows(report)), ""]
        lines += _table(show.GROWTH_HEADINGS, show.growth_rows(report))
    return "\n".join(lines) + "\n"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    ruler = "|---|" + "---:|" * (len(headings) - 1)
    return [f"| {' | '.join(headings)} |", ruler, *(f"| {' | '.join(row)} |" for row in rows)]
