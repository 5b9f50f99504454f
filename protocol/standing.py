"""What a peer is and knows outside the round in hand; its round reads it, the machine keeps it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from protocol.assembly import Pace
from protocol.chain import ChainState
from protocol.clusters import Grouping, restricted
from protocol.docket import Docket
from protocol.experience import Experience
from protocol.links import NO_REPORTS, Reports
from protocol.names import Base, PeerId
from protocol.outbox import Outbox
from protocol.presence import Heard, Presence
from protocol.rules import Rules

T = TypeVar("T")

AVOIDED_ROUNDS = 8
"""For so many rounds after an exchange between two failed plans do without one (design section 7)."""


@dataclass(slots=True)
class Stopwatch:
    """Time that passed while it was running."""

    elapsed_s: float = 0.0
    running: bool = False
    seen_s: float = 0.0

    def run(self, running: bool, now_s: float) -> None:
        """From `now_s` on it runs, or stands still."""
        if self.running:
            self.elapsed_s += now_s - self.seen_s
        self.running, self.seen_s = running, now_s

    def reached(self, length_s: float, outbox: Outbox) -> bool:
        """Whether `length_s` has passed while running; if it will, the machine wakes then."""
        self.run(self.running, outbox.now_s)
        left_s = length_s - self.elapsed_s
        # Sums of differences of clock readings round: an alarm that rings a hair early must not ring again for ever.
        if left_s <= 1e-6:
            return True
        if self.running:
            outbox.due(outbox.now_s + left_s)
        return False


class Derived(Generic[T]):
    """One answer, kept while what it was derived from stands still: in a swarm of hundreds most events change none."""

    def __init__(self) -> None:
        self._key: object = None
        self._of: object = None
        self._answer: T | None = None

    def get(self, key: object, of: object) -> T | None:
        """The answer for an equal `key` and the very same object `of`; else None, and `put` is for these two."""
        if self._of is of and self._key == key:
            return self._answer
        self._key, self._of, self._answer = key, of, None
        return None

    def put(self, answer: T) -> T:
        self._answer = answer
        return answer


class Failures:
    """Peers with which an exchange failed here, for `AVOIDED_ROUNDS`."""

    def __init__(self) -> None:
        self._last: dict[PeerId, int] = {}
        """Peer → round of the newest failure."""

    def note(self, peers: Iterable[PeerId], round_number: int) -> None:
        self._last |= dict.fromkeys(peers, round_number)

    def since(self, round_number: int) -> tuple[PeerId, ...]:
        """Those that are to be avoided in this round, newest failures first."""
        self._last = {peer: at for peer, at in self._last.items() if round_number - at <= AVOIDED_ROUNDS}
        return tuple(sorted(self._last, key=lambda peer: (-self._last[peer], peer)))


@dataclass(slots=True, kw_only=True)
class Standing:
    me: PeerId
    rules: Rules
    outbox: Outbox
    presence: Presence
    docket: Docket
    persist: Callable[[], None]
    """Puts the journal of the moment before whatever is emitted next."""
    misbehaved: Callable[[PeerId, str], None]
    pace: Pace = field(default_factory=Pace)

    voting: bool = True
    """False in a lineage where earlier promises may be forgotten or were given to another (`Journal.barred`)."""
    quorum_was_heard: bool = False
    """Whether a quorum of electors was ever heard together in this life."""
    comparing: bool = False
    """Another lineage has as many live electors: no round is started until it is decided which goes on."""
    left: Base | None = None
    """Tip of my earlier lineage, which is kept until the one that I follow has taken me in."""
    leaving: bool = False
    able: bool = True
    remaining_s: float | None = None
    """The local trainer's remaining budget; None without a trainer."""
    units_wanted: int = 0
    upload_limit_bytes: int = 0
    download_limit_bytes: int = 0
    failed_edges: tuple[PeerId, ...] = ()
    failures: Failures = field(default_factory=lambda: Failures())
    reports: Reports = field(default_factory=lambda: NO_REPORTS)
    """What peers say of their links."""
    grouping: Grouping = field(default_factory=Grouping)
    experience: Experience = field(default_factory=Experience)
    fresh: Mapping[PeerId, Heard] = field(default_factory=dict)
    """Everyone else heard of late, as of the event in hand."""
    _members: Derived[frozenset[PeerId]] = field(default_factory=lambda: Derived())
    _live: Derived[tuple[set[PeerId], set[PeerId]]] = field(default_factory=lambda: Derived())

    def avoided(self, round_number: int) -> tuple[PeerId, ...]:
        """Whom I could not exchange with lately, the newest first."""
        return tuple(dict.fromkeys((*self.failures.since(round_number), *self.failed_edges)))

    def regroup(self, state: ChainState) -> None:
        """Once a round: which members are near each other by now."""
        before = self.grouping.groups
        self.grouping.update([peer for peer, _ in state.members], self.reports)
        now = self.grouping.groups
        common = {peer for group in before for peer in group} & {peer for group in now for peer in group}
        # Who comes and goes changes no site.
        if restricted(before, common) != restricted(now, common):
            self.experience.forget()

    def on_base(self, base: Base) -> set[PeerId]:
        """Peers heard on exactly this base, and not leaving."""
        return {peer for peer, heard in self.fresh.items() if heard.base == base and peer not in self.presence.leaves}

    def live_members(self, state: ChainState) -> tuple[set[PeerId], set[PeerId]]:
        """Members heard on this round, me included, and members heard one round behind; without those who leave, and
        without those who say that they cannot take part."""
        found = self._live.get((self.presence.version, self.voting), state)
        if found is None:
            found = self._live.put(self._find_live(state))
        return found

    def _find_live(self, state: ChainState) -> tuple[set[PeerId], set[PeerId]]:
        mine = state.base
        here, behind = self._able_at(mine), set[PeerId]()
        for base in self.presence.places:
            if base.lineage == mine.lineage and base.round == mine.round - 1:
                behind |= self._able_at(base)
        members = self._members.get(None, state) or self._members.put(frozenset(peer for peer, _ in state.members))
        here &= members
        if self.voting:
            here.add(self.me)
        return here, behind & members

    def _able_at(self, base: Base) -> set[PeerId]:
        """Peers heard at a place, who take part and stay."""
        there, leaves = self.presence.places.get(base, {}), self.presence.leaves
        return {peer for peer, heard in there.items() if heard.able and peer not in leaves}
