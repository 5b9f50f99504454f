"""Assembling a round: READYs and JOINs as they come in, and the coordinator's rules (protocol sections 4.2 and 4.3)."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass, field, replace

from protocol import chain, planner, planning, validity
from protocol.chain import ChainState
from protocol.messages import Evidence, Join, Leave, Ready, Roster, Signed
from protocol.names import PeerId
from protocol.planner import NOTHING_KNOWN, Outlook
from protocol.rules import Rules

JOINS_KEPT = 64
"""JOINs taken into one roster at most; the others come with the next round."""
ARRIVALS_KEPT = 128
ARRIVALS_A_ROUND = ARRIVALS_KEPT // 2
"""Of more, evenly many of the early and of the late are kept: the last alone would say that everyone is late."""
ARRIVALS_NEEDED = 6
"""Fewer recent arrivals than this say nothing about how long to wait."""
SHARE_FOR_THOSE_BEHIND = 0.25
"""Of `assembly_max_s`: the most that a coordinator waits for members that have the commit before yet to apply."""
EXCHANGE_MARGIN = 2.0
"""Durations are this many times what an exchange took that missed nobody."""
STRETCH_MAX = 4.0
"""What is learned goes no further, so that nobody slow holds every round hostage; failed attempts go further."""
STRETCH_DECAY = 0.5
"""Of the stretch, after each exchange that missed somebody."""
SPREADS_WAITED = 4.0
"""`k` of "median + k·MAD"."""


@dataclass(slots=True)
class Pace:
    """How long after a round's first READY the others came, over the recent rounds; and how long exchanges took."""

    arrivals_s: deque[float] = field(default_factory=lambda: deque(maxlen=ARRIVALS_KEPT))
    stretch: float = 1.0
    """How many times what their plans predict exchanges are given: distance shows only in what they took."""

    def learn(self, assembly: Assembly) -> None:
        if assembly.first_ready_s is not None:
            arrivals_s = [at_s - assembly.first_ready_s for at_s in assembly.received_s.values()]
            if (count := len(arrivals_s)) > ARRIVALS_A_ROUND:
                places = ((2 * place + 1) * count // (2 * ARRIVALS_A_ROUND) for place in range(ARRIVALS_A_ROUND))
                ordered_s = sorted(arrivals_s)
                arrivals_s = [ordered_s[place] for place in places]
            self.arrivals_s.extend(arrivals_s)

    def learn_exchange(self, *, given_s: float, predicted_s: float, took_s: float | None, failed_before: bool) -> None:
        """After a commit.

        Args:
            given_s: the last duration of the roster that was committed; `predicted_s`: the same by its plan alone.
            took_s: from my receipt of the roster until I held its last part; None when a contribution is missing
                somewhere: then nothing tells a slow peer from a dead one.
            failed_before: an earlier attempt's exchange of this round came to nothing.
        """
        if took_s is not None:
            learned = max(self.stretch / 2, EXCHANGE_MARGIN * took_s / predicted_s)
        elif failed_before:
            learned = max(self.stretch, given_s / predicted_s)
        else:
            learned = STRETCH_DECAY * self.stretch
        self.stretch = min(max(1.0, learned), STRETCH_MAX)

    def patience_s(self, rules: Rules) -> float:
        """How long after the first READY a coordinator waits for those still missing."""
        if len(self.arrivals_s) < ARRIVALS_NEEDED:
            return rules.assembly_max_s
        median = statistics.median(self.arrivals_s)
        spread = statistics.median(abs(arrival - median) for arrival in self.arrivals_s)
        return min(median + SPREADS_WAITED * spread, rules.assembly_max_s)


class Assembly:
    """READYs and JOINs for one base. The caller has verified them; each sender's first one counts."""

    def __init__(self, *, state: ChainState, rules: Rules) -> None:
        self.state = state
        self.rules = rules
        self.quorum = chain.quorum(state, rules)
        self.readys: dict[PeerId, Signed[Ready]] = {}
        """`add_ready` alone changes it."""
        self._contributors: set[PeerId] = set()
        self._electors = frozenset(state.electors)
        self.received_s: dict[PeerId, float] = {}
        """When each one's first READY came, in that order."""
        self.joins: dict[PeerId, Signed[Join]] = {}
        self.first_ready_s: float | None = None
        self.quorum_since_s: float | None = None
        """When I first held READYs of a quorum of electors."""

    def is_news(self, signed: Signed[Ready]) -> bool:
        """A sender's first READY counts; one with work also replaces one without (its trainer was late)."""
        known = self.readys.get(signed.sender)
        return known is None or (signed.message.contributes and not known.message.contributes)

    def add_ready(self, signed: Signed[Ready], now_s: float) -> str | None:
        """Why it is misbehaviour, or None; a repetition is not."""
        if not self.is_news(signed):
            known = self.readys[signed.sender]
            repeated = known.body == signed.body or not signed.message.contributes
            return None if repeated else "sent two different READYs with work for one base"
        self.readys[signed.sender] = signed
        if signed.message.contributes:
            self._contributors.add(signed.sender)
        self.received_s.setdefault(signed.sender, now_s)
        if self.first_ready_s is None:
            self.first_ready_s = now_s
        if self.quorum_since_s is None and self.electors_ready() >= self.quorum:
            self.quorum_since_s = now_s
        return None

    def others_first_s(self, me: PeerId) -> float | None:
        """When the first READY of somebody else came."""
        return next((at_s for peer, at_s in self.received_s.items() if peer != me), None)

    def add_join(self, signed: Signed[Join]) -> None:
        if signed.sender in self.joins or len(self.joins) < JOINS_KEPT:
            self.joins.setdefault(signed.sender, signed)

    def forget(self, peer: PeerId) -> None:
        """`peer` leaves: it joins nothing any more. Its READY stays, should its vote be needed."""
        self.joins.pop(peer, None)

    def electors_ready(self) -> int:
        return len(self._electors & self.readys.keys())

    def contributors(self) -> int:
        return len(self._contributors)

    def enough(self) -> bool:
        """Whether a roster can be made at all: with parts, or without parts for the sake of those who join."""
        if self.quorum_since_s is None:
            return False
        return self.contributors() >= max(1, self.rules.min_peers) or bool(self._joining())

    def due_s(self, *, same_round: Set[PeerId], behind: Set[PeerId], pace: Pace, now_s: float) -> float | None:
        """When a coordinator goes ahead without those still missing; `now_s` when nobody is. None: not before more
        READYs come.

        Args:
            same_round: live members on this base.
            behind: live members still applying the commit before. They are waited for as long as others usually take,
                but not for long: who hears everything late must not be left behind for that.
        """
        if self.quorum_since_s is None or self.first_ready_s is None:
            return None
        least_s = self.quorum_since_s + 2 * self.rules.grace_s
        if not self.readys.keys() >= same_round:
            wanted_s = self.first_ready_s + pace.patience_s(self.rules)
            return max(least_s, min(wanted_s, self.quorum_since_s + self.rules.assembly_max_s))
        if not self.readys.keys() >= behind:
            usual_s = min(pace.patience_s(self.rules), self.rules.assembly_max_s * SHARE_FOR_THOSE_BEHIND)
            return max(least_s, self.first_ready_s + usual_s)
        return now_s

    def roster(
        self,
        *,
        attempt: int,
        leaves: Mapping[PeerId, Signed[Leave]],
        absent: Collection[PeerId],
        evidence: tuple[Evidence, ...] = (),
        stretch: float = 1.0,
        outlook: Outlook = NOTHING_KNOWN,
    ) -> Roster | None:
        """The roster of `attempt` from what is here, or None while too few are ready.

        Leaving peers, and those that `evidence` catches, stay out unless their votes are needed for the quorum; absent
        ones, and then those caught, stand in it without a slot. The exchange is given `stretch` times what its plan
        predicts; it follows what `outlook` knows of the peers' links.
        """
        caught = {piece.culprit for piece in evidence}
        peers = sorted(peer for peer in self.readys if peer not in leaves and peer not in caught)
        if sum(peer in self.state.electors for peer in peers) < self.quorum:
            peers = sorted(self.readys)
        if sum(peer in self.state.electors for peer in peers) < self.quorum:
            return None
        if len(peers) > planning.ROSTER_MAX:
            # Electors first: without a quorum of them there is no roster at all. The others by turns.
            prev = self.state.base.prev
            peers.sort(key=lambda peer: (peer not in self.state.electors, chain.elector_key(prev, peer)))
            peers = sorted(peers[: planning.ROSTER_MAX])
        common = Roster(
            base=self.state.base,
            attempt=attempt,
            readys=tuple(self.readys[peer] for peer in peers),
            joins=tuple(self.joins[peer] for peer in sorted(self._joining())),
            leaves=tuple(leaves[peer] for peer in sorted(leaves)),
            absent=sum(1 << index for index, peer in enumerate(peers) if attempt > 0 and peer in absent),
            evidence=evidence,
        )
        # Without those whom an earlier attempt missed, if that leaves enough; else they are given another chance: a
        # round that needs them would never end otherwise.
        for roster in (common, replace(common, absent=0)):
            contributing = planning.contributing_of(roster, self.rules)
            if contributing.bit_count() >= max(1, self.rules.min_peers):
                return self._with_plan(roster, contributing, stretch, outlook)
        changes = common.joins or common.evidence
        return replace(common, absent=0) if changes and contributing.bit_count() < self.rules.min_peers else None

    def _joining(self) -> list[PeerId]:
        """Those who asked first, as far as there is room for members."""
        return list(self.joins)[: validity.room_for_joins(self.state)]

    def _with_plan(self, roster: Roster, contributing: int, stretch: float, outlook: Outlook) -> Roster:
        planned = planner.make_plan(roster, contributing, self.rules, outlook)
        durations_s = planning.stretched(planned.durations_s, stretch, self.rules)
        return replace(roster, plan=planned.plan, durations_s=durations_s)


def absent_after(roster: Roster, bitmaps: Collection[int], live: Collection[PeerId]) -> set[PeerId]:
    """Peers of an earlier attempt's roster that may stand as absent in a later one (protocol section 6).

    Args:
        bitmaps: of the part headers that I hold for it.
        live: peers that are heard now and were not missed here; they stay in while no part at all came of that roster.
    """
    reached = 0
    for bitmap in bitmaps:
        reached |= bitmap
    return {
        signed.sender
        for index, signed in enumerate(roster.readys)
        if signed.message.contributes and not reached >> index & 1 and (bitmaps or signed.sender not in live)
    }
