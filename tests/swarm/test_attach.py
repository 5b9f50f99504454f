"""`node.attach()` in a program of one's own, against a real attach socket: exactness, reconnection, clear errors."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
import torch
import trio
from attach_daemon import BATCH_SEQUENCES, PART_ELEMENTS, STEPS, PlayedDaemon, small_model, small_run, why

import node
from node.daemon.trainer_host import Attached, Detached
from node.errors import OperatorError
from node.home import Home
from node.trainer import wire
from node.trainer.errors import AttachRefused, LayoutMismatch, RunChanged
from node.trainer.models import flatten
from node.trainer.outer_optimizer import OuterOptimizer

pytestmark = [pytest.mark.swarm, pytest.mark.slow]

T = TypeVar("T")


def flat(model: torch.nn.Module, like: np.ndarray) -> np.ndarray:
    out = np.full_like(like, np.nan)
    flatten(model, out)
    return out


def train_step(outer: OuterOptimizer, model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> bool:
    loss = model(**batch).loss
    loss.backward()
    outer.inner.step()
    outer.inner.zero_grad()
    return outer.step(tokens=batch["input_ids"].numel(), loss=loss.detach())


async def program(function: Callable[[], T]) -> T:
    """A user's program, in a thread of its own beside the daemon's loop."""
    with trio.fail_after(60):
        return await trio.to_thread.run_sync(function)


def a_daemon(tmp_path: Path, **options: object) -> PlayedDaemon:
    manifest, theta = small_run(tmp_path / "artifacts")
    return PlayedDaemon(Home(tmp_path), manifest, theta, folder=tmp_path, **options)  # type: ignore[arg-type]


def test_without_a_daemon_the_error_names_the_socket_and_the_command(tmp_path: Path) -> None:
    with pytest.raises(node.NoDaemon, match="start `atoll daemon`") as caught:
        node.attach(tmp_path)
    assert str(Home(tmp_path).attach_socket) in str(caught.value)


def test_a_contribution_is_the_difference_and_counted_work_leaves_once(tmp_path: Path) -> None:
    daemon = a_daemon(tmp_path, rounds=3, counts=lambda _round, part: part % 3 != 1)
    seen: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def user() -> None:
        with node.attach(tmp_path) as swarm:
            model = small_model(seed=7)
            inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
            outer = swarm.optimizer(model, inner)
            assert np.array_equal(flat(model, daemon.theta), daemon.theta), "θ_r is loaded"
            for batch in outer.batches(batch_size=BATCH_SEQUENCES):
                theta_before = daemon.theta.copy()
                last_step = outer.steps == STEPS - 1
                loss = model(**batch).loss
                loss.backward()
                inner.step()
                inner.zero_grad()
                local_before = flat(model, daemon.theta)
                assert outer.step(tokens=batch["input_ids"].numel(), loss=loss.detach()) == last_step
                if last_step:
                    seen.append((theta_before, local_before, flat(model, daemon.theta)))
            assert outer.done
            assert outer.discarded_tokens == 0

    async def main() -> None:
        async with daemon.serving():
            await program(user)

    trio.run(main)
    assert len(seen) == 3
    counted = np.repeat([part % 3 != 1 for part in range(daemon.parts)], PART_ELEMENTS)[: len(daemon.theta)]
    moved = 0.0
    for theta_before, local_before, local_after in seen:
        # The commit in `PlayedDaemon.advance`, from the contribution that a NumPy subtraction gives.
        theta_after = np.where(counted, theta_before - (theta_before - local_before), local_after)
        assert np.array_equal(local_after[counted], theta_after[counted])
        increment = local_after - local_before
        moved = max(moved, float(np.abs(increment[~counted]).max()))
    assert moved > 0
    # Counted parts hold θ's bytes; uncounted ones still hold work that θ does not have.
    assert np.array_equal(seen[-1][2][counted], daemon.theta[counted])
    assert not np.array_equal(seen[-1][2][~counted], daemon.theta[~counted])


def test_uncounted_parts_get_exactly_the_increment(tmp_path: Path) -> None:
    daemon = a_daemon(tmp_path, automatic=False, counts=lambda _round, part: part < 5)
    locals_: dict[str, np.ndarray] = {}

    def user() -> None:
        with node.attach(tmp_path) as swarm:
            model = small_model()
            outer = swarm.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
            for batch in outer.batches(batch_size=BATCH_SEQUENCES):
                train = outer.steps < STEPS - 1
                loss = model(**batch).loss
                loss.backward()
                outer.inner.step()
                outer.inner.zero_grad()
                locals_["before"] = flat(model, daemon.theta)
                outer.step(tokens=batch["input_ids"].numel(), loss=loss.detach())
                if not train:
                    locals_["after"] = flat(model, daemon.theta)
                    break

    async def main() -> None:
        async with daemon.serving():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(program, user)
                await daemon.until(lambda: bool(daemon.of(wire.Contribution)))
                assert daemon.host.vectors_free
                delta = daemon.delta.copy()
                theta = daemon.theta.copy()
                assert not delta[daemon.gaps].any()
                assert np.array_equal(delta[~daemon.gaps], (theta - locals_["before"])[~daemon.gaps])
                await daemon.commit(daemon.of(wire.Contribution)[0])
            await daemon.until(lambda: bool(daemon.of(Detached)))
        place = 5 * PART_ELEMENTS
        assert np.array_equal(locals_["after"][:place], daemon.theta[:place])
        assert np.array_equal(locals_["after"][place:], locals_["before"][place:] + daemon.delta[place:])
        assert daemon.delta[place:].any()
        assert [loaded.fresh for loaded in daemon.of(wire.Loaded)] == [True, False]

    trio.run(main)


def test_the_units_of_a_round_that_was_not_counted_are_reported_again(tmp_path: Path) -> None:
    daemon = a_daemon(tmp_path, rounds=3, counts=lambda round, _part: round == 1)

    def user() -> None:
        with node.attach(tmp_path) as swarm:
            model = small_model()
            outer = swarm.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.01))
            for batch in outer.batches(batch_size=BATCH_SEQUENCES):
                train_step(outer, model, batch)

    async def main() -> None:
        async with daemon.serving():
            await program(user)
        first, second, third = daemon.of(wire.Contribution)
        # Three units a round. Round 0 is not counted, so round 1 reports its units too; then they are consumed.
        assert first.ranges_done == (wire.Lease(epoch=0, start=0, stop=3),)
        assert second.ranges_done == (wire.Lease(epoch=0, start=0, stop=6),)
        assert third.ranges_done == (wire.Lease(epoch=0, start=6, stop=9),)
        assert first.units_wanted == 4

    trio.run(main)


def test_a_freeze_without_time_ends_the_round_at_the_next_step_and_a_used_up_lease_too(tmp_path: Path) -> None:
    daemon = a_daemon(tmp_path, lease_units=1)
    steps: list[int] = []

    def user() -> None:
        with node.attach(tmp_path) as swarm:
            model = small_model()
            outer = swarm.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.01))
            train_step(outer, model, next(outer.batches(batch_size=2)))
            trio.from_thread.run(daemon.host.freeze, 0, 0.0)
            assert swarm.link is not None
            assert swarm.link.wait(10)
            assert outer.step(tokens=7)
            assert outer.round == 1
            for batch in outer.batches(batch_size=4):
                train_step(outer, model, batch)
                steps.append(outer.round)
                if outer.round == 3:
                    break

    async def main() -> None:
        async with daemon.serving():
            await program(user)
        contributions = daemon.of(wire.Contribution)
        assert contributions[0].steps == 2
        assert contributions[0].ranges_done == ()
        # The unit in the middle is finished (6 of its 8 sequences are left), then the lease is used up.
        assert contributions[1].ranges_done == (wire.Lease(epoch=0, start=0, stop=1),)
        assert contributions[1].steps == 2
        assert contributions[2].ranges_done == (wire.Lease(epoch=0, start=1, stop=2),)

    trio.run(main)


def test_a_freeze_with_time_leaves_the_budget_whole(tmp_path: Path) -> None:
    daemon = a_daemon(tmp_path, rounds=2)

    def user() -> None:
        with node.attach(tmp_path) as swarm:
            model = small_model()
            outer = swarm.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.01))
            for round_number, within_s in enumerate((60.0, 2.0)):
                outer.step(tokens=7)
                trio.from_thread.run(daemon.host.freeze, round_number, within_s)
                assert swarm.link is not None
                assert swarm.link.wait(10)
                began_s = time.monotonic()
                while not outer.step(tokens=7):
                    if within_s < 60.0:
                        assert time.monotonic() - began_s < within_s, "the daemon has given up by now"
                        time.sleep(0.6)  # a slow step: three of them are more than there is time for

    async def main() -> None:
        async with daemon.serving():
            await program(user)
        whole, cut = daemon.of(wire.Contribution)
        assert whole.steps == STEPS
        assert 2 <= cut.steps <= 4 < STEPS

    trio.run(main)


def test_a_program_with_its_own_loader_counts_tokens_and_reports_no_units(tmp_path: Path) -> None:
    daemon = a_daemon(tmp_path, rounds=2)

    def user() -> None:
        with node.attach(tmp_path, name="mine") as swarm:
            model = small_model()
            outer = swarm.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.01))
            while not outer.done:
                outer.step(tokens=100, loss=1.5)

    async def main() -> None:
        async with daemon.serving() as host:
            await program(user)
            await daemon.until(lambda: bool(daemon.of(Detached)))
            assert host.name is None
        assert [contribution.tokens for contribution in daemon.of(wire.Contribution)] == [100 * STEPS] * 2
        assert all(contribution.ranges_done == () for contribution in daemon.of(wire.Contribution))
        assert all(contribution.loss == 1.5 for contribution in daemon.of(wire.Contribution))
        assert daemon.of(Attached)[0].name == "mine"

    trio.run(main)


def test_a_users_dataset_is_indexed_by_the_lease(tmp_path: Path) -> None:
    daemon = a_daemon(tmp_path, rounds=1)
    size = daemon.manifest.data.units * daemon.manifest.data.unit_sequences
    seen: list[int] = []

    def user() -> None:
        with node.attach(tmp_path) as swarm:
            model = small_model()
            outer = swarm.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.01))
            with pytest.raises(OperatorError, match=f"the dataset has 3 samples and an epoch of the run {size}"):
                outer.batches([0, 1, 2])
            for batch in outer.batches(range(size), batch_size=3):
                seen.extend(batch.tolist())
                outer.step(tokens=3)

    async def main() -> None:
        async with daemon.serving():
            await program(user)
        assert len(set(seen)) == len(seen) == STEPS * 3
        units = [index // 8 for index in seen]
        assert sorted(set(units)) != list(range(len(set(units)))), "places are permuted"
        assert seen[:8] == list(range(units[0] * 8, units[0] * 8 + 8)), "a unit's samples lie in a row"

    trio.run(main)


def test_a_hard_reset_takes_theta_and_trains_the_units_again(tmp_path: Path) -> None:
    daemon = a_daemon(tmp_path, automatic=False, counts=lambda _round, _part: False)
    result: dict[str, object] = {}

    def user() -> None:
        with node.attach(tmp_path) as swarm:
            model = small_model()
            outer = swarm.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
            for batch in outer.batches(batch_size=BATCH_SEQUENCES):
                if train_step(outer, model, batch):
                    result["equal"] = np.array_equal(flat(model, daemon.theta), daemon.theta)
                    result["discarded"] = outer.discarded_tokens
                    result["next"] = outer.cursor.take(1)[0].unit
                    return

    async def main() -> None:
        async with daemon.serving(), trio.open_nursery() as nursery:
            nursery.start_soon(program, user)
            await daemon.until(lambda: bool(daemon.of(wire.Contribution)))
            await daemon.commit(daemon.of(wire.Contribution)[0], hard_reset=True)
        assert result == {"equal": True, "discarded": STEPS * BATCH_SEQUENCES * 32, "next": 0}

    trio.run(main)


def test_a_daemon_that_dies_while_it_holds_the_contribution_gets_it_again(tmp_path: Path) -> None:
    daemon = a_daemon(tmp_path, automatic=False)
    rounds: list[int] = []

    def user() -> None:
        with node.attach(tmp_path) as swarm:
            model = small_model()
            outer = swarm.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
            for batch in outer.batches(batch_size=BATCH_SEQUENCES):
                if train_step(outer, model, batch):
                    rounds.append(outer.round)
                    rounds.append(outer.discarded_tokens)
                    return

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            async with daemon.serving():
                nursery.start_soon(program, user)
                await daemon.until(lambda: bool(daemon.of(wire.Contribution)))
                first, delta = daemon.of(wire.Contribution)[0], daemon.delta.copy()
            daemon.events.clear()
            daemon.delta[:] = np.nan
            async with daemon.serving():
                await daemon.until(lambda: bool(daemon.of(wire.Contribution)))
                assert daemon.of(wire.Contribution) == [first]
                assert np.array_equal(daemon.delta, delta)
                await daemon.commit(first)
                await daemon.until(lambda: bool(daemon.of(Detached)))
        assert rounds == [1, 0]

    trio.run(main)


def test_after_a_round_that_it_missed_a_program_takes_the_whole_state(tmp_path: Path) -> None:
    daemon = a_daemon(tmp_path, automatic=False)
    result: dict[str, object] = {}

    def user() -> None:
        with node.attach(tmp_path) as swarm:
            model = small_model()
            outer = swarm.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
            for batch in outer.batches(batch_size=BATCH_SEQUENCES):
                if train_step(outer, model, batch):
                    result["round"] = outer.round
                    result["equal"] = np.array_equal(flat(model, daemon.theta), daemon.theta)
                    result["discarded"] = outer.discarded_tokens
                    return

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            async with daemon.serving():
                nursery.start_soon(program, user)
                await daemon.until(lambda: bool(daemon.of(wire.Contribution)))
            daemon.advance((False,) * daemon.parts)
            daemon.advance((False,) * daemon.parts)
            async with daemon.serving():
                await daemon.until(
                    lambda: [(one.round, one.fresh) for one in daemon.of(wire.Loaded)][-1:] == [(2, True)]
                )
                await daemon.until(lambda: bool(daemon.of(Detached)))
        assert result == {"round": 2, "equal": True, "discarded": STEPS * BATCH_SEQUENCES * 32}

    trio.run(main)


def test_work_that_is_not_finite_never_leaves_the_machine(tmp_path: Path) -> None:
    daemon = a_daemon(tmp_path, rounds=2)
    finite: list[bool] = []

    def user() -> None:
        with node.attach(tmp_path) as swarm:
            model = small_model()
            outer = swarm.optimizer(model, torch.optim.AdamW(model.parameters(), lr=0.1))
            for batch in outer.batches(batch_size=BATCH_SEQUENCES):
                if outer.round == 0 and outer.steps == 2:
                    with torch.no_grad():
                        next(model.parameters()).fill_(float("nan"))
                train_step(outer, model, batch)
                finite.append(all(bool(p.isfinite().all()) for p in model.parameters()))

    async def main() -> None:
        async with daemon.serving():
            await program(user)
        first, second = daemon.of(wire.Contribution)
        assert (first.steps, first.tokens, first.ranges_done) == (0, 0, ())
        assert second.tokens > 0
        assert finite[-1]
        assert np.isfinite(daemon.theta).all()

    trio.run(main)


def test_another_model_is_refused_with_the_first_tensor_that_differs(tmp_path: Path) -> None:
    daemon = a_daemon(tmp_path)

    def user() -> None:
        with node.attach(tmp_path) as swarm:
            wider = small_model(intermediate_size=96)
            with pytest.raises(LayoutMismatch, match=r"gate_proj.weight' \[64, 32\] where yours .* \[96, 32\]"):
                swarm.optimizer(wider, torch.optim.SGD(wider.parameters(), lr=0.1))

    async def main() -> None:
        async with daemon.serving():
            await program(user)

    trio.run(main)


class Heard(logging.Handler):
    """Sets `event` when a record has `words`; the programs here run in threads of trio."""

    def __init__(self, words: str, event: trio.Event) -> None:
        super().__init__()
        self._words = words
        self._event = event

    def emit(self, record: logging.LogRecord) -> None:
        if self._words in record.getMessage():
            trio.from_thread.run_sync(self._event.set)


def test_a_second_program_is_refused_and_a_waiting_one_is_told_why(tmp_path: Path) -> None:
    daemon = a_daemon(tmp_path)
    daemon.holding = True

    def first() -> None:
        with node.attach(tmp_path, name="first") as swarm:
            assert swarm.peer_id == "peer"
            with pytest.raises(AttachRefused, match="a trainer is attached already \\('first', process"):
                node.attach(tmp_path, name="second")

    async def main() -> None:
        told = trio.Event()
        logger = logging.getLogger("node.trainer.attach")
        logger.setLevel("INFO")
        handler = Heard("the test holds the state", told)
        logger.addHandler(handler)
        try:
            async with daemon.serving() as host:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(program, first)
                    with trio.fail_after(10):
                        await told.wait()
                    assert host.name == "first"
                    assert not host.attached
                    daemon.holding = False
                    host.poke()
                await daemon.until(lambda: bool(daemon.of(Detached)))
        finally:
            logger.removeHandler(handler)
            logger.setLevel("NOTSET")
        assert why(daemon.of(Detached)[0]) == "it has finished"

    trio.run(main)


def test_another_run_in_the_daemons_place_is_an_error(tmp_path: Path) -> None:
    daemon = a_daemon(tmp_path, automatic=False)

    def user() -> None:
        with node.attach(tmp_path) as swarm:
            model = small_model()
            outer = swarm.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
            for _ in range(STEPS - 1):
                outer.step(tokens=1)
            with pytest.raises(RunChanged, match="start this program again"):
                outer.step(tokens=1)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            async with daemon.serving():
                nursery.start_soon(program, user)
                await daemon.until(lambda: bool(daemon.of(wire.Contribution)))
            daemon.manifest, _ = small_run(tmp_path / "artifacts", lr=1.0)
            async with daemon.serving():
                await daemon.until(lambda: bool(daemon.of(Detached)))

    trio.run(main)


def test_a_step_between_rounds_costs_next_to_nothing(tmp_path: Path) -> None:
    daemon = a_daemon(tmp_path)
    spent: list[float] = []

    def user() -> None:
        with node.attach(tmp_path) as swarm:
            model = small_model()
            outer = swarm.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
            loss = torch.tensor(1.0)
            for _ in range(200):
                began = time.perf_counter()
                began_round = outer.step(tokens=100, loss=loss)
                if not began_round:
                    spent.append(time.perf_counter() - began)

    async def main() -> None:
        async with daemon.serving():
            await program(user)
        # 1 % of the shortest step worth the name (10 ms).
        assert sorted(spent)[len(spent) // 2] < 1e-4, sorted(spent)

    trio.run(main)
