"""`atoll swarm`: a local swarm from start to end, shown while it runs, judged when it is over."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from node.artifacts import write_atomically
from node.cli.local_swarm import POLL_S, LocalSwarm, SwarmFailed
from node.cli.show import number, quantity, short
from node.status import HistoryRound, Status

STALLED_S = 600.0
"""No node has applied a commit for this long: the swarm is given up, with what each node waits for."""
EXPORT_S = 300.0


class SwarmRound(msgspec.Struct, frozen=True, kw_only=True):
    round: int
    contributors: int
    seconds: float
    state_hashes: tuple[str, ...]
    """Of all nodes that applied it: one, when they agree."""
    loss: float | None
    """Mean training loss over the nodes."""
    validation_loss: float | None
    bytes_sent: int
    """By all nodes."""


class SwarmReport(msgspec.Struct, frozen=True, kw_only=True):
    """`atoll swarm --json`."""

    ok: bool
    problem: str | None
    nodes: int
    run_id: str
    run_name: str
    parameters: int
    rounds: tuple[SwarmRound, ...]
    final_rounds: dict[str, int]
    """Node → commits it applied."""
    state_hashes: dict[str, str | None]
    """Node → hash of its last state."""
    loss_start: float | None
    loss_end: float | None
    validation_loss_start: float | None
    validation_loss_end: float | None
    bytes_per_parameter_round: float | None
    """Sent by one node, on average."""
    seconds: float
    model: str | None
    """Directory of the exported model."""
    directory: str


def run_swarm(
    *,
    nodes: int,
    rounds: int,
    run: str,
    overrides: Sequence[str],
    device: str,
    as_json: bool,
    directory: Path | None,
    keep: bool,
    timeout_s: float | None,
) -> int:
    """Exit status: 0 when every node ended on the same state of the last round."""
    place = directory.absolute() if directory else Path(tempfile.mkdtemp(prefix="atoll-swarm-"))
    place.mkdir(parents=True, exist_ok=True)
    console = Console(stderr=as_json)
    started_s = time.monotonic()
    problem: str | None = None
    with LocalSwarm(
        place,
        nodes=nodes,
        run=run,
        rounds=rounds,
        overrides=overrides,
        device=device,
        report=_report,
    ) as swarm:
        try:
            swarm.start_all()
            follow(swarm, console, timeout_s)
        except SwarmFailed as error:
            problem = str(error)
            swarm.poll()
    model = export_in_process(swarm, place / "model") if problem is None else None
    report = summarise(swarm, rounds=rounds, problem=problem, seconds=time.monotonic() - started_s, model=model)
    write_atomically(msgspec.json.format(msgspec.json.encode(report)), place / "report.json")
    if as_json:
        sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
    else:
        console.print(report_view(report))
    if report.ok and not keep:
        for node in swarm.nodes:
            shutil.rmtree(node.home.path, ignore_errors=True)
    return 0 if report.ok else 1


def follow(swarm: LocalSwarm, console: Console, timeout_s: float | None) -> None:
    """Show the swarm until all nodes have ended. Raises `SwarmFailed`."""
    deadline_s = time.monotonic() + timeout_s if timeout_s is not None else None
    moved_s = time.monotonic()
    newest = -1
    told = -1
    live = Live(swarm_table([], swarm), console=console, auto_refresh=False) if console.is_terminal else None
    try:
        if live is not None:
            live.start()
        while any(node.running for node in swarm.nodes):
            statuses = swarm.poll()
            swarm.check()
            now_s = time.monotonic()
            reached = max((status.round for status in statuses if status is not None), default=-1)
            if reached > newest:
                newest, moved_s = reached, now_s
            if live is not None:
                live.update(swarm_table(statuses, swarm), refresh=True)
            else:
                told = _tell_rounds(swarm, console, told)
            if deadline_s is not None and now_s > deadline_s:
                raise SwarmFailed(f"not finished within {timeout_s:.0f} s; {swarm.reasons()}")
            if now_s - moved_s > STALLED_S:
                raise SwarmFailed(f"no round for {STALLED_S:.0f} s; {swarm.reasons()}")
            time.sleep(POLL_S)
        swarm.check()
        if live is None:
            _tell_rounds(swarm, console, told)
    finally:
        if live is not None:
            live.stop()


def _tell_rounds(swarm: LocalSwarm, console: Console, told: int) -> int:
    for one in collect_rounds(swarm):
        if one.round > told and len(one.state_hashes) > 0:
            told = one.round
            validation = f", validation {number(one.validation_loss)}" if one.validation_loss is not None else ""
            console.print(
                f"round {one.round}: {one.contributors} contributors, {one.seconds:.1f} s, loss {number(one.loss)}"
                f"{validation}, state {short(one.state_hashes[0])}",
                highlight=False,
                soft_wrap=True,
            )
    return told


# ---------------------------------------------------------------- judging


def collect_rounds(swarm: LocalSwarm) -> list[SwarmRound]:
    """What the nodes saw of each round, put together."""
    seen: dict[int, list[HistoryRound]] = {}
    for node in swarm.nodes:
        for one in node.history.values():
            seen.setdefault(one.round, []).append(one)
    return [
        SwarmRound(
            round=round_number,
            contributors=max(len(one.contributors) for one in views),
            seconds=max(one.seconds for one in views),
            state_hashes=tuple(sorted({one.state_hash for one in views})),
            loss=_mean([one.loss for one in views]),
            validation_loss=_mean([one.validation_loss for one in views]),
            bytes_sent=sum(one.bytes_sent for one in views),
        )
        for round_number, views in sorted(seen.items())
    ]


def summarise(
    swarm: LocalSwarm, *, rounds: int, problem: str | None, seconds: float, model: Path | None
) -> SwarmReport:
    """The verdict: all nodes applied the last round, and hold one state."""
    assert swarm.run is not None
    finals = {f"node-{node.index}": node.last for node in swarm.nodes}
    hashes = {name: status.state_hash if status else None for name, status in finals.items()}
    reached = {name: status.round if status else 0 for name, status in finals.items()}
    collected = collect_rounds(swarm)
    if problem is None and any(count < rounds for count in reached.values()):
        problem = f"not all nodes reached round {rounds}: {reached}"
    if problem is None and len(set(hashes.values())) != 1:
        problem = f"the nodes ended on different states: {hashes}"
    split = [one.round for one in collected if len(one.state_hashes) > 1]
    if problem is None and split:
        problem = f"the nodes disagreed about rounds {split}"
    elements = swarm.run.manifest.layout.elements
    losses = [one.loss for one in collected if one.loss is not None]
    validations = [one.validation_loss for one in collected if one.validation_loss is not None]
    views = sum(len(node.history) for node in swarm.nodes)
    sent = sum(one.bytes_sent for one in collected)
    return SwarmReport(
        ok=problem is None,
        problem=problem,
        nodes=len(swarm.nodes),
        run_id=swarm.run.run_id.hex(),
        run_name=swarm.run.manifest.name,
        parameters=elements,
        rounds=tuple(collected),
        final_rounds=reached,
        state_hashes=hashes,
        loss_start=losses[0] if losses else None,
        loss_end=losses[-1] if losses else None,
        validation_loss_start=validations[0] if validations else None,
        validation_loss_end=validations[-1] if validations else None,
        bytes_per_parameter_round=sent / elements / views if views else None,
        seconds=seconds,
        model=str(model) if model else None,
        directory=str(swarm.directory),
    )


def export_in_process(swarm: LocalSwarm, directory: Path) -> Path | None:
    """The first node's model, written by `atoll export` (PyTorch stays out of this process)."""
    command = [sys.executable, "-P", "-m", "node.cli.main", "export", str(directory)]
    done = subprocess.run(
        [*command, "--home", str(swarm.nodes[0].home.path)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=EXPORT_S,
        check=False,
    )
    if done.returncode != 0:
        sys.stderr.write(done.stderr)
        return None
    return directory


def _report(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


# ---------------------------------------------------------------- showing


def swarm_table(statuses: Sequence[Status | None], swarm: LocalSwarm) -> RenderableType:
    """One row a node."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("node", "round", "phase", "members", "loss", "validation", "tokens/s", "state", "waiting for"):
        table.add_column(title, no_wrap=title != "waiting for")
    for node, status in zip(swarm.nodes, statuses, strict=False):
        if status is None:
            table.add_row(f"node-{node.index}", "-", "starting")
            continue
        final = f"/{status.final_round}" if status.final_round else ""
        table.add_row(
            f"node-{node.index}",
            f"{status.round}{final}",
            status.phase if node.running else f"ended ({node.ended})",
            str(status.members),
            number(status.loss),
            number(status.validation_loss),
            quantity(status.tokens_per_s),
            short(status.state_hash),
            status.reason if node.running else "",
        )
    return table


def report_view(report: SwarmReport) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("round", "contributors", "seconds", "loss", "validation", "state"):
        table.add_column(title)
    for one in report.rounds:
        table.add_row(
            str(one.round),
            str(one.contributors),
            f"{one.seconds:.1f}",
            number(one.loss),
            number(one.validation_loss),
            ", ".join(short(state_hash) for state_hash in one.state_hashes),
        )
    facts = Table.grid(padding=(0, 2))
    facts.add_row("run", f"{report.run_name} {short(report.run_id)}, {report.parameters:,} parameters")
    facts.add_row("training loss", f"{number(report.loss_start)} → {number(report.loss_end)}")
    facts.add_row("validation loss", f"{number(report.validation_loss_start)} → {number(report.validation_loss_end)}")
    if report.bytes_per_parameter_round is not None:
        facts.add_row("sent", f"{report.bytes_per_parameter_round:.2f} bytes per parameter, node and round")
    facts.add_row("time", f"{report.seconds:.0f} s")
    if report.model:
        facts.add_row("model", report.model)
    if not report.ok:
        facts.add_row("homes", report.directory)
    if report.ok:
        verdict = Text(f"all {report.nodes} nodes ended on the same state", style="bold green")
    else:
        verdict = Text(f"failed: {report.problem}", style="bold red")
    return Group(table, facts, verdict)
