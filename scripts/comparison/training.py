"""The same training without a network: DiLoCo with virtual workers, and AdamW alone, both in one process.

N: elements of the flat vector, fp32. P: its parts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from node import artifacts
from node.manifest import Manifest, rules_of
from node.trainer.batches import RunSource
from node.trainer.inner import InnerTraining
from node.trainer.models import build_model, flatten, load_flat
from node.trainer.units import UnitReader, validation_sequences
from protocol.codecs import codec
from protocol.outer import step_range
from protocol.state_hash import state_hash
from protocol.sums import PartSum
from scripts.comparison.work import Batch, MemberRound, NotComparable, Round, Work, sequences_of

Report = Callable[[int, float], None]
"""(rounds done, validation loss)."""


@dataclass(kw_only=True)
class Curve:
    """Validation loss against trained tokens, one point before the first round and one after each."""

    tokens: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    steps: int = 0
    """Steps of the inner optimizer, one after the other."""
    seconds: float = 0.0
    state_hash: str | None = None
    """Hex; of the last outer state."""
    different_rounds: list[int] = field(default_factory=list)
    """Rounds whose state is not the swarm's, bit for bit."""

    def add(self, tokens: int, loss: float) -> None:
        self.tokens.append(tokens)
        self.losses.append(loss)


class Trial:
    """Work, data, S_0 and validation set of one comparison, on one device."""

    def __init__(self, work: Work, artifacts_directory: Path, device: torch.device, threads: int) -> None:
        """`threads`: of one virtual worker; a node's, if the same bits are wanted."""
        self.work = work
        self.manifest: Manifest = work.manifest
        self.threads = threads
        self._device = device
        self._artifacts_directory = artifacts_directory
        self._validation = torch.from_numpy(validation_sequences(self.manifest, artifacts_directory))
        place = artifacts.verified(self.manifest.artifacts[self.manifest.initial_state], artifacts_directory)
        self.initial_n: torch.Tensor = load_file(place)["theta"]

    def training(self, theta_n: torch.Tensor) -> InnerTraining:
        """A model that holds `theta_n`, with a fresh inner optimizer."""
        model = build_model(self.manifest)
        load_flat(model, theta_n)
        return InnerTraining(model, self.manifest.inner, self._device)

    def source(self) -> RunSource:
        return RunSource(UnitReader(self.manifest, self._artifacts_directory))

    def validate(self, training: InnerTraining) -> float:
        """The loss of the model as it is, over the run's validation set."""
        return training.mean_loss(self._validation)

    def loss_of(self, theta_n: torch.Tensor) -> float:
        return self.validate(self.training(theta_n))


# ---------------------------------------------------------------- DiLoCo


class Worker:
    """One virtual member: its local model, its inner optimizer, and what of it is in no commit yet.

    It begins with its first steps; after round 0 it is a joiner, whose rate rises from zero.
    """

    def __init__(self, trial: Trial, theta_n: torch.Tensor, *, joins_late: bool) -> None:
        self._trial = trial
        self._training = trial.training(theta_n)
        self._joins_late = joins_late
        self._steps = 0
        self._source = trial.source()  # its own: workers train in threads of their own
        self.local_n = theta_n.clone()

    def train(self, round_: Round, batches: tuple[Batch, ...]) -> None:
        first = round_.number * self._trial.manifest.rounds.steps
        torch.set_num_threads(self._trial.threads)  # holds for the calling thread
        load_flat(self._training.model, self.local_n)
        for step, batch in enumerate(batches):
            fresh_steps = self._steps if self._joins_late else None
            self._training.step(self._source.read(batch), run_step=first + step, fresh_steps=fresh_steps)
            self._steps += 1
        flatten(self._training.model, self.local_n)


def take_over(
    local_n: torch.Tensor, before_n: torch.Tensor, after_n: torch.Tensor, member: MemberRound, part_elements: int
) -> None:
    """In place, per part: counted work leaves the local model, the rest stays (protocol section 8)."""
    for part, counted in enumerate(member.counted):
        here = slice(part * part_elements, (part + 1) * part_elements)
        if counted:
            local_n[here] = after_n[here]
        else:
            local_n[here] += after_n[here] - before_n[here]


def diloco(trial: Trial, *, coded: bool, report: Report) -> Curve:
    """The swarm's rounds in one process.

    Not `coded`: DiLoCo as in its paper (arXiv 2311.08105) and none of our arithmetic: fp32 differences, their weighted
    mean, and `torch.optim.SGD` with Nesterov momentum as the outer optimizer. `coded`: contributions and means through
    the run's codec and our outer step, which a swarm with a flat plan must match bit for bit.
    """
    began_s = time.monotonic()
    manifest, rules = trial.manifest, rules_of(trial.manifest)
    outer = CodedOuter(manifest, trial.initial_n) if coded else PaperOuter(manifest, trial.initial_n)
    workers: dict[str, Worker] = {}
    curve = Curve()
    meter = trial.training(trial.initial_n)
    curve.add(0, trial.validate(meter))
    tokens = 0
    for round_ in trial.work.rounds:
        before_n = outer.theta_n.clone()
        for member in round_.members:
            if member.peer not in workers and member.batches:
                workers[member.peer] = Worker(trial, before_n, joins_late=round_.number > 0)
            tokens += sum(map(sequences_of, member.batches)) * manifest.data.sequence_tokens
        with ThreadPoolExecutor(len(round_.members)) as side_by_side:
            ended = [
                side_by_side.submit(workers[member.peer].train, round_, member.batches)
                for member in round_.members
                if member.batches
            ]
        for one in ended:
            one.result()
        curve.steps += max(len(member.batches) for member in round_.members)
        deltas = {peer: before_n - worker.local_n for peer, worker in workers.items()}
        outer.step(round_, deltas)
        for member in round_.members:
            if member.peer in workers:
                take_over(workers[member.peer].local_n, before_n, outer.theta_n, member, rules.part_elements)
        load_flat(meter.model, outer.theta_n)
        curve.add(tokens, trial.validate(meter))
        curve.state_hash = outer.state_hash()
        if curve.state_hash != round_.state_hash:
            curve.different_rounds.append(round_.number)
        report(round_.number + 1, curve.losses[-1])
    curve.seconds = time.monotonic() - began_s
    return curve


class PaperOuter:
    """PyTorch's SGD over one parameter per part: a part that stayed EMPTY has no gradient and is skipped."""

    def __init__(self, manifest: Manifest, initial_n: torch.Tensor) -> None:
        rules = rules_of(manifest)
        if rules.buffer_elements:
            raise NotComparable("the run's model has float buffers, which this outer optimizer does not average")
        self.theta_n = initial_n.clone()
        self._ranges = [slice(*rules.part_range(part)) for part in range(rules.part_count)]
        self._parts = [torch.nn.Parameter(self.theta_n[here]) for here in self._ranges]  # views: stepped in place
        momentum = rules.momentum
        self._sgd = torch.optim.SGD(self._parts, lr=1.0, momentum=momentum, nesterov=momentum > 0, foreach=False)

    def step(self, round_: Round, deltas: dict[str, torch.Tensor]) -> None:
        for part, (parameter, here) in enumerate(zip(self._parts, self._ranges, strict=True)):
            counted = [member for member in round_.members if member.counted[part]]
            total = sum(member.weights[part] for member in counted)
            parameter.grad = None
            if round_.held[part]:
                shares = [deltas[member.peer][here] * (member.weights[part] / total) for member in counted]
                parameter.grad = torch.stack(shares).sum(0)
        for group in self._sgd.param_groups:
            group["lr"] = round_.outer_lr
        self._sgd.step()

    def state_hash(self) -> str | None:
        return None


class CodedOuter:
    """What the engines of a flat plan compute, part by part."""

    def __init__(self, manifest: Manifest, initial_n: torch.Tensor) -> None:
        self._rules = rules_of(manifest)
        self.theta_n = initial_n.clone()
        self._theta_n = self.theta_n.numpy()
        self._momentum_n = np.zeros(self._rules.elements - self._rules.buffer_elements, np.float32)

    def step(self, round_: Round, deltas: dict[str, torch.Tensor]) -> None:
        rules = self._rules
        coding = codec(rules.codec)
        for part in range(rules.part_count):
            start, stop = rules.part_range(part)
            counted = [member for member in round_.members if member.counted[part]]
            if not round_.held[part]:
                continue
            summed = PartSum(stop - start, codec(rules.sum_codec))
            for member in counted:
                contribution = coding.encode(deltas[member.peer][start:stop].numpy())
                summed.add_leaf(member.weights[part], coding, contribution)
            mean = summed.mean(sum(member.weights[part] for member in counted))
            step_range(
                self._theta_n,
                self._momentum_n,
                coding.decode(coding.encode(mean), stop - start),
                start=start,
                lr=round_.outer_lr,
                momentum_factor=rules.momentum,
            )

    def state_hash(self) -> str | None:
        return state_hash(self._theta_n, self._momentum_n).hex()


# ---------------------------------------------------------------- AdamW alone


def adamw(trial: Trial, *, wide: bool, report: Report) -> Curve:
    """The run's inner optimizer alone on all the swarm's sequences, in the swarm's order: equal tokens.

    `wide`: one step for each step of the swarm, on the batches of all members together: what data-parallel training
    over a fast network does, and what DiLoCo stands in for. Otherwise one step for each batch: as many times more
    steps as there are members, which no parallel training has the time for. Both follow the schedule by tokens.
    """
    began_s = time.monotonic()
    manifest, source = trial.manifest, trial.source()
    training = trial.training(trial.initial_n)
    curve = Curve()
    curve.add(0, trial.validate(training))
    tokens = 0
    for round_ in trial.work.rounds:
        for step, batches in enumerate(_side_by_side(round_)):
            run_step = round_.number * manifest.rounds.steps + step
            for batch in [tuple(stretch for one in batches for stretch in one)] if wide else batches:
                training.step(source.read(batch), run_step=run_step)
                tokens += sequences_of(batch) * manifest.data.sequence_tokens
                curve.steps += 1
        curve.add(tokens, trial.validate(training))
        report(round_.number + 1, curve.losses[-1])
    curve.seconds = time.monotonic() - began_s
    return curve


def _side_by_side(round_: Round) -> Iterator[list[Batch]]:
    """The members' first batches of the round, then their second ones, and so on."""
    for batches in zip_longest(*(member.batches for member in round_.members)):
        yield [batch for batch in batches if batch is not None]
