"""Sections of docs/results.md that a command makes: what stands between its two marks is made anew, the rest kept."""

from __future__ import annotations

from pathlib import Path

from node.errors import OperatorError

DOCS = Path(__file__).parents[1] / "docs"
DOCUMENT = DOCS / "results.md"


def marks(command: str) -> tuple[str, str]:
    """`command` as people call it: `scripts/bench_round --record`."""
    return f"<!-- made by `{command}`: begin -->", f"<!-- made by `{command}`: end -->"


def with_section(text: str, command: str, made: str) -> str:
    """`text` with the section of `command` replaced; at its end if it has none. Raises `OperatorError`."""
    begin, end = marks(command)
    if begin not in text:
        return f"{text.rstrip()}\n\n{begin}\n{made}{end}\n"
    before, _, rest = text.partition(begin)
    _, mark, after = rest.partition(end)
    if not mark:
        raise OperatorError(f"{DOCUMENT} has {begin!r} without its end: write the line {end!r} behind the section")
    return f"{before}{begin}\n{made}{end}{after}"
