"""The newest batch of schedules of each range of sizes, in docs/simulation.json, and the section of docs/results.md."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from sim_batch import Tally
from sim_profiles import PROFILES

from scripts.sections import DOCS, DOCUMENT, with_section

RECORD = DOCS / "simulation.json"
COMMAND = "scripts/simulate --record"
INTRODUCTION = """\
## Simulated schedules

The real `protocol/` code, all peers in one thread under a virtual clock, with random faults drawn from the seed;
the invariants of docs/protocol.md, section 12, are checked after every event. `scripts/simulate --help` says what each
profile does to its swarms. A violation prints the command that replays its schedule with a trace.\
"""


@dataclass(frozen=True, kw_only=True)
class Row:
    """Schedules of one profile."""

    profile: str
    schedules: int
    commits: int
    events: int
    violations: int
    cpu_s: float
    longest_s: float
    """The longest that a connected quorum took for a commit, by the virtual clock."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    command: str
    date: str
    machine: str
    sizes: tuple[int, int]
    """Fewest and most peers that were asked for."""
    rows: tuple[Row, ...]


def rows_of(tallies: Iterable[Tally]) -> tuple[Row, ...]:
    ordered = sorted(tallies, key=lambda tally: list(PROFILES).index(tally.profile))
    return tuple(
        _row(profile, list(group)) for profile, group in itertools.groupby(ordered, key=lambda tally: tally.profile)
    )


def _row(profile: str, tallies: Sequence[Tally]) -> Row:
    return Row(
        profile=profile,
        schedules=sum(tally.schedules for tally in tallies),
        commits=sum(tally.commits for tally in tallies),
        events=sum(tally.events for tally in tallies),
        violations=sum(len(tally.failures) for tally in tallies),
        cpu_s=round(sum(tally.cpu_s for tally in tallies), 1),
        longest_s=round(max(tally.longest_s for tally in tallies), 1),
    )


def recorded(path: Path = RECORD) -> list[Batch]:
    """Nothing is recorded yet: empty."""
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return []
    return [
        Batch(**{**one, "sizes": tuple(one["sizes"]), "rows": tuple(Row(**row) for row in one["rows"])})
        for one in found
    ]


def record(batch: Batch) -> None:
    """It takes the place of an older one of the same sizes, and the section is made anew."""
    known = {one.sizes: one for one in recorded()} | {batch.sizes: batch}
    ordered = [known[sizes] for sizes in sorted(known)]
    RECORD.write_text(json.dumps([asdict(one) for one in ordered], indent=1) + "\n")
    DOCUMENT.write_text(with_section(DOCUMENT.read_text(), COMMAND, section(ordered)))


def section(batches: Sequence[Batch]) -> str:
    """Markdown: what each batch came to, and which profiles played how many."""
    lines = [
        INTRODUCTION,
        "",
        "| peers | schedules | commits | events | violations | core-hours | longest wait for a commit |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for batch in batches:
        rows = batch.rows
        lines.append(
            f"| {_sizes(batch)} | {sum(row.schedules for row in rows):,} | {sum(row.commits for row in rows):,} | "
            f"{sum(row.events for row in rows):,} | {sum(row.violations for row in rows):,} | "
            f"{sum(row.cpu_s for row in rows) / 3600:.2f} | {max(row.longest_s for row in rows):,.0f} s |"
        )
    lines += ["", *(f"{_sizes(batch)} peers: `{batch.command}`, {batch.date}, {batch.machine}.  " for batch in batches)]
    lines += ["", "Schedules of each profile, and violations where there are any:", ""]
    lines += [f"| profile | {' | '.join(f'{_sizes(batch)} peers' for batch in batches)} |"]
    lines += ["|---|" + "---:|" * len(batches)]
    by_profile = [{row.profile: row for row in batch.rows} for batch in batches]
    for profile in PROFILES:
        cells = [_cell(rows.get(profile)) for rows in by_profile]
        lines.append(f"| {profile} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _sizes(batch: Batch) -> str:
    fewest, most = batch.sizes
    return str(fewest) if fewest == most else f"{fewest}–{most}"


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    return f"{row.schedules:,}" + (f" (**{row.violations}**)" if row.violations else "")
