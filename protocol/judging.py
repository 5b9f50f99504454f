"""Section 6 of the protocol as one elector applies it: its own disk, clock and memory are part of the question."""

from __future__ import annotations

from protocol import chain, commits, planning, validity
from protocol.candidates import Candidate
from protocol.messages import Proposal, Ready, Roster, Signed
from protocol.record import Record
from protocol.votes import ATTEMPTS_KEPT


class _Everything:
    """A container of all part hashes: what is held is looked at elsewhere, by header."""

    def __contains__(self, item: object) -> bool:
        return True


EVERYTHING = _Everything()


class Judge:
    def __init__(self, record: Record) -> None:
        self.record = record

    def refuses(self, proposal: Proposal, candidate: Candidate) -> str | None:
        """Why section 6 refuses a proposal, apart from omissions and from what is not held yet."""
        record = self.record
        if candidate.problem is not None:
            return candidate.problem
        body = record.proposals[proposal.attempt].body
        if body not in record.judged:
            if len(record.judged) >= 2 * ATTEMPTS_KEPT:
                record.judged.clear()
                record.sound.clear()
            record.judged[body] = self._judge(proposal, candidate)
        return record.judged[body]

    def _judge(self, proposal: Proposal, candidate: Candidate) -> str | None:
        record = self.record
        roster, keyring = candidate.roster, record.outbox.keyring
        if roster.attempt > proposal.attempt:
            return f"the proposal of attempt {proposal.attempt} is over a roster of the later {roster.attempt}"
        held = candidate.held.values()
        why = commits.check_headers(record.rules, candidate.signed, proposal.headers, keyring, held=held)
        if why is not None:
            return why
        record.compare_headers(candidate, proposal.headers)
        decision = chain.decision(record.base_digest, candidate.roster_id, proposal.headers)
        record.sound.add(decision)
        why = validity.check_result(record.rules, roster, proposal.headers, EVERYTHING)
        if why is None and roster.absent and proposal.attempt < validity.TRUSTING_ATTEMPT:
            why = validity.check_roster(
                record.state, record.rules, candidate.signed, keyring, earlier_bitmaps=self._earlier_bitmaps()
            )
        certificate = proposal.valid_certificate
        if why is not None or (certificate is None and proposal.valid_attempt is None):
            return why
        if certificate is None or proposal.valid_attempt is None:
            return "the proposal names a valid attempt without its certificate, or the other way round"
        why = commits.check_certificate(record.state, record.rules, certificate, decision, 1, keyring)
        if why is None and certificate.votes[0].message.attempt != proposal.valid_attempt:
            why = f"the proposal's certificate is not of attempt {proposal.valid_attempt}"
        return why

    def _earlier_bitmaps(self) -> list[tuple[Roster, int]]:
        """Every roster of this round that I know, with the union of the bitmaps of the headers that I hold for it."""
        found = []
        for candidate in self.record.candidates.values():
            reached = 0
            for header in candidate.held.values():
                reached |= header.message.bitmap
            found.append((candidate.roster, reached))
        return found

    def left_out(self, candidate: Candidate) -> tuple[Signed[Ready], ...]:
        """READYs that I had held for longer than the grace period when the roster first reached me."""
        record = self.record
        if record.attempt >= validity.TRUSTING_ATTEMPT or len(candidate.roster.readys) >= planning.ROSTER_MAX:
            return ()
        inside = {ready.sender for ready in candidate.roster.readys}
        inside.update(leave.sender for leave in candidate.roster.leaves)
        inside.update(record.standing.presence.leaves)
        since_s = candidate.seen_s - record.rules.grace_s
        missing = [peer for peer, at_s in record.assembly.received_s.items() if peer not in inside and at_s < since_s]
        return tuple(record.assembly.readys[peer] for peer in sorted(missing))

    def held(self, signed: Signed[Proposal], candidate: Candidate) -> bool:
        record = self.record
        headers = signed.message.headers
        if not candidate.lacks(headers):
            return True
        # The parts are on their way down the trees; only what did not come is fetched.
        patience_s = record.rules.grace_s if candidate.exchanging else 0.0
        if not record.outbox.due(record.proposed_s[signed.message.attempt] + patience_s):
            return False
        return candidate.hold(headers, record.sources_of(signed.sender, candidate), record.outbox)
