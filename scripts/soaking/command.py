"""Real nodes under Poisson faults: killed in part or whole, frozen, cut off, leaving and joining (`scripts/soak`).

Exit status: 0 when there was no fork, no hash mismatch, no exclusion that none of our events explains, all work is
accounted for, no process grows, no log holds a traceback, everybody was counted again and left in time, nothing stayed
behind and all nodes ended on one lineage; else 1. Ctrl-C, or SIGTERM, ends it early with an account: 130.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import NoReturn

import msgspec
from rich.console import Console

from node.artifacts import write_atomically
from node.cli.local_swarm import SwarmFailed
from node.errors import AtollError
from node.manifest import rules_of
from protocol.names import initial_lineage
from scripts.soaking import record, show
from scripts.soaking.accounts import read_account
from scripts.soaking.bridge import Bridge, NoNamespaces
from scripts.soaking.conduct import Conductor
from scripts.soaking.judge import Plan, forks, judge, live_work, work
from scripts.soaking.report import Report
from scripts.soaking.schedule import Happening, Kind, draw
from scripts.soaking.swarm import SoakSwarm, wait_ended
from scripts.soaking.sweeper import Sweeper
from scripts.soaking.watch import Watch

START_S = 180.0
SETTLE_S = 180.0
"""After the last event: until every node that runs is counted in one round."""
LEAVE_S = 10.0
MEASURED_ROUNDS = 2
LINE_EVERY_S = 10.0
WRITE_EVERY_S = 30.0
INTERRUPTED = 130


def main(arguments: Sequence[str]) -> int:
    options = parsed(arguments)
    console = Console(stderr=options.json == Path("-"))
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    happenings = draw(
        seed=options.seed,
        length_s=options.minutes * 60,
        nodes=options.nodes,
        guests=options.guests,
        every_s=options.every,
        cuts=not options.no_namespaces,
        kinds=tuple(Kind(kind) for kind in options.only),
    )
    if options.schedule:
        for one in happenings:
            console.print(f"{one.at_s:8.2f} s  {one.kind.value:<13} node {one.node}  {one.lasts_s:.2f} s")
        return 0
    place = options.directory or Path(tempfile.mkdtemp(prefix="atoll-soak-"))
    place.mkdir(parents=True, exist_ok=True)
    sweeper = Sweeper()
    bridge: Bridge | None = None
    try:
        bridge = _bridge(options, console)
        for name in bridge.all_namespaces if bridge is not None else ():
            sweeper.tell("namespace", name)
        report = Soak(options, place, bridge, sweeper, console).run(happenings)
    except KeyboardInterrupt:
        console.print("interrupted again, or before the first event: everything is being ended")
        return INTERRUPTED
    except AtollError as error:
        console.print(f"the soak could not be run: {error}", soft_wrap=True, highlight=False)
        return 1
    finally:
        if bridge is not None:
            bridge.remove()
        sweeper.close()
        if not options.keep:
            shutil.rmtree(place, ignore_errors=True)
    show.show(report, console)
    write(report, options.json)
    if options.record:
        if report.failures:
            console.print("it has failed, so it is not recorded")
        else:
            record.record(report)
    if report.unfinished is not None:
        return INTERRUPTED
    return 1 if report.failures else 0


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="of events (default: 10)")
    parser.add_argument("--nodes", type=int, default=4, help="founders (default: 4)")
    parser.add_argument("--guests", type=int, help="homes of nodes that join (default: half as many; 0: none)")
    parser.add_argument("--seed", type=int, default=1, help="the same seed, the same events (default: 1)")
    parser.add_argument("--every", type=float, default=10.0, help="mean seconds between two events (default: 10)")
    parser.add_argument("--preset", default="micro", help="preset or TOML of the run (default: micro)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="of the run, as in atoll daemon"
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--round-seconds", type=float, help="training time of a round: a first swarm measures how many steps that are"
    )
    length.add_argument("--steps", type=int, help="inner steps of a round (default: the preset's)")
    parser.add_argument(
        "--no-namespaces",
        action="store_true",
        help="all nodes on loopback, without cuts; else root and `ip` are needed",
    )
    parser.add_argument(
        "--only", action="append", default=[], choices=[kind.value for kind in Kind], help="draw these kinds alone"
    )
    parser.add_argument("--schedule", action="store_true", help="print the events and run nothing")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="the report, also while it runs; - for standard output, at the end"
    )
    parser.add_argument("--samples", type=Path, metavar="FILE", help="each process's memory and descriptors over time")
    parser.add_argument("--record", action="store_true", help="put what passed into docs/soak.json and docs/results.md")
    parser.add_argument("--directory", type=Path, help="for the homes (default: a temporary one)")
    parser.add_argument("--keep", action="store_true", help="keep the homes")
    options = parser.parse_args(list(arguments))
    if options.nodes < 1 or options.minutes <= 0 or options.every <= 0 or (options.guests or 0) < 0:
        parser.error("--nodes, --minutes and --every must be above 0, --guests 0 or more")
    if options.guests is None:
        options.guests = max(1, options.nodes // 2)
    options.command = shlex.join(["scripts/soak", *arguments])
    return options


def write(report: Report, path: Path | None) -> None:
    if path is None:
        return
    data = msgspec.json.format(msgspec.json.encode({**msgspec.to_builtins(report), "failures": report.failures}))
    if path == Path("-"):
        sys.stdout.write(data.decode() + "\n")
    else:
        write_atomically(data, path)


def _bridge(options: argparse.Namespace, console: Console) -> Bridge | None:
    """None: on loopback. Raises `SwarmFailed` where the operator wants cuts and the machine gives none."""
    if options.no_namespaces:
        console.print("all nodes are on loopback: no cuts")
        return None
    try:
        return Bridge(options.nodes + options.guests)
    except NoNamespaces as error:
        raise SwarmFailed(f"{error}; without cuts, on loopback: --no-namespaces") from error


# ---------------------------------------------------------------- running


class Soak:
    """One soak. What it has seen is in `--json` every `WRITE_EVERY_S`, so that nothing ends it without an account."""

    def __init__(
        self, options: argparse.Namespace, place: Path, bridge: Bridge | None, sweeper: Sweeper, console: Console
    ) -> None:
        self._options = options
        self._place = place
        self._bridge = bridge
        self._sweeper = sweeper
        self._console = console
        self._line = _line(console)
        self._load = os.getloadavg()[1]
        self._next_write_s = 0.0

    def run(self, happenings: tuple[Happening, ...]) -> Report:
        """Raises `SwarmFailed` when the swarm does not come up. The first Ctrl-C ends it early, with an account."""
        with self._swarm_in("homes", self._overrides()) as swarm:
            swarm.start_all()
            assert swarm.run is not None
            swarm.wait(lambda: _all_counted(swarm), START_S, "every founder is counted")
            watch = Watch(swarm, time.monotonic(), self._options.samples)
            conductor = Conductor(swarm=swarm, watch=watch, report=self._console.print)
            unfinished: str | None = None
            settled = False
            try:
                self._disturb(conductor, happenings)
                settled = settle(conductor, self._line, self._length_s)
            except KeyboardInterrupt:
                unfinished = f"interrupted after {watch.now_s / 60:.1f} of {self._options.minutes:g} minutes"
                self._console.print(f"{unfinished}: the nodes are being stopped; once more ends it without an account")
            finally:
                watch.close()
            seconds = watch.now_s
            lineages = {status.lineage for index, status in watch.latest.items() if swarm.nodes[index].running}
            conductor.thaw_all()
            leave(swarm, conductor)
            accounts = conductor.gone + [
                account for node in swarm.nodes if (account := read_account(node.home)) is not None
            ]
            for node in swarm.nodes:
                conductor.said.read(node.home, f"node {node.index}")
            first = initial_lineage(rules_of(swarm.run.manifest).run).hex()
            return judge(
                self._plan(swarm),
                conductor,
                seconds=seconds,
                work_of_all=work(accounts),
                forks_found=forks(accounts, {lineage for lineage, _ in watch.rounds}, first),
                one_lineage=settled and len(lineages) == 1,
                unfinished=unfinished,
            )

    @property
    def _length_s(self) -> float:
        return float(self._options.minutes * 60)

    def _disturb(self, conductor: Conductor, happenings: tuple[Happening, ...]) -> None:
        watch = conductor.watch
        conductor.begin(happenings)
        while watch.now_s < self._length_s or conductor.busy:
            conductor.turn()
            self._line(conductor, self._length_s)
            if watch.now_s >= self._next_write_s:
                self._next_write_s = watch.now_s + WRITE_EVERY_S
                self._write_so_far(conductor)

    def _write_so_far(self, conductor: Conductor) -> None:
        if self._options.json in (None, Path("-")):
            return
        report = judge(
            self._plan(conductor.swarm),
            conductor,
            seconds=conductor.watch.now_s,
            work_of_all=live_work(conductor.watch.latest.values()),
            forks_found=[],
            one_lineage=True,
            unfinished="it runs; forks are looked for in the nodes' chains at the end",
        )
        write(report, self._options.json)

    def _plan(self, swarm: SoakSwarm) -> Plan:
        assert swarm.run is not None
        options = self._options
        return Plan(
            command=options.command,
            date=datetime.now(UTC).strftime("%Y-%m-%d"),
            seed=options.seed,
            nodes=options.nodes,
            guests=options.guests,
            every_s=options.every,
            only=tuple(options.only),
            preset=options.preset,
            planned_minutes=options.minutes,
            steps=swarm.run.manifest.rounds.steps,
            machine=f"{os.cpu_count()} cores {platform.machine()}; load average {self._load:.1f} before, "
            f"{os.getloadavg()[1]:.1f} at the end",
            network="on loopback, without cuts" if self._bridge is None else "a namespace a node",
        )

    def _overrides(self) -> list[str]:
        overrides = list(self._options.set)
        if self._options.round_seconds is not None:
            with self._swarm_in("measuring", overrides) as first:
                steps = measured_steps(first, self._options.round_seconds, self._console)
            overrides.append(f"rounds.steps={steps}")
            shutil.rmtree(self._place / "measuring", ignore_errors=True)
        elif self._options.steps is not None:
            overrides.append(f"rounds.steps={self._options.steps}")
        return overrides

    def _swarm_in(self, folder: str, overrides: Sequence[str]) -> SoakSwarm:
        (self._place / folder).mkdir(exist_ok=True)
        return SoakSwarm(
            self._place / folder,
            nodes=self._options.nodes,
            run=self._options.preset,
            overrides=overrides,
            bridge=self._bridge,
            sweeper=self._sweeper,
            report=self._console.print,
        )


def measured_steps(swarm: SoakSwarm, round_s: float, console: Console) -> int:
    """Inner steps that take `round_s` here while all nodes train."""
    swarm.start_all()
    assert swarm.run is not None
    swarm.wait_round(MEASURED_ROUNDS + 1, timeout_s=START_S)
    statuses = [status for status in swarm.poll() if status is not None and status.tokens_per_s > 0]
    if not statuses:
        raise SwarmFailed("no trainer told its speed while it was measured; give --steps")
    manifest = swarm.run.manifest
    step_tokens = manifest.inner.batch_sequences * manifest.data.sequence_tokens
    slowest = min(status.tokens_per_s for status in statuses)
    steps = max(1, math.ceil(round_s * slowest / step_tokens))
    console.print(f"{steps} steps a round: {step_tokens / slowest * 1000:.0f} ms a step, {round_s:g} s of training")
    return steps


def _all_counted(swarm: SoakSwarm) -> bool:
    swarm.poll()
    seen = [peer for node in swarm.nodes for line in node.history.values() for peer in line.contributors]
    return all(node.peer_id in seen for node in swarm.nodes)


def settle(conductor: Conductor, line: Callable[[Conductor, float], None], length_s: float) -> bool:
    """Until all nodes that run are counted in one round, after the last event. False: not in time."""
    watch = conductor.watch
    until_s = watch.now_s + SETTLE_S
    after = watch.newest_round + 1
    while watch.now_s < until_s:
        conductor.turn()
        line(conductor, length_s)
        running = {node.peer_id for node in conductor.swarm.nodes if node.running}
        if any(number > after and running <= seen.contributors for (_, number), seen in watch.rounds.items()):
            lineages = {watch.latest[node.index].lineage for node in conductor.swarm.nodes if node.running}
            if len(lineages) == 1:
                return True
    return False


def leave(swarm: SoakSwarm, conductor: Conductor) -> None:
    running = [node.index for node in swarm.nodes if node.running]
    took = wait_ended(swarm, running, LEAVE_S + 2)
    conductor.late += [
        f"node {index} took {took_s:.1f} s to leave" for index, took_s in took.items() if took_s > LEAVE_S
    ]
    conductor.late += [f"node {index} did not leave and was killed" for index in running if index not in took]


def _line(console: Console) -> Callable[[Conductor, float], None]:
    """One line of progress: in place on a terminal, else now and then."""
    told_s = -math.inf

    def tell(conductor: Conductor, length_s: float) -> None:
        nonlocal told_s
        watch = conductor.watch
        if watch.now_s - told_s < (0.5 if console.is_terminal else LINE_EVERY_S):
            return
        told_s = watch.now_s
        last = conductor.struck[-1] if conductor.struck else None
        event = (
            f"{last.happening.kind.value} of node {last.happening.node} at {last.at_s:.0f} s" if last else "none yet"
        )
        text = (
            f"{watch.now_s:5.0f} of {length_s:.0f} s | round {watch.newest_round} | "
            f"{sum(1 for node in conductor.swarm.nodes if node.running)} nodes | "
            f"{len({lineage for lineage, _ in watch.rounds})} lineages | {len(conductor.struck)} events, last: {event}"
        )
        console.print(text, end="\r" if console.is_terminal else "\n", highlight=False, overflow="crop", no_wrap=True)

    return tell


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
