"""The comparison as a table, JSON and a plot."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

AGREEMENT_PERCENT = 0.5
"""The swarm's final validation loss may differ from the in-process DiLoCo's by this much."""
QUICK_AGREEMENT_PERCENT = 1.0
"""After the few rounds of `--quick` nothing is averaged out yet: what the codec rounds moves the loss by some tenths of
a percent either way (-0.56 to +0.01 % were seen). That the swarm has the same bits through the codec is its proof."""
EXPECTED_GAP_PERCENT = 5.0
"""Above AdamW at equal tokens; reported, not required."""

SWARM = "swarm"
DILOCO = "DiLoCo, one process"
CODED = "… with the codec"
WIDE = "AdamW, batch × nodes"
NARROW = "AdamW, steps × nodes"


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """One way to train."""

    name: str
    tokens: tuple[int, ...]
    """Trained on when each loss was measured."""
    losses: tuple[float, ...]
    """Validation."""
    inner_steps: int
    """One after the other."""
    batch_sequences: int
    """Of one step."""
    seconds: float

    @property
    def final(self) -> float:
        return self.losses[-1]


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    date: str
    machine: str
    command: str
    run_name: str
    run_id: str
    parameters: int
    nodes: int
    rounds: int
    steps_per_round: int
    seed: int | None
    """Of the initial parameters; None: not known of a swarm that was trained before."""
    tokens: int
    contributors: tuple[int, ...]
    """By round."""
    guessed_rounds: tuple[int, ...]
    """Rounds whose steps were inferred, not read."""
    series: tuple[Series, ...]
    difference_percent: float
    """Swarm against in-process DiLoCo in fp32, final validation loss; positive: the swarm's is higher."""
    gap_to_adamw_percent: float
    """Swarm above AdamW with equal tokens and equal steps (batch of all nodes together)."""
    codec_difference_percent: float | None = None
    """The same against in-process DiLoCo through the run's codec."""
    identical_states: bool | None = None
    """Whether that reached the swarm's outer state bit for bit, in every round."""
    different_rounds: tuple[int, ...] = ()
    agreement_percent: float = AGREEMENT_PERCENT
    """How large `difference_percent` may be, either way."""
    gap_to_narrow_adamw_percent: float | None = None
    """Swarm above AdamW with equal tokens and one node's batch (steps of all nodes one after the other)."""

    @property
    def ok(self) -> bool:
        return abs(self.difference_percent) <= self.agreement_percent

    def named(self, name: str) -> Series:
        return next(one for one in self.series if one.name == name)


def percent(value: float, reference: float) -> float:
    """How far `value` is above `reference`."""
    return 100.0 * (value / reference - 1.0)


def machine() -> str:
    """What the figures were measured on, in words."""
    model = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    except OSError:
        pass  # not Linux: the architecture has to do
    return f"{os.cpu_count()} cores, {model}"


def show(comparison: Comparison, console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD, title=None)
    table.add_column("training", no_wrap=True)
    for heading in ("steps", "batch", "tokens", "loss", "swarm is", "time"):
        table.add_column(heading, justify="right", no_wrap=True)
    swarm = comparison.named(SWARM)
    for one in comparison.series:
        table.add_row(
            one.name,
            f"{one.inner_steps:,}",
            f"{one.batch_sequences}",
            f"{one.tokens[-1]:,}",
            f"{one.final:.4f}",
            "" if one is swarm else f"{percent(swarm.final, one.final):+.2f} %",
            f"{one.seconds:.0f} s",
        )
    seed = f", seed {comparison.seed}" if comparison.seed is not None else ""
    console.print(
        f"{comparison.run_name} {comparison.run_id[:12]}: {comparison.parameters:,} parameters, "
        f"{comparison.nodes} nodes, {comparison.rounds} rounds of {comparison.steps_per_round} steps{seed}; "
        f"{comparison.machine}; {comparison.date}",
        highlight=False,
        soft_wrap=True,
    )
    console.print(table)
    verdict = "within" if comparison.ok else "BEYOND"
    console.print(
        f"swarm against in-process DiLoCo: {comparison.difference_percent:+.3f} %, {verdict} "
        f"{comparison.agreement_percent} %",
        highlight=False,
    )
    if comparison.identical_states is not None:
        words = (
            "bit for bit the swarm's state in every round"
            if comparison.identical_states
            else f"{comparison.codec_difference_percent:+.4f} %; not the same bits after rounds "
            f"{', '.join(map(str, comparison.different_rounds))}"
        )
        console.print(f"swarm against in-process DiLoCo through the codec: {words}", highlight=False, soft_wrap=True)
    gaps = f"{comparison.gap_to_adamw_percent:+.2f} % with equal steps (expected at most {EXPECTED_GAP_PERCENT:.0f} %)"
    if comparison.gap_to_narrow_adamw_percent is not None:
        gaps += f", {comparison.gap_to_narrow_adamw_percent:+.2f} % with {comparison.nodes} times the steps"
    console.print(f"swarm above AdamW at equal tokens: {gaps}", highlight=False, soft_wrap=True)
    if set(comparison.contributors) != {comparison.nodes}:
        console.print(f"contributors by round: {comparison.contributors}", highlight=False, soft_wrap=True)
    if comparison.guessed_rounds:
        console.print(f"the steps of rounds {comparison.guessed_rounds} are inferred, not read", highlight=False)


def write(comparison: Comparison, folder: Path) -> None:
    """`compare.json` and `compare.png`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "compare.json").write_bytes(msgspec.json.format(msgspec.json.encode(comparison)) + b"\n")
    plot(comparison, folder / "compare.png")


def plot(comparison: Comparison, path: Path) -> None:
    """Validation loss against tokens."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    styles = {
        SWARM: {"color": "#d1495b", "marker": "o", "markersize": 4, "linestyle": "none", "zorder": 5},
        DILOCO: {"color": "#d1495b", "linewidth": 1.2},
        CODED: {"color": "#edae49", "linestyle": "--", "linewidth": 1.2},
        WIDE: {"color": "#00798c", "linewidth": 1.6},
        NARROW: {"color": "#30638e", "linestyle": ":", "linewidth": 1.6},
    }
    figure, axes = pyplot.subplots(figsize=(7.0, 4.2), dpi=110)
    for one in comparison.series:
        label = f"{one.name}: {one.final:.3f}"
        axes.plot([count / 1e6 for count in one.tokens], one.losses, label=label, **styles[one.name])
    axes.set_xlabel("training tokens (millions)")
    axes.set_ylabel("validation loss (nats per token)")
    axes.set_title(
        f"{comparison.run_name}, {comparison.parameters / 1e6:.2f} M parameters: {comparison.nodes} nodes, "
        f"H = {comparison.steps_per_round}, {comparison.rounds} rounds",
        fontsize=10,
    )
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=9)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
