"""A real attach socket with a real `TrainerHost`, and behind it the least engine there is: the average of one machine.

θ_{r+1} = θ_r − Δ where the part is counted. Where it is not, the others moved θ by a step of their own, which the
trainer finds in `delta`.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import numpy as np
import torch
import trio
from transformers import LlamaConfig, LlamaForCausalLM

from node import artifacts
from node import manifest as manifests
from node.daemon.trainer_host import Attached, Detached, TrainerEvent, TrainerHost
from node.home import Home
from node.trainer import tokens, wire
from node.trainer.models import flatten, layout_of

SEQUENCE_TOKENS = 32
UNIT_SEQUENCES = 8
BATCH_SEQUENCES = 4
STEPS = 6
PART_ELEMENTS = 1024
MODEL_CONFIG: dict[str, object] = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": SEQUENCE_TOKENS,
    "tie_word_embeddings": True,
}
DEADLINE_S = 60.0
"""For anything that a test waits for; nothing comes near it."""


def small_model(seed: int = 0, **changes: object) -> torch.nn.Module:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**MODEL_CONFIG, **changes}))


def small_run(folder: Path, **inner: object) -> tuple[manifests.Manifest, np.ndarray]:
    """A run on the bytes of this repository's own documents, and its θ_0 [N]. Artifacts go into `folder`."""
    text = b"".join(path.read_bytes() for path in sorted((Path(__file__).parents[2] / "docs").glob("*.md")))
    sequences = len(text) // SEQUENCE_TOKENS
    packed = np.frombuffer(text[: sequences * SEQUENCE_TOKENS], dtype=np.uint8).reshape(-1, SEQUENCE_TOKENS)
    packed = packed.astype(np.uint16)
    folder.mkdir(parents=True, exist_ok=True)
    training = artifacts.store(tokens.serialise(packed[64:]), folder)
    validation = artifacts.store(tokens.serialise(packed[:64]), folder)
    model = small_model()
    layout = layout_of(model)
    theta = np.zeros(layout.elements, np.float32)
    flatten(model, theta)
    manifest = manifests.Manifest(
        format=manifests.FORMAT,
        name="small",
        version="0.1.0",
        creator="nobody",
        model=manifests.Model(architecture="LlamaForCausalLM", config=MODEL_CONFIG),
        layout=manifests.stored_layout(layout),
        tokenizer=None,
        data=manifests.Data(
            kind="tokens",
            sequence_tokens=SEQUENCE_TOKENS,
            unit_sequences=UNIT_SEQUENCES,
            units=(sequences - 64) // UNIT_SEQUENCES,
            artifact="training",
        ),
        validation=manifests.Validation(artifact="validation"),
        inner=manifests.Inner(
            **{
                "lr": 5e-3,
                "schedule": "constant",
                "batch_sequences": BATCH_SEQUENCES,
                "rejoin_warmup_steps": 4,
                **inner,
            }
        ),
        outer=manifests.Outer(),
        rounds=manifests.Rounds(steps=STEPS, part_elements=PART_ELEMENTS),
        admission=manifests.Admission(),
        end=manifests.End(),
        limits=manifests.Limits(),
        initial_state="initial",
        initial_state_hash="0" * 64,
        artifacts={"training": training, "validation": validation},
    )
    return manifest, theta


class PlayedDaemon:
    """`events` has everything that the trainer said; `commits` what was made of it."""

    def __init__(
        self,
        home: Home,
        manifest: manifests.Manifest,
        theta: np.ndarray,
        *,
        folder: Path,
        rounds: int = 1_000_000,
        counts: Callable[[int, int], bool] = lambda _round, _part: True,
        automatic: bool = True,
        lease_units: int = 8,
        validate_every: int = 1,
        device: str = "cpu",
    ) -> None:
        self.home = home
        self.manifest = manifest
        self.folder = folder
        self.rounds = rounds
        self.counts = counts
        self.automatic = automatic
        self.lease_units = lease_units
        self.validate_every = validate_every
        self.device = device
        elements = manifest.layout.elements
        self.parts = -(-elements // PART_ELEMENTS)
        self._theta_fd, self.theta = _memfd(elements)
        self._delta_fd, self.delta = _memfd(elements)
        self._theta_read_fd = os.open(f"/proc/self/fd/{self._theta_fd}", os.O_RDONLY | os.O_CLOEXEC)
        self.theta[:] = theta
        self.gaps = np.ones(elements, bool)
        for tensor in (*manifest.layout.parameters, *manifest.layout.buffers):
            self.gaps[tensor.offset : tensor.offset + int(np.prod(tensor.shape))] = False
        self.round = 0
        self.steps_total = 0
        self.next_unit = 0
        self.holding = False
        self.events: list[TrainerEvent] = []
        self.losses: list[float] = []
        self.pids: list[int] = []
        self._news = trio.Condition()
        self.host: TrainerHost

    # ------------------------------------------------------------ what a test asks for

    def of(self, kind: type) -> list:
        return [event for event in self.events if isinstance(event, kind)]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Looks after each event. Raises `trio.TooSlowError`."""
        with trio.fail_after(DEADLINE_S):
            async with self._news:
                while not condition():
                    await self._news.wait()

    @contextlib.asynccontextmanager
    async def serving(self, **options: float) -> AsyncIterator[TrainerHost]:
        """One life of the daemon; the vectors and the round outlive it, as they do under a supervisor."""
        self.host = TrainerHost(self.home, **options)
        self.host.provide(self.welcome, lambda: (self._theta_read_fd, self._delta_fd))
        async with trio.open_nursery() as nursery:
            await nursery.start(lambda task_status: self.host.run(task_status=task_status))
            nursery.start_soon(self._watch, self.host)
            yield self.host
            nursery.cancel_scope.cancel()

    def start(self) -> wire.RoundStart:
        return wire.RoundStart(
            round=self.round,
            state_hash=self.round.to_bytes(32, "big"),
            lease=(wire.Lease(epoch=0, start=self.next_unit, stop=self.next_unit + self.lease_units),),
            budget_steps=STEPS,
            schedule_step=self.steps_total,
            tokens_total=self.steps_total * BATCH_SEQUENCES * SEQUENCE_TOKENS,
            validate=self.round % self.validate_every == 0,
            last=self.round >= self.rounds,
        )

    def welcome(self) -> wire.Welcome | wire.Waiting:
        if self.holding:
            return wire.Waiting(reason="the test holds the state")
        return wire.Welcome(
            run_id=self.manifest.run_id().hex(),
            peer_id="peer",
            manifest=self.manifest.canonical(),
            artifacts_directory=str(self.folder / "artifacts"),
            trainer_directory=str(self.folder / "trainer"),
            device=self.device,
            threads=1,
            allow_functions=(),
            start=self.start(),
        )

    async def commit(self, contribution: wire.Contribution, *, hard_reset: bool = False) -> wire.Committed:
        """Apply it as the engine does, in place, and tell the trainer."""
        counted = tuple(self.counts(self.round, part) for part in range(self.parts))
        self.advance(counted)
        if any(counted):
            self.next_unit += sum(done.stop - done.start for done in contribution.ranges_done)
        if contribution.loss is not None:
            self.losses.append(contribution.loss)
        message = wire.Committed(
            counted=counted, part_elements=PART_ELEMENTS, hard_reset=hard_reset, start=self.start()
        )
        await self.host.committed(message)
        return message

    def advance(self, counted: tuple[bool, ...]) -> None:
        """θ_r → θ_{r+1}, and in delta what the trainer adds where it was not counted."""
        others = np.random.default_rng(self.round).normal(0, 1e-3, len(self.theta)).astype(np.float32)
        others[self.gaps] = 0
        for part, is_counted in enumerate(counted):
            place = slice(part * PART_ELEMENTS, (part + 1) * PART_ELEMENTS)
            before = self.theta[place].copy()
            self.theta[place] = before - self.delta[place] if is_counted else before + others[place]
            self.delta[place] = 0 if is_counted else self.theta[place] - before
        self.round += 1
        self.steps_total += STEPS

    async def _watch(self, host: TrainerHost) -> None:
        async for event in host.events:
            self.events.append(event)
            if isinstance(event, Attached):
                self.pids.append(event.pid)
            if isinstance(event, wire.Contribution) and self.automatic and event.round == self.round:
                await self.commit(event)
            async with self._news:
                self._news.notify_all()


def why(event: TrainerEvent) -> str:
    assert isinstance(event, Detached)
    return event.reason


def decoded(manifest: bytes) -> manifests.Manifest:
    return msgspec.json.decode(manifest, type=manifests.Manifest)


def _memfd(elements: int) -> tuple[int, np.ndarray]:
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    os.ftruncate(fd, elements * 4)
    return fd, np.frombuffer(mmap.mmap(fd, elements * 4), dtype=np.float32)
