"""A benchmark as a table, JSON and a plot; and each case's newest figures in docs/bench.json and docs/results.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from scripts import sections
from scripts.benchmark.contestant import ENCODE, EXCHANGE
from scripts.benchmark.record import CaseResult, Run
from scripts.sections import DOCS, DOCUMENT

RECORD = DOCS / "bench.json"
COMMAND = "scripts/bench_round --record"

# ---------------------------------------------------------------- shown


def show(run: Run, console: Console) -> None:
    for group in _groups(run.results):
        first = group[0]
        table = Table(box=box.SIMPLE_HEAD, title=f"{first.lab.words}; {first.elements:,} values", title_justify="left")
        table.add_column("engine", no_wrap=True)
        for heading in HEADINGS:
            table.add_column(heading, justify="right")
        for one in group:
            if one.measured:
                table.add_row(one.title, *cells(one))
            else:
                table.add_row(one.title, "-", *[""] * (len(HEADINGS) - 1))
        console.print(table)
        for one in group:
            if said := remarks(one):
                console.print(f"{one.title}: {said}", highlight=False, soft_wrap=True)
    console.print(f"{run.machine}; {run.date}", highlight=False, soft_wrap=True)


HEADINGS = ("seconds", "limit", "÷ limit", "encode", "apart", "MB a line", "CPU ns", "+ encode", "peak MB", "rms error")


def cells(one: CaseResult) -> tuple[str, ...]:
    """What `HEADINGS` name."""
    apart = one.matching_s or one.outer_s
    return (
        f"{one.exchange_s:.2f}",
        f"{one.limit_s:.2f}",
        f"{one.ratio:.2f}",
        f"{one.median_s(ENCODE):.2f}" if ENCODE in one.counted[0].phases else "",
        f"{apart:.2f}" if apart else "",
        f"{one.busiest_line_bytes / 1e6:.1f}",
        f"{one.cpu_ns(EXCHANGE):.1f}",
        f"{one.cpu_ns(ENCODE, EXCHANGE):.1f}",
        f"{one.peak_bytes / 1e6:.0f}",
        f"{one.rms_error:.1e}",
    )


def remarks(one: CaseResult) -> str:
    """What failed, bytes on the lines of sites, and its place among the others."""
    said = [one.failure] if one.failure else []
    if not one.measured:
        return "; ".join(said)
    said += [f"{one.site_line_bytes(site.name) / 1e6:.1f} MB on the line of {site.name}" for site in one.lab.sites]
    said += [f"{ratio:.2f} × as fast as {title}" for title, ratio in one.others.items()]
    return "; ".join(said)


def _groups(results: Iterable[CaseResult]) -> list[list[CaseResult]]:
    """Cases of one lab and size, in the order in which they came."""
    groups: dict[tuple[str, int], list[CaseResult]] = {}
    for one in results:
        groups.setdefault(one.key[:2], []).append(one)
    return list(groups.values())


# ---------------------------------------------------------------- written


def write(run: Run, folder: Path) -> None:
    """`bench.json`, with every repetition, and `bench.png`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bench.json").write_bytes(_json(run))
    plot(run.results, folder / "bench.png")


def _json(value: object) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"


def plot(results: Sequence[CaseResult], path: Path) -> None:
    """Seconds of each engine beside its link limit, a panel for each lab and size."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colours = {"atoll": "#d1495b", "gloo": "#00798c", "hivemind": "#edae49"}
    groups = [[one for one in group if one.measured] for group in _groups(results)]
    groups = [group for group in groups if group]
    height = sum(0.9 + 0.34 * len(group) for group in groups) or 1.0
    figure, axes = pyplot.subplots(
        max(1, len(groups)),
        1,
        figsize=(7.5, height),
        dpi=110,
        squeeze=False,
        gridspec_kw={"height_ratios": [0.9 + 0.34 * len(group) for group in groups] or [1]},
    )
    for axis, group in zip(axes[:, 0], groups, strict=False):
        places = range(len(group))
        axis.barh(places, [one.exchange_s for one in group], color=[colours[one.engine] for one in group], height=0.6)
        for place, one in zip(places, group, strict=True):
            axis.plot([one.limit_s] * 2, [place - 0.38, place + 0.38], color="black", linewidth=1.5)
            axis.text(one.exchange_s, place, f" {one.exchange_s:.2f} s, {one.ratio:.2f} ×", va="center", fontsize=8)
        axis.set_yticks(list(places), [one.title for one in group], fontsize=8)
        axis.invert_yaxis()
        axis.set_xlim(0, 1.25 * max(one.exchange_s for one in group))
        axis.set_title(f"{group[0].elements / 1e6:g} M values; {group[0].lab.words}", fontsize=8, loc="left")
        axis.tick_params(axis="x", labelsize=8)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    axes[-1, 0].set_xlabel("seconds of an exchange; black: the link's own limit", fontsize=8)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


# ---------------------------------------------------------------- recorded

HEAD = """\
## Rounds at the speed of the link

`scripts/bench_round` runs engines in turn over one wide-area lab (`scripts/wanlab`: real processes in network
namespaces, real TCP), and checks every value of every result against the mean in fp64. This section is made by
`scripts/bench_round … --record` from the newest figures of each case (`bench.json`, which holds every repetition).

*Seconds*: an exchange, from all being ready to all having every result; the median of the repetitions. *Limit*: the
bytes that this engine's codec and plan must move over the busiest line ÷ its rate, and two round trips. *Encode*:
before that, what makes an engine ready. *Apart*: the outer step of our engine, the matchmaking of hivemind. *MB a
line*: what the busiest host sent or got, whole packets, counted at its interface. *CPU*: nanoseconds of the engine's
processes for a value and host, in the exchange, and with encoding; the kernel's work for arriving packets falls to
the lab. *Peak*: the largest process, the vectors themselves included. *Error*: root mean square, relative to that of
the mean. Our engine writes what it gets to disk and syncs it; the others keep it in memory.
"""


def recorded(path: Path = RECORD) -> list[CaseResult]:
    """Nothing is recorded yet: empty."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[CaseResult])
    except FileNotFoundError:
        return []


def record(results: Iterable[CaseResult]) -> None:
    """The newest measured figure of a case takes the place of an older one, and the section is made anew."""
    known = {one.key: one for one in recorded()} | {one.key: one for one in results if one.measured}
    ordered = sorted(known.values(), key=lambda one: (one.lab.name, one.elements, one.engine, one.codec, one.plan))
    RECORD.write_bytes(_json(ordered))
    DOCUMENT.write_text(with_section(DOCUMENT.read_text(), section(ordered)))


def with_section(text: str, made: str) -> str:
    """`text` with the section of this command replaced; at its end if it has none."""
    return sections.with_section(text, COMMAND, made)


def section(results: Sequence[CaseResult]) -> str:
    parts = [HEAD] if results else [HEAD, "Nothing is recorded yet.\n"]
    for group in _groups(results):
        first = group[0]
        lines = [
            f"### {first.lab.name}: {first.elements / 1e6:g} M values\n",
            f"{first.lab.words[0].upper()}{first.lab.words[1:]}.\n",
            f"| engine | {' | '.join(HEADINGS)} |",
            f"|---|{'---:|' * len(HEADINGS)}",
        ]
        lines += [f"| {one.title} | {' | '.join(cells(one))} |" for one in group]
        lines += [""]
        lines += [
            f"{one.title}: {said}.\n"
            for one in group
            if (one.engine == "atoll" or one.failure) and (said := remarks(one))
        ]
        how = {(one.date, one.machine, one.command): None for one in group}
        lines += [f"{date}, {machine}. `{command}`\n" for date, machine, command in how]
        parts.append("\n".join(lines))
    return "\n".join(parts)
