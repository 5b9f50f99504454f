"""Between the attached trainer, the engine and the state machine: freezing a contribution, taking a commit over.

`delta` has one owner at a time (design section 2). The trainer writes it while it trains; from its Contribution until
the next Committed it is the engine's. A commit is applied only when the trainer has let go of it, or has been given up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import structlog
import trio

from node.daemon.contribution import NOT_FINITE, STATE_REPLACED, TOO_LATE, WITH_THE_TRAINER
from node.daemon.engine_client import EngineClient, EngineFailed
from node.daemon.identity import Identity
from node.daemon.observations import Observations
from node.daemon.trainer_host import Attached, Detached, TrainerHost
from node.daemon.work_book import WorkBook
from node.engine import api
from node.manifest import Manifest
from node.settings import DaemonSettings
from node.trainer import wire
from protocol.budgets import budget_steps
from protocol.chain import ChainState, member
from protocol.events import Event, Frozen, TrainerProgress
from protocol.messages import Commit, UnitRange
from protocol.names import Base, PeerId
from protocol.ready_limits import runs_limit
from protocol.rules import Rules

SURRENDER_S = 10.0
"""How long a commit waits for a trainer in the middle of a step before its work is given up."""

log = structlog.get_logger()


class Training:
    """The trainer's side of the current round. One per run session; the trainer may come and go."""

    def __init__(
        self,
        *,
        settings: DaemonSettings,
        identity: Identity,
        manifest: Manifest,
        manifest_body: bytes,
        rules: Rules,
        host: TrainerHost,
        work: WorkBook,
        observations: Observations,
        artifacts_directory: str,
        trainer_directory: str,
        post: Callable[[Event], None],
        speeds: Callable[[], Mapping[PeerId, float]],
    ) -> None:
        """`speeds`: tokens/s of all peers of the run, this one among them, as they say themselves; 0: unknown."""
        self._settings = settings
        self._identity = identity
        self._manifest = manifest
        self._manifest_body = manifest_body
        self._rules = rules
        self._host = host
        self._work = work
        self._observations = observations
        self._artifacts_directory = artifacts_directory
        self._trainer_directory = trainer_directory
        self._post = post
        self._speeds = speeds
        self.budget_steps = manifest.rounds.steps
        """Inner steps of the present round here."""
        self.engine: EngineClient | None = None
        self.fds = (-1, -1)
        """theta (read-only) and delta of the present engine; the session's."""
        self._state: ChainState | None = None
        self._contribution: wire.Contribution | None = None
        self._encoded: api.Encoded | None = None
        self._frozen = False
        """Whether the machine has been told Frozen for this round. One without work gives way to one with."""
        self._paused: str | None = "the daemon is starting"
        self._applying = False
        """The engine writes theta and delta: nobody is welcomed."""
        self._welcomed_round: int | None = None
        """Round that the attached trainer works in; None: it waits for a Welcome or a Committed."""
        self._let_go = trio.Event()
        self._validated = trio.Event()
        """The attached trainer has measured the present state, or is not asked to."""
        self._hard_reset = False
        self._reset_reason = STATE_REPLACED
        """Why the trainer is told to start from θ."""
        self._progress: wire.Progress | None = None
        """The newest of the current round."""
        host.provide(self._welcome, lambda: self.fds)

    # ------------------------------------------------------------ rounds

    def pause(self, reason: str) -> None:
        """No round goes on (start, catching up, no engine): an attaching trainer waits, and is told why."""
        self._paused = reason

    async def resume(self, state: ChainState, *, frozen_stays: bool = False) -> None:
        """Rounds go on from `state`: the same round where it was, or another, which no commit here led to.

        `frozen_stays`: another lineage is followed, and this node may come back to what is frozen.
        """
        self._paused = None
        await self._work.read_chain()
        if self._state is not None and self._state.base == state.base:
            await self.rebase(state)
        else:
            if self._state is not None:  # else the trainer, which may have outlived this daemon, tells what it holds
                frozen_stays = frozen_stays or self._work.frozen_for(state.base.digest())
                self._work.discard(STATE_REPLACED, frozen_stays=frozen_stays)
            await self.begin(state, counted=None, hard_reset=True)

    async def begin(self, state: ChainState, *, counted: tuple[bool, ...] | None, hard_reset: bool) -> None:
        """A round begins on `state`. `counted` is None when no commit led here (start, catch-up): a hard reset."""
        self._state = state
        self._contribution = None
        self._encoded = None
        self._frozen = False
        self._applying = False
        self._let_go = trio.Event()
        self.budget_steps = self._budget(state)
        start = self._start(state)
        self._validated = trio.Event()
        if start is None or not start.validate:
            self._validated.set()
        if start is None:
            self._post(TrainerProgress(remaining_s=None, units_wanted=self._units_wanted()))
            self._hard_reset = True
            return
        reset = hard_reset or self._hard_reset or counted is None
        self._hard_reset = False
        if self._host.attached and self._welcomed_round is not None:
            self._welcomed_round = state.base.round
            # Also when the engine dies at this very moment: a trainer that never heard which of its work was counted
            # would wait for it through all rounds to come.
            with trio.CancelScope(shield=True):
                await self._host.committed(
                    wire.Committed(
                        counted=counted if counted is not None else (),
                        part_elements=self._rules.part_elements,
                        hard_reset=reset,
                        start=start,
                    )
                )
        else:
            self._host.poke()
        self._post_progress()

    async def rebase(self, state: ChainState) -> None:
        """The run goes on as another lineage, same round and outer state: what is frozen is offered there anew."""
        contribution = self._contribution
        self._state = state
        self._frozen = False
        self._applying = False
        if contribution is not None:
            await self._offer(state.base, contribution)
        elif self._welcomed_round is None:
            self._host.poke()

    def _start(self, state: ChainState) -> wire.RoundStart | None:
        mine = member(state, self._identity.peer_id)
        if mine is None:
            return None
        number = state.base.round
        last = self._is_last(state)
        return wire.RoundStart(
            round=number,
            state_hash=state.base.state_hash,
            lease=tuple(wire.Lease(epoch=held.epoch, start=held.start, stop=held.stop) for held in mine.lease),
            budget_steps=self.budget_steps,
            schedule_step=number * self._manifest.rounds.steps,
            tokens_total=state.tokens_total,
            validate=last or number % self._manifest.validation.every_rounds == 0,
            last=last,
        )

    def _budget(self, state: ChainState) -> int:
        least, most = self._manifest.rounds.step_bounds
        speeds, me = self._speeds(), self._identity.peer_id
        others = [speeds.get(peer, 0.0) for peer, _ in state.members if peer != me]
        return budget_steps(self._manifest.rounds.steps, speeds.get(me, 0.0), others, least=least, most=most)

    def _is_last(self, state: ChainState) -> bool:
        rules = self._rules
        if rules.final_round is not None and state.base.round >= rules.final_round:
            return True
        return rules.final_tokens is not None and state.tokens_total >= rules.final_tokens

    def _welcome(self) -> wire.Welcome | wire.Waiting:
        state = self._state
        if state is None or self._paused is not None:
            return wire.Waiting(reason=self._paused or "the daemon is starting")
        start = self._start(state)
        if start is None:
            return wire.Waiting(reason="this node is not a member yet: its JOIN must be committed first")
        if self._applying:
            return wire.Waiting(reason=f"the commit of round {start.round} is being applied")
        if self._contribution is not None:
            return wire.Waiting(reason=f"the contribution of round {start.round} is already handed over")
        self._welcomed_round = start.round
        self._hard_reset = False
        if self._let_go.is_set():
            self._let_go = trio.Event()  # by the trainer before this one, which has work of its own to hand over
        return wire.Welcome(
            run_id=self._rules.run.hex(),
            peer_id=self._identity.peer_id,
            manifest=self._manifest_body,
            artifacts_directory=self._artifacts_directory,
            trainer_directory=self._trainer_directory,
            device=self._settings.device,
            threads=self._settings.threads,
            allow_functions=self._settings.allow_functions,
            start=start,
        )

    # ------------------------------------------------------------ from the trainer

    async def handle(self, event: object) -> None:
        """One event of the trainer host."""
        if isinstance(event, wire.Progress):
            self._work.report(event.made)
            if self._works_in(event.round):
                self._progress = event
                self._observations.loss = event.loss if event.loss is not None else self._observations.loss
                self._observations.tokens_per_s = event.tokens_per_s
                self._observations.speed.saw(event.round, event.tokens_per_s)
                self._post_progress()
        elif isinstance(event, wire.Validated):
            self._observations.saw_validation(event.round, event.loss)
            if self._works_in(event.round):
                self._validated.set()
            log.info("validated", round=event.round, loss=round(event.loss, 4))
        elif isinstance(event, wire.Contribution):
            await self._contributed(event)
        elif isinstance(event, wire.Loaded):
            self._loaded(event)
            self._post_progress()
        elif isinstance(event, Attached):
            self._progress = None
            self._post_progress()
        elif isinstance(event, Detached):
            self._detached()

    def _loaded(self, event: wire.Loaded) -> None:
        """The trainer says what its model holds beside θ."""
        if not event.fresh:
            self._work.report(event.made)
            return
        reasons = {"start": WITH_THE_TRAINER, "not-finite": NOT_FINITE}
        self._work.loaded(event.made, event.tokens, reasons.get(event.cause, self._reset_reason))
        self._reset_reason = STATE_REPLACED

    def _works_in(self, round_number: int) -> bool:
        return (
            self._state is not None and self._state.base.round == round_number and self._welcomed_round == round_number
        )

    def _detached(self) -> None:
        """The trainer is gone, or only its connection."""
        if self._host.attached:
            return  # the next one was welcomed before this news of the last one was read: its `Attached` says the same
        self._progress = None
        self._welcomed_round = None
        self._let_go.set()
        self._validated.set()
        self._post(TrainerProgress(remaining_s=None, units_wanted=self._units_wanted()))

    async def _contributed(self, contribution: wire.Contribution) -> None:
        state = self._state
        if state is None or not self._works_in(contribution.round) or self._contribution is not None:
            log.warning("a contribution for another round is ignored", round=contribution.round)
            return
        self._contribution = contribution
        self._observations.round_loss = contribution.loss
        self._work.hand_over(contribution.made, contribution.tokens)
        self._let_go.set()
        if self._paused is not None:
            return  # `resume` offers it
        await self._offer(state.base, contribution)

    async def _offer(self, base: Base, contribution: wire.Contribution) -> None:
        """Encode what the trainer handed over, and tell the machine. The same `delta` gives the same bytes."""
        if self.engine is None or contribution.tokens == 0:
            self._send_frozen(base, (), None, contribution)
            return
        try:
            encoded = await self.engine.encode(base=base.digest())
        except trio.BrokenResourceError:
            return  # the engine is restarting: the session starts over and asks for the contribution again
        except EngineFailed as error:
            log.error("the contribution cannot be stored: its work is carried to a later round", why=str(error))
            self._observations.count(["contribution not stored"])
            if self._offers(base, contribution):
                self._send_frozen(base, (), None, contribution)
            return
        if self._state is None or not self._offers(base, contribution):
            return  # a commit that did not wait for it came first
        if not encoded.finite:
            log.error("the trainer's pseudo-gradient holds NaN or infinity: it is discarded", round=contribution.round)
            self._observations.count(["pseudo-gradient not finite"])
            self._hard_reset = True
            self._reset_reason = NOT_FINITE
            self._send_frozen(base, (), None, contribution)
            return
        runs_max = runs_limit(len(self._state.members))
        tokens = await self._work.freeze(base.digest(), encoded.parts_root, runs_max=runs_max)
        if not self._offers(base, contribution):
            return
        self._encoded = encoded
        self._send_frozen(base, tokens, encoded, contribution)

    def _offers(self, base: Base, contribution: wire.Contribution) -> bool:
        """Whether this is still the round, and the contribution, that is in hand."""
        return self._state is not None and self._state.base == base and self._contribution is contribution

    def _send_frozen(
        self,
        base: Base,
        tokens: tuple[tuple[int, int], ...],
        encoded: api.Encoded | None,
        contribution: wire.Contribution | None,
    ) -> None:
        with_work = any(value > 0 for _, value in tokens)
        if self._frozen and not with_work:
            return
        self._frozen = True
        self._observations.saw_ready()
        ranges = () if encoded is None or contribution is None else contribution.ranges_done
        self._post(
            Frozen(
                base=base,
                tokens=tokens,
                norm=encoded.norm if encoded is not None else 0.0,
                largest=encoded.largest if encoded is not None else 0.0,
                ranges_done=tuple(UnitRange(epoch=done.epoch, start=done.start, stop=done.stop) for done in ranges),
                units_wanted=self._units_wanted(),
                parts_root=encoded.parts_root if encoded is not None and with_work else b"",
            )
        )

    # ------------------------------------------------------------ for the driver

    async def freeze(self, base: Base, within_s: float) -> None:
        """`Freeze` of the state machine: the trainer's contribution within `within_s`, else a READY without work."""
        if self._state is None or self._state.base != base or self._handed_over():
            return
        if self._host.loaded and self._welcomed_round is not None:
            await self._host.freeze(base.round, within_s)
        elif not self._settings.starts_trainer:
            self._send_frozen(base, (), None, None)
            return
        with trio.move_on_after(within_s):
            await self._let_go.wait()
        # A contribution sends its own Frozen as soon as it is encoded.
        if not self._handed_over() and self._state is not None and self._state.base == base:
            self._send_frozen(base, (), None, None)

    def _handed_over(self) -> bool:
        return self._contribution is not None

    @property
    def contributes(self) -> bool:
        return self._encoded is not None

    async def wait_validated(self) -> None:
        """Until the trainer has measured the present state, if it is to; not for one that is gone or never measures."""
        if self._welcomed_round is not None and self._observations.validation_loss is not None:
            await self._validated.wait()

    async def surrender(self) -> bool:
        """Get the vectors for a commit. False: the trainer held work back and was cut off; it starts again from θ."""
        state = self._state
        self._applying = True
        if state is None or self._host.vectors_free:
            return True
        step_s = self._progress.step_s if self._progress is not None else 0.0
        handed_over = await self._host.hold(state.base.round, max(SURRENDER_S, 3 * step_s))
        if not handed_over:
            self._reset_reason = TOO_LATE
        return handed_over

    def settle(self, commit: Commit, counted: tuple[bool, ...], after: ChainState) -> bool:
        """A commit is applied, and `counted` parts have left the local model. True: the trainer must start from θ.

        That is when the commit counts a READY of this node's whose bytes an earlier life of it froze: what is in the
        local model of that work would be contributed once more (protocol section 8).
        """
        tokens = self._work.settle(commit, after)
        return any(value and not left for value, left in zip(tokens, counted, strict=False))

    def _post_progress(self) -> None:
        remaining: float | None = None
        if self._host.loaded and self._welcomed_round is not None and self._state is not None:
            progress = self._progress
            steps = self.budget_steps
            if progress is not None and progress.round == self._state.base.round:
                remaining = max(0.0, (steps - progress.steps) * progress.step_s)
            elif progress is not None:
                remaining = steps * progress.step_s
            else:
                remaining = self._rules.ready_max_s
        elif self._settings.starts_trainer and self._state is not None and self._state.base.round == 0:
            # Everybody's trainer is starting: the run's first round is worth waiting for all of them.
            remaining = self._rules.ready_max_s
        self._post(TrainerProgress(remaining_s=remaining, units_wanted=self._units_wanted()))

    def _units_wanted(self) -> int:
        """Units of a round's steps, rounded up, and one more for the unit in progress."""
        sequences = self.budget_steps * self._manifest.inner.batch_sequences
        units = math.ceil(sequences / self._manifest.data.unit_sequences) + 1
        return min(units, self._rules.lease_cap_units)
