"""What one peer knows and has promised in one round; the rules of the round read and extend it."""

from __future__ import annotations

import math
from typing import Any

from protocol import chain, planner, planning, wire
from protocol.assembly import Assembly
from protocol.candidates import Candidate, Headers, roots_of
from protocol.chain import ChainState
from protocol.journal import Journal, LockedOn, OwnVote, ValidValue
from protocol.messages import Certificate, Commit, Fetch, PartHeader, Proposal, Ready, Roster, Signed, Vote
from protocol.names import Digest, PeerId
from protocol.planner import Outlook, kind_of
from protocol.standing import Standing
from protocol.votes import ATTEMPTS_KEPT, Agreement, Lock

CANDIDATES_KEPT = ATTEMPTS_KEPT
ATTEMPTS_AHEAD = 2
"""ROSTERs and PROPOSALs of attempts further ahead are dropped; their coordinator sends them again."""


class Record:
    """Args:
    state: the chain at the start of the round.
    journal: what an earlier life promised at this very base; an empty journal for a new base.
    fence: attempts up to this one may have been touched by an earlier life; nothing of theirs is signed.
    """

    def __init__(self, *, standing: Standing, state: ChainState, journal: Journal, fence: int) -> None:
        self.standing = standing
        self.rules = standing.rules
        self.outbox = standing.outbox
        self.me = standing.me
        self.state = state
        self.base = state.base
        self.base_digest = state.base.digest()
        self.fence = fence
        # What cannot be known to be untouched stays so for every later life, too.
        self.touched = max(journal.touched_attempt, fence)
        self.member = chain.member(state, self.me) is not None
        self.elector = self.me in state.electors
        self.quorum = chain.quorum(state, self.rules)
        self.leaders = chain.coordinators(state)
        self.assembly = Assembly(state=state, rules=self.rules)
        self.agreement = Agreement(electors=state.electors, quorum=self.quorum)
        self.attempt = journal.attempt
        self.my_ready: Signed[Ready] | None = None
        self.my_votes: dict[tuple[int, int], Signed[Vote]] = {}
        """(attempt, phase) → my vote; `keep_vote` alone changes it."""
        self.attempt_voted = -1
        """The newest attempt that I have voted in; -1: none."""
        self.asked_until_s: float | None = None
        """Until when the trainer has been given time for its contribution."""
        self.hurried = False
        """It was told that others wait."""
        self.candidates: dict[Digest, Candidate] = {}
        self.proposals: dict[int, Signed[Proposal]] = {}
        self.proposed_s: dict[int, float] = {}
        self.conflicts: set[int] = set()
        """Attempts whose coordinator signed two different things."""
        self.contents: dict[Digest, tuple[Digest, Headers]] = {}
        """Decision → (roster id, headers)."""
        self.judged: dict[bytes, str | None] = {}
        """Body of a PROPOSAL → why section 6 refuses it, apart from what depends on my clock and disk."""
        self.refusals: dict[int, str] = {}
        """Attempt → why I voted NIL there; for `status` and logs."""
        self.sound: set[Digest] = set()
        """Decisions whose content was checked here."""
        self.valid: tuple[int, Digest, Certificate] | None = None
        self.commit: Commit | None = None
        self.lacking_since_s: float | None = None
        """When I first knew the commit without holding its parts."""
        self.decided_attempt: int | None = None
        self.applying = False
        self.signed_headers: dict[tuple[Digest, int], Signed[PartHeader]] = {}
        self.wanted_rosters: dict[Digest, float] = {}
        """Roster id → when to ask again."""
        self.unreachable: set[PeerId] = set()
        """Peers that my exchanges of this round failed with."""
        self.resend_s = math.inf
        self._restore(journal)

    def journal(self) -> Journal:
        valid = None
        if self.valid is not None:
            attempt, decision, certificate = self.valid
            roster_id, headers = self.contents[decision]
            valid = ValidValue(
                attempt=attempt,
                roster=wire.encode(self.candidates[roster_id].signed),
                headers=tuple(None if header is None else wire.encode(header) for header in headers),
                certificate=tuple(wire.encode(vote) for vote in certificate.votes),
            )
        lock = self.agreement.lock
        # Counted from where a later life starts, which may be before the attempt that this one is in: a vote that is
        # forgotten could be cast again.
        oldest = self.attempt_voted - ATTEMPTS_KEPT
        kept = [(key, vote) for key, vote in sorted(self.my_votes.items()) if key[0] > oldest]
        return Journal(
            run=self.base.run,
            lineage=self.base.lineage,
            round=self.base.round,
            base=self.base_digest,
            attempt=max(self.attempt_voted, 0),
            touched_attempt=self.touched,
            ready=b"" if self.my_ready is None else wire.encode(self.my_ready),
            votes=tuple(OwnVote(attempt=key[0], phase=key[1], envelope=wire.encode(vote)) for key, vote in kept),
            lock=None if lock is None else LockedOn(attempt=lock.attempt, decision=lock.decision),
            valid=valid,
        )

    def keep_vote(self, signed: Signed[Vote]) -> None:
        vote = signed.message
        self.my_votes[vote.attempt, vote.phase] = signed
        self.attempt_voted = max(self.attempt_voted, vote.attempt)

    def _restore(self, journal: Journal) -> None:
        if journal.base != self.base_digest:
            self.attempt = 0
            return
        if journal.ready:
            self.my_ready = wire.decode(journal.ready)
            self.assembly.add_ready(self.my_ready, self.outbox.now_s)
        for own in journal.votes:
            signed = wire.decode(own.envelope)
            self.keep_vote(signed)
            self.agreement.add(signed)
        if journal.lock is not None:
            self.agreement.lock = Lock(attempt=journal.lock.attempt, decision=journal.lock.decision)
        if journal.valid is not None:
            kept = journal.valid
            roster: Signed[Roster] = wire.decode(kept.roster)
            headers: Headers = tuple(None if data is None else wire.decode(data) for data in kept.headers)
            votes = tuple(wire.decode(data) for data in kept.certificate)
            for vote in votes:
                self.agreement.add(vote)
            candidate = self.remember(roster, problem=None)
            decision = self.content(candidate.roster_id, headers)
            self.valid = (kept.attempt, decision, Certificate(votes=votes))
        self.resend_s = self.outbox.now_s

    def knows(self, signed: Signed[Any]) -> bool:
        """Whether this is, byte for byte, what I have taken in already: nothing follows from it a second time."""
        message = signed.message
        known: Signed[Any] | None
        match message:
            case Ready():
                known = self.assembly.readys.get(signed.sender)
            case Vote():
                known = self.agreement.of(signed.sender, message.attempt, message.phase)
            case Proposal():
                known = self.proposals.get(message.attempt)
            case _:
                return False
        return (
            known is not None
            and known.body == signed.body
            and known.signature == signed.signature
            and known.sender == signed.sender
        )

    def touch(self) -> None:
        """Before the first signature under a roster of this attempt: a later life must not sign there again."""
        if self.touched < self.attempt:
            self.touched = self.attempt
            self.standing.persist()

    def remember(self, signed: Signed[Roster], *, problem: str | None) -> Candidate:
        while len(self.candidates) >= CANDIDATES_KEPT:
            pinned = {self.contents[value][0] for value in self._pinned() if value in self.contents}
            loose = [known for known in self.candidates.values() if known.roster_id not in pinned]
            if not loose:
                break
            dropped = min(loose, key=lambda known: known.roster.attempt)
            dropped.stop(self.outbox)
            del self.candidates[dropped.roster_id]
        index = [ready.sender for ready in signed.message.readys]
        candidate = Candidate(
            roster_id=wire.roster_id(signed),
            signed=signed,
            seen_s=self.outbox.now_s,
            problem=problem,
            roots=() if problem is not None else roots_of(signed.message, self.rules),
            my_index=index.index(self.me) if self.me in index else None,
        )
        self.candidates[candidate.roster_id] = candidate
        if problem is None and signed.message.plan is not None:
            self.standing.experience.saw(kind_of(signed.message.plan), self.base.round)
        self.wanted_rosters.pop(candidate.roster_id, None)
        return candidate

    def _pinned(self) -> set[Digest]:
        pinned = set() if self.valid is None else {self.valid[1]}
        if self.agreement.lock is not None:
            pinned.add(self.agreement.lock.decision)
        return pinned

    def content(self, roster_id: Digest, headers: Headers) -> Digest:
        decision = chain.decision(self.base_digest, roster_id, headers)
        if decision not in self.contents:
            while len(self.contents) >= 2 * ATTEMPTS_KEPT:
                loose = next((value for value in self.contents if value not in self._pinned()), None)
                if loose is None:
                    break
                del self.contents[loose]
            self.contents[decision] = (roster_id, headers)
        return decision

    def current(self) -> Candidate | None:
        for candidate in self.candidates.values():
            if candidate.roster.attempt == self.attempt and candidate.problem is None:
                return candidate
        return None

    def compare_headers(self, candidate: Candidate, headers: Headers) -> None:
        """Results of one part that a root signed differently are evidence against it."""
        known = {header.message.part: header for header in candidate.held.values()}
        for header in headers:
            if header is not None:
                self.standing.docket.compare(known.get(header.message.part), header)

    def note_readys(self, roster: Roster) -> None:
        """A roster shows which READYs its leader holds: a second one of the same peer is evidence."""
        for ready in roster.readys:
            self.standing.docket.compare(self.assembly.readys.get(ready.sender), ready)

    def failed_exchanges(self, before: int) -> int:
        """Exchanges of this round's attempts below `before`: as nothing of theirs was decided, the next one is given
        twice the time. What of theirs still comes, comes too late.
        """
        return sum(
            candidate.problem is None and candidate.roster.plan is not None and candidate.roster.attempt < before
            for candidate in self.candidates.values()
        )

    def learn_pace(self, commit: Commit) -> None:
        """From the round that `commit` ends: how long the others took to be ready, and the exchange to be over."""
        self.standing.pace.learn(self.assembly)
        candidate, roster = self.candidates[wire.roster_id(commit.roster)], commit.roster.message
        if roster.plan is None:
            return
        contributing = planning.contributing_of(roster, self.rules)
        terrain = self.outlook().terrain(roster)
        predicted_s = planner.predicted_durations(roster.plan, roster, contributing, self.rules, terrain)[-1]
        whole = all(header is not None and header.message.bitmap == contributing for header in commit.headers)
        took_s = candidate.held_s - candidate.seen_s if whole and candidate.held_s is not None else None
        self.standing.experience.learn(kind_of(roster.plan), self.base.round, took_s)
        self.standing.pace.learn_exchange(
            given_s=roster.durations_s[-1],
            predicted_s=predicted_s,
            took_s=took_s,
            failed_before=self.failed_exchanges(roster.attempt) > 0,
        )

    def outlook(self) -> Outlook:
        """What I know of the peers' links now."""
        standing = self.standing
        return Outlook(
            reports=standing.reports,
            groups=standing.grouping.groups,
            experience=standing.experience,
            nils=self.agreement.failed_edges(),
        )

    @staticmethod
    def held_parts(candidate: Candidate) -> set[int]:
        return {part for part, _ in candidate.held}

    def leader(self) -> PeerId:
        return self.leader_of(self.attempt)

    def leader_of(self, attempt: int) -> PeerId:
        return self.leaders[attempt % len(self.leaders)]

    def want_roster(self, roster_id: Digest, source: PeerId) -> None:
        at_s = self.wanted_rosters.get(roster_id, -math.inf)
        if self.outbox.due(at_s) and source != self.me:
            if len(self.wanted_rosters) >= CANDIDATES_KEPT:
                self.wanted_rosters.clear()
            self.wanted_rosters[roster_id] = self.outbox.now_s + self.rules.resend_s
            self.outbox.tell(source, Fetch(hash=roster_id))

    def sources_of(self, first: PeerId, candidate: Candidate) -> list[PeerId]:
        wanted = [first, *candidate.roots, *(ready.sender for ready in candidate.roster.readys)]
        return [peer for peer in dict.fromkeys(wanted) if peer in self.standing.fresh]

    def decision_of(self, commit: Commit) -> Digest:
        return chain.decision(self.base_digest, wire.roster_id(commit.roster), commit.headers)

    def quiet(self) -> None:
        """Something was sent just now: the next repetition is a full period away."""
        self.resend_s = self.outbox.now_s + self.rules.resend_s

    def due_s(self) -> float | None:
        here, behind = self.standing.live_members(self.state)
        now_s = self.outbox.now_s
        due_s = self.assembly.due_s(same_round=here, behind=behind, pace=self.standing.pace, now_s=now_s)
        if due_s is not None and self.standing.leaving and self.assembly.quorum_since_s is not None:
            due_s = min(due_s, self.assembly.quorum_since_s + 2 * self.rules.grace_s)
        return due_s

    def on_proposal(self, signed: Signed[Proposal]) -> None:
        proposal = signed.message
        if not self.attempt - ATTEMPTS_KEPT < proposal.attempt <= self.attempt + ATTEMPTS_AHEAD:
            return
        if signed.sender != self.leader_of(proposal.attempt):
            self.standing.misbehaved(signed.sender, f"proposed in attempt {proposal.attempt}, which it does not lead")
            return
        known = self.proposals.get(proposal.attempt)
        if known is not None:
            self.standing.docket.compare(known, signed)
            if known.body != signed.body and proposal.attempt not in self.conflicts:
                self.conflicts.add(proposal.attempt)
                self.standing.misbehaved(signed.sender, f"made two proposals in attempt {proposal.attempt}")
            return
        self.proposals[proposal.attempt] = signed
        self.proposed_s[proposal.attempt] = self.outbox.now_s
        for old in [attempt for attempt in self.proposals if attempt <= self.attempt - ATTEMPTS_KEPT]:
            del self.proposals[old], self.proposed_s[old]
        self.content(proposal.roster_id, proposal.headers)
