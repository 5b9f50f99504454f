"""Rosters of one round and the parts held for each: what may be decided (protocol sections 4 to 6)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from protocol import planning
from protocol.events import FetchParts, StopExchange
from protocol.messages import PartHeader, Roster, Signed
from protocol.names import Digest, PeerId
from protocol.outbox import Outbox
from protocol.rules import Rules

Headers = tuple[Signed[PartHeader] | None, ...]


@dataclass(slots=True, kw_only=True)
class Candidate:
    """One roster as this peer has met it, and how its exchange stands here."""

    roster_id: Digest
    signed: Signed[Roster]
    seen_s: float
    """When it first reached me: omissions are judged as of then, durations run from then."""
    problem: str | None
    """Why section 6 refuses it whatever its result; None: nothing is wrong with it."""
    roots: tuple[PeerId, ...]
    """Root of each part; empty without parts."""
    my_index: int | None
    held: dict[tuple[int, bytes], Signed[PartHeader]] = field(default_factory=dict)
    """(part, header body) → header, for payloads that are verified and on disk."""
    held_s: float | None = None
    """When the last part that its exchange brought was here."""
    started: bool = False
    ended: bool = False
    missed: frozenset[PeerId] = frozenset()
    """Contributors whose slots closed at my engine without them."""
    stopped: bool = False
    proposed: set[int] = field(default_factory=set)
    """Attempts in which it was proposed."""
    refused: bool = False
    fetching: bool = False
    fetch_failures: int = 0
    fetch_after_s: float = 0.0

    @property
    def roster(self) -> Roster:
        return self.signed.message

    @property
    def exchanging(self) -> bool:
        return self.started and not self.ended and not self.stopped

    def closes_s(self, rules: Rules) -> float:
        """When the last part must have come down."""
        if self.roster.plan is None or not self.roster.durations_s:
            return self.seen_s
        return self.seen_s + self.roster.durations_s[-1] + rules.slack_s

    def result(self) -> Headers:
        """The headers that I hold, one per part; None where a part is EMPTY so far."""
        first: dict[int, Signed[PartHeader]] = {}
        for (part, _), header in self.held.items():
            first.setdefault(part, header)
        return tuple(first.get(part) for part in range(len(self.roots)))

    def complete(self) -> bool:
        return len({part for part, _ in self.held}) == len(self.roots)

    def lacks(self, headers: Sequence[Signed[PartHeader] | None]) -> tuple[Signed[PartHeader], ...]:
        return tuple(
            header for header in headers if header is not None and (header.message.part, header.body) not in self.held
        )

    def hold(self, headers: Headers, sources: Iterable[PeerId], outbox: Outbox) -> bool:
        """Whether all of `headers` are held; asks for those that are not, one request at a time."""
        missing = self.lacks(headers)
        if not missing:
            return True
        if not self.fetching and outbox.due(self.fetch_after_s):
            self.fetching = True
            outbox.emit(
                FetchParts(
                    roster_id=self.roster_id,
                    headers=missing,
                    sources=tuple(dict.fromkeys(peer for peer in sources if peer != outbox.me)),
                )
            )
        return False

    def stop(self, outbox: Outbox) -> None:
        """Another attempt overtook it: what is not closed stays EMPTY."""
        if self.exchanging:
            self.stopped = True
            outbox.emit(StopExchange(roster_id=self.roster_id))


def roots_of(roster: Roster, rules: Rules) -> tuple[PeerId, ...]:
    """Root of each part of a roster whose plan was checked; empty for a roster without parts."""
    if roster.plan is None:
        return ()
    owners = [roster.readys[shard.root].sender for shard in roster.plan.shards]
    return tuple(owners[shard] for shard in planning.deal(roster.base.digest(), rules.part_count, roster.plan))
