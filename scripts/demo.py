"""The demonstration behind `scripts/demo`: a swarm of real nodes, a power cut, a return, and a verdict.

Everything is done as on the internet, over loopback: separate processes and homes, discovery from one address, signed
messages, TLS between engines. Nothing is simulated, and the exit status is 0 only when everything held (`judge`).
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Optional

import msgspec
import psutil
import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from node.artifacts import write_atomically
from node.cli.errors import one_sentence
from node.cli.local_swarm import POLL_S, LocalSwarm, SwarmFailed
from node.cli.show import number, short
from node.cli.swarm import STALLED_S, SwarmReport, SwarmRound, collect_rounds, summarise, swarm_table
from node.errors import AtollError
from node.status import Status

VICTIM = 0
"""The node that made the run, and whose address all others joined by: no other is missed more."""
KILL_AFTER_ROUNDS = 3
FEWEST_ROUNDS = 10
MUST_FALL = 0.10
"""Share of the first validation loss that ten rounds must take off it (they take about a quarter)."""
QUIET_S = 15.0
"""Without a terminal, the longest silence while the nodes train."""
PROCESSES_GONE_S = 10.0
PROMPT = "The people of the United States"
NEW_TOKENS = 40


def default_rounds() -> int:
    """A returning node starts in the same 5 to 10 s everywhere; where rounds are shorter it needs more of them."""
    return 12 if (os.cpu_count() or 1) < 8 else 24


# ---------------------------------------------------------------- the power cut


@dataclass(kw_only=True)
class Outage:
    """SIGKILL to a whole node in the middle of a round; its return, once a round went without it."""

    killed_s: float | None = None
    killed_round: int = 0
    """The round that it was working on."""
    restarted_s: float | None = None
    restarted_round: int = 0
    """The round that the others were working on."""
    back_s: float | None = None
    back_round: int | None = None
    """The first round that counted its work again."""

    def advance(self, swarm: LocalSwarm, told: int, say: Callable[[str], None]) -> None:
        """The next step of it, when its time has come; `told` is the newest round shown. Raises `SwarmFailed`."""
        if self.killed_s is None:
            started = all(node.last is not None and node.last.round >= KILL_AFTER_ROUNDS for node in swarm.nodes)
            if started and told >= KILL_AFTER_ROUNDS - 1:
                self._kill(swarm, say)
        elif self.restarted_s is None:
            if any(not victim_in for seen, victim_in in _rounds_from(swarm, self.killed_round) if seen <= told):
                self._restart(swarm, say)
        elif self.back_round is None:
            counted = [
                round_number for round_number, victim_in in _rounds_from(swarm, self.restarted_round) if victim_in
            ]
            if counted:
                self.back_round, self.back_s = min(counted), time.monotonic()
                say(f"node-{VICTIM} is back: round {self.back_round} counts its work again")

    def _kill(self, swarm: LocalSwarm, say: Callable[[str], None]) -> None:
        victim = swarm.nodes[VICTIM]
        assert victim.last is not None
        processes = [psutil.Process(victim.pid), *psutil.Process(victim.pid).children(recursive=True)]
        swarm.kill(VICTIM)
        self.killed_s, self.killed_round = time.monotonic(), victim.last.round
        _, alive = psutil.wait_procs(processes[1:], timeout=PROCESSES_GONE_S)
        if alive:
            raise SwarmFailed(f"{len(alive)} processes of node-{VICTIM} outlived its supervisor: {alive}")
        say(f"node-{VICTIM} is killed in round {self.killed_round}: SIGKILL, {len(processes)} processes gone")

    def _restart(self, swarm: LocalSwarm, say: Callable[[str], None]) -> None:
        assert self.killed_s is not None
        swarm.restart(VICTIM)
        self.restarted_s = time.monotonic()
        self.restarted_round = max(node.last.round for node in swarm.nodes if node.last is not None)
        say(f"node-{VICTIM} starts again on its home, after {self.restarted_s - self.killed_s:.0f} s")


def _rounds_from(swarm: LocalSwarm, first: int) -> list[tuple[int, bool]]:
    """Committed rounds from `first` on, each with whether it counted the victim."""
    peer_id = swarm.nodes[VICTIM].peer_id
    seen = {
        one.round: peer_id in one.contributors
        for node in swarm.nodes
        for one in node.history.values()
        if one.round >= first
    }
    return sorted(seen.items())


# ---------------------------------------------------------------- following


@dataclass(kw_only=True)
class Follower:
    """Shows what happens: the same lines everywhere, and on a terminal the nodes' live table below them."""

    swarm: LocalSwarm
    console: Console
    started_s: float
    """When the command began, on `time.time`'s clock."""
    outage: Outage = field(default_factory=Outage)
    first_step_s: float | None = None
    """From the command until a node's first inner step was seen."""
    first_validation_loss: float | None = None
    """Of the state that the run begins with."""
    _told: int = -1
    _said_s: float = field(default_factory=time.monotonic)

    def say(self, text: str) -> None:
        self._said_s = time.monotonic()
        self.console.print(f"{time.time() - self.started_s:5.0f} s  {text}", highlight=False, soft_wrap=True)

    def follow(self) -> None:
        """Until all nodes have ended. Raises `SwarmFailed`."""
        if not self.console.is_terminal:
            self._until_ended(lambda statuses: None)
            return
        with Live(console=self.console, auto_refresh=False, transient=True) as live:
            self._until_ended(lambda statuses: live.update(swarm_table(statuses, self.swarm), refresh=True))

    def _until_ended(self, show: Callable[[Sequence[Status | None]], None]) -> None:
        newest, moved_s = -1, time.monotonic()
        while any(node.running for node in self.swarm.nodes):
            statuses = self.swarm.poll()
            self.swarm.check()
            self._see_start(statuses)
            self._tell_rounds()
            self.outage.advance(self.swarm, self._told, self.say)
            show(statuses)
            now_s = time.monotonic()
            reached = max((status.round for status in statuses if status is not None), default=-1)
            if reached > newest:
                newest, moved_s = reached, now_s
            if now_s - moved_s > STALLED_S:
                raise SwarmFailed(f"no round for {STALLED_S:.0f} s; {self.swarm.reasons()}")
            if not self.console.is_terminal and now_s - self._said_s > QUIET_S:
                self._tell_progress(statuses)
            time.sleep(POLL_S)
        self._tell_rounds(ended=True)
        self.swarm.check()

    def _see_start(self, statuses: Sequence[Status | None]) -> None:
        for status in statuses:
            if self.first_validation_loss is None and status is not None and status.round == 0:
                self.first_validation_loss = status.validation_loss
            if self.first_step_s is None and status is not None and status.trainer.step > 0:
                self.first_step_s = time.time() - self.started_s
                self.say(f"training: validation loss before the first step {number(self.first_validation_loss)}")

    def _tell_rounds(self, *, ended: bool = False) -> None:
        """A round is told once its validation loss is known, or the next round shows that there will be none."""
        rounds = collect_rounds(self.swarm)
        for one in rounds:
            settled = one.validation_loss is not None or one.round < rounds[-1].round or ended
            if one.round > self._told and settled:
                self._told = one.round
                self.say(
                    f"round {one.round:2}  {one.contributors} contributors  {one.seconds:5.1f} s  "
                    f"loss {number(one.loss)}  validation {number(one.validation_loss)}  "
                    f"state {' ≠ '.join(short(state_hash) for state_hash in one.state_hashes)}"
                )

    def _tell_progress(self, statuses: Sequence[Status | None]) -> None:
        losses = [status.loss for status in statuses if status is not None and status.loss is not None]
        words = [f"loss {number(sum(losses) / len(losses) if losses else None)}"]
        for node, status in zip(self.swarm.nodes, statuses, strict=True):
            if not node.running or status is None:
                words.append(f"node-{node.index} {'starts' if node.running else 'is down'}")
            elif status.phase == "training":
                words.append(f"node-{node.index} step {status.trainer.step}/{status.trainer.budget_steps}")
            else:
                words.append(f"node-{node.index} {status.phase}")
        self.say("        " + ", ".join(words))


# ---------------------------------------------------------------- the verdict


class DemoReport(msgspec.Struct, frozen=True, kw_only=True):
    """`scripts/demo --json`."""

    ok: bool
    problems: tuple[str, ...]
    swarm: SwarmReport
    killed_node: str
    killed_in_round: int | None
    down_s: float | None
    """From SIGKILL to its new start."""
    back_in_round: int | None
    back_after_s: float | None
    """From SIGKILL to the commit that counted it again."""
    first_step_s: float | None
    """From the command to the first training step."""
    validation_loss_before: float | None
    """Of the state that the run began with; `swarm.validation_loss_start` is that after the first round."""
    text: str | None
    """Written by the exported model."""
    seconds: float


def judge(
    swarm: SwarmReport, outage: Outage, validation_loss_before: float | None, text: str | None
) -> tuple[str, ...]:
    """All that did not hold, a sentence each."""
    if swarm.problem is not None:
        return (swarm.problem,)
    problems = []
    if len(swarm.rounds) < FEWEST_ROUNDS:
        problems.append(f"only {len(swarm.rounds)} rounds were committed, of at least {FEWEST_ROUNDS}")
    if outage.back_round is None:
        problems.append(
            f"node-{VICTIM} was not counted again before the run ended: give it more rounds by --rounds, "
            f"or see the log in {swarm.directory}/node-{VICTIM}"
        )
    before, after = validation_loss_before, swarm.rounds[-1].validation_loss
    if before is None or after is None:
        problems.append(f"the validation loss is not known: {number(before)} → {number(after)}")
    elif not after < (1 - MUST_FALL) * before:
        problems.append(f"the validation loss did not fall by {MUST_FALL:.0%}: {before:.4f} → {after:.4f}")
    if swarm.model is None or not text:
        problems.append("the exported model wrote no text")
    return tuple(problems)


def export_and_write(swarm: LocalSwarm, directory: Path, seed: int) -> str:
    """Export the model of the first node, load it as anyone would, and let it write. Raises `OperatorError`."""
    # Heavy imports, needed only when all nodes have ended.
    from node.cli.export import export_model

    export_model(swarm.nodes[0].home, directory)

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.manual_seed(seed)
    tokenizer: Any = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    model: Any = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True)
    prompt = tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
    written = model.generate(
        **prompt, max_new_tokens=NEW_TOKENS, do_sample=True, temperature=0.8, top_k=40, pad_token_id=0
    )
    return " ".join(str(tokenizer.decode(written[0], skip_special_tokens=True)).split())


def report_lines(report: DemoReport) -> list[tuple[str, str]]:
    """What a person wants to know, as (name, value)."""
    swarm = report.swarm
    last = swarm.rounds[-1].validation_loss if swarm.rounds else None
    lines = [
        ("run", f"{swarm.run_name}, {swarm.parameters:,} parameters, {swarm.nodes} nodes on this machine"),
        ("rounds", str(len(swarm.rounds))),
        ("contributors", " ".join(str(one.contributors) for one in swarm.rounds)),
        ("state hashes", _agreement(swarm.rounds, swarm)),
        ("training loss", f"{number(swarm.loss_start)} → {number(swarm.loss_end)}"),
        ("validation loss", f"{number(report.validation_loss_before)} → {number(last)}"),
    ]
    if swarm.bytes_per_parameter_round is not None:
        lines.append(("sent", f"{swarm.bytes_per_parameter_round:.2f} bytes per parameter, node and round"))
    if report.killed_in_round is not None:
        lines.append((report.killed_node, _outage_words(report)))
    if report.first_step_s is not None:
        lines.append(
            ("time", f"{report.seconds:.0f} s; the first training step came after {report.first_step_s:.0f} s")
        )
    if swarm.model is not None:
        lines.append(("model", swarm.model))
    if report.text:
        lines.append(("it writes", report.text))
    return lines


def _agreement(rounds: Sequence[SwarmRound], swarm: SwarmReport) -> str:
    split = [one.round for one in rounds if len(one.state_hashes) > 1]
    finals = set(swarm.state_hashes.values())
    words = "equal on all nodes in every round" if not split else f"DIFFERENT in rounds {split}"
    return f"{words}; at the end {', '.join(short(final) for final in sorted(map(str, finals)))} on {swarm.nodes} nodes"


def _outage_words(report: DemoReport) -> str:
    words = f"killed in round {report.killed_in_round}"
    if report.down_s is not None:
        words += f", down for {report.down_s:.0f} s"
    if report.back_in_round is not None:
        return f"{words}, counted again in round {report.back_in_round}, {report.back_after_s:.0f} s after the kill"
    return f"{words}, never counted again"


# ---------------------------------------------------------------- the command


def run_demo(
    *,
    nodes: int,
    rounds: int,
    preset: str,
    seed: int,
    device: str,
    directory: Path | None,
    keep: bool,
    as_json: bool,
) -> int:
    """Exit status: 0 when everything held."""
    # The shell script became this process: its time, and with it the set-up's, counts.
    started_s = psutil.Process().create_time()
    place = directory.absolute() if directory else Path(tempfile.mkdtemp(prefix="atoll-demo-"))
    place.mkdir(parents=True, exist_ok=True)
    console = Console(stderr=as_json)
    problem: str | None = None
    text: str | None = None
    with LocalSwarm(
        place,
        nodes=nodes,
        run=preset,
        rounds=rounds,
        overrides=(f"model.seed={seed}",),
        device=device,
        report=lambda words: follower.say(words),
    ) as swarm:
        follower = Follower(swarm=swarm, console=console, started_s=started_s)
        try:
            swarm.start_all()
            follower.say(f"{nodes} nodes started in {place}: node-0 has the run, the others only its address")
            follower.follow()
            follower.say("the run is over: exporting the model")
            text = export_and_write(swarm, place / "model", seed)
        except SwarmFailed as error:
            swarm.poll()
            problem = str(error)
        except AtollError as error:
            if swarm.run is None:
                raise
            problem = str(error)
    outage = follower.outage
    summary = summarise(
        swarm,
        rounds=rounds,
        problem=problem,
        seconds=time.time() - started_s,
        model=place / "model" if text is not None else None,
    )
    problems = judge(summary, outage, follower.first_validation_loss, text)
    report = DemoReport(
        ok=not problems,
        problems=problems,
        swarm=summary,
        killed_node=f"node-{VICTIM}",
        killed_in_round=outage.killed_round if outage.killed_s is not None else None,
        down_s=_between(outage.killed_s, outage.restarted_s),
        back_in_round=outage.back_round,
        back_after_s=_between(outage.killed_s, outage.back_s),
        first_step_s=follower.first_step_s,
        validation_loss_before=follower.first_validation_loss,
        text=text,
        seconds=time.time() - started_s,
    )
    write_atomically(msgspec.json.format(msgspec.json.encode(report)), place / "report.json")
    _print(report, console, as_json=as_json)
    if report.ok and not keep:
        for node in swarm.nodes:
            shutil.rmtree(node.home.path, ignore_errors=True)
    return 0 if report.ok else 1


def _print(report: DemoReport, console: Console, *, as_json: bool) -> None:
    console.print()
    for name, value in report_lines(report):
        console.print(Text.assemble((f"{name:17}", "dim"), value), soft_wrap=True, highlight=False)
    console.print()
    if report.ok:
        console.print(Text("everything held", style="bold green"))
        atoll = Path(os.path.relpath(Path(sys.executable).with_name("atoll")))
        console.print(f"next: {atoll} daemon --run tiny", soft_wrap=True, highlight=False)
        console.print(
            "      a node of your own; it prints the address by which others `atoll join` it", highlight=False
        )
    else:
        for problem in report.problems:
            console.print(Text(f"failed: {problem}", style="bold red"), soft_wrap=True)
        console.print(f"the homes and logs are in {report.swarm.directory}", soft_wrap=True, highlight=False)
    if as_json:
        sys.stdout.write(msgspec.json.encode(report).decode() + "\n")


def _between(start_s: float | None, end_s: float | None) -> float | None:
    return end_s - start_s if start_s is not None and end_s is not None else None


@one_sentence
def main(
    nodes: Annotated[int, typer.Option("--nodes", min=3, max=64, metavar="N", help="How many.")] = 4,
    rounds: Annotated[
        Optional[int],  # noqa: UP045 (typer evaluates it)
        typer.Option("--rounds", min=FEWEST_ROUNDS, metavar="R", help="12, or 24 with eight cores or more."),
    ] = None,
    preset: Annotated[str, typer.Option("--preset", metavar="RUN", help="tiny, micro, or a TOML file.")] = "tiny",
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the initial parameters and the text.")] = 1,
    device: Annotated[
        str, typer.Option("--device", help="cpu, auto, cuda or cuda:N, for every node.")
    ] = "cpu",  # a million parameters gain nothing from a GPU that four processes would have to share
    directory: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--directory", metavar="DIR", help="For homes and model (a temporary directory)."),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the nodes' homes there.")] = False,
    json: Annotated[bool, typer.Option("--json", help="The report as one JSON object, for programs.")] = False,
) -> None:
    """Nodes train one model on real text; one is killed and comes back. Exit status 0: everything held."""
    sys.exit(
        run_demo(
            nodes=nodes,
            rounds=rounds if rounds is not None else default_rounds(),
            preset=preset,
            seed=seed,
            device=device,
            directory=directory,
            keep=keep,
            as_json=json,
        )
    )


if __name__ == "__main__":
    typer.run(main)
