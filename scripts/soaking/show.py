"""The report for people."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from scripts.soaking.judge import Report
from scripts.soaking.slope import Slope


def show(report: Report, console: Console) -> None:
    facts = Table.grid(padding=(0, 2))
    facts.add_row(
        "soak",
        f"{report.minutes:.1f} min, {report.nodes} founders, seed {report.seed}, {report.steps} steps a round, "
        f"{report.network}; {report.machine}",
    )
    facts.add_row(
        "rounds",
        f"{report.rounds} committed, {report.rounds_per_minute:.1f} a minute, {seconds(report.round_s_median)} median, "
        f"{seconds(report.round_s_worst)} worst",
    )
    facts.add_row("lineages", f"{report.lineages} ({report.lineages - 1} REFORMs), {len(report.forks)} forks")
    facts.add_row("hash mismatches", str(len(report.mismatches)))
    reasons = ", ".join(f"{count} × {why}" for why, count in sorted(report.exclusions.items())) or "none"
    facts.add_row("exclusions", f"{reasons}; {len(report.unexplained)} unexplained")
    loss = "-" if report.validation_loss is None else f"{report.validation_loss:.4f}"
    facts.add_row("validation loss", loss)
    for sentence in report.ended:
        facts.add_row("ended", sentence)
    console.print(facts)

    table = Table("event", "times", "measured", "median s", "worst s", "never", box=box.SIMPLE_HEAD, pad_edge=False)
    for kind, one in report.recoveries.items():
        table.add_row(
            kind, str(one.events), str(one.measured), seconds(one.median_s), seconds(one.worst_s), str(one.never)
        )
    console.print("until the node's next counted contribution:", table)

    table = Table("node", "produced", "counted", "carried", "discarded", "", box=box.SIMPLE_HEAD, pad_edge=False)
    for work in report.work:
        lost = ", ".join(f"{tokens} {why}" for why, tokens in work.discarded.items()) or "0"
        table.add_row(
            f"…{work.peer[-8:]}",
            str(work.produced),
            str(work.counted),
            str(work.carried),
            lost,
            "adds up" if work.balanced else f"DOES NOT ADD UP (the chain counts {work.counted_by_chain})",
        )
    table.add_row(
        "all",
        str(sum(work.produced for work in report.work)),
        str(sum(work.counted for work in report.work)),
        str(sum(work.carried for work in report.work)),
        str(sum(sum(work.discarded.values()) for work in report.work)),
        "",
    )
    console.print("work, in part-tokens:", table)

    table = Table("process", "MiB an hour", "descriptors an hour", "lived 5 min", box=box.SIMPLE_HEAD, pad_edge=False)
    for role, memory in report.memory_mib_per_hour.items():
        lived = str(memory.processes) if memory is not None else "0"
        table.add_row(role, slope_text(memory), slope_text(report.descriptors_per_hour.get(role)), lived)
    console.print("growth (95 % interval):", table)

    for failure in report.failures:
        console.print(f"FAILED: {failure}", style="bold red", soft_wrap=True, highlight=False)
    if not report.failures:
        console.print("passed: no fork, no mismatch, nothing unexplained, all work accounted for", style="bold green")


def seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def slope_text(one: Slope | None) -> str:
    if one is None:
        return "-"
    return f"{one.per_hour:+.2f} ± {one.margin:.2f}" + (" (noise)" if one.within_noise else "")
