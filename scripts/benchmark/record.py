"""What a benchmark measured: one round, one case (an engine, a codec, a plan, a size, a lab), one run of all."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

from scripts.benchmark.contestant import DECODE, ENCODE, EXCHANGE, MATCH, OUTER
from scripts.benchmark.lab import Lab
from scripts.benchmark.vectors import Verdict


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    seconds: float
    """From the first host that began to the last that ended."""
    cpu_ns: int
    """Of the engine's processes on all hosts."""
    system_ns: int = 0
    """The kernel's part of it, in steps of 10 ms a process."""
    lab_ns: int = 0
    """CPU time of what moves the lab's packets meanwhile, the kernel's work for arriving packets included."""


class Round(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    phases: dict[str, Phase]
    sent_bytes: tuple[int, ...]
    """[hosts] In the exchange, whole packets, counted at the host's interface."""
    received_bytes: tuple[int, ...]
    delivered_bytes: tuple[tuple[int, ...], ...]
    """[hosts][hosts] In the exchange, from each host (row) to each other."""
    peak_bytes: tuple[tuple[int, ...], ...]
    """[hosts][processes] Peak resident memory in the exchange, shared memory included."""
    verdict: Verdict

    @property
    def exchange(self) -> Phase:
        return self.phases[EXCHANGE]


class CaseResult(msgspec.Struct, frozen=True, kw_only=True):
    lab: Lab
    elements: int
    engine: str
    codec: str
    plan: str
    part_elements: int | None = None
    """Of an engine that has parts of a stated size."""
    limit_s: float
    """Of the link: bytes that must move over the busiest line ÷ its rate, and the round trips."""
    busiest_bytes_s: float
    """The bytes' part of it, in seconds."""
    rounds: tuple[Round, ...] = ()
    """Measured; not the first ones, which warm up."""
    warm_up_s: float = 0.0
    """Exchange of the first round: connections are made in it."""
    others: dict[str, float] = {}
    """Other engines, and other plans, of the same lab, size and run: their seconds as multiples of this one's."""
    failure: str = ""
    """Why there are no figures, or which rounds are not in them: one sentence."""
    date: str
    machine: str
    command: str

    @property
    def title(self) -> str:
        plan = f", {self.plan}" if self.engine == "atoll" and self.plan != "flat" else ""
        return f"{self.engine} {self.codec}{plan}"

    @property
    def key(self) -> tuple[str, int, str, str, str]:
        return self.lab.name, self.elements, self.engine, self.codec, self.plan

    @property
    def counted(self) -> tuple[Round, ...]:
        """Rounds whose result was right: no other says how long a round takes."""
        return tuple(one for one in self.rounds if one.verdict.right)

    @property
    def measured(self) -> bool:
        return bool(self.counted)

    def median_s(self, *phases: str) -> float:
        """Seconds of these phases together; those that this engine has not take none."""
        return statistics.median(
            sum(one.phases[name].seconds for name in phases if name in one.phases) for one in self.counted
        )

    def cpu_ns(self, *phases: str) -> float:
        """Median CPU nanoseconds per value and host."""
        hosts = len(self.lab.hosts)
        return statistics.median(
            sum(one.phases[name].cpu_ns for name in phases if name in one.phases) / hosts / self.elements
            for one in self.counted
        )

    @property
    def exchange_s(self) -> float:
        return self.median_s(EXCHANGE)

    @property
    def ready_s(self) -> float:
        """The exchange and what codecs do before and after it; hivemind's are in its exchange."""
        return self.median_s(ENCODE, EXCHANGE, DECODE) if self.engine != "hivemind" else self.exchange_s

    @property
    def ratio(self) -> float:
        """To the link's limit."""
        return self.exchange_s / self.limit_s

    @property
    def matching_s(self) -> float:
        return self.median_s(MATCH)

    @property
    def outer_s(self) -> float:
        return self.median_s(OUTER)

    @property
    def busiest_line_bytes(self) -> float:
        """Median over rounds of what the busiest host sent or got."""
        return statistics.median(max(*one.sent_bytes, *one.received_bytes) for one in self.counted)

    def site_line_bytes(self, site: str) -> float:
        """Median over rounds of what left this site, and what came in: the larger of both."""
        inside = [host.site == site for host in self.lab.hosts]
        return statistics.median(
            max(_crossing(one.delivered_bytes, inside, out=True), _crossing(one.delivered_bytes, inside, out=False))
            for one in self.counted
        )

    @property
    def system_share(self) -> float:
        """The kernel's part of the CPU time of exchanges."""
        whole = sum(one.exchange.cpu_ns for one in self.counted)
        return sum(one.exchange.system_ns for one in self.counted) / max(whole, 1)

    @property
    def peak_bytes(self) -> int:
        """Of the largest process."""
        return max(peak for one in self.counted for host in one.peak_bytes for peak in host)

    @property
    def worst(self) -> float:
        """Error, as a share of what is allowed."""
        return max(one.verdict.worst for one in self.counted)

    @property
    def rms_error(self) -> float:
        return max(one.verdict.rms_error for one in self.counted)


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """All cases of one command."""

    date: str
    machine: str
    command: str
    results: tuple[CaseResult, ...]


def compared(results: Sequence[CaseResult]) -> tuple[CaseResult, ...]:
    """The same, each with its `others`."""
    return tuple(
        msgspec.structs.replace(
            one,
            others={
                other.title: round(other.exchange_s / one.exchange_s, 3)
                for other in results
                if other.measured and other.key[:2] == one.key[:2] and _rivals(one, other)
            },
        )
        if one.measured
        else one
        for one in results
    )


def _rivals(one: CaseResult, other: CaseResult) -> bool:
    """Not two codecs of one engine."""
    return one.engine != other.engine or (one.codec == other.codec and one.plan != other.plan)


def _crossing(moved: tuple[tuple[int, ...], ...], inside: list[bool], *, out: bool) -> int:
    return sum(
        size
        for source, row in enumerate(moved)
        for target, size in enumerate(row)
        if inside[source] is out and inside[target] is not out
    )
