"""One round of one peer: from the first READY to the commit, over as many attempts as it takes (protocol 4 to 6).

Every method takes in one fact; `advance` then does everything that has become possible, in the order of the protocol.
No rule waits for a poll: what is not yet possible either follows from a later fact or names the time when it is due.
"""

from __future__ import annotations

import math
from typing import Any

from protocol import chain, commits, validity, wire
from protocol.ballots import Ballots
from protocol.candidates import roots_of
from protocol.chain import ChainState
from protocol.events import Alarm, Apply, ExchangeEnded, Freeze, Frozen, HeaderDraft, HeaderSigned, StartExchange
from protocol.journal import Journal
from protocol.leading import Leader
from protocol.messages import NIL, Commit, Join, PartHeader, Proposal, Ready, Roster, Signed, Vote
from protocol.names import Digest, PeerId
from protocol.ready_limits import EDGES_MAX, ranges_limit
from protocol.record import ATTEMPTS_AHEAD, Record
from protocol.standing import Standing
from protocol.votes import ATTEMPTS_KEPT

SHOWN_MAX = 64
"""Proposals that are shown to their voters for another one, in a round."""
STEPS_MAX = 256
"""Steps of one event; more would be a loop, which the next event goes on with."""


class Round(Record):
    """See `Record` for the arguments."""

    def __init__(self, *, standing: Standing, state: ChainState, journal: Journal, fence: int) -> None:
        super().__init__(standing=standing, state=state, journal=journal, fence=fence)
        self.leads = Leader(self)
        self.shown: set[tuple[int, PeerId]] = set()
        """(attempt, voter) to whom I showed the proposal that I have."""
        self.ballots = Ballots(self)

    # ------------------------------------------------------------ facts

    def on_ready(self, signed: Signed[Ready]) -> None:
        if signed.sender in self.standing.presence.leaves:
            return
        if self.assembly.is_news(signed):
            why = validity.check_ready(self.state, self.rules, signed)
            if why is not None:
                self.standing.misbehaved(signed.sender, why)
                return
        self.standing.docket.compare(self.assembly.readys.get(signed.sender), signed)
        why = self.assembly.add_ready(signed, self.outbox.now_s)
        if why is not None:
            self.standing.misbehaved(signed.sender, why)

    def on_join(self, signed: Signed[Join]) -> None:
        why = validity.check_join(self.state, self.rules, signed)
        if why is None:
            self.assembly.add_join(signed)
        elif chain.member(self.state, signed.sender) is None:
            self.standing.misbehaved(signed.sender, why)

    def wants_roster(self, roster_id: Digest, *, sender: PeerId, attempt: int) -> bool:
        """Whether a ROSTER that `sender` signed is worth reading, by its first fields; whoever had no right to it is
        named."""
        if roster_id in self.candidates:
            return False
        asked_for = roster_id in self.wanted_rosters
        if not asked_for and not self.attempt - ATTEMPTS_KEPT < attempt <= self.attempt + ATTEMPTS_AHEAD:
            return False
        if sender != self.leader_of(attempt):
            self.standing.misbehaved(sender, f"sent a ROSTER for attempt {attempt}, which it does not lead")
            return False
        if not asked_for and sum(known.roster.attempt == attempt for known in self.candidates.values()) > 1:
            # Two show the offence; a third shows nothing more.
            self.standing.misbehaved(sender, f"sent more than two different ROSTERs for attempt {attempt}")
            return False
        return True

    def on_roster(self, signed: Signed[Roster]) -> None:
        roster = signed.message
        if not self.wants_roster(wire.roster_id(signed), sender=signed.sender, attempt=roster.attempt):
            return
        others = [known for known in self.candidates.values() if known.roster.attempt == roster.attempt]
        if others:
            self.conflicts.add(roster.attempt)
            self.standing.docket.compare(others[0].signed, signed)
            self.standing.misbehaved(signed.sender, f"sent two different ROSTERs for attempt {roster.attempt}")
        # What depends on my clock and on earlier attempts is judged with the proposal: it binds only below attempt 3.
        problem = validity.check_roster(
            self.state, self.rules, signed, self.outbox.keyring, attempt=validity.TRUSTING_ATTEMPT
        )
        if problem is not None:
            self.standing.misbehaved(signed.sender, problem)
        self.remember(signed, problem=problem)
        if problem is None:
            self.note_readys(roster)
            for ready in roster.readys:
                self.assembly.add_ready(ready, self.outbox.now_s)

    def on_vote(self, signed: Signed[Vote]) -> None:
        vote = signed.message
        self.standing.docket.compare(self.agreement.of(signed.sender, vote.attempt, vote.phase), signed)
        self._show_proposal(signed)
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
        if self.commit is not None and decision == self.decision_of(self.commit):
            self._compare(commit)
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
            candidate = self.remember(commit.roster, problem=None)
        elif candidate.problem is not None:
            candidate.problem, candidate.roots = None, roots_of(candidate.roster, self.rules)
        self._compare(commit)
        self.compare_headers(candidate, commit.headers)
        self.content(candidate.roster_id, commit.headers)
        self._decide(commit)
        return None

    def _show_proposal(self, signed: Signed[Vote]) -> None:
        """Somebody votes for another proposal than the one I have: its leader made two, and we are to see both."""
        vote = signed.message
        proposal = self.proposals.get(vote.attempt)
        if vote.phase != 1 or vote.value == NIL or proposal is None or (vote.attempt, signed.sender) in self.shown:
            return
        if signed.sender not in self.agreement.electors:
            return
        mine = chain.decision(self.base_digest, proposal.message.roster_id, proposal.message.headers)
        if mine != vote.value and len(self.shown) < SHOWN_MAX:
            self.shown.add((vote.attempt, signed.sender))
            self.outbox.send(signed.sender, proposal)

    def shows_more(self, roster_id: Digest, *, sender: PeerId, attempt: int) -> bool:
        """Whether a ROSTER that comes when the round is over shows an offence: its leader's other one is here."""
        return roster_id not in self.candidates and any(
            known.roster.attempt == attempt and known.signed.sender == sender for known in self.candidates.values()
        )

    def late(self, signed: Signed[Any]) -> None:
        """A message of this round that came when it was over: it decides nothing, but it may show an offence."""
        match signed.message:
            case Ready():
                self.standing.docket.compare(self.assembly.readys.get(signed.sender), signed)
            case Vote():
                vote = signed.message
                self.standing.docket.compare(self.agreement.of(signed.sender, vote.attempt, vote.phase), signed)
            case Proposal():
                self.standing.docket.compare(self.proposals.get(signed.message.attempt), signed)
            case Roster():
                for known in self.candidates.values():
                    if known.roster.attempt == signed.message.attempt:
                        self.standing.docket.compare(known.signed, signed)
            case Commit():
                # Nobody has verified its certificate: signatures are looked at for those who may ever have made one.
                if signed.sender in self.state.electors:
                    self._compare(signed.message)
            case _:
                pass

    def _compare(self, commit: Commit) -> None:
        """What a commit shows that others have signed, beside what I hold of them."""
        self.note_readys(commit.roster.message)
        for vote in commit.certificate.votes:
            mine = self.agreement.of(vote.sender, vote.message.attempt, vote.message.phase)
            if mine is not None and mine.message.value != vote.message.value:
                self.standing.docket.compare(mine, vote)

    def on_frozen(self, event: Frozen) -> None:
        """READY with what was frozen. It may replace a READY without work that went out meanwhile, never one with."""
        if event.base != self.base or not self._may_be_ready():
            return
        ready = Ready(
            base=self.base,
            ranges_done=event.ranges_done[: ranges_limit(len(self.state.members))],
            tokens=event.tokens,
            norm=event.norm,
            largest=event.largest,
            units_wanted=event.units_wanted,
            upload_limit_bytes=self.standing.upload_limit_bytes,
            download_limit_bytes=self.standing.download_limit_bytes,
            failed_edges=self.standing.avoided(self.base.round)[:EDGES_MAX],
            parts_root=event.parts_root,
        )
        if self.my_ready is None or (ready.contributes and not self.my_ready.message.contributes):
            self._send_ready(ready)

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
            self.compare_headers(candidate, (signed,))
            candidate.held[header.part, signed.body] = signed
            if candidate.exchanging:
                candidate.held_s = self.outbox.now_s

    def on_exchange_ended(self, event: ExchangeEnded) -> None:
        self.unreachable.update(event.failed_edges)
        self.standing.failures.note(event.failed_edges, self.base.round)
        candidate = self.candidates.get(event.roster_id)
        if candidate is not None:
            candidate.ended = True
            candidate.missed = frozenset(event.missed)

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
                or self.ballots.enter_later()
                or self.leads.make_roster()
                or self._exchange()
                or self.leads.propose()
                or self.ballots.vote_first()
                or self.ballots.vote_second()
                or self._find_commit()
                or self.ballots.next_attempt()
            ):
                break
        self._resend()

    def _may_be_ready(self) -> bool:
        return self.member and self.standing.voting

    def _be_ready(self) -> bool:
        """Ask for the contribution when it is due, and say READY without one when others have waited long enough."""
        if not self._may_be_ready() or (self.my_ready is not None and self.my_ready.message.contributes):
            return False
        if self.standing.comparing and self.my_ready is None:
            return False
        if self.standing.leaving:
            return self.my_ready is None and self.elector and self._send_ready(Ready(base=self.base))
        first_s, remaining_s = self.assembly.others_first_s(self.me), self.standing.remaining_s
        if remaining_s is not None and (remaining_s <= 0 or first_s is not None) and self._ask(remaining_s, first_s):
            return True
        if self.my_ready is not None or first_s is None:
            return False
        # Others wait. Without a trainer, or with one that does not answer, I vote and contribute nothing so far.
        patient_s = first_s if self.asked_until_s is None else max(first_s, self.asked_until_s)
        return self.outbox.due(patient_s + self.rules.grace_s) and self._send_ready(Ready(base=self.base))

    def _ask(self, remaining_s: float, first_s: float | None) -> bool:
        """Ask the trainer, with patience while nobody waits for it; once more, with less, when somebody does."""
        hurry = first_s is not None and self.my_ready is None
        if self.asked_until_s is not None and (self.hurried or not hurry) and not self.outbox.due(self.asked_until_s):
            return False
        if self.asked_until_s is not None and self.hurried and self.my_ready is None:
            return False
        self.hurried = hurry
        within_s = min(self.rules.ready_max_s, max(self.rules.grace_s, 2 * remaining_s))
        self.asked_until_s = self.outbox.now_s + (within_s if hurry else self.rules.ready_max_s)
        self.outbox.emit(Freeze(base=self.base, within_s=self.asked_until_s - self.outbox.now_s))
        return True

    def _send_ready(self, ready: Ready) -> bool:
        self.my_ready = self.outbox.sign(ready)
        self.assembly.add_ready(self.my_ready, self.outbox.now_s)
        self.standing.persist()
        self.outbox.broadcast(self.my_ready)
        self.quiet()
        return True

    def _exchange(self) -> bool:
        candidate = self.current()
        if candidate is None or candidate.started or candidate.stopped or candidate.roster.plan is None:
            return False
        # Without its promises a peer signs no results either: an earlier life may have, for this very roster.
        if candidate.my_index is None or self.attempt <= self.fence or not self.standing.voting:
            return False
        candidate.started = True
        self.touch()
        self.outbox.emit(
            StartExchange(roster_id=candidate.roster_id, roster=candidate.signed, my_index=candidate.my_index)
        )
        return True

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
            if self.decided_attempt is not None and self.leader_of(attempt) == self.me:
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
        sources = [*voters, *self.sources_of(voters[0], candidate), *sorted(self.standing.fresh)]
        if not candidate.hold(commit.headers, sources, self.outbox):
            return
        self.applying = True
        commit_hash = chain.commit_hash(self.state, self.rules, commit)
        self.outbox.emit(Apply(commit=commit, commit_hash=commit_hash, my_index=candidate.my_index))

    def _resend(self) -> None:
        """Repeat what others may have lost: my READY, as the leader ROSTER and PROPOSAL, my votes, my highest QC."""
        if self.resend_s == math.inf or not self.outbox.due(self.resend_s):
            return
        self.quiet()
        self.outbox.due(self.resend_s)
        if self.my_ready is not None:
            self.outbox.broadcast(self.my_ready)
        if not self.standing.voting or not self.elector:
            return
        if self.leader() == self.me and self.attempt > self.fence:
            candidate = self.current()
            if candidate is not None:
                self.outbox.broadcast(candidate.signed)
            for peer in self.state.electors:
                # It names every part: only to those who may need it still.
                lacking = peer != self.me and self.agreement.of(peer, self.attempt, 2) is None
                if lacking and self.attempt in self.proposals:
                    self.outbox.send(peer, self.proposals[self.attempt])
        certified = () if self.valid is None else self.valid[2].votes
        for peer in self.state.electors:
            heard = self.standing.fresh.get(peer)
            if heard is None or self.agreement.of(peer, self.attempt, 2) is not None:
                continue
            if heard.base == self.base and heard.attempt < self.attempt:
                self.ballots.close_behind(heard.attempt)
            newest = max(self.attempt_voted, 0)
            for (attempt, _), vote in sorted(self.my_votes.items()):
                if attempt >= min(newest, heard.attempt):
                    self.outbox.send(peer, vote)
            for vote in certified:
                if vote.sender not in (peer, self.me):
                    self.outbox.send(peer, vote)
