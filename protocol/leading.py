"""What the coordinator of an attempt does: a roster, then a proposal (protocol sections 4.3, 5 and 6)."""

from __future__ import annotations

from protocol import validity
from protocol.assembly import absent_after
from protocol.candidates import Candidate, Headers
from protocol.judging import EVERYTHING
from protocol.messages import Certificate, Proposal
from protocol.names import Digest, PeerId
from protocol.record import Record


class Leader:
    def __init__(self, record: Record) -> None:
        self.record = record

    def _leads(self) -> bool:
        record = self.record
        return (
            record.standing.voting
            and record.leader() == record.me
            and record.attempt > record.fence
            and (record.attempt, 1) not in record.my_votes
            and record.attempt not in record.proposals
        )

    def _earlier_result(self) -> Candidate | None:
        """A finished result of an earlier attempt of this round, fit to be proposed again."""
        record = self.record
        for candidate in record.candidates.values():
            if candidate.roster.attempt >= record.attempt or candidate.problem is not None or candidate.refused:
                continue
            if len(candidate.proposed) > 1 or not candidate.roster.readys:
                continue
            if validity.check_result(record.rules, candidate.roster, candidate.result(), EVERYTHING) is None:
                return candidate
        return None

    def make_roster(self) -> bool:
        record = self.record
        if not self._leads() or record.valid is not None:
            return False
        if any(candidate.roster.attempt == record.attempt for candidate in record.candidates.values()):
            return False
        if record.assembly.quorum_since_s is None or self._earlier_result() is not None:
            return False
        due_s = record.due_s()
        if due_s is None or not record.outbox.due(due_s):
            return False
        absent: set[PeerId] = set()
        # A peer that says it cannot take part, or is on another lineage by now, is as good as gone, however much its
        # READY weighs.
        lineage = record.base.lineage
        fresh = record.standing.fresh.items()
        live = {peer for peer, heard in fresh if heard.able and heard.base.lineage == lineage} | {record.me}
        for candidate in record.candidates.values():
            if candidate.problem is None and candidate.roster.attempt < record.attempt:
                bitmaps = [header.message.bitmap for header in candidate.held.values()]
                absent |= absent_after(candidate.roster, bitmaps, live - candidate.missed)
        leaves = record.standing.presence.leaves
        carried = [piece for candidate in record.candidates.values() for piece in candidate.roster.evidence]
        evidence = record.standing.docket.for_roster(carried=carried)
        stretch = record.standing.pace.stretch * 2 ** min(record.failed_exchanges(record.attempt), 16)
        roster = record.assembly.roster(
            attempt=record.attempt,
            leaves=leaves,
            absent=absent,
            evidence=evidence,
            stretch=stretch,
            outlook=record.outlook(),
        )
        if roster is None:
            return False
        signed = record.outbox.sign(roster)
        record.touch()
        record.outbox.broadcast(signed)
        record.remember(signed, problem=None)
        record.quiet()
        return True

    def _proposal(self, roster_id: Digest, headers: Headers, valid: tuple[int, Certificate] | None) -> Proposal:
        return Proposal(
            base=self.record.base,
            attempt=self.record.attempt,
            roster_id=roster_id,
            headers=headers,
            valid_attempt=None if valid is None else valid[0],
            valid_certificate=None if valid is None else valid[1],
        )

    def propose(self) -> bool:
        record = self.record
        if not self._leads():
            return False
        if record.valid is not None:
            attempt, decision, certificate = record.valid
            roster_id, headers = record.contents[decision]
            voters = [vote.sender for vote in certificate.votes]
            if not record.candidates[roster_id].hold(headers, voters, record.outbox):
                return False
            return self._send_proposal(self._proposal(roster_id, headers, (attempt, certificate)))
        candidate = record.current()
        if candidate is None:
            candidate = self._earlier_result()
            if candidate is None:
                return False
        elif not (
            candidate.complete()
            or candidate.ended
            or record.outbox.due(candidate.closes_s(record.rules))
            or self._nothing_comes(candidate)
        ):
            return False
        return self._send_proposal(self._proposal(candidate.roster_id, candidate.result(), None))

    def _nothing_comes(self, candidate: Candidate) -> bool:
        """Whether what is here suffices, no part has come for `progress_s`, and the roots of the others are silent.

        In a grouped plan a root's death is news to its neighbours alone: leaves below its heads, the leader perhaps one
        of them, would wait for its parts until DOWN is due.
        """
        record = self.record
        newest_s = candidate.seen_s if candidate.held_s is None else candidate.held_s
        if not candidate.exchanging or not record.outbox.due(newest_s + record.rules.progress_s):
            return False
        held = record.held_parts(candidate)
        roots = {root for part, root in enumerate(candidate.roots) if part not in held}
        if record.me in roots or not roots.isdisjoint(record.standing.fresh):
            return False
        return validity.check_result(record.rules, candidate.roster, candidate.result(), EVERYTHING) is None

    def _send_proposal(self, proposal: Proposal) -> bool:
        record = self.record
        signed = record.outbox.sign(proposal)
        record.touch()
        record.on_proposal(signed)
        record.outbox.broadcast(signed)
        record.quiet()
        return True
