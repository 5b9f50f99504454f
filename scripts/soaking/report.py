"""The account of a soak, and why it has failed."""

from __future__ import annotations

import msgspec

from scripts.soaking.slope import Slope

GROWS_MIB_PER_HOUR = 12.0
"""A process that surely grows faster than this leaks: a fifth of a MiB a minute. Histories and caches that fill up to
their bounds in the first half hour stay below it."""
GROWS_DESCRIPTORS_PER_HOUR = 12.0
LONG_MINUTES = 45.0
"""A soak of this length must be able to tell a leak of `LEAK_MIB_PER_HOUR` from noise."""
LEAK_MIB_PER_HOUR = 60.0


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds until nodes contributed again, by kind of event."""

    events: int
    measured: int
    """The others hit nothing, were overtaken by the next one, or did not recover before the end."""
    median_s: float | None
    worst_s: float | None
    never: int
    """Nodes that did not contribute again, though nothing more was done to them."""


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """One node's account, in part-tokens: a token is one in each of the vector's parts."""

    peer: str
    parts: int
    produced: int
    counted: int
    carried: int
    discarded: dict[str, int]
    counted_by_own_chain: int
    counted_by_longest: int
    """By the longest chain of all homes."""
    on_longest: bool
    """Its own chain is a beginning of that one, or all of it."""

    @property
    def balanced(self) -> bool:
        """What is made is counted, carried or lost. Whoever left may have carried what the others then counted."""
        rest = self.produced - self.counted - self.carried - sum(self.discarded.values())
        least = self.counted if self.on_longest else 0
        return (
            rest == 0
            and self.counted == self.counted_by_own_chain
            and least <= self.counted_by_longest <= self.counted + self.carried
        )


class Report(msgspec.Struct, frozen=True, kw_only=True):
    command: str
    date: str
    seed: int
    nodes: int
    guests: int
    every_s: float
    only: tuple[str, ...]
    """Kinds of events that were drawn; none: all."""
    preset: str
    planned_minutes: float
    minutes: float
    unfinished: str | None
    """Why this is no account of a whole soak; None: it is."""
    steps: int
    machine: str
    network: str
    rounds: int
    rounds_per_minute: float
    round_s_median: float | None
    round_s_worst: float | None
    events: dict[str, int]
    recoveries: dict[str, Recovery]
    reforms: int
    """Lineages that were born."""
    forks: list[str]
    mismatches: list[str]
    exclusions: dict[str, int]
    """By reason, all of them."""
    unexplained: list[str]
    work: list[Work]
    memory_mib_per_hour: dict[str, Slope | None]
    descriptors_per_hour: dict[str, Slope | None]
    validation_loss: float | None
    ended: list[str]
    """Nodes that ended without being told to."""
    late: list[str]
    """Nodes that took too long to leave."""
    left_behind: list[str]
    """Processes that outlived their node."""
    said: dict[str, int]
    """Warnings and errors of the nodes' logs, by level and words."""
    broken: list[str]
    """Tracebacks in the logs, and processes that ended as nobody made them end."""
    one_lineage: bool
    unbalanced: dict[str, int]
    """Peers of which a live status did not add up."""

    @property
    def failures(self) -> list[str]:
        """Why this soak has failed; none: it has passed."""
        problems = [f"unfinished: {self.unfinished}"] if self.unfinished is not None else []
        problems += [f"fork: {fork}" for fork in self.forks]
        problems += [f"hash mismatch: {mismatch}" for mismatch in self.mismatches]
        problems += [f"unexplained exclusion: {one}" for one in self.unexplained]
        problems += [f"work of {one.peer} is not accounted for: {one}" for one in self.work if not one.balanced]
        problems += [f"a status of {peer} lacked {missing} part-tokens" for peer, missing in self.unbalanced.items()]
        problems += self.ended
        problems += self.late
        problems += [f"left behind: {one}" for one in self.left_behind]
        problems += [f"in a log: {one}" for one in self.broken]
        problems += [
            f"{one.never} nodes were never counted again after: {kind}"
            for kind, one in self.recoveries.items()
            if one.never
        ]
        problems += self._growth()
        if not self.rounds:
            problems.append("no round was committed")
        if not self.one_lineage:
            problems.append("the nodes did not end on one lineage, all counted in one round")
        return problems

    def _growth(self) -> list[str]:
        problems = []
        for role, memory in self.memory_mib_per_hour.items():
            if memory is not None and memory.surely > GROWS_MIB_PER_HOUR:
                problems.append(f"the {role} grows by {memory.surely:.0f} MiB an hour at least")
            elif self.minutes >= LONG_MINUTES and (memory is None or memory.at_most > LEAK_MIB_PER_HOUR):
                problems.append(f"a leak of 1 MiB a minute in the {role} cannot be ruled out: soak longer")
        for role, descriptors in self.descriptors_per_hour.items():
            if descriptors is not None and descriptors.surely > GROWS_DESCRIPTORS_PER_HOUR:
                problems.append(f"the {role} opens {descriptors.surely:.0f} descriptors an hour more at least")
        return problems

    # ------------------------------------------------------------ in tokens

    @property
    def trained_tokens(self) -> int:
        return sum(one.produced // one.parts for one in self.work)

    @property
    def counted_tokens(self) -> int:
        return sum(one.counted // one.parts for one in self.work)

    @property
    def carried_tokens(self) -> int:
        return sum(one.carried // one.parts for one in self.work)

    @property
    def reported_tokens(self) -> dict[str, int]:
        """Lost and said so, by reason; what a part here and there lost of a token is not shown."""
        found: dict[str, int] = {}
        for one in self.work:
            for why, part_tokens in one.discarded.items():
                found[why] = found.get(why, 0) + part_tokens // one.parts
        return found
