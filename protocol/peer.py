"""A peer's state machine: events in, ordered effects out (protocol sections 4 to 11).

`PeerMachine` keeps what outlives a round (who is heard, what was promised, the last commits) and hands each message to
the round in hand (`protocol.round`). It has no clock: every call brings the time, and `next_wakeup_s` says when the
next call is due without any event.
"""

from __future__ import annotations

from typing import Any

import msgspec

from protocol import chain, validity, wire
from protocol.announcing import Announcer
from protocol.chain import ChainState
from protocol.describe import describe
from protocol.docket import Docket
from protocol.early import EarlyMail
from protocol.events import (
    Alarm,
    Applied,
    Effect,
    Event,
    ExchangeEnded,
    Finished,
    Frozen,
    HeaderDraft,
    LeaveRequested,
    LineageLearned,
    LineageUnproven,
    LinksChanged,
    Misbehaved,
    NewLineage,
    PartHeld,
    PartRecomputed,
    PartsFetched,
    Persist,
    Received,
    StateCorrupt,
    StorageAble,
    TrainerProgress,
)
from protocol.following import Follower
from protocol.journal import Journal, Promises, barred_with, promises_at
from protocol.meeting import Meeting
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
from protocol.names import Base, Digest, Keyring, PeerId
from protocol.outbox import Outbox
from protocol.past import Past
from protocol.presence import Presence
from protocol.probation import Probation
from protocol.reform import Reforming
from protocol.round import Round
from protocol.rules import Rules
from protocol.standing import Standing


class PeerMachine:
    """One peer of one run.

    Args:
        state: the chain as the node's disk has it.
        journal: what `Persist` last wrote; None if there never was one.
        journal_lost: there was a journal, and it is gone: this peer does not vote until it has joined anew.
        wants_membership: False for a peer that only follows.
        incarnation: 16 random bytes drawn at this start.
        left: tip of the lineage that this peer left for the one of `state`, which has not taken it in yet.
        returns: how often this peer followed another lineage in vain, and came back.
    """

    def __init__(
        self,
        *,
        rules: Rules,
        me: PeerId,
        keyring: Keyring,
        state: ChainState,
        journal: bytes | None,
        journal_lost: bool,
        wants_membership: bool,
        incarnation: bytes,
        now_s: float,
        left: Base | None = None,
        returns: int = 0,
    ) -> None:
        self.rules = rules
        self.me = me
        self.keyring = keyring
        self.wants_membership = wants_membership
        self.outbox = Outbox(me=me, keyring=keyring, now_s=now_s)
        presence = Presence(me=me, timeout_s=rules.heartbeat_timeout_s)
        self.docket = Docket(me=me, rules=rules, outbox=self.outbox, presence=presence)
        self.standing = Standing(
            me=me,
            rules=rules,
            outbox=self.outbox,
            presence=presence,
            docket=self.docket,
            persist=self._persist,
            misbehaved=self._misbehaved,
            left=left,
        )
        self.state = state
        self.stopped = False
        """After an alarm, or on a corrupt state: nothing is done any more."""
        self.next_wakeup_s = now_s
        self._barred: tuple[Digest, ...] = ()
        self._past_unknown = False
        self._rejoined: tuple[Digest, ...] = ()
        """Where I am not barred although my past is unknown."""
        self.past = Past(self.standing)
        self.docket.commit_of = self.past.commit_of
        self._early = EarlyMail()
        self._previous: Round | None = None
        """The round that my last commit ended."""
        self._foreign_states: dict[PeerId, Digest] = {}
        """The state that each elector named last for my place in the chain, where it is not mine."""
        self.announcer = Announcer(self.standing, incarnation)
        self.follower = Follower(self.standing)
        self.meeting = Meeting(self.standing, state=state, follow=self.follower.catch_up, returns=returns)
        self.probation = Probation(self.standing, state, returns=returns)
        self._final_since_s: float | None = None
        self.finished = False
        promises = promises_at(state.base, journal, lost=journal_lost)
        try:
            self.docket.restore(promises.convicted)
            self._resume(state, promises)
        except wire.WireError:
            # Whole, but of a version that wrote its messages in another form: as good as lost.
            promises = promises_at(state.base, None, lost=True)
            self._resume(state, promises)
        if promises.lost:
            # Before anything else: a later life must not take the journal's absence for a beginning.
            self._persist()

    # ------------------------------------------------------------ events

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """Take in one event; the effects are to be performed strictly in the order given."""
        self.outbox.now_s = max(now_s, self.outbox.now_s)
        self._refresh()
        if self.probation.over:
            return self.outbox.take()
        if not self.stopped and (self._take(event) or self.outbox.now_s >= self.next_wakeup_s):
            self._advance()
        self.next_wakeup_s = self.outbox.wakeup_s
        return self.outbox.take()

    def _take(self, event: Event) -> bool:
        """Whether anything can follow from it. Most of what a swarm of hundreds hears is heard again and again."""
        match event:
            case Received():
                return self._received(event)
            case Frozen():
                self.round.on_frozen(event)
            case HeaderDraft():
                self.round.on_header_draft(event)
            case PartHeld():
                self.round.on_part_held(event.header)
            case ExchangeEnded():
                self.round.on_exchange_ended(event)
            case PartsFetched():
                self.round.on_parts_fetched(event.roster_id, event.missing)
            case Applied():
                self._applied(event)
            case PartRecomputed():
                why = self.docket.recomputed(event)
                if why is not None:
                    self._misbehaved(self.me, why)
            case TrainerProgress():
                self.standing.remaining_s = event.remaining_s
                self.standing.units_wanted = event.units_wanted
            case LinksChanged():
                self.standing.upload_limit_bytes = event.upload_limit_bytes
                self.standing.download_limit_bytes = event.download_limit_bytes
                self.standing.failed_edges = event.failed_edges
            case StorageAble():
                self.standing.able = event.able
                self.announcer.at_once()
            case LineageLearned():
                self.meeting.learned(event)
            case LineageUnproven():
                self.meeting.unproven(event.peer)
            case LeaveRequested():
                self.standing.leaving = True
                self.announcer.at_once()
            case _:
                pass
        return True

    def _received(self, event: Received) -> bool:
        """Whether anything can follow from it."""
        heard = self.standing.presence.repeated(event.from_peer, event.data, self.outbox.now_s)
        if heard is not None:
            self.past.help_along(event.from_peer, heard.base, self.state)
            if heard.base.lineage != self.state.base.lineage:
                self.docket.tell(event.from_peer, anew=False)
            return False
        try:
            signed: Signed[Any] = wire.decode(event.data)
        except wire.WireError as error:
            self._misbehaved(event.from_peer, str(error))
            return False
        if signed.sender == self.me:
            return False
        message = signed.message
        if self.round.knows(signed):
            self.past.help_along(signed.sender, message.base, self.state)
            return False
        if not wire.verify(self.keyring, signed):
            self._misbehaved(event.from_peer, f"handed over a message that {signed.sender} did not sign")
            return False
        present = isinstance(message, Heartbeat) and not self.docket.unheard(signed.sender)
        if signed.sender in self.docket and not present and not isinstance(message, Fetch):
            return False  # it may still learn what the run decided, but it has no say in it
        match message:
            case Evidence():
                why = self.docket.told(signed)
                if why is not None:
                    self._misbehaved(signed.sender, why)
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

    def _heard(self, signed: Signed[Heartbeat], beat: Heartbeat, envelope: bytes) -> bool:
        """A heartbeat that its own signer handed over: whether it says anything new."""
        if beat.base.run != self.rules.run:
            return False
        anew = signed.sender not in self.standing.fresh
        if anew or beat.base.lineage != self.state.base.lineage:
            self.docket.tell(signed.sender, anew=anew)
        if anew:
            # Heard for the first time: it need not wait for my next heartbeat to know me.
            self.outbox.send(signed.sender, self.announcer.heartbeat(self.state, self.round.attempt))
        news = self.standing.presence.note(signed.sender, beat, self.outbox.now_s, envelope)
        self.past.help_along(signed.sender, beat.base, self.state)
        return news

    def _based(self, signed: Signed[Any], base: Base) -> None:
        """A message that belongs to a place in the chain."""
        mine = self.state.base
        if base.run != mine.run:
            self._misbehaved(signed.sender, f"spoke of the run {base.run.hex()[:16]}, not of {mine.run.hex()[:16]}")
        elif isinstance(signed.message, Leave):
            if self.standing.presence.leave(signed, self.state):
                self.round.assembly.forget(signed.sender)
        elif base == mine or (isinstance(signed.message, Join) and validity.is_of_round_before(self.state, base)):
            self._route(signed)
        elif isinstance(signed.message, Commit):
            if self._previous is not None and base == self._previous.base:
                self._previous.late(signed)
            if self.past.decided_twice(signed, base):
                self._alarm(f"round {base.round} has two decisions: stop the node and keep its home for a report")
        elif self._previous is not None and base == self._previous.base:
            self._previous.late(signed)
        elif base.round in (mine.round, mine.round + 1):
            self._suspect(signed, base)
            self._early.keep(signed)
        self.past.help_along(signed.sender, base, self.state)

    def _route(self, signed: Signed[Any]) -> None:
        match signed.message:
            case Ready():
                self.round.on_ready(signed)
            case Join():
                self.round.on_join(signed)
            case Roster():
                self.round.on_roster(signed)
            case Proposal():
                self.round.on_proposal(signed)
            case Vote():
                self.round.on_vote(signed)
            case Commit():
                why = self.round.on_commit(signed.message)
                if why is not None:
                    self._misbehaved(signed.sender, f"sent a commit that is none: {why}")
            case Reform():
                self.reforming.on_reform(signed)
            case ReformVote():
                self.reforming.on_vote(signed)
            case Reformed():
                reformed = self.reforming.accepts(signed.message)
                if reformed is not None:
                    self._reborn(reformed)

    def _suspect(self, signed: Signed[Any], base: Base) -> None:
        """A quorum that names my `prev` but another state says that mine is corrupt (protocol section 8)."""
        mine = self.state.base
        if not isinstance(signed.message, Ready) or signed.sender not in self.state.electors:
            return
        if (base.lineage, base.round, base.prev) != (mine.lineage, mine.round, mine.prev):
            return
        if mine.round == 0:
            return  # the manifest says what the first state is, and nobody else
        self._foreign_states[signed.sender] = base.state_hash
        named = sum(state_hash == base.state_hash for state_hash in self._foreign_states.values())
        if named >= chain.quorum(self.state, self.rules):
            self.stopped = True
            self.outbox.emit(StateCorrupt(base=mine, agreed=base.state_hash, electors=named))

    # ------------------------------------------------------------ content by hash

    def _serve(self, peer: PeerId, wanted: Digest) -> None:
        """Small content: a commit by the digest of its base, a roster by its id."""
        kept = self.past.commit_of(wanted)
        if kept is not None:
            self.outbox.send(peer, kept)
            return
        candidate = self.round.candidates.get(wanted)
        if candidate is not None:
            self.outbox.tell(peer, Have(hash=wanted, content=wire.encode(candidate.signed)))

    def _have(self, signed: Signed[Have], message: Have) -> None:
        if message.hash not in self.round.wanted_rosters:
            return
        try:
            inner: Signed[Any] = wire.decode(message.content)
        except wire.WireError as error:
            self._misbehaved(signed.sender, str(error))
            return
        # A roster's name binds its body, not its signature: unverified, a damaged copy would take the good one's place.
        genuine = isinstance(inner.message, Roster) and wire.roster_id(inner) == message.hash
        if not genuine or not wire.verify(self.keyring, inner):
            self._misbehaved(signed.sender, f"answered {message.hash.hex()[:16]} with other content")
        elif inner.message.base == self.state.base:
            self.round.on_roster(inner)

    # ------------------------------------------------------------ places in the chain

    def _resume(self, state: ChainState, promises: Promises) -> None:
        """Where an earlier life stopped. Raises `WireError` if its messages are of another version."""
        self._barred, self._past_unknown, self._rejoined = promises.barred, promises.past_unknown, promises.rejoined
        self._start_round(state, promises.journal, promises.fence)

    def _start_round(self, state: ChainState, promised: Journal, fence: int) -> None:
        self.state = state
        self.docket.begin(state)
        if chain.member(state, self.me) is None:
            # Whoever is out of M has no vote to give twice; what comes later is a new membership.
            self._barred = tuple(lineage for lineage in self._barred if lineage != state.base.lineage)
            self._knows_past_in(state.base.lineage)
        forgotten = self._past_unknown and state.base.lineage not in self._rejoined
        self.standing.voting = state.base.lineage not in self._barred and not forgotten
        self.standing.presence.forget_leaves(state)
        self.round = Round(standing=self.standing, state=state, journal=promised, fence=fence)
        self.reforming = Reforming(
            standing=self.standing, state=state, signed=promised.reform, joins=self.round.assembly.joins
        )
        self.reforming.wants_in = self.wants_membership
        self.round.ballots.on_silence = self.reforming.left_attempt
        self._foreign_states = {}
        self.announcer.at_once()
        self.follower.progressed()
        for signed in self._early.release(state.base):
            self._route(signed)

    def _applied(self, event: Applied) -> None:
        commit = self.round.commit
        if commit is None or not self.round.applying or event.round != self.state.base.round + 1:
            return
        try:
            state = chain.next_state(self.state, self.rules, commit, event.state_hash)
        except ValueError as error:
            self._alarm(str(error))
            return
        self.round.learn_pace(commit)
        before, self._previous = self.state, self.round
        self.past.applied(before, commit)
        self.meeting.grew(state, commit)
        self._start_round(state, Journal(), -1)
        self.docket.learn(commit)
        self.docket.audit(before, commit, state.base.prev)

    def _knows_past_in(self, lineage: Digest) -> None:
        if self._past_unknown:
            self._rejoined = barred_with(self._rejoined, lineage)

    def _reborn(self, reformed: Reformed) -> None:
        """All of E′ signed: this peer is on the new lineage, same round and state, and voteless in the old one."""
        old = self.state.base
        self._barred = barred_with(self._barred, old.lineage)
        mine = self.reforming.mine
        if mine is not None and mine.message.k == reformed.reform.k:
            # Born with a signature that I remember: nothing was promised in it before.
            self._knows_past_in(chain.lineage_of(reformed))
        state = chain.reform_state(self.state, self.rules, reformed)
        proof = self.outbox.sign(reformed)
        for candidate in self.round.candidates.values():
            candidate.stop(self.outbox)
        self.past.born(old, proof)
        self.meeting.grew(state)
        # The next promise is written with the new lineage's name; until then the journal speaks of the old one, which
        # is what a restart in between must find.
        self.outbox.emit(NewLineage(reformed=reformed))
        self._start_round(state, Journal(), -1)
        self.outbox.broadcast(proof)

    # ------------------------------------------------------------ what follows

    def _advance(self) -> None:
        while not self.stopped:
            self.outbox.wakeup_s = float("inf")
            base = self.state.base
            self.probation.advance(self.state)
            if self.probation.over:
                return
            if not self.finished and not self.standing.leaving:
                self.meeting.advance(self.round, self.reforming)
            if self.final:
                self._finish()
            else:
                reformed = self.reforming.advance()
                if reformed is not None:
                    self._reborn(reformed)
                else:
                    self.round.advance()
            self.stopped = self.stopped or any(isinstance(effect, Alarm) for effect in self.outbox.effects)
            if self.state.base == base:
                break
        self.docket.advance()
        if self.docket.unsaved:
            self._persist()
        self.announcer.beat(self.state, self.round.attempt)
        self.announcer.leave(self.state)
        # JOIN counts at the tip and one round behind it. That others claim a later round hinders nobody.
        if self.wants_membership and not self.final:
            self.announcer.join(self.state)
        if not self.final:
            self.follower.follow(self.round)
        silence_s = self.standing.presence.next_silence_s(self.outbox.now_s)
        if silence_s is not None:
            # Silence begins after the timeout, not at it.
            self.outbox.due(silence_s + 1e-3)

    @property
    def final(self) -> bool:
        """Whether the run ends with the state that I hold."""
        rounds, tokens = self.rules.final_round, self.rules.final_tokens
        return (rounds is not None and self.state.base.round >= rounds) or (
            tokens is not None and self.state.tokens_total >= tokens
        )

    def _finish(self) -> None:
        """The run is over: wait until everyone heard has the final state too, but not for ever (section 11)."""
        if self._final_since_s is None:
            self._final_since_s = self.outbox.now_s
        if self.finished:
            return
        mine = self.state.base
        waiting = [
            peer
            for peer, heard in self.standing.fresh.items()
            if heard.base.lineage == mine.lineage and heard.base.round < mine.round
        ]
        if not waiting or self.outbox.due(self._final_since_s + self.rules.assembly_max_s):
            self.finished = True
            self.outbox.emit(Finished())

    # ------------------------------------------------------------ shared

    def _refresh(self) -> None:
        self.standing.fresh = self.standing.presence.fresh(self.outbox.now_s)

    def _persist(self) -> None:
        if self.reforming.mine is not None:
            self._barred = barred_with(self._barred, self.state.base.lineage)
        journal = msgspec.structs.replace(
            self.round.journal(),
            reform=self.reforming.journal(),
            barred=self._barred,
            past_unknown=self._past_unknown,
            rejoined=self._rejoined,
            convicted=self.docket.saved(),
        )
        self.outbox.emit(Persist(journal=journal.encode()))

    def _misbehaved(self, peer: PeerId, why: str) -> None:
        self.outbox.emit(Misbehaved(peer=peer, why=why))

    def _alarm(self, text: str) -> None:
        self.stopped = True
        self.outbox.emit(Alarm(text=text))

    # ------------------------------------------------------------ for status

    @property
    def attempt(self) -> int:
        return self.round.attempt

    @property
    def live(self) -> frozenset[PeerId]:
        """Everyone heard within `heartbeat_timeout_s`, me included."""
        return frozenset(self.standing.fresh) | {self.me}

    @property
    def phase(self) -> str:
        """One of joining, training, waiting, assembling, exchanging, voting, applying, reforming, leaving, finished,
        paused."""
        return describe(self)[0]

    @property
    def reason(self) -> str:
        """One sentence: what am I waiting for?"""
        return describe(self)[1]
