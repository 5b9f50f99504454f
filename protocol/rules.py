"""The constants of one run that its peers must share: a pure view of the manifest (protocol sections 2 to 6)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from protocol.names import Digest, PeerId


class Quorum(StrEnum):
    """How many electors decide. `MAJORITY` suits closed admission, `TWO_THIRDS` open admission."""

    MAJORITY = "majority"
    TWO_THIRDS = "two_thirds"

    def of(self, electors: int) -> int:
        """`q(n)` of protocol section 2."""
        return electors // 2 + 1 if self is Quorum.MAJORITY else 2 * electors // 3 + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """All durations are seconds, measured locally from a received event (design section 3, "Clocks")."""

    run: Digest
    founders: tuple[PeerId, ...]
    initial_state_hash: Digest
    allowed_peers: tuple[PeerId, ...] | None = None
    """None: anyone may join."""

    quorum: Quorum = Quorum.MAJORITY
    min_peers: int = 1
    """A round needs at least this many contributors; with fewer, the run pauses."""
    max_electors: int = 64

    # The vector
    elements: int
    """Length of the flat vector, both segments, a multiple of 256."""
    buffer_elements: int = 0
    """Length of the second segment (persistent float buffers, averaged without momentum), the vector's tail."""
    part_elements: int = 65_536
    """Elements of a part; the last part may be shorter. A multiple of 256."""
    fragments: int = 1
    overlap: int = 0
    codec: str = "int8"
    sum_codec: str = "sum16"
    momentum: float = 0.9
    outer_lr: tuple[tuple[int, float], ...] = ((1, 0.4), (2, 0.6), (8, 0.7))
    """(contributors at least, learning rate), ascending; the last row that applies counts."""

    # Data
    epoch_units: int
    lease_cap_units: int
    """The most units a READY or JOIN may ask for; a member holds at most twice that."""
    unit_tokens: int
    """Tokens of a unit: bounds the weight that a lease allows."""

    # Weights
    weight_cap_ratio: float = 3.0
    norm_limit_ratio: float = 5.0
    """A contribution whose norm is beyond this many times the roster's median has no slot."""

    # Durations
    heartbeat_s: float = 1.0
    heartbeat_timeout_s: float = 6.0
    grace_s: float = 2.0
    ready_max_s: float = 600.0
    """The most that a peer may take for READY once one elector is ready."""
    assembly_max_s: float = 60.0
    """The most that a coordinator waits for live members after it holds a quorum of READYs."""
    level_max_s: float = 300.0
    """The most that a roster may give a level of its trees."""
    level_min_s: float = 2.0
    progress_s: float = 5.0
    slack_s: float = 1.0
    attempt_timeout_s: float = 10.0
    """Length of an attempt's timer (without the roster's own durations); doubles each attempt."""
    attempt_timeout_max_s: float = 120.0
    resend_s: float = 2.0
    fork_timeout_s: float = 20.0
    """`T_fork`: how long fewer than a quorum of electors must be heard before a REFORM."""
    reform_collect_s: float = 10.0

    final_round: int | None = None
    """Commits of rounds 0 … final_round-1 make the run; None: until stopped or `final_tokens`."""
    final_tokens: int | None = None

    @property
    def settle_s(self) -> float:
        """`T_settle`: how long a verdict between lineages must hold before the loser follows."""
        return self.fork_timeout_s / 2

    @property
    def part_count(self) -> int:
        return -(-self.elements // self.part_elements)

    def part_range(self, part: int) -> tuple[int, int]:
        """First element and one past the last of `part`."""
        return part * self.part_elements, min((part + 1) * self.part_elements, self.elements)

    def outer_lr_for(self, contributors: int) -> float:
        rate = self.outer_lr[0][1]
        for at_least, value in self.outer_lr:
            if contributors >= at_least:
                rate = value
        return rate
