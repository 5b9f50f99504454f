"""What joining nodes do to the swarm's validation loss: one run, trained with and without them (`scripts/joins`)."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from node.cli import runs
from node.cli.local_swarm import LocalSwarm
from node.cli.runs import HomeRun
from node.errors import AtollError
from node.status import HistoryRound

ROUND_S = 180.0
"""For one round, whatever else the machine does."""
AFTER_ROUNDS = 5
"""Rounds after the first that counts a joiner in which a spike would show."""
SPIKE = 1.25
"""A rise over the round before counts as a spike when it is this many times the largest that was there anyway."""
NOISE = 0.01
"""Rises below this are nobody's doing; in nats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One round: the validation loss of the state that it led to, and how many were counted in it."""

    round: int
    loss: float
    contributors: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    alone: tuple[Line, ...]
    joined: tuple[Line, ...]
    first_counted: int
    """The first round that counts a joiner."""

    def largest_rise(self, lines: Sequence[Line], first: int, last: int) -> float:
        """From one round to the next, of rounds `first` … `last`; 0: it only fell."""
        by_round = {line.round: line.loss for line in lines}
        rises = [
            by_round[number] - by_round[number - 1]
            for number in range(first, last + 1)
            if number in by_round and number - 1 in by_round
        ]
        return max([0.0, *rises])

    @property
    def usual_rise(self) -> float:
        """Without joins, in all rounds but the first few, and in the other training before them."""
        rounds = max(line.round for line in self.alone)
        return max(
            self.largest_rise(self.alone, 2, rounds), self.largest_rise(self.joined, 2, self.first_counted - 1), NOISE
        )

    @property
    def rise(self) -> float:
        """When joiners were counted, and shortly after."""
        return self.largest_rise(self.joined, self.first_counted, self.first_counted + AFTER_ROUNDS)

    @property
    def spike(self) -> bool:
        return self.rise > SPIKE * self.usual_rise


class LateSwarm(LocalSwarm):
    """The first `founders` of its nodes begin; the others are strangers to the run until they start."""

    def __init__(self, directory: Path, *, founders: int, **settings: object) -> None:
        super().__init__(directory, **settings)  # type: ignore[arg-type]
        self.founders = founders

    def create_run(self) -> HomeRun:
        if self.run is None:
            first = self.nodes[0].home
            named = sorted(node.peer_id for node in self.nodes[: self.founders])
            self.run = runs.obtain(
                first, self._run_named, overrides=self._overrides, founders=named, report=self._report
            )
            runs.make_current(first, self.run.run_id)
        return self.run


def train(options: argparse.Namespace, place: Path, say: Callable[[str], None], *, joiners: int) -> list[Line]:
    """One training to its last round, seen by the first node. Raises `SwarmFailed`."""
    seen: dict[int, HistoryRound] = {}
    with LateSwarm(
        place,
        founders=options.founders,
        nodes=options.founders + joiners,
        run=options.preset,
        rounds=options.rounds,
        overrides=[f"model.seed={options.seed}", "validation.every_rounds=1"],
        device=options.device,
        threads=1,
        report=say,
    ) as swarm:
        members = range(options.founders)
        swarm.create_run()
        swarm.start(0)
        swarm.wait_listening(0)
        for index in members[1:]:
            swarm.start(index, join=0)
        if joiners:
            swarm.wait_round(options.join_at, nodes=members, timeout_s=ROUND_S * options.join_at)
            for index in range(options.founders, options.founders + joiners):
                swarm.start(index, join=index % options.founders)
            say(f"{joiners} nodes join after round {options.join_at}")

        def over() -> bool:
            status = swarm.status(0)
            if status is not None:
                seen.update({one.round: one for one in status.history})
            return status is not None and status.round >= options.rounds and status.phase == "finished"

        swarm.wait(over, ROUND_S * options.rounds, "the last round")
    return [
        Line(round=number, loss=one.validation_loss, contributors=len(one.contributors))
        for number, one in sorted(seen.items())
        if one.validation_loss is not None
    ]


def compare(options: argparse.Namespace, say: Callable[[str], None]) -> Compared:
    with tempfile.TemporaryDirectory(prefix="atoll-joins-") as place:
        say("without joins")
        alone = train(options, Path(place) / "alone", say, joiners=0)
        say("with joins")
        joined = train(options, Path(place) / "joined", say, joiners=options.joiners)
    more = [line.round for line in joined if line.contributors > options.founders]
    if not more:
        raise AtollError(f"no joiner was counted in {options.rounds} rounds: give it more by --rounds")
    return Compared(alone=tuple(alone), joined=tuple(joined), first_counted=more[0])


def table(compared: Compared) -> str:
    """For docs/results.md."""
    alone = {line.round: line for line in compared.alone}
    rows = ["| round | without joins | with joins | counted |", "|---|---|---|---|"]
    for line in compared.joined:
        other = alone.get(line.round)
        rows.append(
            f"| {line.round} | {f'{other.loss:.4f}' if other is not None else ''} | {line.loss:.4f} | "
            f"{line.contributors}{' (first joiner)' if line.round == compared.first_counted else ''} |"
        )
    return "\n".join(rows)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="scripts/joins", description=__doc__)
    parser.add_argument("--preset", default="micro", help="preset or TOML of the run (default: micro)")
    parser.add_argument("--founders", type=int, default=2, help="nodes from the start (default: 2)")
    parser.add_argument("--joiners", type=int, default=2, help="nodes that join (default: 2)")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--join-at", type=int, default=10, help="round after which they start (default: 10)")
    parser.add_argument("--seed", type=int, default=1, help="of the initial parameters (default: 1)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args(arguments)
    if not 0 < options.join_at < options.rounds or options.founders < 1 or options.joiners < 1:
        parser.error("--join-at must lie within --rounds, --founders and --joiners must be at least 1")

    def say(text: str) -> None:
        sys.stderr.write(f"{text}\n")

    try:
        compared = compare(options, say)
    except AtollError as error:
        say(f"scripts/joins failed: {error}")
        return 2
    if options.json is not None:
        options.json.write_text(json.dumps(asdict(compared), indent=1) + "\n")
    fell = statistics.mean(line.loss for line in compared.joined[-3:])
    sys.stdout.write(
        f"{table(compared)}\n\n"
        f"largest rise from one round to the next: {compared.rise:.4f} in the {AFTER_ROUNDS} rounds after a joiner was "
        f"first counted, {compared.usual_rise:.4f} otherwise; mean of the last three losses {fell:.4f} with joins, "
        f"{statistics.mean(line.loss for line in compared.alone[-3:]):.4f} without: "
        f"{'a SPIKE' if compared.spike else 'no spike'}\n"
    )
    return 1 if compared.spike else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
