"""One simulated node: a driver like the daemon's, with a disk that survives it, around one `PeerMachine`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from sim_audit import convicted, recompute
from sim_engine import Engine
from sim_links import TOLD_EVERY_S
from sim_model import PARTS, UNIT_TOKENS, Account, Outbox, state_after
from sim_oracle import Violation

from protocol import chain, wire
from protocol.chain import ChainState
from protocol.events import (
    Alarm,
    Applied,
    Apply,
    CatchUp,
    Convicted,
    Effect,
    Event,
    FetchParts,
    Finished,
    Freeze,
    Frozen,
    HeaderSigned,
    LearnLineage,
    LeaveRequested,
    LineageLearned,
    LineageLeft,
    LineageResumed,
    LineageUnproven,
    Misbehaved,
    NewLineage,
    PartHeld,
    PartsFetched,
    Persist,
    Received,
    RecomputePart,
    ReportsChanged,
    Send,
    StartExchange,
    StateCorrupt,
    StopExchange,
    StorageAble,
    Tick,
    TrainerProgress,
)
from protocol.lineages import Place, Position
from protocol.messages import Commit, PartHeader, Signed
from protocol.names import Base, Digest, Keyring, PeerId, digest, encode_integer
from protocol.peer import PeerMachine

if TYPE_CHECKING:
    from sim_hostile import Mischief
    from sim_world import World

SETTLED_S = 40.0
"""Fair weather after which nobody may be dropped from the members any more."""


@dataclass(frozen=True, slots=True)
class Left:
    """The chain of a lineage that lost, kept until the winner takes this node in."""

    state: ChainState
    course: list[Place]


class Node:
    def __init__(self, *, world: World, peer: PeerId, keyring: Keyring, state: ChainState) -> None:
        self.world = world
        self.peer = peer
        self.keyring = keyring
        # The disk: what survives a crash.
        self.state = state
        self.journal: bytes | None = None
        self.journal_lost = False
        self.had_lost_journal = False
        self.held: set[Digest] = set()
        """Hashes of the payloads on disk."""
        self.outbox: dict[Digest, Outbox] = {}
        """Contributions by base, as they were frozen."""
        self.frozen_flags: set[Digest] = set()
        """Bases at which one was frozen, durable before it is sent: never again, even when the bytes are lost."""
        self.account = Account()
        self.course = [Place.of(state, world.rules)]
        """Every place of my chain."""
        self.counted_at: dict[Position, list[int]] = {}
        """Place → work of mine, a part each, that the commit which led there counted."""
        self.kept: Left | None = None
        self.returns = 0
        self.mischief: Mischief | None = None
        # The process.
        self.machine: PeerMachine | None = None
        self.engine: Engine | None = None
        self.started = False
        self.left = False
        self.finished = False
        self.life = 0
        """Counts starts: what an earlier life has scheduled does not happen."""
        self.started_s = 0.0
        self.storage_fails = False
        self._checked: ChainState | None = None
        self._wakeup_s = math.inf
        self._trained_s = 0.0
        self._trained_base: Base | None = None
        self.budget_s: float | None = None
        """Of training, in every round; None: the weather decides."""
        self.trained_s: dict[int, float] = {}
        """Round → when its budget was done."""
        self.committed_s: dict[int, float] = {}
        """Round → when its commit was applied."""
        self.committed: list[Commit] = []

    # ------------------------------------------------------------ life

    def start(self) -> None:
        if self.machine is not None or self.finished:
            return
        self.started = True
        self.left = False
        self.life += 1
        self._boot()

    def _boot(self) -> None:
        self.engine = Engine(self)
        self.world.moves += 1
        self.started_s = self.world.now_s
        self._wakeup_s = math.inf
        self.machine = PeerMachine(
            rules=self.world.rules,
            me=self.peer,
            keyring=self.keyring,
            state=self.state,
            journal=self.journal,
            journal_lost=self.journal_lost,
            wants_membership=True,
            incarnation=digest(self.peer.encode(), encode_integer(self.life))[:16],
            now_s=self.world.now_s,
            left=None if self.kept is None else self.kept.state.base,
            returns=self.returns,
        )
        self.world.note(self.peer, f"starts in round {self.state.base.round}")
        self._train()
        self.feed(Tick())
        self._tell_links()

    def _tell_links(self) -> None:
        """What peers report of their links, now and then."""
        links = self.world.links
        if links is not None and self.machine is not None:
            self.feed(ReportsChanged(reports=links.reports()))
            self.later(TOLD_EVERY_S, self._tell_links)

    def crash(self) -> None:
        if self.machine is None:
            return
        self.world.note(self.peer, "crashes")
        self._halt()
        weather, chance = self.world.weather, self.world.random.random
        if weather.journal_losses and chance() < weather.journal_losses:
            self.journal, self.journal_lost, self.had_lost_journal = None, True, True
        if weather.outbox_losses and chance() < weather.outbox_losses:
            self.outbox.pop(self.state.base.digest(), None)
        self.world.after(self.world.random.uniform(*self.world.weather.down_s), self.start)

    def leave(self) -> None:
        if self.machine is None or self.left:
            return
        self.world.note(self.peer, "is asked to leave")
        self.left = True
        self.feed(LeaveRequested())
        life = self.life

        def gone() -> None:
            if self.life == life and self.machine is not None:
                self._halt()
                self.world.after(self.world.random.uniform(*self.world.weather.down_s), self.start)

        self.world.after(self.world.random.uniform(0.5, 10.0), gone)

    def kill(self) -> None:
        """Dies and stays dead until `start`."""
        self.world.note(self.peer, "is killed")
        self._halt()

    def _halt(self) -> None:
        self.machine, self.engine = None, None
        self.life += 1
        self.world.moves += 1

    def later(self, delay_s: float, action: Callable[[], object]) -> None:
        """`action` after `delay_s`, unless this life is over by then."""
        self.world.after(delay_s, partial(self._if_alive, self.life, action))

    def _if_alive(self, life: int, action: Callable[[], object]) -> None:
        if self.life == life and self.machine is not None:
            action()

    def fail_storage(self, for_s: float) -> None:
        """The disk takes no parts for a while; the node says that it is not able once it has noticed."""
        if self.machine is None or self.storage_fails:
            return
        self.storage_fails = True
        self.later(self.world.random.uniform(0.5, 5.0), self.tell_storage)

        def works() -> None:
            self.storage_fails = False
            self.tell_storage()

        self.world.after(for_s, works)

    def tell_storage(self) -> None:
        self.feed(StorageAble(able=not self.storage_fails))

    def can_commit(self) -> bool:
        """Whether it would take part honestly if it were asked."""
        return (
            self.machine is not None
            and self.peer not in self.world.hostile
            and self.machine.standing.voting
            and not self.storage_fails
            and not self.left
        )

    # ------------------------------------------------------------ events and effects

    def receive(self, data: bytes, sender: PeerId) -> None:
        if self.machine is not None:
            self.feed(Received(data=data, from_peer=sender))

    def feed(self, event: Event) -> None:
        machine, life = self.machine, self.life
        if machine is None:
            return
        if self.world.trace is not None and not isinstance(event, Tick):
            self.world.note(self.peer, f"  ← {describe_event(event)}")
        before = machine.state
        if self.mischief is not None:
            self.mischief.prepare()
        effects = machine.handle(event, self.world.now_s)
        dies_after = -1
        mortal = self.world.weather.crash_in_effects
        if effects and mortal and self.world.random.random() < mortal:
            dies_after = self.world.random.randrange(len(effects) + 1)
        for index, effect in enumerate(effects):
            if index == dies_after:
                break
            self._perform(effect, before)
            if self.life != life or self.machine is not machine:
                return
        if dies_after >= 0:
            self.crash()
            return
        if machine.state is not self._checked:
            self._checked = machine.state
            self.world.oracle.check_state(self.peer, machine.state)
        self._schedule()

    def _schedule(self) -> None:
        machine = self.machine
        assert machine is not None
        at_s = machine.next_wakeup_s
        if at_s == math.inf or at_s >= self._wakeup_s:
            return
        if at_s < self.world.now_s - 1e-9:
            raise Violation(f"{self.peer} wants to wake in the past: {at_s} at {self.world.now_s}")
        self._wakeup_s = at_s

        def wake() -> None:
            if self._wakeup_s == at_s:
                self._wakeup_s = math.inf
                self.feed(Tick())

        self.later(max(0.0, at_s - self.world.now_s), wake)

    def _perform(self, effect: Effect, before: ChainState) -> None:
        if self.world.trace is not None and not isinstance(effect, Send):
            self.world.note(self.peer, f"  → {type(effect).__name__}")
        engine = self.engine
        assert engine is not None
        match effect:
            case Persist():
                self._persist(effect.journal)
            case Send() if self.mischief is not None:
                self.mischief.send(effect.to, effect.data)
            case Send():
                signed = wire.decode(effect.data)
                if signed.sender == self.peer:
                    self.world.oracle.check_sent(signed)
                self.world.send(self.peer, effect.to, effect.data)
            case Freeze():
                self._freeze(effect)
            case StartExchange():
                if self.world.switches.freeze_twice:
                    self._freeze_again()
                engine.start(effect)
            case StopExchange():
                engine.stop(effect.roster_id)
            case HeaderSigned():
                if effect.signed is not None:
                    self.world.oracle.check_sent(effect.signed)
                engine.signed(effect)
            case FetchParts():
                self._fetch(effect)
            case Apply():
                self.world.oracle.check_commit(self.peer, self.state, effect.commit, self.world.rules, self.world.nodes)
                self.world.after(0.0, partial(self.world.faults.decided, self.peer, self.state.base.round))
                self.later(self.world.random.uniform(*self.world.weather.apply_s), partial(self._apply, effect))
            case NewLineage():
                self.state = chain.reform_state(before, self.world.rules, effect.reformed)
                self.world.note(self.peer, f"is on the lineage of {effect.reformed.reform.members}")
                self.world.oracle.births.add(self.state.base.lineage)
                self.course.append(Place.of(self.state, self.world.rules))
                self.world.moves += 1
                self._train()
            case CatchUp():
                self._catch_up(effect)
            case LearnLineage():
                self._learn(effect)
            case LineageLeft():
                self._give_up_left()
            case LineageResumed():
                self._resume_left()
            case Convicted():
                convicted(self, effect)
            case RecomputePart():
                recompute(self, effect)
            case Misbehaved():
                self._accuses(effect)
            case Alarm() if self.mischief is None:
                raise Violation(f"{self.peer} raised an alarm: {effect.text}")
            case StateCorrupt() if self.mischief is None:
                raise Violation(f"{self.peer} takes its state for corrupt, which it is not: {effect}")
            case Finished():
                self._finish()
            case _:
                pass

    def _accuses(self, effect: Misbehaved) -> None:
        world = self.world
        accused = world.nodes.get(effect.peer)
        deserved = accused is None or effect.peer in world.hostile or self.mischief is not None
        # Of a wrong mean in a deeper tree it says that somebody made it, and accuses nobody.
        deserved = deserved or (effect.peer == self.peer and bool(world.hostile))
        forgetful = any(node.had_lost_journal for node in world.nodes.values())
        if world.switches.accuse and not forgetful and not deserved:
            raise Violation(f"{self.peer} accuses the honest {effect.peer}: {effect.why}")

    def _finish(self) -> None:
        """The run is over here. The process is stopped some time later, unless it is the last that could serve it."""
        self.world.note(self.peer, "has finished")
        life = self.life

        def stop() -> None:
            others = [node for node in self.world.up() if node is not self and node.finished]
            if self.life == life and others:
                self._halt()

        self.finished = True
        self.world.moves += 1
        self.world.after(self.world.random.uniform(1.0, 60.0), stop)

    def _persist(self, journal: bytes) -> None:
        if self.world.switches.forget_votes and self.journal is not None:
            return
        self.journal, self.journal_lost = journal, False

    # ------------------------------------------------------------ trainer

    def _train(self) -> None:
        """The trainer starts on the budget of the round that the disk is in."""
        machine = self.machine
        if machine is None or (self._trained_base == self.state.base and self.state.base.digest() in self.outbox):
            remaining_s = 0.0
        elif self.budget_s is not None:
            remaining_s = self.budget_s
        else:
            remaining_s = self.world.random.uniform(*self.world.weather.training_s)
        self._trained_base = self.state.base
        self._trained_s = self.world.now_s + remaining_s
        base = self.state.base

        def done() -> None:
            if self.state.base == base:
                self.trained_s.setdefault(base.round, self.world.now_s)
                self.feed(TrainerProgress(remaining_s=0.0, units_wanted=2))

        self.later(0.0, lambda: self.feed(TrainerProgress(remaining_s=self._trained_s - self.world.now_s)))
        self.later(remaining_s, done)

    def _freeze(self, effect: Freeze) -> None:
        left_s = max(0.0, min(effect.within_s, self._trained_s - self.world.now_s))
        weather = self.world.weather
        if weather.stalls and self.world.random.random() < weather.stalls:
            late_s = left_s + self.world.random.uniform(*weather.stall_s)
            if late_s > effect.within_s:
                empty = Frozen(base=effect.base, tokens=(), norm=0.0, largest=0.0, ranges_done=(), units_wanted=2)
                self.later(effect.within_s, lambda: self.feed(empty))
            left_s = late_s
        self.later(left_s, partial(self._frozen, effect.base))

    def _frozen(self, base: Base) -> None:
        if base != self.state.base:
            return
        key = base.digest()
        if key not in self.outbox:
            if key in self.frozen_flags:
                # The bytes were lost with a crash: this round goes without them.
                self.feed(Frozen(base=base, tokens=(), norm=0.0, largest=0.0, ranges_done=(), units_wanted=2))
                return
            self.outbox[key] = self._work()
            self.frozen_flags.add(key)
            self.world.oracle.frozen.setdefault((self.peer, key), self.outbox[key])
        outbox, life = self.outbox[key], self.life
        self.feed(
            Frozen(
                base=base,
                tokens=((PARTS, outbox.tokens),),
                norm=1.0,
                largest=0.5,
                ranges_done=outbox.ranges_done,
                units_wanted=2,
                parts_root=outbox.commitment.root,
            )
        )
        if self.life == life:
            self.world.faults.ready(self)

    def _work(self) -> Outbox:
        """Work of one budget goes into the local model; the contribution is all that is in there uncounted."""
        for part in range(PARTS):
            work = self.world.random.randrange(1, 1000)
            self.account.produced[part] += work
            self.account.carried[part] += work
        entry = chain.member(self.state, self.peer)
        ranges = () if entry is None else entry.lease[:1]
        tokens = self.world.random.randrange(1, 4) * UNIT_TOKENS
        return Outbox(values=tuple(self.account.carried), tokens=tokens, ranges_done=ranges)

    def _freeze_again(self) -> None:
        """The mutant: every attempt sends what the local model holds by then."""
        key = self.state.base.digest()
        if key in self.outbox:
            self.outbox[key] = self._work()

    # ------------------------------------------------------------ parts and commits

    def hold(self, header: Signed[PartHeader]) -> None:
        """A payload is verified and on disk, if the disk takes it."""
        if self.storage_fails:
            return
        self.held.add(header.message.hash)
        self.feed(PartHeld(header=header))

    def _fetch(self, effect: FetchParts) -> None:
        world = self.world
        missing: list[int] = []
        arrivals: list[Signed[PartHeader]] = []
        for header in effect.headers:
            wanted = header.message.hash
            sources = [world.nodes[peer] for peer in effect.sources if peer in world.nodes]
            if wanted in self.held or (
                not self.storage_fails
                and any(
                    source.machine is not None
                    and wanted in source.held
                    and world.connected(source.peer, self.peer)
                    and world.connected(self.peer, source.peer)
                    for source in sources
                )
            ):
                arrivals.append(header)
            else:
                missing.append(header.message.part)

        def arrive() -> None:
            life = self.life
            for header in arrivals:
                if self.life == life:
                    self.hold(header)
            if self.life == life:
                self.feed(PartsFetched(roster_id=effect.roster_id, missing=tuple(missing)))

        self.later(world.delay_s() * 2, arrive)

    def _apply(self, effect: Apply) -> None:
        state, commit = self.state, effect.commit
        if commit.roster.message.base != state.base:
            return
        for header in commit.headers:
            if header is not None and header.message.hash not in self.held:
                raise Violation(f"{self.peer} applies part {header.message.part} without holding it")
        if self.world.switches.early_ready:
            # The mutant: the next round begins before what this one counted has left the local model.
            self.later(self.world.random.uniform(0.5, 3.0), partial(self._settle, state, effect))
            mine = [0] * PARTS
        else:
            mine = self._settle(state, effect)
        self._move_to(chain.next_state(state, self.world.rules, commit, self._state_after(state, commit)))
        if self.state.base.prev != effect.commit_hash:
            raise Violation(f"{self.peer} named the commit of round {state.base.round} wrongly")
        self.course.append(Place.of(self.state, self.world.rules, commit))
        if any(mine):
            self.counted_at[self.course[-1].position] = mine
        counted = chain.counted_bits(commit.headers)
        self.committed_s[state.base.round] = self.world.now_s
        self.committed.append(commit)
        self.world.note(
            self.peer,
            f"commits round {state.base.round} (attempt {commit.roster.message.attempt}, "
            f"{len(commit.roster.message.readys)} ready, counted {counted:b}), electors {self.state.electors}",
        )
        self._train()
        self.feed(Applied(round=self.state.base.round, state_hash=self.state.base.state_hash))

    def _settle(self, state: ChainState, effect: Apply) -> list[int]:
        """Counted work leaves the local model, uncounted work stays (protocol section 8). Returns what was counted."""
        switches, account = self.world.switches, self.account
        outbox = self.outbox.get(state.base.digest())
        frozen = self.world.oracle.frozen.get((self.peer, state.base.digest()))
        lost = False
        counted = [0] * PARTS
        for header in effect.commit.headers:
            if header is None or effect.my_index is None or not header.message.bitmap >> effect.my_index & 1:
                continue
            part, contributions = header.message.part, self.world.oracle.payloads[header.message.hash].contributions
            # What was counted is in the payload; what leaves the local model is what I know that I sent.
            counted[part] = sum(value for who, _, value in contributions if who == self.peer)
            account.counted[part] += counted[part]
            if outbox is not None:
                account.carried[part] -= 0 if switches.keep_counted else outbox.values[part]
            elif frozen is not None:
                account.carried[part] -= frozen.values[part]
                lost = True
        if lost:
            # Counted, and the frozen copy is gone: nobody knows any more what else is in there.
            account.reset()
            self.world.note(self.peer, "resets its local model: its frozen contribution is gone")
        if switches.drop_uncounted:
            account.carried = [0] * PARTS
        self.world.oracle.check_account(self.peer, account)
        return counted

    def _state_after(self, state: ChainState, commit: Commit) -> Digest:
        own = None
        if self.world.switches.fill_empty:
            outbox = self.outbox.get(state.base.digest())
            own = digest(repr(None if outbox is None else outbox.values).encode())
        return state_after(state, commit, own)

    def _move_to(self, state: ChainState) -> None:
        before, self.state = self.state, state
        self.world.moves += 1
        if self.world.weather is not self.world.calm or self.world.rules.max_electors < len(self.world.nodes):
            return
        for peer, _ in before.members:
            node = self.world.nodes[peer]
            settled = self.world.now_s - max(node.started_s, self.world.clear_s) > SETTLED_S
            # Who has applied this very commit, and was barred until then, is free of its promises by now.
            here = node.state.base.lineage == state.base.lineage and node.state.base.round <= before.base.round
            if settled and here and node.can_commit() and chain.member(state, peer) is None:
                raise Violation(f"I5: {peer} is dropped from the members although nothing is wrong with it")

    # ------------------------------------------------------------ lineages

    def _reaches(self, source: Node) -> bool:
        return (
            source.machine is not None
            and self.world.connected(source.peer, self.peer)
            and self.world.connected(self.peer, source.peer)
        )

    def _learn(self, effect: LearnLineage) -> None:
        """The other's chain from the newest place on that both share; a peer that this world does not have has none."""
        source = self.world.nodes.get(effect.peer)

        def arrive() -> None:
            if source is None or not self._reaches(source):
                self.feed(LineageUnproven(peer=effect.peer))
                return
            place = shared(self.course, source.course) - 1
            mine, theirs = tuple(self.course[place:]), tuple(source.course[place:])
            self.feed(LineageLearned(peer=effect.peer, mine=mine, theirs=theirs))

        self.later(self.world.delay_s() * 2, arrive)

    def _catch_up(self, effect: CatchUp) -> None:
        source = self.world.nodes.get(effect.peer)
        if source is None:
            return
        takes_s = self.world.random.uniform(*self.world.weather.catch_up_s)
        snapshot = (source.state, list(source.course))

        def arrive() -> None:
            if not self._reaches(source):
                return
            # A quick download is followed by the log up to the tip; after a slow one the log is ahead again.
            state, course = (source.state, list(source.course)) if takes_s <= 1.0 else snapshot
            if state.base.lineage == self.state.base.lineage and len(course) <= len(self.course):
                return
            common = shared(self.course, course)
            if common == len(course):
                return  # it is only behind
            if common < len(self.course):
                if state.base.lineage != effect.lineage:
                    return
                self.world.note(self.peer, f"leaves {self.state.base.lineage.hex()[:6]}, round {self.state.base.round}")
                if self.kept is None:
                    self.kept = Left(self.state, self.course)
            self.world.note(self.peer, f"catches up with {source.peer}, round {state.base.round}")
            self.state, self.course = state, course
            if self.kept is not None and shared(self.course, self.kept.course) == len(self.kept.course):
                self.kept = None  # what was followed has come back to it
            self._reboot()

        self.later(takes_s, arrive)

    def _reboot(self) -> None:
        """A machine of another state: a hard reset for the trainer."""
        self.account.reset()
        self.life += 1
        self._boot()

    def _give_up_left(self) -> None:
        """What was counted on the lineage that lost is discarded, once."""
        assert self.kept is not None
        for place in self.kept.course[shared(self.course, self.kept.course) :]:
            for part, value in enumerate(self.counted_at.pop(place.position, ())):
                self.account.counted[part] -= value
                self.account.discarded[part] += value
        self.world.note(self.peer, f"gives up {self.kept.state.base.lineage.hex()[:6]}")
        self.kept, self.returns = None, 0
        self.world.oracle.check_account(self.peer, self.account)
        self.world.oracle.check_counted(self.peer, self.account, self.counted_at, self.course)

    def _resume_left(self) -> None:
        assert self.kept is not None
        self.world.note(self.peer, f"goes back to {self.kept.state.base.lineage.hex()[:6]}")
        self.state, self.course = self.kept.state, self.kept.course
        self.kept, self.returns = None, self.returns + 1
        self._reboot()
        frozen = self.outbox.get(self.state.base.digest())
        if frozen is not None:
            # It is on disk, and its READY binds: what was reported as discarded may be counted yet.
            for part, value in enumerate(frozen.values):
                self.account.discarded[part] -= value
                self.account.carried[part] += value


def shared(one: Sequence[Place], other: Sequence[Place]) -> int:
    """How many places, from the beginning on, two chains have in common."""
    count = 0
    for mine, theirs in zip(one, other, strict=False):
        if mine.position != theirs.position:
            break
        count += 1
    return count


def describe_event(event: Event) -> str:
    if isinstance(event, Received):
        try:
            signed = wire.decode(event.data)
        except wire.WireError:
            return f"junk from {event.from_peer}"
        message = signed.message
        details = [
            f"{name}={getattr(message, name)}" for name in ("attempt", "phase", "k", "sign") if hasattr(message, name)
        ]
        if hasattr(message, "value"):
            details.append(message.value.hex()[:6] or "NIL")
        base = getattr(message, "base", None)
        if base is not None:
            details.append(f"round={base.round}")
        return f"{type(message).__name__} of {signed.sender} {' '.join(details)}"
    return type(event).__name__
