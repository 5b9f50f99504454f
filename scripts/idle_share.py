"""How long unequal trainers wait for each other, with and without budgets by speed (`scripts/idle_share`).

Real nodes over loopback, each with a program of its own that attaches, sleeps through its steps and so has exactly the
speed that it is to have, whatever the machine's. A trainer *waits* in a round for as long as it is done before the
last one is: what the exchange takes all of them is no waiting.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import node
from node.cli.local_swarm import END_S, LocalSwarm, SwarmFailed
from node.errors import AtollError
from node.trainer.models import build_model

ATTACH_S = 120.0
ROUND_S = 120.0
"""For one round, beside its training."""
LEARNING_ROUNDS = 3
"""The first, in which speeds are not known yet, are not counted."""
BOUNDS = 8
"""Budgets by speed stay between an eighth of the usual steps and eight times as many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One trainer's round."""

    round: int
    steps: int
    trained_s: float
    waited_s: float
    """From its last step to the next round, the exchange included."""


def train(home: Path, step_s: float) -> list[Turn]:
    """What the program of one node does until the run ends: its parameters move a little with every step, which takes
    `step_s`."""
    turns: list[Turn] = []
    with node.attach(home, wait_s=ATTACH_S) as swarm:
        model = build_model(swarm.manifest)
        outer = swarm.optimizer(model, torch.optim.SGD(model.parameters(), lr=1e-3))
        began_s = time.monotonic()
        for batch in outer.batches(batch_size=swarm.manifest.inner.batch_sequences):
            number, steps = outer.round, outer.steps + 1
            time.sleep(step_s)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1e-6)
            done_s = time.monotonic()
            if outer.step(tokens=batch["input_ids"].numel(), loss=1.0):
                now_s = time.monotonic()
                turns.append(Turn(round=number, steps=steps, trained_s=done_s - began_s, waited_s=now_s - done_s))
                began_s = now_s
    return turns


def idle_share(of_nodes: Sequence[Sequence[Turn]]) -> float:
    """Of all the time in the rounds that all were in, after the first few: what was spent waiting for the last one."""
    by_round: dict[int, list[Turn]] = {}
    for turns in of_nodes:
        for turn in turns:
            by_round.setdefault(turn.round, []).append(turn)
    idle_s = whole_s = 0.0
    for number, turns in by_round.items():
        if number < LEARNING_ROUNDS or len(turns) < len(of_nodes):
            continue
        least_s = min(turn.waited_s for turn in turns)
        idle_s += sum(turn.waited_s - least_s for turn in turns)
        whole_s += sum(turn.trained_s + turn.waited_s for turn in turns)
    if not whole_s:
        raise SwarmFailed(f"no round after the first {LEARNING_ROUNDS} had all trainers in it; give it more --rounds")
    return idle_s / whole_s


def play(options: argparse.Namespace, *, by_speed: bool) -> list[list[Turn]]:
    """One swarm, from start to end. Raises `AtollError`."""
    steps = options.steps
    overrides = [f"rounds.steps={steps}", "validation.every_rounds=1000", "limits.min_peers=2"]
    if by_speed:
        overrides += [f"rounds.steps_least={max(1, steps // BOUNDS)}", f"rounds.steps_most={BOUNDS * steps}"]
    speeds = [float(speed) for speed in options.speeds.split(":")]
    rounds = LEARNING_ROUNDS + options.rounds
    slowest_s = options.step_s * max(speeds) / min(speeds)
    with tempfile.TemporaryDirectory(prefix="idle-") as folder:
        swarm = LocalSwarm(
            Path(folder),
            nodes=len(speeds),
            run="micro",
            rounds=rounds,
            overrides=overrides,
            device="none",
            threads=1,
        )
        with swarm:
            swarm.start_all()
            programs = [
                subprocess.Popen(
                    [
                        *(sys.executable, "-m", "scripts.idle_share", "--trainer", str(one.home.path)),
                        *("--step-s", str(options.step_s * max(speeds) / speed)),
                    ],
                    stdout=subprocess.PIPE,
                    text=True,
                )
                for one, speed in zip(swarm.nodes, speeds, strict=True)
            ]
            try:
                within_s = ATTACH_S + rounds * (ROUND_S + steps * slowest_s)
                told = [program.communicate(timeout=within_s)[0] for program in programs]
            except subprocess.TimeoutExpired as error:
                raise SwarmFailed(f"a trainer was not done within {error.timeout:.0f} s; {swarm.reasons()}") from error
            finally:
                for program in programs:
                    program.terminate()
                    program.wait(END_S)
    return [[Turn(**turn) for turn in json.loads(line)] for line in told]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="scripts/idle_share", description=__doc__)
    parser.add_argument("--speeds", default="1:2:4", help="of the trainers, in proportion (default: 1:2:4)")
    parser.add_argument("--steps", type=int, default=16, help="of a round, at the usual speed (default: 16)")
    parser.add_argument("--step-s", type=float, default=0.25, help="a step of the fastest (default: 0.25)")
    parser.add_argument("--rounds", type=int, default=8, help="that are counted (default: 8)")
    parser.add_argument("--trainer", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.trainer is not None:
        turns = train(options.trainer, options.step_s)
        sys.stdout.write(json.dumps([{name: getattr(turn, name) for name in Turn.__slots__} for turn in turns]))
        return 0
    try:
        for words, by_speed in (("equal budgets", False), ("budgets by speed", True)):
            of_nodes = play(options, by_speed=by_speed)
            last = ", ".join(f"{turns[-1].steps} steps in {turns[-1].trained_s:.1f} s" for turns in of_nodes)
            sys.stdout.write(
                f"{words}: {100 * idle_share(of_nodes):.1f} % of the time waiting; the last round: {last}\n"
            )
            sys.stdout.flush()
    except AtollError as error:
        sys.stderr.write(f"scripts/idle_share failed: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
