"""The trainer's side of a round, in the orders of events that a fast machine hides."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import msgspec
import trio
import trio.testing
from run_samples import CREATOR, VALID

from node.daemon.contribution import WITH_THE_TRAINER, Place, WorkLedger
from node.daemon.engine_client import EngineClient, EngineFailed
from node.daemon.identity import Identity
from node.daemon.observations import Observations
from node.daemon.store import Store
from node.daemon.trainer_host import Attached, Detached, TrainerHost
from node.daemon.training import Training
from node.daemon.work_book import WorkBook
from node.daemon.work_file import WorkFile
from node.engine import api
from node.manifest import Manifest, rules_of
from node.settings import DaemonSettings
from node.trainer import wire
from protocol.chain import ChainState, genesis
from protocol.events import Event, Frozen, TrainerProgress

RULES = rules_of(VALID)
PARTS = RULES.part_count
FIRST = genesis(RULES)
SECOND = replace(FIRST, base=replace(FIRST.base, round=1, prev=bytes([1]) * 32))
WORK = wire.Contribution(round=0, steps=5, tokens=320, loss=2.0, ranges_done=(), units_wanted=3, made=320)
ENCODED = api.Encoded(id=1, parts_root=bytes(32), norm=1.0, largest=0.5, finite=True)


class Engine:
    """Answers `encode` when it is let, with an error if the disk is full."""

    def __init__(self) -> None:
        self.asked = trio.Event()
        self.answer = trio.Event()
        self.full = False

    async def encode(self, *, base: bytes) -> api.Encoded:
        self.asked.set()
        await self.answer.wait()
        if self.full:
            raise EngineFailed("No space left on device")
        return ENCODED


class Host:
    """The place of a trainer; tests say who is there."""

    def __init__(self) -> None:
        self.attached = False
        self.loaded = False
        self.told: list[wire.Committed] = []

    def provide(self, *_: object) -> None:
        pass

    def poke(self) -> None:
        pass

    async def freeze(self, round: int, within_s: float) -> None:
        pass

    async def committed(self, message: wire.Committed) -> None:
        await trio.lowlevel.checkpoint()
        self.told.append(message)


class Scene:
    def __init__(self, tmp_path: Path, *, starts_trainer: bool = True, manifest: Manifest = VALID) -> None:
        self.engine, self.host = Engine(), Host()
        self.observations = Observations()
        self.posted: list[Event] = []
        self.speeds: dict[str, float] = {}
        self.store = Store(tmp_path, RULES, cast(Identity, _Me()))
        self.work = WorkBook(
            file=WorkFile(tmp_path / "work"),
            store=self.store,
            peer=CREATOR,
            rules=RULES,
            observations=self.observations,
        )
        self.ledger = self.work.ledger
        self.training = Training(
            settings=DaemonSettings(home=str(tmp_path), device="auto" if starts_trainer else "none"),
            identity=cast(Identity, _Me()),
            manifest=manifest,
            manifest_body=b"",
            rules=RULES,
            host=cast(TrainerHost, self.host),
            work=self.work,
            observations=self.observations,
            artifacts_directory="",
            trainer_directory="",
            post=self.posted.append,
            speeds=lambda: self.speeds,
        )
        self.training.engine = cast(EngineClient, self.engine)

    async def begin(self, state: ChainState) -> None:
        await self.training.begin(state, counted=None, hard_reset=True)

    async def attach(self) -> None:
        assert isinstance(self.training._welcome(), wire.Welcome)
        self.host.attached = True
        self.host.loaded = True

    @property
    def remaining_s(self) -> float | None:
        return next(event.remaining_s for event in reversed(self.posted) if isinstance(event, TrainerProgress))

    @property
    def frozen(self) -> list[Frozen]:
        return [event for event in self.posted if isinstance(event, Frozen)]


class _Me:
    peer_id = CREATOR


def detached() -> Detached:
    return Detached(name="one", reason="it died", failed=False)


async def _a_commit_overtakes_the_contribution(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    await scene.training.resume(FIRST)
    await scene.attach()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(scene.training.handle, WORK)
        await scene.engine.asked.wait()
        scene.ledger.settle(FIRST.base.digest(), [], Place(round=1, prev=b"", lineage=b""))
        await scene.training.begin(SECOND, counted=(False,) * PARTS, hard_reset=False)
        scene.engine.answer.set()
    assert not scene.frozen, "it is of a round that is over"
    assert not scene.training.contributes, "nothing is encoded for the new round"
    await scene.training.freeze(SECOND.base, 0.0)
    assert [event.base for event in scene.frozen] == [SECOND.base], "the new round gets its READY without work"


def test_a_contribution_encoded_too_late_says_nothing_about_the_next_round(tmp_path: Path) -> None:
    trio.run(partial(_a_commit_overtakes_the_contribution, tmp_path), clock=_clock())


async def _the_engine_dies_after_a_commit(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.engine.answer.set()
    await scene.training.resume(FIRST)
    await scene.attach()
    await scene.training.handle(WORK)
    with trio.CancelScope() as session:
        session.cancel()
        await scene.training.begin(SECOND, counted=(True,) * PARTS, hard_reset=False)
    assert [message.counted for message in scene.host.told] == [(True,) * PARTS]


def test_a_trainer_hears_what_was_counted_whatever_happens_to_the_engine(tmp_path: Path) -> None:
    trio.run(partial(_the_engine_dies_after_a_commit, tmp_path), clock=_clock())


async def _a_full_disk(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    await scene.training.resume(FIRST)
    await scene.attach()
    scene.engine.full = True
    scene.engine.answer.set()
    await scene.training.handle(WORK)
    assert [event.tokens for event in scene.frozen] == [()]
    scene.ledger.settle(FIRST.base.digest(), [], Place(round=1, prev=b"", lineage=b""))
    work = scene.ledger.status()
    assert (work.produced_tokens, work.carried_tokens, work.discarded_tokens) == (320, 320, 0)


def test_a_contribution_that_the_disk_refuses_is_carried(tmp_path: Path) -> None:
    trio.run(partial(_a_full_disk, tmp_path), clock=_clock())


async def _news_of_the_last_trainer_comes_late(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.engine.answer.set()
    await scene.training.resume(FIRST)
    await scene.attach()
    progress = wire.Progress(round=0, steps=2, tokens=128, loss=2.0, tokens_per_s=1.0, step_s=0.1, made=128)
    await scene.training.handle(progress)
    await scene.attach()  # the next one: welcomed before the daemon read that the first has gone
    await scene.training.handle(detached())
    await scene.training.handle(Attached(name="two", pid=2, layout_digest=None, round=0))
    await scene.training.handle(wire.Loaded(round=0, made=192, fresh=True, cause="start"))
    # What the first did not hand over, its last step included, of which it never told.
    assert scene.ledger.status().discarded == {WITH_THE_TRAINER: 192}
    await scene.training.handle(msgspec.structs.replace(WORK, made=512))
    assert [event.tokens for event in scene.frozen] == [((PARTS, 320),)], "the second one's work counts"
    await scene.training.begin(SECOND, counted=(True,) * PARTS, hard_reset=False)
    assert [message.start.round for message in scene.host.told] == [1]


async def _a_trainer_builds_its_model(tmp_path: Path) -> None:
    scene = Scene(tmp_path, starts_trainer=False)
    later = replace(FIRST, base=replace(FIRST.base, round=3, prev=bytes([3]) * 32))
    await scene.training.resume(later)
    await scene.attach()
    scene.host.loaded = False
    await scene.training.handle(Attached(name="a user's", pid=2, layout_digest=None, round=3))
    assert scene.remaining_s is None, "as good as none"
    await scene.training.freeze(later.base, 30.0)
    assert [event.tokens for event in scene.frozen] == [()], "the others do not wait for it"
    scene.host.loaded = True
    await scene.training.handle(wire.Loaded(round=3, made=0, fresh=True, cause="start"))
    assert scene.remaining_s is not None


def test_a_trainer_that_builds_its_model_is_not_waited_for(tmp_path: Path) -> None:
    trio.run(partial(_a_trainer_builds_its_model, tmp_path), clock=_clock())


def test_a_trainer_that_follows_at_once_is_not_taken_for_the_one_that_went(tmp_path: Path) -> None:
    trio.run(partial(_news_of_the_last_trainer_comes_late, tmp_path), clock=_clock())


async def _caught_up_with_nothing(tmp_path: Path, after: ChainState) -> WorkLedger:
    scene = Scene(tmp_path)
    scene.engine.answer.set()
    await scene.training.resume(FIRST)
    await scene.attach()
    await scene.training.handle(WORK)
    scene.training.pause("the node is behind the run and catches up")
    await scene.training.resume(after)
    assert len([event for event in scene.frozen if event.tokens]) == (2 if after is FIRST else 1)
    return scene.ledger


def test_work_is_kept_when_catching_up_changed_nothing(tmp_path: Path) -> None:
    ledger = trio.run(partial(_caught_up_with_nothing, tmp_path, FIRST), clock=_clock())
    assert (ledger.status().carried_tokens, ledger.status().discarded_tokens) == (320, 0)


def test_work_is_reported_as_discarded_when_catching_up_brought_another_state(tmp_path: Path) -> None:
    ledger = trio.run(partial(_caught_up_with_nothing, tmp_path, SECOND), clock=_clock())
    assert (ledger.status().carried_tokens, ledger.status().discarded_tokens) == (0, 320)


async def _many_sentences() -> None:
    seen = Observations()
    assert seen.misbehaved("one")
    assert not seen.misbehaved("one")
    news = [seen.misbehaved(f"handed over a message that {number} did not sign" + "x" * 999) for number in range(5000)]
    assert sum(news) < 100
    assert len(seen.problems) < 100
    assert sum(seen.problems.values()) == 5002
    assert max(map(len, seen.problems)) <= 200


def test_what_strangers_say_does_not_pile_up_in_the_status() -> None:
    trio.run(_many_sentences, clock=_clock())


async def _speeds_of_one_two_and_four(tmp_path: Path) -> None:
    bounded = msgspec.structs.replace(VALID.rounds, steps_least=2, steps_most=15)
    slow, middle = "12D3KooWslow", "12D3KooWmiddle"
    scene = Scene(tmp_path, manifest=msgspec.structs.replace(VALID, rounds=bounded))
    members = (*FIRST.members, (slow, FIRST.members[0][1]), (middle, FIRST.members[0][1]))
    state = replace(FIRST, members=members)
    told = []
    for mine in (0.0, 400.0, 100.0, 9000.0):
        scene.speeds = {CREATOR: mine, slow: 100.0, middle: 200.0, "no member": 1e9}
        await scene.begin(state)
        start = scene.training._start(state)
        assert start is not None
        told.append(start.budget_steps)
    assert told == [5, 10, 5, 15], "unknown, the fastest of three, one of two slow ones, and as many as there may be"
    await scene.begin(FIRST)
    assert scene.training.budget_steps == 5, "alone there is nobody to wait for"


def test_a_budget_follows_the_speeds_of_the_members(tmp_path: Path) -> None:
    trio.run(_speeds_of_one_two_and_four, tmp_path)


def _clock() -> trio.testing.MockClock:
    return trio.testing.MockClock(autojump_threshold=0)
