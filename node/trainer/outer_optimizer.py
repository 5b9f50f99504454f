"""The outer half of DiLoCo in a training loop: counts inner steps, hands Δ over, takes commits over.

A round without overlap (protocol sections 4 and 8): train `budget_steps` from θ_r, write Δ = θ_r − θ_local, wait for
the commit, then per part θ_local = θ_{r+1} where Δ was counted and θ_local += θ_{r+1} − θ_r where it was not. The
daemon may die at any point: the model stays, the link reconnects, and at most the current round's work is discarded.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import torch

from node.errors import OperatorError
from node.manifest import flat_layout
from node.trainer import wire
from node.trainer.batches import Batches, batch_source
from node.trainer.errors import RunChanged
from node.trainer.lease_cursor import LeaseCursor, Unit
from node.trainer.link import Connected, Lost
from node.trainer.made import TokenCounter
from node.trainer.meter import Meter
from node.trainer.vector import ModelVector, SharedVectors, stretches

if TYPE_CHECKING:
    from node.trainer.attach import Swarm

logger = logging.getLogger(__name__)

PROGRESS_S = 0.2
"""The least between two Progress messages."""
FREEZE_SHARE = 0.75
"""Of the time that a Freeze leaves, what further steps may take; the rest is for a late step and for handing over."""
REMIND_S = 60.0
"""How often the log repeats what a blocked step waits for."""
_POLL_S = 1.0


class _Train(msgspec.Struct, frozen=True, tag=True):
    """Go on with inner steps."""


class _Contribute(msgspec.Struct, frozen=True, tag=True):
    """Write Δ and hand it over."""


class _TakeOver(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Begin the round `start`."""

    start: wire.RoundStart
    counted: tuple[bool, ...] = ()
    part_elements: int = 0
    reset: bool = False
    """θ_local = θ everywhere, whatever `counted` says."""


class _Stop(msgspec.Struct, frozen=True, tag=True):
    """The daemon now serves another run."""

    reason: str


_Action: TypeAlias = _Train | _Contribute | _TakeOver | _Stop
_ACTIONS: msgspec.msgpack.Decoder[_Action] = msgspec.msgpack.Decoder(_Action)


class OuterOptimizer:
    """Made by `Swarm.optimizer`. Call `step` after each step of the inner optimizer; stop when `done`.

    Under `torch.distributed` every rank calls every method; rank 0 talks to the daemon.
    """

    def __init__(self, swarm: Swarm, model: torch.nn.Module, inner: torch.optim.Optimizer) -> None:
        manifest = swarm.manifest
        if manifest.rounds.overlap > 0 or manifest.rounds.fragments > 1:
            raise OperatorError(
                f"the run has overlap = {manifest.rounds.overlap} and fragments = {manifest.rounds.fragments}, which "
                "this version cannot train: join a run with overlap = 0 and fragments = 1"
            )
        self.inner = inner
        self._swarm = swarm
        self._ranks = swarm.ranks
        self._link = swarm.link
        self._connected = swarm.connected
        layout = flat_layout(manifest.layout)
        self._vector = ModelVector(model, layout, self._ranks)
        if self._link is not None:
            self._link.declare(layout.digest())
        self._shared = SharedVectors(self._connected.memory) if self._connected is not None else None
        self._start = swarm.start
        self._equals_theta = True
        self._cursor = LeaseCursor(manifest.data.unit_sequences)
        self._meter = Meter()
        self._handed_over = False
        self._stop_at_s = math.inf
        """Monotonic; a Freeze sets it. The step that would end later than this is not begun."""
        self._validated_round: int | None = None
        self._reason = "training"
        self._waiting_since = 0.0
        self.discarded_tokens = 0
        """Tokens trained here since the program began that no commit will count."""
        self._uncounted_tokens = 0
        self._made = TokenCounter(swarm.directory if self._link is not None else None)
        self._made_before = self._made.tokens
        """The counter when this round began."""
        self._begin(_TakeOver(start=swarm.start, reset=True), cause="start")

    # ------------------------------------------------------------ what a loop sees

    @property
    def round(self) -> int:
        return self._start.round

    @property
    def done(self) -> bool:
        """The run is over: the model holds its last θ."""
        return self._start.last

    @property
    def reason(self) -> str:
        """What the last step waited for, or waits for now, in one sentence."""
        return self._reason

    @property
    def steps(self) -> int:
        """Inner steps of this round so far."""
        return self._meter.steps

    @property
    def budget_steps(self) -> int:
        """Inner steps of this round after which `step` contributes by itself."""
        return self._start.budget_steps

    @property
    def schedule_step(self) -> int:
        """The next inner step's place in the run's learning-rate schedule."""
        return self._start.schedule_step + self._meter.steps

    @property
    def tokens_total(self) -> int:
        """Tokens that the run had counted when this round began."""
        return self._start.tokens_total

    @property
    def wants_validation(self) -> bool:
        """Whether the run wants θ's validation loss now; answer with `report_validation`."""
        return self._start.validate and self._validated_round != self.round

    @property
    def cursor(self) -> LeaseCursor:
        """Where training stands in the lease."""
        return self._cursor

    def resume_lease(self, counted: Mapping[Unit, int]) -> None:
        """Before the first batch: sequences of started units that an earlier program of this machine trained."""
        self._cursor.restore(counted)
        self._cursor.begin(self._start.lease)

    def step(self, *, tokens: int, loss: torch.Tensor | float | None = None) -> bool:
        """An inner step ended that trained on `tokens` tokens (on this rank). True: a new round began.

        Between rounds this costs microseconds and never waits for the device. At the end of the round's budget, or when
        the others have waited long enough, it blocks until the round is committed; `reason` says why. Never raises for
        the network.
        """
        if self.done:
            return False
        self._meter.count(tokens, loss)
        self._made.tokens = self._made_before + self._meter.tokens * self._ranks.world
        self._cursor.trained()
        hurried = self._link is not None and (self._time_is_up() or self._link.has_mail)
        if self._meter.steps < self.budget_steps and not self._ranks.share_flag(hurried):
            self._report_progress()
            return False
        return self._synchronise()

    def batches(self, dataset: Any = None, batch_size: int = 8) -> Batches:
        """Batches of the units leased to this machine, until the run ends; several rounds in one loop.

        Without `dataset`, those of the run's data: dictionaries of `input_ids` and `labels` [batch_size, T], int64, on
        the CPU. With a map-style dataset, its samples at the leased places, collated as a `DataLoader` would. A batch
        has fewer sequences at the end of a lease.
        """
        return Batches(self, batch_source(self._swarm, dataset), batch_size, self._ranks)

    @contextlib.contextmanager
    def global_state(self) -> Iterator[None]:
        """Within, the model holds exactly θ, for validation or export; work that is not counted yet returns after."""
        if self._equals_theta and self._meter.steps == 0:
            yield
            return
        with self._vector.global_state(self._shared):
            yield

    def report_validation(self, loss: float, tokens: int) -> None:
        """The mean loss of θ over `tokens` validation tokens."""
        self._validated_round = self.round
        self._send(wire.Validated(round=self.round, loss=loss, tokens=tokens))

    def finish_round(self) -> bool:
        """Contribute now, whatever the budget says, as when the lease is used up. True: a new round began."""
        if self.done:
            return False
        return self._synchronise(contribute=True)

    # ------------------------------------------------------------ the round's turn

    def _synchronise(self, *, contribute: bool = False) -> bool:
        """Do what rank 0 finds to do until there is training to do. True: a new round began."""
        began = self.round
        action = self._next_action(contribute)
        while not isinstance(action, _Train):
            if isinstance(action, _Stop):
                raise RunChanged(action.reason)
            if isinstance(action, _Contribute):
                self._contribute()
            else:
                self._begin(action)
                contribute = False
            action = self._next_action(contribute and not self._handed_over)
        self._reason = "training"
        return self.round != began

    def _next_action(self, contribute: bool) -> _Action:
        if self._link is None:
            return _ACTIONS.decode(self._ranks.share(None))
        action = self._decide(contribute)
        if self._ranks.world > 1:
            self._ranks.share(msgspec.msgpack.encode(action))
        return action

    def _decide(self, contribute: bool) -> _Action:
        """Rank 0: read the mail; wait while the contribution is handed over."""
        assert self._link is not None
        while True:
            mail = self._link.take()
            action: _Action | None = None
            if mail is None:
                if self.done:
                    return _Train()
                if not self._handed_over:
                    due = contribute or self._time_is_up() or self._meter.steps >= self.budget_steps
                    return _Contribute() if due else _Train()
                self._wait()
            elif isinstance(mail, Connected):
                action = self._reconnected(mail)
            elif isinstance(mail, wire.Committed):
                action = self._committed(mail)
            elif isinstance(mail, wire.Freeze):
                if mail.round == self.round:
                    # Nobody is cut short (protocol section 4, rule 2): the others leave time for the budget.
                    self._stop_at_s = min(self._stop_at_s, time.monotonic() + FREEZE_SHARE * mail.within_s)
            elif isinstance(mail, Lost):
                self._say(f"the daemon is gone ({mail.reason}): reconnecting; the model is kept")
            elif isinstance(mail, wire.Waiting):
                self._reason = mail.reason
            else:
                self._say(mail.reason)
            if action is not None:
                return action

    def _reconnected(self, mail: Connected) -> _Action | None:
        if mail.welcome.run_id != self._swarm.run_id:
            return _Stop(
                f"the daemon now serves the run {mail.welcome.run_id}, and this program trains {self._swarm.run_id}: "
                "start this program again"
            )
        logger.info("attached again at round %d", mail.welcome.start.round)
        self._connected = mail
        self._shared = SharedVectors(mail.memory)
        start = mail.welcome.start
        if (start.round, start.state_hash, start.last) != (self.round, self._start.state_hash, self._start.last):
            return _TakeOver(start=start, reset=True)
        self._say_loaded("reconnect")
        # The daemon may have lost the contribution with its life: the same bytes again.
        return _Contribute() if self._handed_over else None

    def _committed(self, mail: wire.Committed) -> _Action | None:
        if mail.start.round <= self.round and not mail.hard_reset:
            return None  # said twice
        follows = mail.start.round == self.round + 1
        reset = mail.hard_reset or not follows
        if not reset:
            try:
                stretches(mail.counted, mail.part_elements, self._vector.layout.elements)
            except ValueError as error:
                logger.error("the daemon's commit does not fit the model (%s): taking the whole state", error)
                reset = True
        return _TakeOver(start=mail.start, counted=mail.counted, part_elements=mail.part_elements, reset=reset)

    def _time_is_up(self) -> bool:
        """Whether one more step would end after what a Freeze leaves."""
        return time.monotonic() + self._meter.step_s() > self._stop_at_s

    def _wait(self) -> None:
        assert self._link is not None
        if not self._link.wait(_POLL_S) and time.monotonic() - self._waiting_since > REMIND_S:
            self._waiting_since = time.monotonic()
            logger.info("round %d: waiting: %s", self.round, self._reason)

    def _contribute(self) -> None:
        """Hand Δ over. Work that is not finite is thrown away first: it would never leave the model."""
        finite = self._ranks.share_flag(self._vector.write_difference(self._shared))
        if not finite:
            logger.error(
                "the model holds NaN or infinity after %d steps of round %d: back to the round's first state, with a "
                "fresh inner optimizer; if it comes again, lower the run's learning rate",
                self._meter.steps,
                self.round,
            )
            lost = self._tokens_of_all_ranks()
            self._made.tokens = self._made_before + lost
            self._discard(self._uncounted_tokens + lost)
            self._vector.load(self._shared)
            self.inner.state.clear()
            self._equals_theta = True
            self._begin_counting()
            self._cursor.discarded()
            self._cursor.begin(self._start.lease)
            self._say_loaded("not-finite")
            self._vector.write_difference(self._shared)
        tokens = self._tokens_of_all_ranks()
        self._made.tokens = self._made_before + tokens
        if not self._handed_over:
            self._uncounted_tokens += tokens
            self._waiting_since = time.monotonic()
            self._reason = (
                f"round {self.round}: this machine's work is handed over; waiting for the others' to be averaged"
            )
        self._handed_over = True
        self._stop_at_s = math.inf
        self._send(
            wire.Contribution(
                round=self.round,
                steps=self._meter.steps,
                tokens=tokens,
                loss=self._meter.mean_loss(),
                ranges_done=self._cursor.ranges_done(),
                units_wanted=self._units_wanted(tokens),
                made=self._made.tokens,
            )
        )

    def _begin(self, action: _TakeOver, *, cause: wire.Cause | None = None) -> None:
        """Take the state over and begin its round."""
        if action.reset:
            if self._uncounted_tokens or self._meter.steps:
                lost = self._uncounted_tokens + (0 if self._handed_over else self._tokens_of_all_ranks())
                self._discard(lost)
            self._vector.load(self._shared)
            self._equals_theta = True
            self._cursor.discarded()
        else:
            kinds = stretches(action.counted, action.part_elements, self._vector.layout.elements)
            self._vector.take_over(self._shared, kinds)
            self._equals_theta = all(action.counted) and self._handed_over
            if self._handed_over and any(action.counted):
                self._cursor.counted()
                self._uncounted_tokens = 0
            elif not self._handed_over:
                self._uncounted_tokens += self._tokens_of_all_ranks()
        self._start = action.start
        self._handed_over = False
        self._stop_at_s = math.inf
        self._cursor.begin(action.start.lease)
        self._begin_counting()
        self._say_loaded(cause or ("reset" if action.reset else "commit"))

    # ------------------------------------------------------------ small things

    def _begin_counting(self) -> None:
        self._meter.begin()
        self._made_before = self._made.tokens

    def _say_loaded(self, cause: wire.Cause) -> None:
        self._send(
            wire.Loaded(
                round=self.round,
                made=self._made.tokens,
                tokens=self._made.tokens - self._made_before,
                fresh=self._equals_theta,
                cause=cause,
            )
        )

    def _discard(self, tokens: int) -> None:
        self._uncounted_tokens = 0
        self.discarded_tokens += tokens
        if tokens:
            logger.warning(
                "round %d: %d tokens of uncounted work are discarded: taking the whole state", self.round, tokens
            )

    def _tokens_of_all_ranks(self) -> int:
        return int(self._ranks.sum(float(self._meter.tokens))[0])

    def _units_wanted(self, tokens: int) -> int:
        """Units of a full budget at this round's appetite, and one for the unit in the middle."""
        data, inner = self._swarm.manifest.data, self._swarm.manifest.inner
        a_step = tokens / self._meter.steps if tokens else inner.batch_sequences * data.sequence_tokens
        return math.ceil(a_step * self.budget_steps / (data.sequence_tokens * data.unit_sequences)) + 1

    def _report_progress(self) -> None:
        if self._link is None or not self._meter.due(PROGRESS_S):
            return
        meter = self._meter
        self._send(
            wire.Progress(
                round=self.round,
                steps=meter.steps,
                tokens=meter.tokens * self._ranks.world,
                loss=meter.recent_loss(),
                tokens_per_s=meter.tokens_per_s() * self._ranks.world,
                step_s=meter.step_s(),
                made=self._made.tokens,
            ),
            or_drop=True,
        )

    def _send(self, message: wire.FromTrainer, *, or_drop: bool = False) -> None:
        if self._link is not None and self._connected is not None:
            self._link.send(message, self._connected.connection, or_drop=or_drop)

    def _say(self, reason: str) -> None:
        if reason != self._reason:
            logger.warning("%s", reason)
        self._reason = reason
