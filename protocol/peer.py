"""A peer's state machine: events in, ordered effects out (protocol sections 4 to 11).

`PeerMachine` keeps what outlives a round (who is heard, what was promised, the last commits) and hands each message to
the round in hand (`protocol.round`). It has no clock: every call brings the time, and `next_wakeup_s` says when the
next call is due without any event.
"""

from __future__ import annotations

import msgspec

from protocol import chain, wire
from protocol.announcing import Announcer
from protocol.chain import ChainState
from protocol.describe import describe
from protocol.docket import Docket
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
    ReportsChanged,
    StorageAble,
    TrainerProgress,
)
from protocol.following import Follower
from protocol.journal import Journal, Promises, barred_with, promises_at
from protocol.meeting import Meeting
from protocol.messages import Reformed, Roster
from protocol.names import Base, Digest, Keyring, PeerId
from protocol.outbox import Outbox
from protocol.past import Past
from protocol.presence import Presence
from protocol.probation import Probation
from protocol.receiving import Receiver
from protocol.reform import Reforming
from protocol.round import Round
from protocol.rules import Rules
from protocol.sites import group_of
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
        self.receiver = Receiver(self)
        self.announcer = Announcer(self.standing, incarnation)
        self.follower = Follower(self.standing)
        self.meeting = Meeting(self.standing, state=state, follow=self.follower.catch_up, returns=returns)
        self.probation = Probation(self.standing, state, returns=returns)
        self._final_since_s: float | None = None
        self._last_roster: Roster | None = None
        """Of the newest commit that was applied in this life."""
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
                return self.receiver.take(event)
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
            case ReportsChanged():
                self.standing.reports = event.reports
                return False
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

    # ------------------------------------------------------------ places in the chain

    def _resume(self, state: ChainState, promises: Promises) -> None:
        """Where an earlier life stopped. Raises `WireError` if its messages are of another version."""
        self._barred, self._past_unknown, self._rejoined = promises.barred, promises.past_unknown, promises.rejoined
        self._start_round(state, promises.journal, promises.fence)

    def _start_round(self, state: ChainState, promised: Journal, fence: int) -> None:
        self.state = state
        self.final = self._is_final(state)
        """Whether the run ends with the state that I hold."""
        self.docket.begin(state)
        if chain.member(state, self.me) is None:
            # Whoever is out of M has no vote to give twice; what comes later is a new membership.
            self._barred = tuple(lineage for lineage in self._barred if lineage != state.base.lineage)
            self._knows_past_in(state.base.lineage)
        forgotten = self._past_unknown and state.base.lineage not in self._rejoined
        self.standing.voting = state.base.lineage not in self._barred and not forgotten
        self.standing.presence.forget_leaves(state)
        self.standing.regroup(state)
        self.round = Round(standing=self.standing, state=state, journal=promised, fence=fence)
        self.reforming = Reforming(
            standing=self.standing, state=state, signed=promised.reform, joins=self.round.assembly.joins
        )
        self.reforming.wants_in = self.wants_membership
        self.round.ballots.on_silence = self.reforming.left_attempt
        self.announcer.at_once()
        self.follower.progressed()
        self.receiver.begin(state)

    def _applied(self, event: Applied) -> None:
        commit = self.round.commit
        if commit is None or not self.round.applying or event.round != self.state.base.round + 1:
            return
        try:
            state = chain.next_state(self.state, self.rules, commit, event.state_hash)
        except ValueError as error:
            self.alarm(str(error))
            return
        self.round.learn_pace(commit)
        self._last_roster = commit.roster.message
        before, self.receiver.previous = self.state, self.round
        self.past.applied(before, commit)
        self.meeting.grew(state, commit)
        self._start_round(state, Journal(), -1)
        self.docket.learn(commit)
        self.docket.audit(before, commit, state.base.prev)

    def _knows_past_in(self, lineage: Digest) -> None:
        if self._past_unknown:
            self._rejoined = barred_with(self._rejoined, lineage)

    def reborn(self, reformed: Reformed) -> None:
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
                    self.reborn(reformed)
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
        if self.wants_membership and not self.final and not self.round.member:
            self.announcer.join(self.state)
        if not self.final:
            self.follower.follow(self.round)
        silence_s = self.standing.presence.next_silence_s(self.outbox.now_s)
        if silence_s is not None:
            # Silence begins after the timeout, not at it.
            self.outbox.due(silence_s + 1e-3)

    def _is_final(self, state: ChainState) -> bool:
        rounds, tokens = self.rules.final_round, self.rules.final_tokens
        return (rounds is not None and state.base.round >= rounds) or (
            tokens is not None and state.tokens_total >= tokens
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

    def alarm(self, text: str) -> None:
        self.stopped = True
        self.outbox.emit(Alarm(text=text))

    # ------------------------------------------------------------ for status

    @property
    def attempt(self) -> int:
        return self.round.attempt

    @property
    def group(self) -> tuple[PeerId, ...]:
        """My group in the plan of the newest round; all members where that had no groups."""
        mine = () if self._last_roster is None else group_of(self._last_roster, self.me)
        return mine or tuple(peer for peer, _ in self.state.members)

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
