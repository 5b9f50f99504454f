"""Trains a swarm, then repeats its work in one process, and says how far they are apart (`scripts/compare --help`)."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path

import msgspec
from rich.console import Console

from node.cli.local_swarm import LocalSwarm, SwarmFailed
from node.cli.swarm import follow
from node.errors import AtollError
from node.status import Status
from node.supervisor.roles import trainer_process
from scripts.comparison import jobs, report, training, work
from scripts.comparison.jobs import Evaluated
from scripts.comparison.report import CODED, DILOCO, NARROW, SWARM, WIDE, Comparison, Series, percent
from scripts.comparison.work import NotComparable

TIME_LIMIT_S = 4 * 3600.0


def main(arguments: Sequence[str]) -> int:
    options = parsed(arguments)
    os.environ.update(trainer_process())  # threads that share cores must sleep while they wait; processes inherit it
    console = Console()
    kept = options.swarm is not None
    place = Path(options.swarm) if kept else Path(tempfile.mkdtemp(prefix="atoll-compare-"))
    try:
        swarm_seconds = None if kept else run_swarm(options, place, console)
        comparison = compare(options, place, swarm_seconds, arguments, console)
    except AtollError as error:
        console.print(f"the comparison failed: {error}", highlight=False, soft_wrap=True)
        console.print(f"the swarm's homes are in {place}", highlight=False, soft_wrap=True)
        return 1 if isinstance(error, SwarmFailed) else 2
    report.write(comparison, options.output)
    report.show(comparison, console)
    console.print(f"written to {options.output}: compare.json, compare.png", highlight=False, soft_wrap=True)
    if options.keep or kept:
        console.print(f"the swarm's homes are in {place} (again: --swarm {place})", highlight=False, soft_wrap=True)
    else:
        shutil.rmtree(place, ignore_errors=True)
    return 0 if comparison.ok else 1


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/compare", description=__doc__)
    parser.add_argument("--preset", default="tiny", help="preset or TOML of the run (default: tiny)")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--steps", type=int, default=50, help="inner steps of a round, H (default: 50)")
    parser.add_argument("--seed", type=int, help="of the initial parameters (default: 1)")
    parser.add_argument("--device", default="cpu", help="of the nodes and of the comparison (default: cpu)")
    parser.add_argument("--threads", type=int, default=0, help="of a node and of a virtual worker (default: all cores)")
    parser.add_argument("--codec", action="store_true", help="also repeat the swarm through its codec, bit for bit")
    parser.add_argument("--narrow", action="store_true", help="also AdamW with one node's batch, and the steps of all")
    parser.add_argument("--quick", action="store_true", help="micro, few rounds, --codec and --narrow: for tests")
    parser.add_argument("--output", type=Path, default=Path("out/compare"), help="folder (default: out/compare)")
    parser.add_argument("--swarm", type=Path, help="folder of a finished swarm that was kept: train no other")
    parser.add_argument("--keep", action="store_true", help="keep the swarm's homes")
    options = parser.parse_args(arguments)
    if options.quick:
        options.preset, options.rounds, options.steps, options.threads = "micro", 4, 30, 1
        options.codec = options.narrow = True
    if options.seed is None and options.swarm is None:
        options.seed = 1
    # Virtual workers need the nodes' number of threads: sums in another number of threads round otherwise.
    options.threads = options.threads or max(1, (os.cpu_count() or 1) // options.nodes)
    if options.nodes < 1 or options.rounds < 1 or options.steps < 1:
        parser.error("--nodes, --rounds and --steps must be at least 1")
    return options


def run_swarm(options: argparse.Namespace, place: Path, console: Console) -> float:
    """Real nodes, from start to end. Returns its seconds. Raises `SwarmFailed` or another `AtollError`."""
    began_s = time.monotonic()
    overrides = [f"rounds.steps={options.steps}", f"model.seed={options.seed}", "validation.every_rounds=1"]
    with LocalSwarm(
        place,
        nodes=options.nodes,
        run=options.preset,
        rounds=options.rounds,
        overrides=overrides,
        device=options.device,
        threads=options.threads,
        report=lambda text: console.print(text, highlight=False),
    ) as swarm:
        swarm.start_all()
        follow(swarm, console, TIME_LIMIT_S)
    return time.monotonic() - began_s


# ---------------------------------------------------------------- comparing


def compare(
    options: argparse.Namespace, place: Path, swarm_seconds: float | None, arguments: Sequence[str], console: Console
) -> Comparison:
    """Raises `NotComparable` or another `AtollError`."""
    run, done = work.read_work(work.home_of(place))
    nodes = len(done.rounds[0].members) if done.rounds else 0
    if not nodes or done.tokens == 0:
        raise NotComparable(f"the swarm in {place} has committed no work: compare one that finished a round")
    losses = validation_losses(place, nodes)
    curves, evaluated = in_processes(options, place, console)
    manifest = run.manifest
    batch = manifest.inner.batch_sequences
    before = [one for one in done.rounds[:-1] if one.number in losses]
    swarm = Series(
        name=SWARM,
        tokens=(0, *(one.tokens_total for one in before), done.rounds[-1].tokens_total),
        losses=(evaluated.initial, *(losses[one.number] for one in before), evaluated.final),
        inner_steps=curves[DILOCO].steps,
        batch_sequences=batch,
        seconds=swarm_seconds if swarm_seconds is not None else sum(round_seconds(place)),
    )
    reference = curves[DILOCO].losses[-1]
    coded = curves.get(CODED)
    return Comparison(
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        machine=report.machine(),
        command=shlex.join(["scripts/compare", *arguments]),
        run_name=manifest.name,
        run_id=run.run_id.hex(),
        parameters=manifest.layout.elements,
        nodes=nodes,
        rounds=len(done.rounds),
        steps_per_round=manifest.rounds.steps,
        seed=options.seed,
        tokens=done.tokens,
        contributors=tuple(one.contributors for one in done.rounds),
        guessed_rounds=done.guessed_rounds,
        series=(
            swarm,
            *(
                Series(
                    name=name,
                    tokens=tuple(curve.tokens),
                    losses=tuple(curve.losses),
                    inner_steps=curve.steps,
                    batch_sequences=batch * nodes if name == WIDE else batch,
                    seconds=curve.seconds,
                )
                for name, curve in curves.items()
            ),
        ),
        difference_percent=percent(swarm.final, reference),
        codec_difference_percent=percent(swarm.final, coded.losses[-1]) if coded else None,
        identical_states=not coded.different_rounds if coded else None,
        different_rounds=tuple(coded.different_rounds) if coded else (),
        agreement_percent=report.QUICK_AGREEMENT_PERCENT if options.quick else report.AGREEMENT_PERCENT,
        gap_to_adamw_percent=percent(swarm.final, curves[WIDE].losses[-1]),
        gap_to_narrow_adamw_percent=percent(swarm.final, curves[NARROW].losses[-1]) if NARROW in curves else None,
    )


def validation_losses(place: Path, nodes: int) -> dict[int, float]:
    """By round: what the nodes measured on the state that it led to. They hold one state: any answer counts."""
    losses: dict[int, float] = {}
    for status in last_statuses(place, nodes):
        for one in status.history:
            if one.validation_loss is not None:
                losses.setdefault(one.round, one.validation_loss)
    return losses


def round_seconds(place: Path) -> list[float]:
    """Of each round, as the first node saw it."""
    return [one.seconds for status in last_statuses(place, 1) for one in status.history]


def last_statuses(place: Path, nodes: int) -> list[Status]:
    found = []
    for index in range(nodes):
        path = work.home_of(place, index).path / "last_status.json"
        try:
            found.append(msgspec.json.decode(path.read_bytes(), type=Status))
        except (OSError, msgspec.DecodeError) as error:
            raise NotComparable(f"{path} cannot be read ({error}): compare a swarm that has ended") from error
    return found


def in_processes(
    options: argparse.Namespace, place: Path, console: Console
) -> tuple[dict[str, training.Curve], Evaluated]:
    """All other trainings, side by side in processes of their own, as the nodes were."""
    names = [DILOCO, *([CODED] if options.codec else []), WIDE, *([NARROW] if options.narrow else [])]
    home = str(work.home_of(place).path)
    curves: dict[str, training.Curve] = {}
    with ProcessPoolExecutor(len(names), mp_context=get_context("spawn")) as pool:
        trainings = {pool.submit(jobs.train, home, name, options.device, options.threads): name for name in names}
        evaluation = pool.submit(jobs.evaluate, home, options.device, options.threads)
        for future in as_completed(trainings, timeout=TIME_LIMIT_S):
            name = trainings[future]
            curves[name] = future.result()
            console.print(f"{name}: {curves[name].losses[-1]:.4f} after {curves[name].seconds:.0f} s", highlight=False)
        evaluated = evaluation.result(timeout=TIME_LIMIT_S)
    return {name: curves[name] for name in names}, evaluated
