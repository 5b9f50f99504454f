"""Performs what the state machine decides, in its order, and tells it what happened (`protocol.events`).

One task handles events one at a time; whatever takes long (a transfer, an apply) runs beside it and posts its result,
so heartbeats never wait for bytes. The vote journal is waited for: nothing may leave before it is on disk. A disk that
refuses it holds back what comes behind, and nothing else (`node.daemon.storage`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import structlog
import trio

from node.daemon.auditor import Auditor
from node.daemon.chain_download import is_ahead
from node.daemon.engine_client import EngineClient, EngineFailed, EngineGone
from node.daemon.lineage_leaving import give_up_left
from node.daemon.lineage_probe import learn_lineage
from node.daemon.link_reports import keep_reports
from node.daemon.network import Network
from node.daemon.observations import Observations
from node.daemon.outcomes import Behind, Corrupt, Fallen, Outcome, Over, Refused
from node.daemon.requests import apply_request, exchange_request, part_ref
from node.daemon.storage import HeldEffects, Storage
from node.daemon.store import Store
from node.daemon.training import Training
from node.engine import api
from node.manifest import Manifest
from protocol import events
from protocol.lineages import Position
from protocol.messages import Commit, Evidence
from protocol.names import Digest, PeerId
from protocol.peer import PeerMachine
from protocol.rules import Rules
from protocol.shares import warm_up

log = structlog.get_logger()

FETCH_PARTS_S = 30.0
STOPPED_KEPT = 64
WAITING_MESSAGES = 256
"""Messages of peers between the network's inbox, which is fair and bounded, and the machine."""
JOURNAL, CHAIN = "the vote journal", "the chain"
DISK_RETRY_S = 2.0
LEAVE_SPREADS_S = 1.0
"""For the LEAVE to be written to every peer's connection before it closes, at most."""
LAST_VALIDATION_S = 60.0
"""How long a node stays, at the end of the run, for its trainer to measure the final state."""
BUSY_PHASES = frozenset({"exchanging", "voting", "applying"})
"""Phases in which leaving would cost the others parts or votes of the round under way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _ApplyDone:
    effect: events.Apply
    answer: api.Applied


class Driver:
    """Runs one `PeerMachine` until it is behind, over, or cancelled."""

    def __init__(
        self,
        *,
        machine: PeerMachine,
        rules: Rules,
        manifest: Manifest,
        network: Network,
        engine: EngineClient,
        store: Store,
        training: Training,
        observations: Observations,
        storage: Storage,
        max_rounds: int | None,
        on_commit: Callable[[Commit, events.Applied], None],
    ) -> None:
        self.machine = machine
        self._rules = rules
        self._manifest = manifest
        self._network = network
        self._engine = engine
        self._store = store
        self._training = training
        self._observations = observations
        self._storage = storage
        self._max_rounds = max_rounds
        self._auditor = Auditor(rules=rules, engine=engine, observations=observations, post=self.post)
        self._on_commit = on_commit
        # Without bound: what this node's own processes say is never dropped. Peers fill it no further than their share.
        self._send, self._receive = trio.open_memory_channel[events.Event | _ApplyDone](math.inf)
        self._room_for_messages = trio.Semaphore(WAITING_MESSAGES)
        self._nursery: trio.Nursery
        self._outcome: Outcome | None = None
        self._stopped: deque[Digest] = deque(maxlen=STOPPED_KEPT)
        """Rosters that were stopped, in case their start is still on its way to the engine."""
        self._snapshot_done = trio.Event()
        self._snapshot_done.set()
        self._between_rounds = trio.Event()
        self._announced = trio.Event()
        self._held = HeldEffects()
        """What waits for a disk that refuses the journal or the chain."""
        self._retry_s = math.inf
        self._proving = False
        self._deep_told: Position | None = None
        """Where the lineage branches that the log has named already."""
        self._leaving = False
        self._solver_is_there = False
        """What plans over groups take was imported, or is being."""

    def post(self, event: events.Event | _ApplyDone) -> None:
        """An event for the machine, from anywhere in the daemon."""
        self._send.send_nowait(event)

    async def announce_leaving(self) -> None:
        """LEAVE to everybody: written when this returns, or not within `LEAVE_SPREADS_S`."""
        self.post(events.LeaveRequested())
        with trio.move_on_after(LEAVE_SPREADS_S):
            await self._announced.wait()
        if slow := await self._network.drain(LEAVE_SPREADS_S):
            log.warning("some peers do not read that this node leaves: they will notice its silence", peers=slow)

    async def wait_between_rounds(self) -> None:
        """Until no exchange or vote is under way. The caller sets the deadline."""
        await self._between_rounds.wait()

    async def run(self) -> Outcome:
        """Raises `Fallen` on an alarm of the protocol."""
        self._observations.began_round(self.machine.state.base.round)
        # What an earlier machine could not write died with it.
        self._storage.forget(JOURNAL)
        self._storage.forget(CHAIN)
        if not self._storage.able:
            self.post(events.StorageAble(able=False))
        await self._training.resume(self.machine.state, frozen_stays=self._store.left is not None)
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._from_network)
            nursery.start_soon(keep_reports, self._network.membership, self.post)
            while self._outcome is None:
                self._observations.phase = self.machine.phase
                self._auditor.exchanging = self.machine.phase in BUSY_PHASES
                if self._auditor.exchanging:
                    if self._between_rounds.is_set():
                        self._between_rounds = trio.Event()
                else:
                    self._between_rounds.set()
                event = await self._next_event()
                if trio.current_time() >= self._retry_s:
                    await self._release()
                await self._handle(event)
            await self._snapshot_done.wait()
            nursery.cancel_scope.cancel()
        assert self._outcome is not None
        return self._outcome

    async def _next_event(self) -> events.Event | _ApplyDone:
        wait_s = max(0.0, min(self.machine.next_wakeup_s, self._retry_s) - trio.current_time())
        with trio.move_on_after(wait_s) as timer:
            event = await self._receive.receive()
        return events.Tick() if timer.cancelled_caught else event

    async def _from_network(self) -> None:
        async for peer, data in self._network.inbox:
            await self._room_for_messages.acquire()
            self.post(events.Received(data=data, from_peer=peer))

    async def _handle(self, event: events.Event | _ApplyDone) -> None:
        if isinstance(event, _ApplyDone):
            await self._applied(event)
            return
        if isinstance(event, events.PartHeld):
            self._observations.saw_part()
        elif isinstance(event, events.Received):
            self._room_for_messages.release()
        for effect in self.machine.handle(event, trio.current_time()):
            await self._perform(effect)
        deep = self.machine.meeting.deep
        if deep is not None and deep.place != self._deep_told:
            self._deep_told = deep.place
            log.warning("a lineage that branches too far back is not followed", why=self.machine.meeting.says)
        if isinstance(event, events.LeaveRequested):
            self._announced.set()

    async def _perform(self, effect: events.Effect) -> None:
        """At once, or when the disk has taken what comes before it."""
        if self._held and not self._held.may_pass(effect):
            self._held.add(effect)
        else:
            await self._perform_now(effect)

    async def _perform_now(self, effect: events.Effect) -> None:
        match effect:
            case events.Send():
                self._network.send(effect.to, effect.data, replaces=effect.replaces)
            case events.Persist():
                if not await self._stored(JOURNAL, partial(self._store.write_journal, effect.journal)):
                    self._hold(effect)
            case events.Freeze():
                self._nursery.start_soon(self._training.freeze, effect.base, effect.within_s)
            case events.StartExchange():
                self._observations.saw_roster()
                self._auditor.make_way()
                if effect.my_index is not None:
                    self._nursery.start_soon(self._start_exchange, effect)
            case events.StopExchange():
                self._stopped.append(effect.roster_id)
                self._nursery.start_soon(self._ask, partial(self._engine.stop_exchange, roster_id=effect.roster_id))
            case events.HeaderSigned():
                header = part_ref(effect.signed) if effect.signed is not None else None
                self._nursery.start_soon(
                    self._ask,
                    partial(
                        self._engine.signed_header,
                        roster_id=effect.header.roster_id,
                        part=effect.header.part,
                        header=header,
                    ),
                )
            case events.FetchParts():
                self._nursery.start_soon(self._fetch_parts, effect)
            case events.Apply():
                self._nursery.start_soon(self._apply, effect)
            case events.RecomputePart():
                self._nursery.start_soon(self._auditor.recompute, effect)
            case events.Convicted():
                self._observations.convicted(effect.evidence.culprit, effect.evidence.offence)
                _tell_conviction(effect.evidence, self.machine.me)
            case events.NewLineage():
                if not await self._stored(CHAIN, partial(self._store.append_reform, effect.reformed)):
                    self._hold(effect)
                    return
                log.warning(
                    "the electors are gone: this run goes on as a new lineage",
                    round=self.machine.state.base.round,
                    members=len(effect.reformed.reform.members),
                )
                self._nursery.start_soon(self._training.rebase, self.machine.state)
            case events.CatchUp():
                if effect.lineage != self.machine.state.base.lineage:
                    log.warning("another lineage is followed", why=self.machine.meeting.says)
                    self._outcome = self._outcome or Behind(peer=effect.peer, lineage=effect.lineage)
                elif not self._proving:
                    self._proving = True
                    self._nursery.start_soon(self._prove_behind, effect)
            case events.LearnLineage():
                self._nursery.start_soon(self._learn_lineage, effect.peer)
            case events.LineageLeft():
                self._nursery.start_soon(give_up_left, self._store, self.machine.me, self._observations)
            case events.LineageResumed():
                self._outcome = self._outcome or Refused()
            case events.Misbehaved():
                if self._observations.misbehaved(effect.why):
                    log.warning("bad input from a peer", peer=effect.peer, why=effect.why)
            case events.Alarm():
                raise Fallen(effect.text)
            case events.StateCorrupt():
                self._outcome = Corrupt(effect=effect)
            case events.Finished():
                self._nursery.start_soon(self._end)

    # ------------------------------------------------------------ longer work

    async def _stored(self, what: str, write: Callable[[], None]) -> bool:
        """Whether the disk took it; told either way."""
        try:
            await trio.to_thread.run_sync(write)
        except OSError as error:
            self._storage.refused(what, error.strerror or str(error))
            return False
        self._storage.works(what)
        return True

    def _hold(self, effect: events.Effect) -> None:
        """Until the disk takes it; heartbeats go on meanwhile, and say that this node cannot take part."""
        self._held.add(effect)
        self._retry_s = trio.current_time() + DISK_RETRY_S

    async def _release(self) -> None:
        """Try again; what the disk still refuses is held anew, and so is all behind it."""
        self._retry_s = math.inf
        for effect in self._held.take():
            await self._perform(effect)

    async def _prove_behind(self, effect: events.CatchUp) -> None:
        """A heartbeat is only a claim: no round is left before somebody shows a record that follows this chain."""
        mine = self.machine.state.base.round
        records = self._network.membership.records
        others = [peer for peer in self._network.peers if peer in records and records[peer].round > mine]
        proven: list[PeerId] = []

        async def ask(peer: PeerId) -> None:
            if await is_ahead(self._network, self._store, peer):
                proven.append(peer)
                nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            for peer in dict.fromkeys([effect.peer, *others]):
                nursery.start_soon(ask, peer)
        self._proving = False
        if self.machine.state.base.round != mine or self.machine.phase == "applying":
            return  # the commit that was missing has come meanwhile
        if proven:
            self._outcome = self._outcome or Behind(peer=proven[0], lineage=effect.lineage)
            self.post(events.Tick())
        else:
            self._observations.count(["later rounds claimed without proof"])

    async def _learn_lineage(self, peer: PeerId) -> None:
        learned = await learn_lineage(self._network, self._store, peer)
        if isinstance(learned, events.LineageUnproven):
            self._observations.count(["lineage claimed without proof"])
        self.post(learned)

    async def _ask(self, request: Callable[[], object]) -> None:
        """A request whose failure the protocol's own deadlines take care of."""
        try:
            await request()  # type: ignore[misc]
        except EngineFailed as error:
            log.warning("the engine refused", why=str(error))
            self._observations.count(["engine refused"])
        except trio.BrokenResourceError:
            pass  # the engine is gone; the session notices by itself

    async def _start_exchange(self, effect: events.StartExchange) -> None:
        assert effect.my_index is not None
        if effect.roster_id in self._stopped:
            return
        request = exchange_request(effect.roster_id, effect.roster.message, effect.my_index, self._rules)
        try:
            await self._engine.exchange(request)
        except EngineFailed as error:
            log.warning("the engine takes no part in an exchange", why=str(error))
            self._observations.count(["engine refused"])
            # The frozen bytes are gone, or all of the engine's exchanges are taken: nothing will come from here.
            self.post(events.ExchangeEnded(roster_id=effect.roster_id, missed=(self.machine.me,)))
        except trio.BrokenResourceError:
            pass  # the engine is gone; the session notices by itself

    async def _end(self) -> None:
        """The run is over; its last figure is the validation loss of the state that it ended on."""
        with trio.move_on_after(LAST_VALIDATION_S) as waited:
            await self._training.wait_validated()
        if waited.cancelled_caught:
            log.warning("the final state was not measured in time", waited_s=LAST_VALIDATION_S)
        self._outcome = self._outcome or Over()
        self.post(events.Tick())

    async def _fetch_parts(self, effect: events.FetchParts) -> None:
        missing = tuple(header.message.part for header in effect.headers)
        try:
            answer = await self._engine.fetch_parts(
                headers=tuple(part_ref(header) for header in effect.headers),
                sources=effect.sources,
                timeout_s=FETCH_PARTS_S,
            )
            missing = answer.missing
        except EngineFailed as error:
            log.warning("parts cannot be fetched", why=str(error))
        except trio.BrokenResourceError:
            return
        self.post(events.PartsFetched(roster_id=effect.roster_id, missing=missing))

    async def _apply(self, effect: events.Apply) -> None:
        """Commit to disk first, then the outer step: a crash in between replays it (protocol section 8)."""
        await self._snapshot_done.wait()
        append = partial(self._store.append_commit, effect.commit, effect.commit_hash)
        while not await self._stored(CHAIN, append):  # noqa: ASYNC110 - a disk tells nobody that it has room again
            await trio.sleep(DISK_RETRY_S)  # the trainer goes on meanwhile
        handed_over = await self._training.surrender()
        if not handed_over:
            self._observations.count(["trainer did not hand over in time"])
        try:
            answer = await self._engine.apply(
                apply_request(
                    effect.commit, self._rules, my_index=effect.my_index, contributed=self._training.contributes
                )
            )
        except trio.BrokenResourceError:
            return
        except EngineFailed as error:
            log.error("the engine cannot apply a committed round", why=str(error))
            self._observations.count(["commit not applied"])
            # Nobody decides this round differently: from the newest good state, as after a crash, until it works.
            raise EngineGone(f"it cannot apply a committed round: {error}") from error
        self.post(_ApplyDone(effect=effect, answer=answer))

    async def _applied(self, done: _ApplyDone) -> None:
        before = self.machine.state
        commit = done.effect.commit
        applied = events.Applied(round=before.base.round + 1, state_hash=done.answer.state_hash)
        await trio.to_thread.run_sync(self._store.mark_applied, applied.round, applied.state_hash)
        effects = self.machine.handle(applied, trio.current_time())
        after = self.machine.state
        counted_before = self._training.settle(commit, done.answer.counted, after)
        line = self._observations.saw_commit(commit, before, after, self._rules)
        log.info(
            "round committed",
            round=line.round,
            contributors=len(line.contributors),
            excluded=len(line.excluded),
            seconds=round(line.seconds, 2),
            loss=round(line.loss, 4) if line.loss is not None else None,
            tokens_total=after.tokens_total,
            state=line.state_hash[:16],
        )
        self._on_commit(commit, applied)
        if self.machine.standing.grouping.has_sites and not self._solver_is_there:
            self._solver_is_there = True
            self._nursery.start_soon(self._get_solver)
        self._snapshot_done = trio.Event()
        self._nursery.start_soon(self._after_commit, commit, after.base.round)
        await self._training.begin(after, counted=done.answer.counted, hard_reset=counted_before)
        for effect in effects:
            await self._perform(effect)
        enough = self._max_rounds is not None and self._observations.rounds_seen >= self._max_rounds
        if enough and not self._leaving:
            self._leaving = True
            self._nursery.start_soon(self._leave)

    async def _get_solver(self) -> None:
        """What a plan over sites takes, before the first one is to be made."""
        await trio.to_thread.run_sync(warm_up, abandon_on_cancel=True)  # type: ignore[call-arg]  # older stubs

    async def _leave(self) -> None:
        """This node has done its rounds: the others shall not wait for it."""
        await self.announce_leaving()
        self._outcome = self._outcome or Over()
        self.post(events.Tick())

    async def _after_commit(self, commit: Commit, new_round: int) -> None:
        """Housekeeping that must be over before the next apply."""
        try:
            hashes = tuple(header.message.hash for header in commit.headers if header is not None)
            await self._ask(partial(self._engine.keep_commits, round=new_round - 1, hashes=hashes))
            ends = self._rules.final_round is not None and new_round >= self._rules.final_round
            if ends or new_round % self._manifest.limits.snapshot_every_rounds == 0:
                await self._save_snapshot(new_round)
        finally:
            self._snapshot_done.set()

    async def _save_snapshot(self, new_round: int) -> None:
        try:
            await self._engine.save_snapshot(round=new_round)
        except EngineFailed as error:
            log.error("no snapshot was saved: those before it are kept", round=new_round, why=str(error))
            self._observations.count(["snapshot not saved"])
        except trio.BrokenResourceError:
            pass  # the engine is gone; the session notices by itself


def _tell_conviction(evidence: Evidence, me: PeerId) -> None:
    if evidence.culprit == me:
        log.critical(
            "this node's own key signed what excludes each other: is it in use on another machine?",
            offence=evidence.offence.value,
        )
    else:
        log.error("a peer is caught and left out for good", peer=evidence.culprit, offence=evidence.offence.value)
