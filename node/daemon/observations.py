"""What `status` shows: this node's view of its run, gathered as things happen (design section 11)."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import trio

from node.daemon.training_speed import TrainingSpeed
from node.status import MAX_HISTORY_ROUNDS, AuditStatus, HistoryRound, LastRound, LostLineage, WorkStatus
from protocol.chain import ChainState
from protocol.events import Verdict
from protocol.messages import Commit
from protocol.names import PeerId
from protocol.planner import kind_of
from protocol.planning import contributing_of
from protocol.rules import Rules
from protocol.weights import tokens_of

MAX_MISBEHAVIOURS = 64
"""Different sentences about strangers' input that are counted one by one: what they say may stand in them."""
MAX_LOST_LINEAGES = 16
MAX_SENTENCE_CHARACTERS = 200
OTHER_MISBEHAVIOUR = "other bad input from peers"


def counted_bitmap(commit: Commit) -> int:
    """READYs that are in at least one part."""
    bitmap = 0
    for header in commit.headers:
        if header is not None:
            bitmap |= header.message.bitmap
    return bitmap


def contributors(commit: Commit) -> tuple[PeerId, ...]:
    bitmap = counted_bitmap(commit)
    readys = commit.roster.message.readys
    return tuple(ready.sender for bit, ready in enumerate(readys) if bitmap >> bit & 1)


def exclusions(commit: Commit, state: ChainState, rules: Rules, seen_here: dict[str, str]) -> dict[PeerId, str]:
    """Members that the commit did not count, each with the reason as far as this node can know it."""
    roster = commit.roster.message
    bitmap = counted_bitmap(commit)
    slots = contributing_of(roster, rules)
    why: dict[PeerId, str] = {}
    present = {ready.sender for ready in roster.readys}
    why |= {evidence.culprit: f"left out for good: {evidence.offence}" for evidence in roster.evidence}
    for peer, _ in state.members:
        if peer not in present and peer not in why:
            why[peer] = "its READY was not in the roster"
    for bit, ready in enumerate(roster.readys):
        if bitmap >> bit & 1 or ready.sender in why:
            continue
        if not any(tokens_of(ready.message.tokens, part) for part in range(max(1, len(commit.headers)))):
            why[ready.sender] = "voted without work to contribute"
        elif roster.absent >> bit & 1:
            why[ready.sender] = "stood without a slot: it was in no part of an earlier attempt"
        elif not slots >> bit & 1:
            why[ready.sender] = (
                f"stood without a slot: a norm of {ready.message.norm:.3g} is no number, or over "
                f"{rules.norm_limit_ratio:g} times the others' median"
            )
        else:
            why[ready.sender] = seen_here.get(ready.sender, "its parts did not arrive in time")
    return why


@dataclass(slots=True)
class RoundClock:
    """When the stages of the current round were reached, on this node's monotonic clock."""

    started_s: float
    round: int | None = None
    """None: no round has begun yet."""
    first_ready_s: float | None = None
    roster_s: float | None = None
    last_part_s: float | None = None


@dataclass(slots=True)
class Observations:
    """Mutable on purpose: one per daemon, written by the driver, read by the status server."""

    started_s: float = field(default_factory=trio.current_time)
    starting: str | None = "the daemon is starting"
    """Why there is no state machine yet; None while one runs."""
    phase: str = "starting"
    storage: str | None = None
    """What the disk refuses, and what follows from it; None while it takes everything."""
    loss: float | None = None
    validation_loss: float | None = None
    tokens_per_s: float = 0.0
    speed: TrainingSpeed = field(default_factory=TrainingSpeed)
    """The same, as others are told of it."""
    bytes_sent: int = 0
    """In exchanges since the last commit."""
    bytes_received: int = 0
    excluded_here: dict[str, str] = field(default_factory=dict)
    last_round: LastRound | None = None
    history: deque[HistoryRound] = field(default_factory=lambda: deque(maxlen=MAX_HISTORY_ROUNDS))
    lost_lineages: deque[LostLineage] = field(default_factory=lambda: deque(maxlen=MAX_LOST_LINEAGES))
    problems: Counter[str] = field(default_factory=Counter)
    _misbehaviours: set[str] = field(default_factory=set)
    work: WorkStatus = field(default_factory=WorkStatus)
    audits: AuditStatus = field(default_factory=AuditStatus)
    caught: dict[PeerId, str] = field(default_factory=dict)
    """Peers whose offence was verified here → what it was."""
    disk_bytes: int = 0
    rounds_seen: int = 0
    clock: RoundClock = field(default_factory=lambda: RoundClock(started_s=trio.current_time()))
    round_loss: float | None = None
    """Mean training loss of this node's newest contribution."""

    def setting_up(self, phase: str, reason: str) -> None:
        self.phase = phase
        self.starting = reason

    def began_round(self, number: int) -> None:
        """Rounds go on from here. Unless this very round was under way, the time before belongs to none."""
        if self.clock.round != number:
            self.clock = RoundClock(started_s=trio.current_time(), round=number)
            self.bytes_sent = self.bytes_received = 0
            self.excluded_here.clear()

    def saw_ready(self) -> None:
        if self.clock.first_ready_s is None:
            self.clock.first_ready_s = trio.current_time()

    def saw_roster(self) -> None:
        self.clock.roster_s = trio.current_time()

    def saw_part(self) -> None:
        self.clock.last_part_s = trio.current_time()

    def saw_exchange(self, sent: int, received: int, excluded: dict[str, str]) -> None:
        self.bytes_sent += sent
        self.bytes_received += received
        self.excluded_here.update(excluded)

    def saw_commit(self, commit: Commit, before: ChainState, after: ChainState, rules: Rules) -> HistoryRound:
        """Close the round's account; `before` is the state that the commit changed, `after` what it led to."""
        now = trio.current_time()
        clock = self.clock
        roster = clock.roster_s if clock.roster_s is not None else now
        last_part = clock.last_part_s if clock.last_part_s is not None else roster
        counted = contributors(commit)
        excluded = exclusions(commit, before, rules, self.excluded_here)
        self.last_round = LastRound(
            round=before.base.round,
            contributors=len(counted),
            excluded=excluded,
            seconds=now - clock.started_s,
            bytes_sent=self.bytes_sent,
            bytes_received=self.bytes_received,
            assemble_s=max(0.0, roster - (clock.first_ready_s if clock.first_ready_s is not None else roster)),
            exchange_s=max(0.0, last_part - roster),
            commit_s=max(0.0, now - last_part),
        )
        plan = commit.roster.message.plan
        line = HistoryRound(
            round=before.base.round,
            seconds=self.last_round.seconds,
            contributors=counted,
            excluded=excluded,
            state_hash=after.base.state_hash.hex(),
            lineage=before.base.lineage.hex(),
            plan="" if plan is None else kind_of(plan).value,
            leader=commit.roster.sender,
            loss=self.round_loss,
            bytes_sent=self.bytes_sent,
            bytes_received=self.bytes_received,
            tokens_total=after.tokens_total,
            committed_unix_s=time.time(),
        )
        self.history.append(line)
        self.rounds_seen += 1
        self.clock = RoundClock(started_s=now, round=after.base.round)
        self.bytes_sent = self.bytes_received = 0
        self.excluded_here.clear()
        self.round_loss = None
        return line

    def saw_validation(self, round_number: int, loss: float) -> None:
        """`loss` was measured on the state that round `round_number - 1` led to."""
        self.validation_loss = loss
        for index, line in enumerate(self.history):
            if line.round == round_number - 1:
                values = {name: getattr(line, name) for name in line.__struct_fields__}
                self.history[index] = HistoryRound(**{**values, "validation_loss": loss})

    def misbehaved(self, why: str) -> bool:
        """Count a stranger's bad input; whether it is the first of its kind."""
        why = why[:MAX_SENTENCE_CHARACTERS]
        if why not in self._misbehaviours:
            if len(self._misbehaviours) >= MAX_MISBEHAVIOURS:
                why = OTHER_MISBEHAVIOUR
            self._misbehaviours.add(why)
        self.problems[why] += 1
        return self.problems[why] == 1

    def saw_recomputation(self, verdict: Verdict, why: str, *, seconds: float, received: int, audit: bool) -> None:
        skipped = dict(self.audits.skipped)
        if audit and verdict is Verdict.UNKNOWN:
            known = why in skipped or len(skipped) < MAX_MISBEHAVIOURS
            reason = why[:MAX_SENTENCE_CHARACTERS] if known else "other reasons"
            skipped[reason] = skipped.get(reason, 0) + 1
        self.audits = AuditStatus(
            right=self.audits.right + (verdict is Verdict.RIGHT),
            wrong=self.audits.wrong + (verdict is Verdict.WRONG),
            skipped=skipped,
            seconds=self.audits.seconds + seconds,
            bytes_received=self.audits.bytes_received + received,
        )

    def convicted(self, peer: PeerId, offence: str) -> None:
        while len(self.caught) >= MAX_MISBEHAVIOURS:
            del self.caught[next(iter(self.caught))]
        self.caught[peer] = str(offence)

    def count(self, reasons: Sequence[str]) -> None:
        self.problems.update(reasons)
