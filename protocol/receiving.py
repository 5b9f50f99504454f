"""What others send, taken in: told apart, verified, and handed to whom it concerns (protocol sections 1, 3 and 9).

A message belongs to a place in the chain. Of this round it goes to the round; of the one just over it may still show an
offence; of the next one it waits; of any other it says where its sender is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from protocol import chain, validity, wire
from protocol.chain import ChainState
from protocol.early import EarlyMail
from protocol.events import Received, StateCorrupt
from protocol.messages import (
    Commit,
    Evidence,
    Fetch,
    Have,
    Heartbeat,
    Join,
    Leave,
    PartHeader,
    Proposal,
    Ready,
    Reform,
    Reformed,
    ReformVote,
    Roster,
    Signed,
    Vote,
)
from protocol.names import Base, Digest, PeerId
from protocol.round import Round

if TYPE_CHECKING:
    from protocol.peer import PeerMachine

EARLY_ROSTERS = 8
"""Of other places than mine, read for one link in a round; a leader sends one an attempt."""


class Receiver:
    """The part of a `PeerMachine` that reads its mail."""

    def __init__(self, machine: PeerMachine) -> None:
        self.machine = machine
        self.me = machine.me
        self.rules = machine.rules
        self.keyring = machine.keyring
        self.outbox = machine.outbox
        self.standing = machine.standing
        self.docket = machine.docket
        self.past = machine.past
        self.previous: Round | None = None
        """The round that my last commit ended."""
        self.foreign_states: dict[PeerId, Digest] = {}
        """The state that each elector named last for my place in the chain, where it is not mine."""
        self._early = EarlyMail()
        self._early_rosters: dict[PeerId, int] = {}
        """How many ROSTERs of other places each link had me read in this round."""
        self._unreadable: set[tuple[PeerId, int]] = set()
        """(leader, attempt) of ROSTERs of this round that were signed and malformed."""

    def begin(self, state: ChainState) -> None:
        """A round begins on `state`: what came too early for it comes now."""
        self.foreign_states = {}
        self._early_rosters = {}
        self._unreadable = set()
        for signed in self._early.release(state.base):
            self.route(signed)

    def take(self, event: Received) -> bool:
        """One message, with whoever handed it over: whether anything can follow from it."""
        heard = self.standing.presence.repeated(event.from_peer, event.data, self.outbox.now_s)
        if heard is not None:
            self.past.help_along(event.from_peer, heard.base, self.machine.state)
            if heard.base.lineage != self.machine.state.base.lineage:
                self.docket.tell(event.from_peer, anew=False)
            return False
        signed = self._open(event)
        if signed is None:
            return False
        message = signed.message
        present = isinstance(message, Heartbeat) and not self.docket.unheard(signed.sender)
        if signed.sender in self.docket and not present and not isinstance(message, Fetch):
            return False  # it may still learn what the run decided, but it has no say in it
        match message:
            case Evidence():
                why = self.docket.told(signed)
                if why is not None:
                    self.standing.misbehaved(signed.sender, why)
            case Fetch():
                self._serve(signed.sender, message.hash)
                return False
            case Have():
                self._have(signed, message)
            case PartHeader():
                return False
            case Reformed():
                self._based(signed, message.reform.base)
            case Commit():
                self._based(signed, message.roster.message.base)
            case Heartbeat():
                return event.from_peer == signed.sender and self._heard(signed, message, event.data)
            case _:
                self._based(signed, message.base)
        return True

    def _open(self, event: Received) -> Signed[Any] | None:
        """What is worth taking in, verified; None for the rest. A large body is read only for whom it may come from.

        In this order: size, signature, the sender's right to send it now, and only then the reading. Under READY,
        PROPOSAL and VOTE signatures cover what only reading brings out: these are known byte for byte, or small.
        """
        try:
            sealed = wire.unseal(event.data)
            if sealed.sender == self.me:
                return None
            start = wire.beginning(sealed) if sealed.kind is Roster else None
            verified = self._signed_unread(sealed, start)
            if verified is False:
                self._forged(event, sealed.sender)
                return None
            if start is not None and not self._worth_reading(event.from_peer, sealed.sender, start):
                return None
            try:
                signed = wire.open_sealed(sealed)
            except wire.WireError:
                if start is not None:
                    # Its leader signed what cannot be read: it is not read a second time in this round.
                    self._unreadable.add((sealed.sender, start.attempt))
                raise
        except wire.WireError as error:
            self.standing.misbehaved(event.from_peer, str(error))
            return None
        if self.machine.round.knows(signed):
            self.past.help_along(signed.sender, signed.message.base, self.machine.state)
            return None
        if verified is None and not wire.verify(self.keyring, signed):
            self._forged(event, signed.sender)
            return None
        return signed

    def _signed_unread(self, sealed: wire.Sealed, start: wire.Beginning | None) -> bool | None:
        """Whether the signature holds; None where that takes reading the body. `start`: of a ROSTER."""
        if start is not None:
            return wire.verify_beginning(self.keyring, sealed, start)
        if sealed.kind in (Ready, Proposal, Vote):
            return None
        return self.keyring.verify(sealed.sender, wire.signing_bytes(sealed.kind, sealed.body), sealed.signature)

    def _forged(self, event: Received, sender: PeerId) -> None:
        self.standing.misbehaved(event.from_peer, f"handed over a message that {sender} did not sign")

    def _worth_reading(self, link: PeerId, sender: PeerId, start: wire.Beginning) -> bool:
        """Whether a ROSTER whose signature holds may change anything: it is the largest message of a round, and whoever
        has no part in the round could make everyone read it again and again.
        """
        if sender in self.docket:
            return False
        mine, judged = self.machine.state.base, self.machine.round
        base, attempt = start.base, start.attempt
        if base.run != mine.run:
            self.standing.misbehaved(sender, f"spoke of the run {base.run.hex()[:16]}, not of {mine.run.hex()[:16]}")
            return False
        asked_for = start.roster_id in judged.wanted_rosters
        if base == mine:
            unreadable = (sender, attempt) in self._unreadable and not asked_for
            worth = not unreadable and judged.wants_roster(start.roster_id, sender=sender, attempt=attempt)
        elif self.previous is not None and base == self.previous.base:
            worth = self.previous.shows_more(start.roster_id, sender=sender, attempt=attempt)
        elif base.round in (mine.round, mine.round + 1):
            # Who leads there is not known yet; what is dropped is sent again, or asked for by its proposal.
            read = self._early_rosters.get(link, 0)
            worth = read < EARLY_ROSTERS
            self._early_rosters[link] = min(read + 1, EARLY_ROSTERS)
        else:
            worth = False
        if not worth:
            self.past.help_along(sender, base, self.machine.state)
        return worth

    def _heard(self, signed: Signed[Heartbeat], beat: Heartbeat, envelope: bytes) -> bool:
        """A heartbeat that its own signer handed over: whether it says anything new."""
        if beat.base.run != self.rules.run:
            return False
        anew = signed.sender not in self.standing.fresh
        if anew or beat.base.lineage != self.machine.state.base.lineage:
            self.docket.tell(signed.sender, anew=anew)
        if anew:
            # Heard for the first time: it need not wait for my next heartbeat to know me.
            self.outbox.send(
                signed.sender, self.machine.announcer.heartbeat(self.machine.state, self.machine.round.attempt)
            )
        news = self.standing.presence.note(signed.sender, beat, self.outbox.now_s, envelope)
        self.past.help_along(signed.sender, beat.base, self.machine.state)
        return news

    def _based(self, signed: Signed[Any], base: Base) -> None:
        """A message that belongs to a place in the chain."""
        mine = self.machine.state.base
        if base.run != mine.run:
            self.standing.misbehaved(
                signed.sender, f"spoke of the run {base.run.hex()[:16]}, not of {mine.run.hex()[:16]}"
            )
        elif isinstance(signed.message, Leave):
            if self.standing.presence.leave(signed, self.machine.state):
                self.machine.round.assembly.forget(signed.sender)
        elif base == mine or (
            isinstance(signed.message, Join) and validity.is_of_round_before(self.machine.state, base)
        ):
            self.route(signed)
        elif isinstance(signed.message, Commit):
            if self.previous is not None and base == self.previous.base:
                self.previous.late(signed)
            if self.past.decided_twice(signed, base):
                self.machine.alarm(
                    f"round {base.round} has two decisions: stop the node and keep its home for a report"
                )
        elif self.previous is not None and base == self.previous.base:
            self.previous.late(signed)
        elif base.round in (mine.round, mine.round + 1):
            self._suspect(signed, base)
            self._early.keep(signed)
        self.past.help_along(signed.sender, base, self.machine.state)

    def route(self, signed: Signed[Any]) -> None:
        match signed.message:
            case Ready():
                self.machine.round.on_ready(signed)
            case Join():
                self.machine.round.on_join(signed)
            case Roster():
                self.machine.round.on_roster(signed)
            case Proposal():
                self.machine.round.on_proposal(signed)
            case Vote():
                self.machine.round.on_vote(signed)
            case Commit():
                why = self.machine.round.on_commit(signed.message)
                if why is not None:
                    self.standing.misbehaved(signed.sender, f"sent a commit that is none: {why}")
            case Reform():
                self.machine.reforming.on_reform(signed)
            case ReformVote():
                self.machine.reforming.on_vote(signed)
            case Reformed():
                reformed = self.machine.reforming.accepts(signed.message)
                if reformed is not None:
                    self.machine.reborn(reformed)

    def _suspect(self, signed: Signed[Any], base: Base) -> None:
        """A quorum that names my `prev` but another state says that mine is corrupt (protocol section 8)."""
        mine = self.machine.state.base
        if not isinstance(signed.message, Ready) or signed.sender not in self.machine.state.electors:
            return
        if (base.lineage, base.round, base.prev) != (mine.lineage, mine.round, mine.prev):
            return
        if mine.round == 0:
            return  # the manifest says what the first state is, and nobody else
        self.foreign_states[signed.sender] = base.state_hash
        named = sum(state_hash == base.state_hash for state_hash in self.foreign_states.values())
        if named >= chain.quorum(self.machine.state, self.rules):
            self.machine.stopped = True
            self.outbox.emit(StateCorrupt(base=mine, agreed=base.state_hash, electors=named))

    # ------------------------------------------------------------ content by hash

    def _serve(self, peer: PeerId, wanted: Digest) -> None:
        """Small content: a commit by the digest of its base, a roster by its id."""
        kept = self.past.commit_of(wanted)
        if kept is not None:
            self.outbox.send(peer, kept)
            return
        candidate = self.machine.round.candidates.get(wanted)
        if candidate is not None:
            self.outbox.tell(peer, Have(hash=wanted, content=wire.encode(candidate.signed)))

    def _have(self, signed: Signed[Have], message: Have) -> None:
        if message.hash not in self.machine.round.wanted_rosters:
            return
        try:
            inner: Signed[Any] = wire.decode(message.content)
        except wire.WireError as error:
            self.standing.misbehaved(signed.sender, str(error))
            return
        # A roster's name binds its body, not its signature: unverified, a damaged copy would take the good one's place.
        genuine = isinstance(inner.message, Roster) and wire.roster_id(inner) == message.hash
        if not genuine or not wire.verify(self.keyring, inner):
            self.standing.misbehaved(signed.sender, f"answered {message.hash.hex()[:16]} with other content")
        elif inner.message.base == self.machine.state.base:
            self.machine.round.on_roster(inner)
