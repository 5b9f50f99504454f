"""One round of one peer: from the first READY to the commit, over as many attempts as it takes (protocol 4 to 6).

Every method takes in one fact; `advance` then does everything that has become possible, in the order of the protocol.
No rule waits for a poll: what is not yet possible either follows from a later fact or names the time when it is due.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from protocol import chain, commits, validity, wire
from protocol.assembly import Assembly, absent_after
from protocol.candidates import Candidate, Headers, roots_of
from protocol.chain import ChainState
from protocol.events import Alarm, Apply, Freeze, Frozen, HeaderDraft, HeaderSigned, StartExchange
from protocol.journal import Journal, LockedOn, OwnVote, ValidValue
from protocol.messages import (
    NIL,
    Certificate,
    Commit,
    Fetch,
    Join,
    PartHeader,
    Proposal,
    Ready,
    Roster,
    Signed,
    Vote,
)
from protocol.names import Digest, PeerId
from protocol.standing import Standing, Stopwatch
from protocol.votes import ATTEMPTS_KEPT, PHASES, Agreement, Lock

ATTEMPTS_AHEAD = 2
"""ROSTERs and PROPOSALs of attempts further ahead are dropped; their coordinator sends them again."""
CANDIDATES_KEPT = ATTEMPTS_KEPT
UNKNOWN_PAST = 2**62
"""A fence above every attempt: nothing is known of what an earlier life signed."""
STEPS_MAX = 256


class _Everything:
    """A container of all part hashes: what is held is looked at elsewhere, by header."""

    def __contains__(self, item: object) -> bool:
        return True


_EVERYTHING = _Everything()


class Round:
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
        self.touched = journal.touched_attempt
        self.member = chain.member(state, self.me) is not None
        self.elector = self.me in state.electors
        self.quorum = chain.quorum(state, self.rules)
        self.assembly = Assembly(state=state, rules=self.rules)
        self.agreement = Agreement(electors=state.electors, quorum=self.quorum)
        self.attempt = journal.attempt
        self.my_ready: Signed[Ready] | None = None
        self.my_votes: dict[tuple[int, int], Signed[Vote]] = {}
        self.frozen = False
        self.asked_until_s: float | None = None
        self.candidates: dict[Digest, Candidate] = {}
        self.proposals: dict[int, Signed[Proposal]] = {}
        self.proposed_s: dict[int, float] = {}
        self.conflicts: set[int] = set()
        """Attempts whose coordinator signed two different things."""
        self.contents: dict[Digest, tuple[Digest, Headers]] = {}
        """Decision → (roster id, headers)."""
        self.judged: dict[bytes, str | None] = {}
        """Body of a PROPOSAL → why section 6 refuses it, apart from what depends on my clock and disk."""
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
        self._enter_timers()
        self._restore(journal)

    # ------------------------------------------------------------ durable record

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
        kept = [(key, vote) for key, vote in sorted(self.my_votes.items()) if key[0] > self.attempt - ATTEMPTS_KEPT]
        return Journal(
            run=self.base.run,
            lineage=self.base.lineage,
            round=self.base.round,
            base=self.base_digest,
            attempt=max([self.attempt_voted(), 0]),
            touched_attempt=self.touched,
            ready=b"" if self.my_ready is None else wire.encode(self.my_ready),
            votes=tuple(OwnVote(attempt=key[0], phase=key[1], envelope=wire.encode(vote)) for key, vote in kept),
            lock=None if lock is None else LockedOn(attempt=lock.attempt, decision=lock.decision),
            valid=valid,
        )

    def attempt_voted(self) -> int:
        return max((attempt for attempt, _ in self.my_votes), default=-1)

    def _restore(self, journal: Journal) -> None:
        if journal.base != self.base_digest:
            self.attempt = 0
            return
        if journal.ready:
            self.my_ready = wire.decode(journal.ready)
            self.frozen = True
            self.assembly.add_ready(self.my_ready, self.outbox.now_s)
        for own in journal.votes:
            signed = wire.decode(own.envelope)
            self.my_votes[own.attempt, own.phase] = signed
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
            candidate = self._remember(roster, problem=None)
            decision = self._content(candidate.roster_id, headers)
            self.valid = (kept.attempt, decision, Certificate(votes=votes))
        self.resend_s = self.outbox.now_s

    def _touch(self) -> None:
        """Before the first signature under a roster of this attempt: a later life must not sign there again."""
        if self.touched < self.attempt:
            self.touched = self.attempt
            self.standing.persist()

    # ------------------------------------------------------------ facts

    def on_ready(self, signed: Signed[Ready]) -> None:
        if signed.sender in self.standing.presence.leaves:
            return
        if signed.sender not in self.assembly.readys:
            why = validity.check_ready(self.state, self.rules, signed)
            if why is not None:
                self.standing.misbehaved(signed.sender, why)
                return
        why = self.assembly.add_ready(signed, self.outbox.now_s)
        if why is not None:
            self.standing.misbehaved(signed.sender, why)

    def on_join(self, signed: Signed[Join]) -> None:
        why = validity.check_join(self.state, self.rules, signed)
        if why is None:
            self.assembly.add_join(signed)
        elif chain.member(self.state, signed.sender) is None:
            self.standing.misbehaved(signed.sender, why)

    def on_roster(self, signed: Signed[Roster]) -> None:
        roster = signed.message
        roster_id = wire.roster_id(signed)
        if roster_id in self.candidates:
            return
        asked_for = roster_id in self.wanted_rosters
        if not asked_for and not self.attempt - ATTEMPTS_KEPT < roster.attempt <= self.attempt + ATTEMPTS_AHEAD:
            return
        if signed.sender != chain.coordinator(self.state, roster.attempt):
            self.standing.misbehaved(
                signed.sender, f"sent a ROSTER for attempt {roster.attempt}, which it does not lead"
            )
            return
        others = [known for known in self.candidates.values() if known.roster.attempt == roster.attempt]
        if others:
            self.conflicts.add(roster.attempt)
            self.standing.misbehaved(signed.sender, f"sent two different ROSTERs for attempt {roster.attempt}")
            if len(others) > 1 and not asked_for:
                return
        # What depends on my clock and on earlier attempts is judged with the proposal: it binds only below attempt 3.
        problem = validity.check_roster(
            self.state, self.rules, signed, self.outbox.keyring, attempt=validity.TRUSTING_ATTEMPT
        )
        if problem is not None:
            self.standing.misbehaved(signed.sender, problem)
        self._remember(signed, problem=problem)
        if problem is None:
            for ready in roster.readys:
                self.assembly.add_ready(ready, self.outbox.now_s)

    def _remember(self, signed: Signed[Roster], *, problem: str | None) -> Candidate:
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
        self.wanted_rosters.pop(candidate.roster_id, None)
        return candidate

    def _pinned(self) -> set[Digest]:
        pinned = set() if self.valid is None else {self.valid[1]}
        if self.agreement.lock is not None:
            pinned.add(self.agreement.lock.decision)
        return pinned

    def on_proposal(self, signed: Signed[Proposal]) -> None:
        proposal = signed.message
        if not self.attempt - ATTEMPTS_KEPT < proposal.attempt <= self.attempt + ATTEMPTS_AHEAD:
            return
        if signed.sender != chain.coordinator(self.state, proposal.attempt):
            self.standing.misbehaved(signed.sender, f"proposed in attempt {proposal.attempt}, which it does not lead")
            return
        known = self.proposals.get(proposal.attempt)
        if known is not None:
            if known.body != signed.body and proposal.attempt not in self.conflicts:
                self.conflicts.add(proposal.attempt)
                self.standing.misbehaved(signed.sender, f"made two proposals in attempt {proposal.attempt}")
            return
        self.proposals[proposal.attempt] = signed
        self.proposed_s[proposal.attempt] = self.outbox.now_s
        for old in [attempt for attempt in self.proposals if attempt <= self.attempt - ATTEMPTS_KEPT]:
            del self.proposals[old], self.proposed_s[old]
        self._content(proposal.roster_id, proposal.headers)

    def _content(self, roster_id: Digest, headers: Headers) -> Digest:
        decision = chain.decision(self.base_digest, roster_id, headers)
        if decision not in self.contents:
            while len(self.contents) >= 2 * ATTEMPTS_KEPT:
                loose = next((value for value in self.contents if value not in self._pinned()), None)
                if loose is None:
                    break
                del self.contents[loose]
            self.contents[decision] = (roster_id, headers)
        return decision

    def on_vote(self, signed: Signed[Vote]) -> None:
        why = self.agreement.add(signed)
        if why is not None:
            self.standing.misbehaved(signed.sender, why)
        if signed.sender in self.agreement.electors:
            for ready in signed.message.left_out:
                news = ready.message.base == self.base and ready.sender not in self.assembly.readys
                if news and wire.verify(self.outbox.keyring, ready):
                    self.on_ready(ready)

    def on_commit(self, commit: Commit) -> str | None:
        """A commit for this base from another peer: why it is not one, or None."""
        decision = chain.decision(self.base_digest, wire.roster_id(commit.roster), commit.headers)
        if self.commit is not None and decision == self._decision(self.commit):
            return None
        try:
            commits.verify_commit(self.state, self.rules, commit, self.outbox.keyring)
        except commits.InvalidCommit as error:
            return str(error)
        if self.commit is not None:
            self._alarm(decision)
            return None
        candidate = self.candidates.get(wire.roster_id(commit.roster))
        if candidate is None:
            candidate = self._remember(commit.roster, problem=None)
        elif candidate.problem is not None:
            candidate.problem, candidate.roots = None, roots_of(candidate.roster, self.rules)
        self._content(candidate.roster_id, commit.headers)
        self._decide(commit)
        return None

    def on_frozen(self, event: Frozen) -> None:
        if self.my_ready is not None or event.base != self.base or not self._may_be_ready():
            return
        self.frozen = True
        self._send_ready(
            Ready(
                base=self.base,
                ranges_done=event.ranges_done,
                tokens=event.tokens,
                norm=event.norm,
                largest=event.largest,
                units_wanted=event.units_wanted,
                upload_limit_bytes=self.standing.upload_limit_bytes,
                download_limit_bytes=self.standing.download_limit_bytes,
                failed_edges=self.standing.failed_edges,
            )
        )

    def on_header_draft(self, event: HeaderDraft) -> None:
        """Signs at most one header per part, only for the current attempt's roster and never behind the fence."""
        header = event.header
        candidate = self.candidates.get(header.roster_id)
        signed = self.signed_headers.get((header.roster_id, header.part))
        if signed is not None and signed.message != header:
            signed = None
        elif (
            signed is None
            and candidate is not None
            and candidate.exchanging
            and candidate.roster.attempt == self.attempt > self.fence
            and header.part < len(candidate.roots)
            and candidate.roots[header.part] == self.me
        ):
            signed = self.outbox.sign(header)
            self.signed_headers[header.roster_id, header.part] = signed
        self.outbox.emit(HeaderSigned(header=header, signed=signed))

    def on_part_held(self, signed: Signed[PartHeader]) -> None:
        header = signed.message
        candidate = self.candidates.get(header.roster_id)
        if candidate is None or candidate.problem is not None or header.part >= len(candidate.roots):
            return
        if signed.sender == candidate.roots[header.part]:
            candidate.held[header.part, signed.body] = signed

    def on_exchange_ended(self, roster_id: Digest, failed_edges: Iterable[PeerId]) -> None:
        self.unreachable.update(failed_edges)
        candidate = self.candidates.get(roster_id)
        if candidate is not None:
            candidate.ended = True

    def on_parts_fetched(self, roster_id: Digest, missing: tuple[int, ...]) -> None:
        candidate = self.candidates.get(roster_id)
        if candidate is None:
            return
        candidate.fetching = False
        if missing:
            candidate.fetch_failures += 1
            candidate.fetch_after_s = self.outbox.now_s + self.rules.resend_s

    # ------------------------------------------------------------ what follows

    def advance(self) -> None:
        """Everything that is possible now, until nothing is."""
        for _ in range(STEPS_MAX):
            if self.commit is not None:
                self._apply()
                return
            if not (
                self._be_ready()
                or self._enter_later()
                or self._make_roster()
                or self._exchange()
                or self._propose()
                or self._vote_first()
                or self._vote_second()
                or self._find_commit()
                or self._next_attempt()
            ):
                break
        self._resend()

    # -- ready

    def _may_be_ready(self) -> bool:
        return self.member and self.standing.voting

    def _be_ready(self) -> bool:
        if self.my_ready is not None or not self._may_be_ready():
            return False
        if self.standing.leaving:
            return self._send_ready(Ready(base=self.base)) if self.elector else False
        first_s, grace_s, remaining_s = self.assembly.first_ready_s, self.rules.grace_s, self.standing.remaining_s
        if self.asked_until_s is not None:
            return self.outbox.due(self.asked_until_s + grace_s) and self._send_ready(Ready(base=self.base))
        if remaining_s is None:
            # Without a trainer I only vote; not before somebody has work to be voted on.
            return (
                first_s is not None and self.outbox.due(first_s + grace_s) and self._send_ready(Ready(base=self.base))
            )
        if remaining_s > 0 and first_s is None:
            return False
        within_s = grace_s if remaining_s <= 0 else min(self.rules.ready_max_s, max(grace_s, 2 * remaining_s))
        self.asked_until_s = self.outbox.now_s + within_s
        self.outbox.emit(Freeze(base=self.base, within_s=within_s))
        return True

    def _send_ready(self, ready: Ready) -> bool:
        self.my_ready = self.outbox.sign(ready)
        self.assembly.add_ready(self.my_ready, self.outbox.now_s)
        self.standing.persist()
        self.outbox.broadcast(self.my_ready)
        self._quiet()
        return True

    # -- attempts

    def _enter_timers(self) -> None:
        self.watch = Stopwatch(seen_s=self.outbox.now_s)
        self.watched_roster = False
        self.first_votes_s: float | None = None
        self.second_votes_s: float | None = None

    def _enter(self, attempt: int) -> bool:
        for candidate in self.candidates.values():
            candidate.stop(self.outbox)
        self.attempt = attempt
        self._enter_timers()
        self._adopt_valid()
        self._quiet()
        return True

    def _enter_later(self) -> bool:
        later = self.agreement.later_attempt(self.attempt)
        return later is not None and self._enter(later)

    def _length_s(self, short_s: float | None = None) -> float:
        """An attempt's own time, doubled for each attempt before it, without what the roster gives the exchange."""
        first_s = self.rules.attempt_timeout_s if short_s is None else min(short_s, self.rules.attempt_timeout_s)
        return float(min(first_s * 2 ** min(self.attempt, 30), self.rules.attempt_timeout_max_s))

    def current(self) -> Candidate | None:
        for candidate in self.candidates.values():
            if candidate.roster.attempt == self.attempt and candidate.problem is None:
                return candidate
        return None

    @staticmethod
    def held_parts(candidate: Candidate) -> set[int]:
        return {part for part, _ in candidate.held}

    def leader(self) -> PeerId:
        return chain.coordinator(self.state, self.attempt)

    def due_s(self) -> float | None:
        here, behind = self.standing.live_members(self.state)
        now_s = self.outbox.now_s
        due_s = self.assembly.due_s(same_round=here, behind=behind, pace=self.standing.pace, now_s=now_s)
        if due_s is not None and self.standing.leaving and self.assembly.quorum_since_s is not None:
            due_s = min(due_s, self.assembly.quorum_since_s + 2 * self.rules.grace_s)
        return due_s

    def _timed_out(self) -> bool:
        """Whether this attempt's timer has run out for the phase-1 vote."""
        candidate = self.current()
        if candidate is not None:
            if not self.watched_roster:
                self.watched_roster = True
                self.watch = Stopwatch(seen_s=self.outbox.now_s)
            self.watch.run(True, self.outbox.now_s)
            return self.watch.reached(candidate.closes_s(self.rules) - candidate.seen_s + self._length_s(), self.outbox)
        leader = self.leader()
        silent = leader != self.me and leader not in self.standing.fresh
        due_s = self.due_s()
        started = self.assembly.enough() and (silent or (due_s is not None and self.outbox.due(due_s)))
        started = started or (self.attempt > 0 and (self.valid is not None or bool(self.candidates)))
        self.watch.run(started, self.outbox.now_s)
        return self.watch.reached(self._length_s(2 * self.rules.grace_s if silent else None), self.outbox)

    def _next_attempt(self) -> bool:
        if len(self.agreement.cast(self.attempt, 2)) < self.quorum:
            return False
        if self.second_votes_s is None:
            self.second_votes_s = self.outbox.now_s
        if self.agreement.undecidable(self.attempt, 2):
            return self._enter(self.attempt + 1)
        due = self.outbox.due(self.second_votes_s + self._length_s(self.rules.grace_s))
        return due and self._enter(self.attempt + 1)

    # -- the coordinator

    def _leads(self) -> bool:
        return (
            self.standing.voting
            and self.leader() == self.me
            and self.attempt > self.fence
            and (self.attempt, 1) not in self.my_votes
            and self.attempt not in self.proposals
        )

    def _earlier_result(self) -> Candidate | None:
        """A finished result of an earlier attempt of this round, fit to be proposed again."""
        for candidate in self.candidates.values():
            if candidate.roster.attempt >= self.attempt or candidate.problem is not None or candidate.refused:
                continue
            if len(candidate.proposed) > 1 or not candidate.roster.readys:
                continue
            if validity.check_result(self.rules, candidate.roster, candidate.result(), _EVERYTHING) is None:
                return candidate
        return None

    def _make_roster(self) -> bool:
        if not self._leads() or self.valid is not None:
            return False
        if any(candidate.roster.attempt == self.attempt for candidate in self.candidates.values()):
            return False
        if self.assembly.quorum_since_s is None or self._earlier_result() is not None:
            return False
        due_s = self.due_s()
        if due_s is None or not self.outbox.due(due_s):
            return False
        absent: set[PeerId] = set()
        for candidate in self.candidates.values():
            if candidate.problem is None and candidate.roster.attempt < self.attempt:
                bitmaps = [header.message.bitmap for header in candidate.held.values()]
                absent |= absent_after(candidate.roster, bitmaps, self.standing.fresh.keys() | {self.me})
        leaves = self.standing.presence.leaves
        roster = self.assembly.roster(attempt=self.attempt, leaves=leaves, absent=absent)
        if roster is None:
            return False
        signed = self.outbox.sign(roster)
        self._touch()
        self.outbox.broadcast(signed)
        self._remember(signed, problem=None)
        self._quiet()
        return True

    def _exchange(self) -> bool:
        candidate = self.current()
        if candidate is None or candidate.started or candidate.stopped or candidate.roster.plan is None:
            return False
        if candidate.my_index is None or self.attempt <= self.fence:
            return False
        candidate.started = True
        self._touch()
        self.outbox.emit(
            StartExchange(roster_id=candidate.roster_id, roster=candidate.signed, my_index=candidate.my_index)
        )
        return True

    def _proposal(self, roster_id: Digest, headers: Headers, valid: tuple[int, Certificate] | None) -> Proposal:
        return Proposal(
            base=self.base,
            attempt=self.attempt,
            roster_id=roster_id,
            headers=headers,
            valid_attempt=None if valid is None else valid[0],
            valid_certificate=None if valid is None else valid[1],
        )

    def _propose(self) -> bool:
        if not self._leads():
            return False
        if self.valid is not None:
            attempt, decision, certificate = self.valid
            roster_id, headers = self.contents[decision]
            voters = [vote.sender for vote in certificate.votes]
            if not self.candidates[roster_id].hold(headers, voters, self.outbox):
                return False
            return self._send_proposal(self._proposal(roster_id, headers, (attempt, certificate)))
        candidate = self.current()
        if candidate is None:
            candidate = self._earlier_result()
            if candidate is None:
                return False
        elif not candidate.complete() and not candidate.ended and not self.outbox.due(candidate.closes_s(self.rules)):
            return False
        return self._send_proposal(self._proposal(candidate.roster_id, candidate.result(), None))

    def _send_proposal(self, proposal: Proposal) -> bool:
        signed = self.outbox.sign(proposal)
        self._touch()
        self.on_proposal(signed)
        self.outbox.broadcast(signed)
        self._quiet()
        return True

    # -- votes

    def _may_cast(self, phase: int) -> bool:
        return (
            self.elector
            and self.standing.voting
            and (self.attempt, phase) not in self.my_votes
            and self.attempt_voted() <= self.attempt
        )

    def _cast(
        self, phase: int, value: Digest, left_out: tuple[Signed[Ready], ...] = (), *, attempt: int | None = None
    ) -> bool:
        attempt = self.attempt if attempt is None else attempt
        vote = Vote(
            base=self.base,
            attempt=attempt,
            phase=phase,
            value=value,
            failed_edges=() if value else tuple(sorted(self.unreachable)),
            left_out=left_out,
        )
        signed = self.outbox.sign(vote)
        self.my_votes[attempt, phase] = signed
        self.agreement.add(signed)
        self.standing.persist()
        self.outbox.broadcast(signed)
        self._quiet()
        return True

    def _vote_first(self) -> bool:
        if not self._may_cast(1) or (self.attempt, 2) in self.my_votes:
            return False
        if self.attempt in self.conflicts:
            return self._cast(1, NIL)
        signed = self.proposals.get(self.attempt)
        if signed is not None:
            candidate = self.candidates.get(signed.message.roster_id)
            if candidate is None:
                self._want_roster(signed.message.roster_id, signed.sender)
            else:
                candidate.proposed.add(self.attempt)
                left_out = self._left_out(candidate)
                if self._refuses(signed.message, candidate) is not None or left_out:
                    candidate.refused = True
                    return self._cast(1, NIL, left_out)
                if self._held(signed, candidate):
                    decision = chain.decision(self.base_digest, candidate.roster_id, signed.message.headers)
                    may = self.agreement.may_vote(
                        decision, attempt=self.attempt, valid_attempt=signed.message.valid_attempt
                    )
                    return self._cast(1, decision if may else NIL)
        elif self.leader() == self.me and self.attempt <= self.fence:
            # An earlier life may have led this attempt; nothing that I send for it could be trusted.
            return self._cast(1, NIL)
        return self._timed_out() and self._cast(1, NIL)

    def _refuses(self, proposal: Proposal, candidate: Candidate) -> str | None:
        """Why section 6 refuses a proposal, apart from omissions and from what is not held yet."""
        if candidate.problem is not None:
            return candidate.problem
        body = self.proposals[proposal.attempt].body
        if body not in self.judged:
            if len(self.judged) >= 2 * ATTEMPTS_KEPT:
                self.judged.clear()
            self.judged[body] = self._judge(proposal, candidate)
        return self.judged[body]

    def _judge(self, proposal: Proposal, candidate: Candidate) -> str | None:
        roster, keyring = candidate.roster, self.outbox.keyring
        if roster.attempt > proposal.attempt:
            return f"the proposal of attempt {proposal.attempt} is over a roster of the later {roster.attempt}"
        why = commits.check_headers(self.rules, candidate.signed, proposal.headers, keyring)
        if why is not None:
            return why
        decision = chain.decision(self.base_digest, candidate.roster_id, proposal.headers)
        self.sound.add(decision)
        why = validity.check_result(self.rules, roster, proposal.headers, _EVERYTHING)
        if why is None and roster.absent and proposal.attempt < validity.TRUSTING_ATTEMPT:
            why = validity.check_roster(
                self.state, self.rules, candidate.signed, keyring, earlier_bitmaps=self._earlier_bitmaps()
            )
        if why is not None or proposal.valid_attempt is None or proposal.valid_certificate is None:
            return why
        certificate = proposal.valid_certificate
        if certificate.votes[0].message.attempt != proposal.valid_attempt:
            return f"the proposal's certificate is not of attempt {proposal.valid_attempt}"
        return commits.check_certificate(self.state, self.rules, certificate, decision, 1, keyring)

    def _earlier_bitmaps(self) -> list[tuple[Roster, int]]:
        """Every roster of this round that I know, with the union of the bitmaps of the headers that I hold for it."""
        found = []
        for candidate in self.candidates.values():
            reached = 0
            for header in candidate.held.values():
                reached |= header.message.bitmap
            found.append((candidate.roster, reached))
        return found

    def _left_out(self, candidate: Candidate) -> tuple[Signed[Ready], ...]:
        """READYs that I had held for longer than the grace period when the roster first reached me."""
        if self.attempt >= validity.TRUSTING_ATTEMPT:
            return ()
        inside = {ready.sender for ready in candidate.roster.readys}
        inside.update(leave.sender for leave in candidate.roster.leaves)
        inside.update(self.standing.presence.leaves)
        since_s = candidate.seen_s - self.rules.grace_s
        missing = [peer for peer, at_s in self.assembly.received_s.items() if peer not in inside and at_s < since_s]
        return tuple(self.assembly.readys[peer] for peer in sorted(missing))

    def _held(self, signed: Signed[Proposal], candidate: Candidate) -> bool:
        headers = signed.message.headers
        if not candidate.lacks(headers):
            return True
        # The parts are on their way down the trees; only what did not come is fetched.
        patience_s = self.rules.grace_s if candidate.exchanging else 0.0
        if not self.outbox.due(self.proposed_s[signed.message.attempt] + patience_s):
            return False
        return candidate.hold(headers, self._sources(signed.sender, candidate), self.outbox)

    def _sources(self, first: PeerId, candidate: Candidate) -> list[PeerId]:
        wanted = [first, *candidate.roots, *(ready.sender for ready in candidate.roster.readys)]
        return [peer for peer in dict.fromkeys(wanted) if peer in self.standing.fresh]

    def _vote_second(self) -> bool:
        if not self._may_cast(2):
            return False
        made = self.agreement.certificate(self.attempt, 1)
        if made is not None:
            decision, certificate = made
            if self._content_held(decision, certificate):
                self.agreement.lock = Lock(attempt=self.attempt, decision=decision)
                self.valid = (self.attempt, decision, certificate)
                return self._cast(2, decision)
        elif self.agreement.undecidable(self.attempt, 1) and self.agreement.nils(self.attempt, 1):
            return self._cast(2, NIL)
        if len(self.agreement.cast(self.attempt, 1)) < self.quorum:
            return False
        if self.first_votes_s is None:
            self.first_votes_s = self.outbox.now_s
        length_s = self._length_s(None if made is not None else self.rules.grace_s)
        return self.outbox.due(self.first_votes_s + length_s) and self._cast(2, NIL)

    def _content_held(self, decision: Digest, certificate: Certificate) -> bool:
        content = self.contents.get(decision)
        if content is None:
            return False
        voters = [vote.sender for vote in certificate.votes]
        candidate = self.candidates.get(content[0])
        if candidate is None:
            for voter in voters:
                self._want_roster(content[0], voter)
            return False
        return candidate.problem is None and candidate.hold(content[1], voters, self.outbox)

    def _adopt_valid(self) -> None:
        """A QC of a later attempt than my valid value's replaces it, if I know what it is about."""
        newest = -1 if self.valid is None else self.valid[0]
        for attempt in range(self.attempt - 1, max(newest, self.attempt - ATTEMPTS_KEPT), -1):
            made = self.agreement.certificate(attempt, 1)
            if made is not None and made[0] in self.contents and self.contents[made[0]][0] in self.candidates:
                self.valid = (attempt, *made)
                return

    def _want_roster(self, roster_id: Digest, source: PeerId) -> None:
        at_s = self.wanted_rosters.get(roster_id, -math.inf)
        if self.outbox.due(at_s) and source != self.me:
            if len(self.wanted_rosters) >= CANDIDATES_KEPT:
                self.wanted_rosters.clear()
            self.wanted_rosters[roster_id] = self.outbox.now_s + self.rules.resend_s
            self.outbox.tell(source, Fetch(hash=roster_id))

    # -- the commit

    def _decision(self, commit: Commit) -> Digest:
        return chain.decision(self.base_digest, wire.roster_id(commit.roster), commit.headers)

    def _alarm(self, decision: Digest) -> None:
        self.outbox.emit(
            Alarm(
                text=f"round {self.base.round} of lineage {self.base.lineage.hex()[:16]} has two decisions "
                f"(another is {decision.hex()[:16]}): stop the node and keep its home for a report"
            )
        )

    def _find_commit(self) -> bool:
        for attempt, decision, certificate in self.agreement.commit_certificates():
            content = self.contents.get(decision)
            candidate = None if content is None else self.candidates.get(content[0])
            if content is None or candidate is None:
                continue
            commit = Commit(roster=candidate.signed, headers=content[1], certificate=certificate)
            if candidate.problem is not None or decision not in self.sound:
                # Certified by a quorum, but not checked here: what applying takes for granted must hold.
                try:
                    commits.verify_commit(self.state, self.rules, commit, self.outbox.keyring)
                except commits.InvalidCommit:
                    continue
                candidate.problem, candidate.roots = None, roots_of(candidate.roster, self.rules)
            self.decided_attempt = attempt
            self._decide(commit)
            if self.decided_attempt is not None and chain.coordinator(self.state, attempt) == self.me:
                self.outbox.broadcast(self.outbox.sign(commit))
            return True
        return False

    def _decide(self, commit: Commit) -> None:
        self.commit = commit
        roster_id = wire.roster_id(commit.roster)
        for candidate in self.candidates.values():
            if candidate.roster_id != roster_id:
                candidate.stop(self.outbox)

    def _apply(self) -> None:
        commit = self.commit
        assert commit is not None
        if self.applying:
            return
        candidate = self.candidates[wire.roster_id(commit.roster)]
        voters = [vote.sender for vote in commit.certificate.votes]
        if candidate.lacks(commit.headers) and candidate.exchanging:
            patience_s = candidate.closes_s(self.rules)
            if self.lacking_since_s is None:
                self.lacking_since_s = self.outbox.now_s
            if not self.outbox.due(min(patience_s, self.lacking_since_s + self.rules.grace_s)):
                return
        sources = [*voters, *self._sources(voters[0], candidate), *sorted(self.standing.fresh)]
        if not candidate.hold(commit.headers, sources, self.outbox):
            return
        self.applying = True
        commit_hash = chain.commit_hash(self.state, self.rules, commit)
        self.outbox.emit(Apply(commit=commit, commit_hash=commit_hash, my_index=candidate.my_index))

    # -- repetition

    def _quiet(self) -> None:
        """Something was sent just now: the next repetition is a full period away."""
        self.resend_s = self.outbox.now_s + self.rules.resend_s

    def _resend(self) -> None:
        """Repeat what others may have lost: my READY, as the leader ROSTER and PROPOSAL, my votes, my highest QC."""
        if self.resend_s == math.inf or not self.outbox.due(self.resend_s):
            return
        self._quiet()
        self.outbox.due(self.resend_s)
        if self.my_ready is not None:
            self.outbox.broadcast(self.my_ready)
        if not self.standing.voting or not self.elector:
            return
        if self.leader() == self.me and self.attempt > self.fence:
            candidate = self.current()
            if candidate is not None:
                self.outbox.broadcast(candidate.signed)
            if self.attempt in self.proposals:
                self.outbox.broadcast(self.proposals[self.attempt])
        certified = () if self.valid is None else self.valid[2].votes
        for peer in self.state.electors:
            heard = self.standing.fresh.get(peer)
            if heard is None or self.agreement.of(peer, self.attempt, 2) is not None:
                continue
            if heard.base == self.base and heard.attempt < self.attempt:
                self._close_behind(heard.attempt)
            newest = max(self.my_votes, default=(0, 0))[0]
            for (attempt, _), vote in sorted(self.my_votes.items()):
                if attempt >= min(newest, heard.attempt):
                    self.outbox.send(peer, vote)
            for vote in certified:
                if vote.sender not in (peer, self.me):
                    self.outbox.send(peer, vote)

    def _close_behind(self, attempt: int) -> None:
        """An elector is still in an attempt that I have left. Where I have not voted there, NIL helps it on.

        Without this, one elector in attempt 1 and one in attempt 0 of three wait for each other for ever once the third
        is dead: neither sees a quorum of votes of one attempt.
        """
        if attempt <= self.attempt - ATTEMPTS_KEPT or self.attempt <= self.fence:
            return
        for phase in PHASES:
            if (attempt, phase) not in self.my_votes:
                self._cast(phase, NIL, attempt=attempt)
