"""One training of the comparison, from a swarm's home to its curve: what runs in a process of its own.

Nothing here is in the module that is started: a spawned process imports it by name.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch

from node.cli.export import read_theta, snapshots
from node.home import Home
from node.trainer.loop import choose_device
from scripts.comparison import training, work
from scripts.comparison.report import CODED, DILOCO, WIDE
from scripts.comparison.work import NotComparable

TELL_EVERY_ROUNDS = 5


class Evaluated(msgspec.Struct, frozen=True, kw_only=True):
    """Validation loss of the swarm's first and last state, measured by the code that measures all others."""

    initial: float
    final: float


def train(home: str, name: str, device: str, threads: int) -> training.Curve:
    """The training that `report` calls `name`, on the work of the swarm's member in `home`."""
    trial = _trial(home, device, threads)

    def tell(rounds: int, loss: float) -> None:
        if rounds % TELL_EVERY_ROUNDS == 0:
            print(f"{name}: round {rounds} of {len(trial.work.rounds)}, validation {loss:.4f}", flush=True)

    if name in (DILOCO, CODED):
        return training.diloco(trial, coded=name == CODED, report=tell)
    return training.adamw(trial, wide=name == WIDE, report=tell)


def evaluate(home: str, device: str, threads: int) -> Evaluated:
    trial = _trial(home, device, threads)
    run, _ = work.read_work(Home(Path(home)))
    last = trial.work.rounds[-1]
    for snapshot in snapshots(Home(Path(home)), run):
        if snapshot.name == f"{last.number + 1}-{last.state_hash}":
            final_n = torch.from_numpy(read_theta(run, snapshot).copy())
            return Evaluated(initial=trial.loss_of(trial.initial_n), final=trial.loss_of(final_n))
    raise NotComparable(f"{home} has no snapshot of its last state: compare a swarm that ended by itself")


def _trial(home: str, device: str, threads: int) -> training.Trial:
    torch.set_num_threads(threads)
    run, done = work.read_work(Home(Path(home)))
    artifacts = Home(Path(home)).engine_directory(run.run_id) / "artifacts"
    return training.Trial(done, artifacts, choose_device(device), threads)
