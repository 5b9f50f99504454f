"""Voting in the attempts of one round: when to vote for what, and when to go on (protocol section 5)."""

from __future__ import annotations

from collections.abc import Callable, Collection

from protocol import chain
from protocol.fields import MAX_EDGES, MAX_LEFT_OUT
from protocol.judging import Judge
from protocol.messages import NIL, Certificate, Proposal, Ready, Signed, Vote
from protocol.names import Digest, PeerId
from protocol.record import Record
from protocol.standing import Derived, Stopwatch
from protocol.votes import ATTEMPTS_KEPT, PHASES, Lock


def _nobody_asks(silent: Collection[PeerId], voted: Collection[PeerId]) -> None:
    """For a round without a machine around it."""


class Ballots:
    def __init__(self, record: Record) -> None:
        self.record = record
        self.judge = Judge(record)
        self.on_silence: Callable[[Collection[PeerId], Collection[PeerId]], None] = _nobody_asks
        """Told, of each attempt of maximal length in which I voted for something, who did not and who did."""
        self.watch = Stopwatch()
        self._ahead: Derived[dict[PeerId, int]] = Derived()
        """Electors that show themselves in later attempts."""
        self._start_timers()

    def _start_timers(self) -> None:
        self.entered_s = self.record.outbox.now_s
        self.watch = Stopwatch(seen_s=self.record.outbox.now_s)
        self.watched_roster = False
        self.first_votes_s: float | None = None
        self.second_votes_s: float | None = None

    def _enter(self, attempt: int) -> bool:
        record = self.record
        self._note_silence()
        for candidate in record.candidates.values():
            candidate.stop(record.outbox)
        record.attempt = attempt
        self._start_timers()
        self._adopt_valid()
        record.quiet()
        return True

    def _note_silence(self) -> None:
        """Who voted for what I voted for in the attempt that ends, if it had all the time there is (section 10)."""
        record = self.record
        mine = record.agreement.of(record.me, record.attempt, 1)
        if self._length_s() < record.rules.attempt_timeout_max_s or mine is None or not mine.message.value:
            return
        votes = {peer: record.agreement.of(peer, record.attempt, 1) for peer in record.state.electors}
        voted = {peer for peer, vote in votes.items() if vote is not None and vote.message.value}
        self.on_silence(votes.keys() - voted, voted)

    def enter_later(self) -> bool:
        """Follow electors that have gone on. Their votes show it, and before those their ROSTERs and HEARTBEATs:
        whoever waited for the votes of an attempt would miss its exchange.
        """
        record = self.record
        key = (record.standing.presence.version, record.attempt)
        seen = self._ahead.get(key, record.base)
        if seen is None:
            fresh = record.standing.fresh
            seen = self._ahead.put(
                {
                    peer: heard.attempt
                    for peer in record.state.electors
                    # The attempt first: it seldom is a later one, and bases are long to compare.
                    if (heard := fresh.get(peer)) is not None
                    and heard.attempt > record.attempt
                    and heard.base == record.base
                }
            )
        for candidate in record.candidates.values():
            leader, attempt = candidate.signed.sender, candidate.roster.attempt
            if attempt > max(record.attempt, seen.get(leader, -1)):
                seen = {**seen, leader: attempt}
        later = record.agreement.later_attempt(record.attempt, seen)
        return later is not None and self._enter(later)

    def _length_s(self, short_s: float | None = None) -> float:
        """An attempt's own time, doubled for each attempt before it, without what the roster gives the exchange."""
        record = self.record
        first_s = record.rules.attempt_timeout_s if short_s is None else min(short_s, record.rules.attempt_timeout_s)
        return float(min(first_s * 2 ** min(record.attempt, 30), record.rules.attempt_timeout_max_s))

    def _least_s(self) -> float:
        """How long I stay in an attempt although it can decide nothing any more.

        Attempt 0 is left at once. If the next one fails as fast, its cause is no lost message: whatever makes every
        voter refuse every proposal must not make them vote hundreds of times a minute.
        """
        attempt, rules = self.record.attempt, self.record.rules
        if attempt == 0:
            return 0.0
        return float(min(rules.grace_s * 2 ** min(attempt - 1, 30), rules.attempt_timeout_max_s))

    def _timed_out(self) -> bool:
        """Whether this attempt's timer has run out for the phase-1 vote."""
        record = self.record
        candidate = record.current()
        if candidate is not None:
            if not self.watched_roster:
                self.watched_roster = True
                self.watch = Stopwatch(seen_s=record.outbox.now_s)
            self.watch.run(True, record.outbox.now_s)
            return self.watch.reached(
                candidate.closes_s(record.rules) - candidate.seen_s + self._length_s(), record.outbox
            )
        leader = record.leader()
        heard = record.standing.fresh.get(leader)
        # Who says that it cannot take part leads no more than who is dead.
        silent = leader != record.me and (heard is None or not heard.able)
        due_s = record.due_s()
        started = record.assembly.enough() and (silent or (due_s is not None and record.outbox.due(due_s)))
        started = started or (record.attempt > 0 and (record.valid is not None or bool(record.candidates)))
        self.watch.run(started, record.outbox.now_s)
        return self.watch.reached(self._length_s(2 * record.rules.grace_s if silent else None), record.outbox)

    def next_attempt(self) -> bool:
        record = self.record
        if record.agreement.cast(record.attempt, 2) < record.quorum:
            return False
        if self.second_votes_s is None:
            self.second_votes_s = record.outbox.now_s
        if record.agreement.undecidable(record.attempt, 2):
            return record.outbox.due(self.entered_s + self._least_s()) and self._enter(record.attempt + 1)
        due = record.outbox.due(self.second_votes_s + self._length_s(record.rules.grace_s))
        return due and self._enter(record.attempt + 1)

    def _may_cast(self, phase: int) -> bool:
        record = self.record
        return (
            record.elector
            and record.standing.voting
            and (record.attempt, phase) not in record.my_votes
            and record.attempt_voted <= record.attempt
        )

    def _cast(
        self, phase: int, value: Digest, left_out: tuple[Signed[Ready], ...] = (), *, attempt: int | None = None
    ) -> bool:
        record = self.record
        attempt = record.attempt if attempt is None else attempt
        vote = Vote(
            base=record.base,
            attempt=attempt,
            phase=phase,
            value=value,
            failed_edges=() if value else tuple(sorted(record.unreachable)[:MAX_EDGES]),
            left_out=left_out[:MAX_LEFT_OUT],
        )
        signed = record.outbox.sign(vote)
        record.keep_vote(signed)
        record.agreement.add(signed)
        record.standing.persist()
        record.outbox.broadcast(signed)
        record.quiet()
        return True

    def vote_first(self) -> bool:
        record, docket = self.record, self.record.standing.docket
        unproven: str | None = None
        if not self._may_cast(1) or (record.attempt, 2) in record.my_votes:
            return False
        if record.attempt in record.conflicts:
            record.refusals[record.attempt] = f"its leader {record.leader()} signed two different things"
            return self._cast(1, NIL)
        signed = record.proposals.get(record.attempt)
        if signed is not None:
            candidate = record.candidates.get(signed.message.roster_id)
            if candidate is None:
                record.want_roster(signed.message.roster_id, signed.sender)
            else:
                candidate.proposed.add(record.attempt)
                left_out = self.judge.left_out(candidate)
                why = self.judge.refuses(signed.message, candidate) or docket.refuted(candidate.roster)
                if why is None and left_out:
                    why = f"the roster leaves out the READY of {left_out[0].sender}, which was there in time"
                if why is not None:
                    candidate.refused = True
                    record.refusals[record.attempt] = why
                    return self._cast(1, NIL, left_out)
                decision = chain.decision(record.base_digest, candidate.roster_id, signed.message.headers)
                if not self._stood_by(signed.message, decision):
                    unproven = docket.unproven(candidate.roster, candidate.signed.sender)
                if unproven is None and self.judge.held(signed, candidate):
                    may = record.agreement.may_vote(
                        decision, attempt=record.attempt, valid_attempt=signed.message.valid_attempt
                    )
                    if not may:
                        record.refusals[record.attempt] = "it is not what this node is locked on"
                    return self._cast(1, decision if may else NIL)
        elif record.leader() == record.me and record.attempt <= record.fence:
            # An earlier life may have led this attempt; nothing that I send for it could be trusted.
            return self._cast(1, NIL)
        if not self._timed_out():
            return False
        record.refusals[record.attempt] = unproven or f"nothing to vote for came in time from {record.leader()}"
        return self._cast(1, NIL)

    def _stood_by(self, proposal: Proposal, decision: Digest) -> bool:
        """Whether a quorum has voted for it: those who did looked into its roster's evidence before.

        Whoever has restarted since has lost the commit that it takes to recompute a mean. If it asked for that again,
        those who are locked could vote for nothing else and it for anything but: no attempt would ever decide.
        """
        lock, valid = self.record.agreement.lock, self.record.valid
        mine = (lock is not None and lock.decision == decision) or (valid is not None and valid[1] == decision)
        return mine or proposal.valid_certificate is not None  # verified by then: `Judge.refuses`

    def vote_second(self) -> bool:
        record = self.record
        if not self._may_cast(2):
            return False
        made = record.agreement.certificate(record.attempt, 1)
        if made is not None:
            decision, certificate = made
            if self._content_held(decision, certificate):
                record.agreement.lock = Lock(attempt=record.attempt, decision=decision)
                record.valid = (record.attempt, decision, certificate)
                return self._cast(2, decision)
        elif record.agreement.undecidable(record.attempt, 1) and record.agreement.nils(record.attempt, 1):
            return self._give_up_second()
        if record.agreement.cast(record.attempt, 1) < record.quorum:
            return False
        if self.first_votes_s is None:
            self.first_votes_s = record.outbox.now_s
        length_s = self._length_s(None if made is not None else record.rules.grace_s)
        return record.outbox.due(self.first_votes_s + length_s) and self._give_up_second()

    def _give_up_second(self) -> bool:
        """NIL in phase 2; before it in phase 1, if I have not voted there. I could not any more, and an elector that
        misses a vote which I had would wait for mine for ever.
        """
        return self._cast(2 if (self.record.attempt, 1) in self.record.my_votes else 1, NIL)

    def _content_held(self, decision: Digest, certificate: Certificate) -> bool:
        record = self.record
        content = record.contents.get(decision)
        if content is None:
            return False
        voters = [vote.sender for vote in certificate.votes]
        candidate = record.candidates.get(content[0])
        if candidate is None:
            for voter in voters:
                record.want_roster(content[0], voter)
            return False
        return candidate.problem is None and candidate.hold(content[1], voters, record.outbox)

    def _adopt_valid(self) -> None:
        """A QC of a later attempt than my valid value's replaces it, if I know what it is about."""
        record = self.record
        newest = -1 if record.valid is None else record.valid[0]
        for attempt in range(record.attempt - 1, max(newest, record.attempt - ATTEMPTS_KEPT), -1):
            made = record.agreement.certificate(attempt, 1)
            if made is not None and made[0] in record.contents and record.contents[made[0]][0] in record.candidates:
                record.valid = (attempt, *made)
                return

    def close_behind(self, attempt: int) -> None:
        """An elector is still in an attempt that I have left. Where I have not voted there, NIL helps it on.

        Without this, one elector in attempt 1 and one in attempt 0 of three wait for each other for ever once the third
        is dead: neither sees a quorum of votes of one attempt.
        """
        record = self.record
        if attempt <= record.attempt - ATTEMPTS_KEPT or record.attempt <= record.fence:
            return
        for phase in PHASES:
            if (attempt, phase) not in record.my_votes:
                self._cast(phase, NIL, attempt=attempt)
