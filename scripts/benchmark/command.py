"""Rounds of this and other engines over one wide-area lab, in turn, in one run: seconds, the link's own limit, bytes,
CPU and memory, every result checked against the mean in fp64."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import trio
from rich.console import Console

from node.errors import AtollError, OperatorError
from protocol.planning import level_count
from scripts.benchmark import lab as labs
from scripts.benchmark import report
from scripts.benchmark.bounds import BOUNDS, bound_of
from scripts.benchmark.contestant import Case
from scripts.benchmark.lab import Lab
from scripts.benchmark.plans import bytes_to_move, plan_of
from scripts.benchmark.record import CaseResult, Run, compared
from scripts.benchmark.runner import machine, run_case
from scripts.benchmark.vectors import Inputs
from scripts.benchmark.workers import HIVEMIND_HOME
from scripts.wanlab.wan import Wan, unavailable

ENGINES = ("atoll", "gloo", "hivemind")
REQUIREMENTS = Path(__file__).with_name("hivemind.txt")
PATIENCE_RATIO, PATIENCE_S = 20.0, 30.0
"""A phase may take so many times the link's limit, and so much more."""
TABLE_CHARACTERS = 140
SHORT = {"lab": ["short"], "sizes": "200_000", "repetitions": 2, "part_elements": 16_384}


def main(arguments: Sequence[str]) -> int:
    options = parsed(arguments)
    console = Console()
    console.width = max(console.width, TABLE_CHARACTERS)
    # Ended from outside, it still takes down what it put up: namespaces, processes.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        if options.setup_hivemind:
            set_up_hivemind(console)
            return 0
        if options.labs:
            for name in labs.shipped():
                console.print(f"{name}: {labs.load(name).words}", highlight=False, soft_wrap=True)
            return 0
        if options.record and not options.arguments_given:
            report.record(())
            return 0
        run = measured(options, shlex.join(["scripts/bench_round", *arguments]), console)
    except AtollError as error:
        console.print(f"the benchmark failed: {error}", highlight=False, soft_wrap=True)
        return 2
    report.show(run, console)
    report.write(run, options.output)
    console.print(f"written to {options.output}: bench.json, bench.png", highlight=False, soft_wrap=True)
    if options.record:
        report.record(run.results)
    return 0 if all(not one.failure or one.failure.startswith("not available") for one in run.results) else 1


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench_round", description=__doc__)
    parser.add_argument(
        "--lab",
        action="append",
        metavar="NAME|FILE",
        help="what lies between the hosts (default: wide-200); again: more",
    )
    parser.add_argument("--labs", action="store_true", help="say what the named labs are")
    parser.add_argument("--sizes", default="25_000_000", help="numbers of values, separated by commas")
    parser.add_argument("--engines", default=",".join(ENGINES), help=f"of {', '.join(ENGINES)} (default: all)")
    parser.add_argument(
        "--codecs", default="int8,fp16", help="each engine takes those that it has (default: int8,fp16)"
    )
    parser.add_argument(
        "--plans",
        default="flat",
        help="of our engine: flat, weighted (by rates), grouped (by the lab's sites) (default: flat)",
    )
    parser.add_argument("--repetitions", type=int, default=5, help="rounds that are counted (default: 5)")
    parser.add_argument("--part-elements", type=int, default=65_536, help="values of a part (default: 65,536)")
    parser.add_argument("--rate", type=float, metavar="MBIT_S", help="of every host's line, instead of the lab's")
    parser.add_argument("--round-trip", type=float, metavar="MS", help="instead of the lab's")
    parser.add_argument("--loss", type=float, metavar="PERCENT", help="instead of the lab's")
    parser.add_argument("--mtu", type=int, metavar="BYTES", help="instead of the lab's")
    parser.add_argument("--congestion", metavar="NAME", help="of the hosts' TCP: bbr, cubic, reno")
    parser.add_argument("--seed", type=int, default=1, help="of inputs and losses (default: 1)")
    parser.add_argument("--short", action="store_true", help="two hosts, 200,000 values, seconds: for tests")
    parser.add_argument("--output", type=Path, default=Path("out/bench"), help="folder (default: out/bench)")
    parser.add_argument("--directory", type=Path, help="for what the engines write (a temporary directory)")
    parser.add_argument("--record", action="store_true", help="put it into docs/bench.json and docs/results.md")
    parser.add_argument("--setup-hivemind", action="store_true", help=f"make {HIVEMIND_HOME.name} and end")
    options = parser.parse_args(arguments)
    options.arguments_given = [word for word in arguments if word != "--record"]
    if options.short:
        for name, value in SHORT.items():
            if getattr(options, name) == parser.get_default(name):
                setattr(options, name, value)
    options.lab = options.lab or ["wide-200"]
    try:
        options.sizes = [int(word) for word in options.sizes.split(",")]
    except ValueError:
        parser.error(f"--sizes {options.sizes!r} are not whole numbers separated by commas")
    for name in ("engines", "codecs", "plans"):
        setattr(options, name, [word.strip() for word in getattr(options, name).split(",")])
    strange = next((name for name in options.engines if name not in ENGINES), None)
    if strange is not None:
        parser.error(f"there is no engine {strange!r}: choose of {', '.join(ENGINES)}")
    known = sorted({name for _, name in BOUNDS})
    strange = next((name for name in options.codecs if name not in known), None)
    if strange is not None:
        parser.error(f"there is no codec {strange!r}: choose of {', '.join(known)}")
    if min(options.sizes) < 1 or options.repetitions < 1:
        parser.error("sizes and repetitions are at least 1")
    if options.part_elements < 256 or options.part_elements % 256:
        parser.error(f"parts of {options.part_elements} values are not possible: choose a multiple of 256")
    return options


def measured(options: argparse.Namespace, command: str, console: Console) -> Run:
    """All cases, in turn. Raises `OperatorError` or `WanError`."""
    if why := unavailable():
        raise OperatorError(f"{why}.")
    chosen = [changed(labs.load(name), options) for name in options.lab]
    cases = [(lab, size) for lab in chosen for size in options.sizes]
    date, here = datetime.now(UTC).strftime("%Y-%m-%d"), machine()
    results: list[CaseResult] = []
    for lab, size in cases:
        console.print(f"{lab.name}: {lab.words}; {size:,} values", style="bold", highlight=False, soft_wrap=True)
        with contextlib.closing(Inputs(len(lab.hosts), size, seed=options.seed)) as inputs:
            for blank in blanks(options, lab, size, date=date, here=here, command=command):
                results.append(one_case(blank, inputs, options, console))
    return Run(date=date, machine=here, command=command, results=compared(results))


def changed(lab: Lab, options: argparse.Namespace) -> Lab:
    """The lab with what the command line says instead, which its name then says, too. Raises `OperatorError`."""
    said: list[str] = []
    if options.rate is not None:
        said.append(f"{options.rate:g} Mbit/s")
        hosts = tuple(
            msgspec.structs.replace(host, up_mbit_s=options.rate, down_mbit_s=options.rate) for host in lab.hosts
        )
        lab = msgspec.structs.replace(lab, hosts=hosts)
    for given, field, unit in (
        (options.round_trip, "round_trip_ms", "ms"),
        (options.loss, "loss_percent", "% loss"),
        (options.mtu, "mtu_bytes", "bytes MTU"),
        (options.congestion, "congestion_control", ""),
    ):
        if given is not None:
            said.append(f"{given} {unit}".strip())
            lab = msgspec.structs.replace(lab, **{field: given})
    lab = msgspec.structs.replace(lab, name=", ".join([lab.name, *said]))
    if why := lab.check():
        raise OperatorError(why)
    return lab


def blanks(options: argparse.Namespace, lab: Lab, size: int, *, date: str, here: str, command: str) -> list[CaseResult]:
    """The cases of one lab and size, before they are run. Raises `OperatorError`."""
    found = []
    for engine in options.engines:
        for codec in options.codecs:
            if bound_of(engine, codec) is None:
                continue
            for plan in options.plans if engine == "atoll" else ["flat" if engine == "hivemind" else "ring"]:
                traffic = bytes_to_move(engine, codec, plan, lab, size)
                found.append(
                    CaseResult(
                        lab=lab,
                        elements=size,
                        engine=engine,
                        codec=codec,
                        plan=plan,
                        part_elements=options.part_elements if engine == "atoll" else None,
                        limit_s=lab.limit_s(traffic),
                        busiest_bytes_s=lab.busiest_s(traffic),
                        date=date,
                        machine=here,
                        command=command,
                    )
                )
    return found


def one_case(blank: CaseResult, inputs: Inputs, options: argparse.Namespace, console: Console) -> CaseResult:
    """In a lab of its own, so that nothing of one engine is left for the next."""
    everybody = (1 << len(blank.lab.hosts)) - 1
    levels = level_count(plan_of(blank.plan, blank.lab), everybody) if blank.engine == "atoll" else 1
    bound = bound_of(blank.engine, blank.codec, levels)
    assert bound is not None, "only such cases are made"
    place = Path(tempfile.mkdtemp(prefix="atoll-bench-", dir=options.directory))
    lab = blank.lab
    kept = False
    try:
        with Wan(
            len(lab.hosts), mtu_bytes=lab.mtu_bytes, congestion_control=lab.congestion_control, seed=options.seed
        ) as wan:
            lab.lay(wan)
            case = Case(
                engine=blank.engine,
                codec=blank.codec,
                plan=blank.plan,
                lab=lab,
                hosts=wan.hosts,
                inputs=inputs,
                part_elements=options.part_elements,
                patience_s=PATIENCE_S + PATIENCE_RATIO * blank.limit_s,
                directory=place,
            )

            async def run() -> CaseResult:
                return await run_case(
                    case,
                    wan,
                    bound,
                    blank,
                    repetitions=options.repetitions,
                    say=lambda text: console.print(f"  {text}", highlight=False, soft_wrap=True),
                )

            result = trio.run(run)
            kept = bool(result.failure) and not result.failure.startswith("not available")
    finally:
        if not kept:
            shutil.rmtree(place, ignore_errors=True)
    if result.failure:
        where = f" (logs: {place})" if kept else ""
        console.print(f"  {blank.title}: {result.failure}{where}", highlight=False, soft_wrap=True)
    return result


def set_up_hivemind(console: Console) -> None:
    """An environment of its own: it cannot share ours (other versions of libp2p's and protobuf's code).

    Raises `OperatorError`.
    """
    console.print(f"setting up {HIVEMIND_HOME} ...", highlight=False, soft_wrap=True)
    python = HIVEMIND_HOME / "bin" / "python"
    pinned = REQUIREMENTS.read_text()
    torch = next(line.partition("==")[2] for line in pinned.splitlines() if line.startswith("torch=="))
    shutil.rmtree(HIVEMIND_HOME, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(HIVEMIND_HOME)], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    # The CPU build where pip can find one, as scripts/setup does.
    if subprocess.run([*pip, f"torch=={torch}+cpu"], capture_output=True, check=False).returncode:
        subprocess.run([*pip, f"torch=={torch}"], check=False)
    done = subprocess.run([*pip, "--requirement", str(REQUIREMENTS)], capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["pip says nothing"])[-1]
        raise OperatorError(f"hivemind cannot be installed: {last}")
    subprocess.run([str(python), "-c", "import hivemind"], check=True, env=os.environ)
    console.print(f"done: {python}", highlight=False, soft_wrap=True)
