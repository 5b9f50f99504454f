"""Runs one case: starts an engine on the hosts of a lab, lets it do rounds, and takes account of each phase."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import msgspec
import trio

from scripts.benchmark import accounts
from scripts.benchmark.accounts import Account
from scripts.benchmark.atoll import opened_atoll
from scripts.benchmark.bounds import Bound
from scripts.benchmark.contestant import EXCHANGE, Case, Contestant, NotAvailable, RoundFailed
from scripts.benchmark.record import CaseResult, Phase, Round
from scripts.benchmark.vectors import judge
from scripts.benchmark.workers import opened_workers
from scripts.wanlab.wan import Wan

WARM_UP_ROUNDS = 1
"""Not counted: connections are made and windows opened in it, which a swarm does once, not each round."""


def machine() -> str:
    """What it runs on, and how much else it does: the load of the last minute."""
    model = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return f"{os.cpu_count()} cores, {model}, Linux {platform.release()}; load {os.getloadavg()[0]:.1f}"


def opened(case: Case, nursery: trio.Nursery) -> AbstractAsyncContextManager[Contestant]:
    if case.engine == "atoll":
        return opened_atoll(case, nursery)
    return opened_workers(case)


async def run_case(
    case: Case, wan: Wan, bound: Bound, blank: CaseResult, *, repetitions: int, say: Callable[[str], None]
) -> CaseResult:
    """`blank` with figures, or with the reason why there are none."""
    failure = ""
    rounds: list[Round] = []
    async with trio.open_nursery() as nursery:
        try:
            async with opened(case, nursery) as contestant:
                for number in range(WARM_UP_ROUNDS + repetitions):
                    one = await _round(case, wan, bound, contestant, number)
                    rounds.append(one)
                    say(f"{blank.title}: round {number} in {one.exchange.seconds:.2f} s")
                    if not one.verdict.right:
                        say(f"{blank.title}: round {number} is wrong: {one.verdict.why}")
        except NotAvailable as error:
            failure = f"not available: {error}"
        except RoundFailed as error:
            failure = str(error)
        nursery.cancel_scope.cancel()
    if not failure and (wrong := [one for one in rounds if not one.verdict.right]):
        failure = (
            f"{len(wrong)} of {len(rounds)} rounds gave no mean; in round {wrong[0].number}, {wrong[0].verdict.why}"
        )
    return msgspec.structs.replace(
        blank,
        rounds=tuple(rounds[WARM_UP_ROUNDS:]),
        warm_up_s=rounds[0].exchange.seconds if rounds else 0.0,
        failure=failure,
    )


async def _round(case: Case, wan: Wan, bound: Bound, contestant: Contestant, number: int) -> Round:
    phases: dict[str, Phase] = {}
    spent: list[Account] = []
    moved: list[list[int]] = []
    peaks: tuple[tuple[int, ...], ...] = ()
    for phase in contestant.phases:
        families = [accounts.family(pid) for pid in contestant.pids()]
        if phase == EXCHANGE:
            accounts.forget_peaks(pid for members in families for pid in members)
            moved = wan.delivered_bytes()
        before, lab_ns = [accounts.account(members) for members in families], accounts.cpu_ns(wan.process_id)
        seconds = await contestant.perform(phase, number)
        after = [accounts.account(members) for members in families]
        used = [late.since(early) for early, late in zip(before, after, strict=True)]
        phases[phase] = Phase(
            seconds=seconds,
            cpu_ns=sum(one.cpu_ns for one in used),
            system_ns=sum(one.system_ns for one in used),
            lab_ns=accounts.cpu_ns(wan.process_id) - lab_ns,
        )
        if phase == EXCHANGE:
            spent = used
            moved = [
                [late - early for early, late in zip(*rows, strict=True)]
                for rows in zip(moved, wan.delivered_bytes(), strict=True)
            ]
            peaks = tuple(tuple(accounts.peak_bytes(pid) for pid in members) for members in families)
    verdict = await trio.to_thread.run_sync(lambda: judge(contestant.results(), case.inputs, number, bound))
    return Round(
        number=number,
        phases=phases,
        sent_bytes=tuple(one.sent_bytes for one in spent),
        received_bytes=tuple(one.received_bytes for one in spent),
        delivered_bytes=tuple(tuple(row) for row in moved),
        peak_bytes=peaks,
        verdict=verdict,
    )
