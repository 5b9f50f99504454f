"""What every engine of a benchmark is asked: to go through the phases of a round, one after another, on all hosts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import trio

from node.errors import AtollError
from protocol.codecs import Float32Array
from scripts.benchmark.lab import Lab
from scripts.benchmark.vectors import Inputs
from scripts.wanlab.wan import Host

EXCHANGE = "exchange"
"""The phase that is compared: from all being ready to all having every result."""
ENCODE = "encode"
"""What an engine does to its input before it is ready."""
LOAD = "load"
"""Putting the round's input where the engine wants it: the benchmark's own work."""
MATCH = "match"
"""Agreeing on who takes part."""
OUTER = "outer step"
DECODE = "decode"

WARM_UP_S = 60.0
"""To start processes and connect them, beside what bytes need."""


class NotAvailable(AtollError):
    """This engine cannot run here: one sentence that says why, and what to do."""


class RoundFailed(AtollError):
    """An engine did not do a phase: one sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What one engine is to do."""

    engine: str
    codec: str
    plan: str
    lab: Lab
    hosts: Sequence[Host]
    inputs: Inputs
    part_elements: int
    """Of engines that have parts of a stated size."""
    patience_s: float
    """For any one phase."""
    directory: Path
    """For what the engines write: logs, parts."""

    @property
    def elements(self) -> int:
        return self.inputs.elements


class Contestant(Protocol):
    """An engine that runs on all hosts."""

    @property
    def phases(self) -> tuple[str, ...]:
        """Of a round, in order; `EXCHANGE` is one of them."""
        ...

    def pids(self) -> list[int]:
        """Of each host: the process that all others of it descend from."""
        ...

    async def perform(self, phase: str, round_number: int) -> float:
        """Do it on all hosts at once; the seconds from the first that began to the last that ended.

        Raises `RoundFailed`.
        """
        ...

    def results(self) -> Sequence[Float32Array]:
        """The last round's result on each host, decoded. Valid until the next round."""
        ...


async def at_once(*works: Callable[[], Awaitable[None]]) -> None:
    """All of them; the first `RoundFailed` ends the others and is raised, without a group around it."""
    failures: list[RoundFailed] = []

    async def run(work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except RoundFailed as error:
            failures.append(error)
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for work in works:
            nursery.start_soon(run, work)
    if failures:
        raise failures[0]
