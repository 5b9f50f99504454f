"""What a trainer and the daemon say to each other over the attach socket (`node.ipc` frames).

One trainer is attached at a time. A round from the trainer's side, without overlap:

    Attach → Welcome (descriptors: theta read-only, delta writable)
    … inner steps, Progress every step …
    [Freeze ←]            somebody is ready: a deadline for the rest of the budget
    Contribution →        delta holds θ_r − θ_local; the trainer must not touch delta until the next Committed
    Committed ←           parts counted: θ_local = θ; parts not counted: θ_local += delta; delta is the trainer's again
    Loaded →              the trainer has taken it over and goes on
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

Cause: TypeAlias = Literal["start", "commit", "reset", "not-finite", "reconnect"]


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """Units `[start, stop)` of epoch `epoch`."""

    epoch: int
    start: int
    stop: int


class Attach(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """First message. `layout_digest` of the model as the trainer sees it must equal the manifest's."""

    version: str
    pid: int
    layout_digest: bytes | None
    """None: not known yet; the trainer will build the model from the Welcome's manifest."""
    name: str
    """What status calls it: "atoll trainer" or the user's program."""


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """With it come the descriptors of theta and delta. Sent once state and lease exist (until then: Waiting)."""

    run_id: str
    peer_id: str
    manifest: bytes
    """Canonical bytes of the manifest."""
    artifacts_directory: str
    trainer_directory: str
    """Where the trainer keeps its own checkpoint."""
    device: str
    """The operator's choice: "auto", "cpu", "cuda", "cuda:1"."""
    threads: int
    """Threads for intra-operation parallelism; 0: PyTorch's default."""
    allow_functions: tuple[str, ...]
    """`module:function` names that the operator allows the manifest to name."""
    start: RoundStart


class Waiting(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Why the Welcome (or the next round) is not there yet."""

    reason: str


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The trainer cannot attach; one sentence with the fix. The connection ends."""

    reason: str


class RoundStart(msgspec.Struct, frozen=True, kw_only=True):
    """What a round begins with."""

    round: int
    state_hash: bytes
    lease: tuple[Lease, ...]
    """Units to train on, in this order; what was reported done is no longer in it."""
    budget_steps: int
    """Inner steps after which the trainer contributes by itself."""
    schedule_step: int
    """Position of the learning-rate schedule (inner steps of the run so far, as the run counts them)."""
    tokens_total: int
    """Tokens counted by the run so far."""
    validate: bool
    """Measure validation loss on θ before training on."""
    last: bool
    """The run is over: no more training; export and close."""


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """After each inner step (or less often when steps are short): non-blocking, best effort."""

    round: int
    steps: int
    """Steps of this round."""
    tokens: int
    """Tokens of this round."""
    loss: float | None
    tokens_per_s: float
    step_s: float
    made: int
    """Tokens that the trainers of this machine have made, over all their lives (`node.trainer.made`)."""


class Validated(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    round: int
    loss: float
    tokens: int


class Freeze(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Contribute within `within_s`: the whole budget if there is time, else what you have. 0: after this step."""

    round: int
    within_s: float


class Contribution(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """`delta` is written. `tokens` 0: nothing to contribute."""

    round: int
    steps: int
    tokens: int
    loss: float | None
    """Mean training loss of the round."""
    ranges_done: tuple[Lease, ...]
    """Whole units of the lease trained since the last counted contribution."""
    units_wanted: int
    made: int
    """As in Progress; the round's `tokens` are its newest."""


class Committed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Round `start.round - 1` is applied. `delta` belongs to the trainer again after it has taken over."""

    counted: tuple[bool, ...]
    """Per part: True: θ_local = θ. False: θ_local += delta (increments of that part)."""
    part_elements: int
    hard_reset: bool
    """θ_local = θ everywhere; uncounted work is discarded and reported."""
    start: RoundStart


class Loaded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The trainer has taken over what a Welcome or a Committed gave it, and trains round `round`."""

    round: int
    made: int
    """As in Progress."""
    tokens: int = 0
    """Of this round, in the model or handed over."""
    fresh: bool = False
    """Beside these, no uncounted work is in the model (any more): θ_local = θ when the round began."""
    cause: Cause = "commit"
    """A program that begins; a commit taken over; a hard reset; NaN or infinity in the model; the same model as before
    on a new connection."""


class Goodbye(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The daemon is leaving, or the trainer is; `reason` says why."""

    reason: str


class TrainerFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The trainer cannot go on; one sentence for status, and the process ends."""

    reason: str


ToTrainer: TypeAlias = Welcome | Waiting | Refused | Freeze | Committed | Goodbye
FromTrainer: TypeAlias = Attach | Progress | Validated | Contribution | Loaded | Goodbye | TrainerFailed
