"""Engines that are not ours: one `worker` process on each host, told what to do over its standard input."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import trio

from protocol.codecs import Float32Array
from scripts.benchmark.accounts import family
from scripts.benchmark.contestant import (
    DECODE,
    ENCODE,
    EXCHANGE,
    LOAD,
    MATCH,
    WARM_UP_S,
    Case,
    NotAvailable,
    RoundFailed,
    at_once,
)
from scripts.benchmark.vectors import Shared, scale_of
from scripts.benchmark.worker import Place

ROOT = Path(__file__).parents[2]
END_S = 10.0
LOG_CHARACTERS = 600
"""Of a worker's own words, in a failure."""
PHASES = {"gloo": (LOAD, ENCODE, EXCHANGE, DECODE), "hivemind": (LOAD, MATCH, EXCHANGE, DECODE)}

HIVEMIND_HOME = ROOT / ".venv-hivemind"
HIVEMIND_VARIABLE = "ATOLL_HIVEMIND_PYTHON"


def hivemind_python() -> str:
    """The interpreter with hivemind in it. Raises `NotAvailable`."""
    path = os.environ.get(HIVEMIND_VARIABLE) or str(HIVEMIND_HOME / "bin" / "python")
    if not Path(path).exists():
        raise NotAvailable(f"{path} is not there: run `scripts/bench_round --setup-hivemind`")
    asked = subprocess.run([path, "-c", "import hivemind"], capture_output=True, text=True, timeout=60, check=False)
    if asked.returncode:
        last = (asked.stderr.strip().splitlines() or ["it says nothing"])[-1]
        raise NotAvailable(f"{path} cannot import hivemind ({last}): run `scripts/bench_round --setup-hivemind`")
    return path


@dataclass(eq=False, kw_only=True)
class Worker:
    name: str
    process: trio.Process
    log: Path
    _unread: bytearray = field(default_factory=bytearray)

    async def ask(self, question: dict[str, Any], within_s: float) -> dict[str, Any]:
        """Raises `RoundFailed`."""
        assert self.process.stdin is not None
        what = question["op"]
        try:
            with trio.fail_after(within_s):
                await self.process.stdin.send_all(json.dumps(question).encode() + b"\n")
                answer = json.loads(await self._line())
        except trio.TooSlowError:
            raise RoundFailed(f"{self.name} did not end the phase {what!r} within {within_s:.0f} s") from None
        except (trio.BrokenResourceError, trio.EndOfChannel):
            raise RoundFailed(f"{self.name} ended in the phase {what!r}: {self._last_words()}") from None
        if not answer["ok"]:
            raise RoundFailed(f"{self.name} failed in the phase {what!r}: {answer['why']}")
        return dict(answer)

    async def _line(self) -> bytes:
        assert self.process.stdout is not None
        while b"\n" not in self._unread:
            more = await self.process.stdout.receive_some()
            if not more:
                raise trio.EndOfChannel
            self._unread += more
        line, _, self._unread = self._unread.partition(b"\n")
        return bytes(line)

    def _last_words(self) -> str:
        return self.log.read_text(errors="replace").strip()[-LOG_CHARACTERS:] or "it said nothing"

    async def end(self) -> None:
        """With all that descends from it."""
        members = family(self.process.pid)
        assert self.process.stdin is not None
        await self.process.stdin.aclose()
        with trio.move_on_after(END_S):
            await self.process.wait()
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await self.process.wait()


@dataclass(eq=False, kw_only=True)
class Workers:
    """A `Contestant`."""

    case: Case
    members: Sequence[Worker]
    outputs: Sequence[Shared]

    @property
    def phases(self) -> tuple[str, ...]:
        return PHASES[self.case.engine]

    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self.members]

    async def perform(self, phase: str, round_number: int) -> float:
        answers = await self.ask_all({"op": phase, "scale": scale_of(round_number)}, self.case.patience_s)
        return float(max(one["end_s"] for one in answers) - min(one["start_s"] for one in answers))

    def results(self) -> Sequence[Float32Array]:
        return [output.values for output in self.outputs]

    async def ask_all(self, question: dict[str, Any], within_s: float) -> list[dict[str, Any]]:
        """Raises the first `RoundFailed`."""
        answers: list[dict[str, Any]] = [{}] * len(self.members)

        async def ask(index: int) -> None:
            answers[index] = await self.members[index].ask(question, within_s)

        await at_once(*(partial(ask, index) for index in range(len(self.members))))
        return answers

    async def open(self) -> None:
        within_s = WARM_UP_S + self.case.patience_s
        if self.case.engine == "gloo":
            await self.ask_all({"op": "open"}, within_s)
            return
        first, *others = self.members
        addresses = (await first.ask({"op": "open", "initial_peers": []}, within_s))["addresses"]
        for other in others:
            await other.ask({"op": "open", "initial_peers": addresses}, within_s)


@asynccontextmanager
async def opened_workers(case: Case) -> AsyncIterator[Workers]:
    """Processes on all hosts, connected. Raises `NotAvailable` or `RoundFailed`."""
    python = hivemind_python() if case.engine == "hivemind" else sys.executable
    outputs = [Shared(case.elements) for _ in case.hosts]
    members: list[Worker] = []
    try:
        for host, given, output in zip(case.hosts, case.inputs.vectors, outputs, strict=True):
            place = Place(
                index=host.index,
                hosts=len(case.hosts),
                address=host.address,
                first_address=case.hosts[0].address,
                elements=case.elements,
                codec=case.codec,
                input_fd=given.fd,
                result_fd=output.fd,
                patience_s=case.patience_s,
            )
            log = case.directory / f"{case.engine}-{host.index}.log"
            command = [python, "-m", f"scripts.benchmark.{case.engine}_worker", json.dumps(asdict(place))]
            with log.open("wb") as words:
                process = await trio.lowlevel.open_process(
                    [*host.prefix, *command],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=words,
                    pass_fds=(given.fd, output.fd),
                    cwd=ROOT,
                    env=os.environ | {"PYTHONPATH": str(ROOT)},
                )
            members.append(Worker(name=f"{case.engine} on host {host.index}", process=process, log=log))
        workers = Workers(case=case, members=members, outputs=outputs)
        await workers.open()
        yield workers
    finally:
        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as nursery:
                for worker in members:
                    nursery.start_soon(worker.end)
        for output in outputs:
            output.close()
