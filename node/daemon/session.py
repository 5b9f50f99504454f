"""One run on this node, from manifest to the end: engine, artifacts, state, and the state machine's life.

A session survives the death of its engine (it starts over with a new connection) and of its trainer (the next one
attaches); what must last lies in the store and in the engine's folder.
"""

from __future__ import annotations

from pathlib import Path

import structlog
import trio

from node.daemon.acquaintances import look_for
from node.daemon.answers import Answers
from node.daemon.artifact_fetch import obtain_artifacts
from node.daemon.catch_up import CatchUp, HeldState, WinnerGone
from node.daemon.driver import CHAIN, DISK_RETRY_S, Driver
from node.daemon.engine_client import EngineClient, EngineFailed, EngineGone
from node.daemon.engine_feed import EngineFeed
from node.daemon.engine_opener import EngineOpener
from node.daemon.identity import Identity
from node.daemon.lineage_leaving import keep_state, resume_left
from node.daemon.mending import mend_chain
from node.daemon.network import Network
from node.daemon.observations import Observations
from node.daemon.outcomes import Corrupt, Over, Refused
from node.daemon.prober import Prober
from node.daemon.storage import Storage
from node.daemon.store import JournalState, Store, StoreError
from node.daemon.supervisor_client import EngineHandle, EngineRestarted, SupervisorClient, TrainerExited
from node.daemon.trainer_host import TrainerHost
from node.daemon.training import Training
from node.daemon.work_book import WorkBook
from node.daemon.work_file import WorkFile
from node.engine import api
from node.errors import OperatorError
from node.manifest import Manifest, SignedManifest, rules_of
from node.settings import DaemonSettings
from protocol import events
from protocol.chain import ChainState
from protocol.messages import Commit
from protocol.names import Base, Digest, PeerId
from protocol.peer import PeerMachine

FINISH_ROUND_S = 2.5
"""How long a leaving node stays for the exchange or the vote under way: the others would miss its parts."""
LAST_SNAPSHOT_S = 2.0
"""For the state at leaving, so that the next start replays nothing."""
INVENTORY_EVERY_S = 2.0
FP32_BYTES = 4

log = structlog.get_logger()


class RunSession:
    def __init__(
        self,
        *,
        settings: DaemonSettings,
        identity: Identity,
        network: Network,
        supervisor: SupervisorClient,
        host: TrainerHost,
        signed: SignedManifest,
        manifest: Manifest,
        observations: Observations,
        incarnation: bytes,
    ) -> None:
        self._settings = settings
        self._identity = identity
        self._network = network
        self._supervisor = supervisor
        self._host = host
        self._signed = signed
        self.manifest = manifest
        self._observations = observations
        self._incarnation = incarnation
        self.rules = rules_of(manifest)
        home = settings.home_directory
        run = self.rules.run
        self._run_directory = home.run_directory(run)
        self._engine_directory = home.engine_directory(run)
        self._trainer_directory = home.trainer_directory(run)
        self.store = Store(self._run_directory, self.rules, identity)
        self.engine: EngineClient | None = None
        self.driver: Driver | None = None
        self._answers = Answers(self.store)
        self._storage = Storage(observations=observations, post=self._post)
        self._feed = EngineFeed(network=network, observations=observations, storage=self._storage, post=self._post)
        self._opener = EngineOpener(
            settings=settings,
            identity=identity,
            manifest=manifest,
            rules=self.rules,
            directory=self._engine_directory,
            network=network,
            observations=observations,
        )
        self.inventory: api.Inventoried | None = None
        self._training: Training | None = None
        self._looked_for_others = False
        self._chain_is_whole = False
        """Every record of the log was read, and is good."""
        self._left_state: ChainState | None = None
        self._returns = 0
        """How often another lineage was followed in vain since the last that took this node in."""

    @property
    def machine(self) -> PeerMachine | None:
        return self.driver.machine if self.driver is not None else None

    @property
    def state(self) -> ChainState | None:
        """Where this node stands; while it catches up, where it stood before."""
        return self.driver.machine.state if self.driver is not None else self._left_state

    async def run(self) -> None:
        """Returns when the run is over for this node. Raises `OperatorError`, `Fallen`."""
        await self._open_store()
        try:
            await self._live()
        finally:
            self.store.close()

    async def _open_store(self) -> None:
        """When there is room to: a damaged end of the chain log is set aside before anything goes on."""
        while True:
            try:
                await trio.to_thread.run_sync(self.store.open)
            except StoreError as error:
                raise OperatorError(str(error)) from error
            except OSError as error:
                self._storage.refused(CHAIN, error.strerror or str(error))
                self._observations.setting_up("starting", "the chain of this run cannot be opened yet")
                await trio.sleep(DISK_RETRY_S)
            else:
                self._storage.works(CHAIN)
                return

    async def _live(self) -> None:
        self._answers.serve(self._network)
        while True:
            try:
                await self._live_with_an_engine()
                return
            except* trio.BrokenResourceError:
                log.error("the engine died: starting over with the next one")
                self._observations.count(["engine restarted"])
                self._observations.setting_up("starting", "the engine died and starts again")
                self._left_state = self.state
                self.engine = self.driver = self._answers.engine = self._network.splicing.engine = None
                if self._training is not None:
                    self._training.engine = None
                    self._training.pause("the engine died and starts again")

    async def leave(self) -> None:
        """Finish the exchange under way, announce leaving, keep the state. The caller sets the deadline."""
        driver = self.driver
        if driver is None:
            return
        with trio.move_on_after(FINISH_ROUND_S) as waited:
            await driver.wait_between_rounds()
        if waited.cancelled_caught:
            log.warning("leaving in the middle of a round, which did not end in time", phase=driver.machine.phase)
        await driver.announce_leaving()
        if driver.machine.state.base.round > 0:
            try:
                with trio.move_on_after(LAST_SNAPSHOT_S):
                    await self.save_snapshot()
            except (EngineFailed, trio.BrokenResourceError) as error:
                log.warning(
                    "no snapshot was saved at leaving: the next start replays from an older one", why=str(error)
                )

    async def save_snapshot(self) -> tuple[str, Base]:
        """A snapshot of the current state on this disk: its path and the state's place in the chain.

        Raises `EngineFailed`, or `EngineGone` while no round goes on.
        """
        engine, driver = self.engine, self.driver
        if engine is None or driver is None:
            raise EngineGone("the engine is starting, or the node catches up")
        if driver.machine.phase == "applying":  # the engine may be at the next state already
            await driver.wait_between_rounds()
        base = driver.machine.state.base
        await engine.save_snapshot(round=base.round)
        return str(self._snapshot_path(base)), base

    # ------------------------------------------------------------ engine

    async def _live_with_an_engine(self) -> None:
        self._observations.setting_up("starting", "the engine is starting")
        elements, buffers = self.rules.elements, self.rules.buffer_elements
        handle = await self._supervisor.start_engine(
            theta_bytes=elements * FP32_BYTES,
            momentum_bytes=(elements - buffers) * FP32_BYTES,
            delta_bytes=elements * FP32_BYTES,
        )
        try:
            async with trio.open_nursery() as nursery:
                engine = EngineClient(handle.socket)
                nursery.start_soon(self._receive_from_engine, engine)
                self.engine = self._answers.engine = self._network.splicing.engine = engine
                await self._opener.open(engine, handle)
                nursery.start_soon(self._feed.pump, engine)
                nursery.start_soon(self._feed.keep_peers, engine)
                nursery.start_soon(self._watch_supervisor, handle.life)
                nursery.start_soon(self._watch_inventory, engine)
                nursery.start_soon(Prober(network=self._network, engine=engine, idle=self._trains).run)
                nursery.start_soon(self._mend_chain)
                await obtain_artifacts(
                    self.manifest.artifacts,
                    self._engine_directory / "artifacts",
                    network=self._network,
                    engine=engine,
                    observations=self._observations,
                )
                training = self._training_with(handle, engine)
                nursery.start_soon(self._pump_trainer, training)
                if self._settings.starts_trainer:
                    await self._supervisor.start_trainer()
                await self._follow(engine, training, fresh=handle.fresh)
                nursery.cancel_scope.cancel()
        finally:
            handle.close()

    async def _receive_from_engine(self, engine: EngineClient) -> None:
        await engine.run()
        raise EngineGone("the engine's process ended")

    def _post(self, event: events.Event) -> None:
        if self.driver is not None:
            self.driver.post(event)

    async def _watch_inventory(self, engine: EngineClient) -> None:
        """What the engine has on disk, fresh enough for `status` and for joiners' questions."""
        while True:
            try:
                self.inventory = self._answers.inventory = await engine.inventory()
            except trio.BrokenResourceError:
                return
            except EngineFailed as error:
                log.debug("the engine's inventory cannot be had", why=str(error))
            else:
                self._observations.disk_bytes = self.inventory.disk_bytes
            machine = self.machine
            if machine is not None and machine.phase != "training":
                self._host.explain(machine.reason)  # what a trainer that has contributed waits for
            await trio.sleep(INVENTORY_EVERY_S)

    def _speeds(self) -> dict[PeerId, float]:
        """Tokens/s of whom the run's records know, by their own word."""
        return {peer: record.tokens_per_s for peer, record in self._network.membership.records.items()}

    @property
    def budget_steps(self) -> int:
        """Inner steps of the present round here."""
        return self._training.budget_steps if self._training is not None else self.manifest.rounds.steps

    def _trains(self) -> bool:
        """No exchange or vote is under way."""
        return self.machine is not None and self.machine.phase == "training"

    async def _mend_chain(self) -> None:
        if not self._chain_is_whole:
            await mend_chain(self.store, self._network, self._observations)
            self._chain_is_whole = True

    async def _watch_supervisor(self, life: int) -> None:
        """`life`: of the engine that this session is connected to; its own start may be news that is still unread."""
        async for event in self._supervisor.events:
            if isinstance(event, EngineRestarted) and event.life > life:
                raise EngineGone("the engine was started again")
            if isinstance(event, TrainerExited):
                self.trainer_exit = _exit_sentence(event)
                log.warning("the trainer ended", code=event.code, why=event.reason)

    trainer_exit: str | None = None

    # ------------------------------------------------------------ training

    def _training_with(self, handle: EngineHandle, engine: EngineClient) -> Training:
        """One for the session's life: the attached trainer outlives engines."""
        if self._training is None:
            self._trainer_directory.mkdir(parents=True, exist_ok=True)
            self._training = Training(
                settings=self._settings,
                identity=self._identity,
                manifest=self.manifest,
                manifest_body=self._signed.body,
                rules=self.rules,
                host=self._host,
                work=WorkBook(
                    file=WorkFile(self._run_directory / "work"),
                    store=self.store,
                    peer=self._identity.peer_id,
                    rules=self.rules,
                    observations=self._observations,
                ),
                observations=self._observations,
                artifacts_directory=str(self._engine_directory / "artifacts"),
                trainer_directory=str(self._trainer_directory),
                post=self._post,
                speeds=self._speeds,
            )
        self._training.engine = engine
        self._training.fds = (handle.theta_read_fd, handle.delta_fd)
        return self._training

    async def _pump_trainer(self, training: Training) -> None:
        async for event in self._host.events:
            await training.handle(event)

    # ------------------------------------------------------------ the run

    async def _follow(self, engine: EngineClient, training: Training, *, fresh: bool) -> None:
        catch_up = CatchUp(
            rules=self.rules,
            manifest=self.manifest,
            keyring=self._identity,
            network=self._network,
            engine=engine,
            store=self.store,
            observations=self._observations,
        )
        held = None if fresh else await self._resumed(engine)
        if not self._looked_for_others:  # the next engine finds this daemon among those whom it knows
            await look_for(self.store.state, self._network, self._observations, self.manifest.limits.fork_timeout_s)
            self._looked_for_others = True
        if self.store.left is not None and self.store.left.resuming:
            await self._resume_left()
            held = None
        lineage: Digest | None = None
        while True:
            try:
                self._answers.catching_up = True
                state = await catch_up.run(held, lineage)
                self._answers.catching_up = False
            except WinnerGone as gone:
                log.warning("the lineage that was left is resumed", why=str(gone))
                await self._resume_left()
                held, lineage = None, None
                continue
            left = self.store.left
            if left is None and lineage is not None:
                await trio.to_thread.run_sync(self.store.left_files.forget)  # nothing had to be left
            journal, journal_state = self.store.read_journal()
            machine = PeerMachine(
                rules=self.rules,
                me=self._identity.peer_id,
                keyring=self._identity,
                state=state,
                journal=journal,
                journal_lost=journal_state is JournalState.TORN
                or (journal_state is JournalState.MISSING and state.base.round > 0),
                wants_membership=True,
                incarnation=self._incarnation,
                now_s=trio.current_time(),
                left=left.tip if left is not None else None,
                returns=self._returns,
            )
            self.driver = Driver(
                machine=machine,
                rules=self.rules,
                manifest=self.manifest,
                network=self._network,
                engine=engine,
                store=self.store,
                training=training,
                observations=self._observations,
                storage=self._storage,
                max_rounds=self._settings.max_rounds,
                on_commit=self._on_commit,
            )
            self._observations.starting = None
            self._publish_tip()
            outcome = await self.driver.run()
            if left is not None and self.store.left is None:
                self._returns = 0
            if isinstance(outcome, Over):
                return
            base = machine.state.base
            held = HeldState(round=base.round, state_hash=base.state_hash)
            self._left_state, self.driver = machine.state, None
            training.pause("the node is behind the run, or its state is not the run's: it catches up")
            await training.surrender()
            if isinstance(outcome, Corrupt):
                await self._set_aside(catch_up, outcome.effect)
                held, lineage = None, None
            elif isinstance(outcome, Refused):
                log.warning("the lineage that was followed did not take this node in: its own is resumed")
                await self._resume_left()
                held, lineage = None, None
            else:
                if outcome.lineage != base.lineage and self.store.left is None:
                    await keep_state(self.store, engine, base, self._snapshot_path(base), self._observations)
                log.warning("behind the run: catching up", round=base.round, peer=outcome.peer)
                lineage = outcome.lineage

    async def _resume_left(self) -> None:
        self._returns += 1
        await resume_left(self.store, self._engine_directory / "snapshots", self._observations)

    def _snapshot_path(self, base: Base) -> Path:
        return self._engine_directory / "snapshots" / f"{base.round}-{base.state_hash.hex()}"

    async def _set_aside(self, catch_up: CatchUp, corrupt: events.StateCorrupt) -> None:
        """This node computed another state than the others: from a good one on disk, or from theirs (section 8)."""
        base, agreed = corrupt.base, corrupt.agreed
        await trio.to_thread.run_sync(self.store.correct_state, base, agreed)
        held = HeldState(round=base.round, state_hash=base.state_hash)
        why = (
            f"{corrupt.electors} electors hold {agreed.hex()[:16]} as the state of round {base.round}, this node "
            f"{base.state_hash.hex()[:16]}"
        )
        try:
            await catch_up.set_aside(held, why)
        except EngineFailed as error:
            log.warning("the corrupt state's snapshot could not be moved", why=str(error))

    async def _resumed(self, engine: EngineClient) -> HeldState | None:
        """The memfds outlived the engine or the daemon: use them when they hold the chain's newest state.

        Of a commit that is stored and not yet applied here they hold the state before, or its outer step, begun or
        done: replaying it finishes that (`api.ResumeState`).
        """
        number = self.store.state.base.round
        state_hash = self.store.state_hash_at(number)
        if state_hash is None:
            number -= 1
            state_hash = self.store.state_hash_at(number)
        if state_hash is None:
            return None
        try:
            await engine.resume_state(round=number, state_hash=state_hash)
        except EngineFailed as error:
            log.info("the state in memory cannot be used", why=str(error))
            return None
        return HeldState(round=number, state_hash=state_hash)

    def _on_commit(self, commit: Commit, applied: events.Applied) -> None:
        self._publish_tip()

    def _publish_tip(self) -> None:
        base = self.store.state.base
        self._network.membership.publish(
            round=base.round,
            state_hash=base.state_hash,
            tokens_per_s=self._observations.speed.tell() if self._host.attached else 0.0,
        )


def _exit_sentence(event: TrainerExited) -> str:
    """For `status`, until another trainer is attached."""
    if event.restart_in_s is None:
        return event.reason
    times = f", the {event.crashes}th death in a row" if event.crashes > 3 else ""
    when = f"in {event.restart_in_s:.1f} s" if event.restart_in_s else "at once"
    return f"the trainer died ({event.reason}{times}) and is started again {when}"
