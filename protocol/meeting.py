"""Lineages that meet: learning about them, the verdict, and what a peer on either side does (protocol section 10).

A heartbeat is a claim. Before the lineage that it names counts for anything, the driver fetches its chain from that
peer and verifies it; only a few such inquiries are open at a time, and a peer that proved nothing waits longer after
each. Whatever follows from the verdict follows from proven lineages and from the live electors of their branchings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from protocol.chain import ChainState
from protocol.events import LearnLineage, LineageLearned
from protocol.lineages import Branching, Lineages, Place, Position, Side, Verdict
from protocol.messages import Commit
from protocol.names import Base, Digest, PeerId
from protocol.record import Record
from protocol.reform import Reforming
from protocol.rules import Quorum
from protocol.standing import Derived, Standing

INQUIRIES_OF_MEMBERS = 4
"""Inquiries open at a time with peers that are, or were, members of a chain known here."""
INQUIRIES_OF_STRANGERS = 2
INQUIRY_TIMEOUT_S = 120.0
"""After which an inquiry without an answer is given up."""
PATIENCE_DOUBLINGS = 6
"""A peer that proves nothing is asked again after 2, 4, … at most 2^6 repetition periods."""
COMPARED_SETTLES = 3
"""On a tie no round is started for so many `T_settle`: a round in hand ends, both sides prove what it counted, and only
then can a verdict by that hold for its own `T_settle`. Sides whose work grows alike would else overtake each other for
ever, each a round ahead of what it knows of the other."""
DEEP_ROUNDS = 64
"""In an open run keys cost nothing and old ones are sold: electors of a place further back take no run away whose own
electors are heard. A partition that lasted longer than so many rounds is for the operators to end."""
RENEWED_SETTLES = 2
"""In a closed run a lineage's newest place is asked for again after so many `T_settle`, if it has moved on."""
LINEAGES_KEPT = 256
RETURNS_DOUBLE = 5
"""Each vain attempt to follow a lineage doubles how long its verdict must hold the next time, at most so often."""


@dataclass(slots=True)
class _Inquiry:
    open_until_s: float | None
    again_s: float
    failures: int = 0


class Meeting:
    """Args:
    follow: has the node catch up with (peer, round, lineage).
    returns: how often this peer followed another lineage in vain.
    """

    def __init__(
        self, standing: Standing, *, state: ChainState, follow: Callable[[PeerId, int, Digest], None], returns: int
    ) -> None:
        self.standing = standing
        self.rules = standing.rules
        self.outbox = standing.outbox
        self._closed = self.rules.quorum is not Quorum.TWO_THIRDS
        self.lineages = Lineages(standing.me, closed=self._closed)
        self._renewed_s: dict[Digest, float] = {}
        """Lineage → when its newest place may be asked for again: who its electors are changes."""
        self.deep: Branching | None = None
        """Where a lineage would win from so far back that it is not followed."""
        self._follow = follow
        self._place = Place.of(state, self.rules)
        self.lineages.learn([self._place])
        self._settle_s = self.rules.settle_s * 2 ** min(returns, RETURNS_DOUBLE)
        self._inquiries: dict[PeerId, _Inquiry] = {}
        self._foreign: Derived[list[PeerId]] = Derived()
        self._verdict: Verdict | None = None
        self._lost_at: tuple[Position, Digest] | None = None
        """Branching and winning child of the verdict against me that stands."""
        self._lost_since_s = 0.0
        self._ties: dict[Position, float] = {}
        """Branching → when its tie was first seen, for a while."""

    # ------------------------------------------------------------ facts

    def grew(self, state: ChainState, commit: Commit | None = None) -> None:
        """My chain goes on: `commit`, or with None a REFORM, led to `state`."""
        place = Place.of(state, self.rules, commit)
        self.lineages.learn([self._place, place])
        self._place = place

    def learned(self, event: LineageLearned) -> None:
        for lineage, place in event.births:
            self.lineages.born(lineage, place)
        self.lineages.learn(event.mine)
        self.lineages.learn(event.theirs)
        inquiry, heard = self._inquiries.get(event.peer), self.standing.fresh.get(event.peer)
        if inquiry is None:
            return
        if heard is not None and not self.lineages.proven(_position(heard.base)):
            self.unproven(event.peer)  # what it has shown is true, and not what it says of itself
        else:
            inquiry.open_until_s, inquiry.failures = None, 0

    def unproven(self, peer: PeerId) -> None:
        inquiry = self._inquiries.get(peer)
        if inquiry is not None and inquiry.open_until_s is not None:
            inquiry.open_until_s = None
            inquiry.failures += 1
            patience_s = self.rules.resend_s * 2 ** min(inquiry.failures, PATIENCE_DOUBLINGS)
            inquiry.again_s = self.outbox.now_s + patience_s

    # ------------------------------------------------------------ what follows

    def advance(self, record: Record, reforming: Reforming) -> None:
        """Learn what is unknown, compare what is known, and follow what has won for long enough."""
        mine = self._place.position
        fresh, presence = self.standing.fresh, self.standing.presence
        foreign = self._foreign.get(presence.version, self._place)
        if foreign is None:
            apart = any(base.lineage != mine[0] for base in presence.places)
            found = [peer for peer, heard in fresh.items() if heard.base.lineage != mine[0]] if apart else []
            foreign = self._foreign.put(found)
        if not foreign and self._verdict is None:
            self.lineages.forget(mine[0], ())
            return
        self.lineages.forget(mine[0], (fresh[peer].base.lineage for peer in foreign))
        verdict = None
        if foreign:
            now_s = self.outbox.now_s
            heard = {peer: [_position(base) for base in presence.bases(peer, now_s)] for peer in fresh}
            # What was said only a while ago loses its weight without any event.
            self.outbox.due(now_s + self.rules.heartbeat_s)
            verdict = self.lineages.choose(mine, heard)
        self._verdict = verdict
        self._inquire(foreign, tied=verdict is not None and any(one.tied for one in verdict.branchings))
        self.deep = self._too_deep(verdict, reforming)
        self._compare(verdict if self.deep is None else None)
        if verdict is None or not verdict.peers or verdict.side is Side.WINNER:
            self._lost_at = None
        elif verdict.side is Side.BEHIND:
            self._lost_at = None
            able_here = len(reforming.heard()) >= reforming.quorum
            if verdict.lineage != mine[0] and not able_here and not record.applying:
                self._follow(verdict.peers[0], verdict.round, verdict.lineage)
        else:
            branching = verdict.branchings[-1]
            if self.deep is not None:
                self._lost_at = None
                return
            if self._lost_at != (branching.place, branching.winner):
                self._lost_at, self._lost_since_s = (branching.place, branching.winner), self.outbox.now_s
            if self.outbox.due(self._lost_since_s + self._settle_s) and not record.applying:
                self._follow(verdict.peers[0], verdict.round, verdict.lineage)

    def _too_deep(self, verdict: Verdict | None, reforming: Reforming) -> Branching | None:
        """In an open run: the branching from which another lineage would win or tie, if it is far behind my tip while
        enough of the tip's own electors are heard."""
        if self._closed or verdict is None or not verdict.branchings or len(reforming.heard()) < reforming.quorum:
            return None
        branching = verdict.branchings[-1]
        against = verdict.side is Side.LOSER or branching.tied
        far = self._place.round - branching.place[1] > DEEP_ROUNDS
        return branching if against and far else None

    def _compare(self, verdict: Verdict | None) -> None:
        """On a tie in live electors no round is started until the verdict can have settled, and not again for long."""
        now_s, pause_s = self.outbox.now_s, COMPARED_SETTLES * self.rules.settle_s
        self._ties = {place: at_s for place, at_s in self._ties.items() if now_s < at_s + 8 * pause_s}
        comparing = False
        for branching in () if verdict is None else verdict.branchings:
            if branching.tied:
                since_s = self._ties.setdefault(branching.place, now_s)
                comparing = comparing or not self.outbox.due(since_s + pause_s)
        self.standing.comparing = comparing

    # ------------------------------------------------------------ inquiries

    def _inquire(self, foreign: list[PeerId], *, tied: bool) -> None:
        now_s, fresh = self.outbox.now_s, self.standing.fresh
        for peer, inquiry in list(self._inquiries.items()):
            if inquiry.open_until_s is not None and now_s >= inquiry.open_until_s:
                self.unproven(peer)
            if peer not in fresh and inquiry.open_until_s is None and now_s >= inquiry.again_s:
                del self._inquiries[peer]
        wanted = [peer for peer in foreign if self._wanted(peer, tied=tied)]
        if not wanted:
            return
        known = {peer for peer in {*wanted, *self._inquiries} if self._known(peer)}
        room = {True: INQUIRIES_OF_MEMBERS, False: INQUIRIES_OF_STRANGERS}
        for peer, inquiry in self._inquiries.items():
            if inquiry.open_until_s is not None:
                room[peer in known] -= 1
        # Whoever has failed least, and then whoever was asked longest ago.
        for peer in sorted(wanted, key=self._patience):
            if room[peer in known] <= 0:
                continue
            room[peer in known] -= 1
            inquiry = self._inquiries.setdefault(peer, _Inquiry(open_until_s=None, again_s=now_s))
            inquiry.open_until_s = now_s + INQUIRY_TIMEOUT_S
            inquiry.again_s = now_s + 2 * self.rules.resend_s
            self.outbox.due(inquiry.open_until_s)
            self._renewed_s[fresh[peer].base.lineage] = now_s + RENEWED_SETTLES * self.rules.settle_s
            self.outbox.emit(LearnLineage(peer=peer))
        if len(self._renewed_s) > LINEAGES_KEPT:
            self._renewed_s = {name: at_s for name, at_s in self._renewed_s.items() if at_s > now_s}

    def _wanted(self, peer: PeerId, *, tied: bool) -> bool:
        """Whether what `peer` says of itself must be proven, or on a tie, how many tokens its side has counted."""
        position = _position(self.standing.fresh[peer].base)
        proven_round = self.lineages.tip(position[0])
        moved_on = proven_round is None or proven_round < position[1]
        renewed = self._closed and self.outbox.now_s >= self._renewed_s.get(position[0], 0.0)
        if self.lineages.proven(position) and not (moved_on and (tied or renewed)):
            return False
        inquiry = self._inquiries.get(peer)
        return inquiry is None or (inquiry.open_until_s is None and self.outbox.due(inquiry.again_s))

    def _known(self, peer: PeerId) -> bool:
        return peer in self._place.members or peer in self.rules.founders or self.lineages.member(peer)

    def _patience(self, peer: PeerId) -> tuple[int, float, PeerId]:
        inquiry = self._inquiries.get(peer)
        return (0, 0.0, peer) if inquiry is None else (inquiry.failures, inquiry.again_s, peer)

    # ------------------------------------------------------------ for status

    @property
    def says(self) -> str | None:
        """What goes on between lineages, for `reason`; None: nothing."""
        verdict = self._verdict
        if verdict is None:
            return None
        name = verdict.lineage.hex()[:8]
        if self.deep is not None:
            since = self.deep.place[1]
            return (
                f"another lineage exists since round {since}, {self._place.round - since} rounds back, too far to "
                "follow while this one's electors are heard: if it is the right one, start this node with an empty "
                "home, else ask its operators to"
            )
        if verdict.side is Side.LOSER:
            branching = verdict.branchings[-1]
            left_s = max(0.0, self._lost_since_s + self._settle_s - self.outbox.now_s)
            return (
                f"the other lineage {name} has {_live(branching, branching.winner_live)}, mine has "
                f"{branching.other_live}: following it in {left_s:.0f} s"
            )
        if verdict.side is Side.BEHIND:
            return None if verdict.lineage == self._place.lineage else f"lineage {name} was born of this one"
        if not verdict.branchings:
            return None
        branching = verdict.branchings[-1]
        if self.standing.comparing:
            return (
                f"another lineage has {_live(branching, branching.other_live)} as well: no round is started while "
                "their work is compared"
            )
        return (
            f"another lineage has {_live(branching, branching.other_live)}, mine has {branching.winner_live}: its "
            "peers are to follow this one"
        )


def _position(base: Base) -> Position:
    return base.lineage, base.round


def _live(branching: Branching, count: int) -> str:
    return f"{count} live {'elector' if count == 1 else 'electors'} since round {branching.place[1]}"
