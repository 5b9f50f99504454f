"""The report for people: one page."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from scripts.soaking.report import Report
from scripts.soaking.slope import Slope


def show(report: Report, console: Console) -> None:
    facts = Table.grid(padding=(0, 2))
    for name, words in summary(report):
        facts.add_row(name, words)
    console.print(facts)
    table = Table(*RECOVERY_HEADINGS, box=box.SIMPLE_HEAD, pad_edge=False, title="until the node's next counted work")
    for row in recovery_rows(report):
        table.add_row(*row)
    console.print(table)
    table = Table(*GROWTH_HEADINGS, box=box.SIMPLE_HEAD, pad_edge=False, title="growth (95 % intervals)")
    for row in growth_rows(report):
        table.add_row(*row)
    console.print(table)
    for words, times in sorted(report.said.items(), key=lambda item: -item[1]):
        console.print(f"{times:5} × {words}", highlight=False, soft_wrap=True)
    for failure in report.failures:
        console.print(f"FAILED: {failure}", style="bold red", soft_wrap=True, highlight=False)
    if not report.failures:
        console.print(PASSED, style="bold green", soft_wrap=True)


PASSED = "passed: no fork, no mismatch, nothing unexplained, all work accounted for, nothing grows, nothing left behind"


def summary(report: Report) -> list[tuple[str, str]]:
    whole = f"{report.minutes:.1f} min" if report.unfinished is None else f"{report.minutes:.1f} min, UNFINISHED"
    events = sum(report.events.values())
    reasons = ", ".join(f"{count} × {why}" for why, count in sorted(report.exclusions.items())) or "none"
    lost = ", ".join(f"{tokens:,} {why}" for why, tokens in sorted(report.reported_tokens.items()))
    reported = sum(report.reported_tokens.values())
    wrong = sum(1 for one in report.work if not one.balanced)
    return [
        (
            "soak",
            f"{whole}, {report.nodes} founders and {report.guests} homes of guests on `{report.preset}`, "
            f"{report.steps} steps a round, seed {report.seed}, {report.network}",
        ),
        ("machine", report.machine),
        ("events", f"{events}, one every {report.every_s:g} s: " + _counted(report.events)),
        (
            "rounds",
            f"{report.rounds} committed, {report.rounds_per_minute:.1f} a minute, {seconds(report.round_s_median)} s "
            f"median, {seconds(report.round_s_worst)} s worst",
        ),
        ("REFORMs", str(report.reforms)),
        ("silent forks", str(len(report.forks))),
        ("hash mismatches", str(len(report.mismatches))),
        ("exclusions", f"{reasons}; {len(report.unexplained)} unexplained"),
        (
            "work, tokens",
            f"{report.trained_tokens:,} trained = {report.counted_tokens:,} counted + {report.carried_tokens:,} "
            f"carried + {reported:,} reported as lost" + (f" ({lost})" if lost else ""),
        ),
        ("accounts", f"{len(report.work)} nodes to the last part-token, {wrong} of them wrong"),
        ("validation loss", "-" if report.validation_loss is None else f"{report.validation_loss:.4f}"),
    ]


RECOVERY_HEADINGS = ("event", "times", "measured", "median s", "worst s", "never")


def recovery_rows(report: Report) -> list[tuple[str, ...]]:
    return [
        (kind, str(one.events), str(one.measured), seconds(one.median_s), seconds(one.worst_s), str(one.never))
        for kind, one in report.recoveries.items()
    ]


GROWTH_HEADINGS = ("process", "MiB an hour", "at most, MiB", "descriptors an hour", "at most", "lives looked at")


def growth_rows(report: Report) -> list[tuple[str, ...]]:
    rows = []
    for role, memory in report.memory_mib_per_hour.items():
        descriptors = report.descriptors_per_hour.get(role)
        rows.append(
            (
                role,
                slope_text(memory),
                "-" if memory is None else f"{memory.highest:.0f}",
                slope_text(descriptors),
                "-" if descriptors is None else f"{descriptors.highest:.0f}",
                "0" if memory is None else str(memory.processes),
            )
        )
    return rows


def seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def slope_text(one: Slope | None) -> str:
    if one is None:
        return "-"
    return f"{one.per_hour:+.1f} ± {one.margin:.1f}" + (" (noise)" if one.within_noise else "")


def _counted(events: dict[str, int]) -> str:
    return ", ".join(f"{times} × {kind}" for kind, times in events.items()) or "none"
