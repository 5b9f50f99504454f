"""What every engine must do, whatever averages (design section 10): both go through the same cases, as real processes.

What hivemind cannot hold stands here by the names of `node.engines.LIMITS`, as failures that must come.
Where hivemind is not installed, its half is skipped; `ATOLL_HIVEMIND_PYTHON` names an interpreter that has it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
import trio

from node.engine import api
from node.engine.hivemind import environment
from node.engines import ATOLL, HIVEMIND, LIMITS
from protocol.weights import part_weights
from tests import reference
from tests.swarm.engine_lab import LabEngine, Round, Sizes, flat_round, lab
from tests.swarm.test_engine_audit import request as recompute_request

pytestmark = [pytest.mark.slow, pytest.mark.swarm]

WHY_NOT = environment.why_missing(os.environ.get(environment.VARIABLE, ""))
NEEDS_HIVEMIND = pytest.mark.skipif(WHY_NOT is not None, reason=f"hivemind's half is skipped: {WHY_NOT}")
BOTH = pytest.mark.parametrize("engine", [ATOLL, pytest.param(HIVEMIND, marks=NEEDS_HIVEMIND)])

PATIENCE_S = 60.0 * float(os.environ.get("ATOLL_TEST_PATIENCE", "1"))
MAX_ERROR = {
    (ATOLL, "fp32"): 1e-6,
    (ATOLL, "fp16"): 1e-3,
    (ATOLL, "int8"): 1e-2,
    (HIVEMIND, "fp32"): 1e-6,
    (HIVEMIND, "fp16"): 2e-3,
    (HIVEMIND, "int8"): 4e-2,
}
"""Root mean square of the error over that of the mean."""
SMALL = 5 * 1024 + 512
MANY = 300 * 1024


def cannot_hold(name: str) -> pytest.MarkDecorator:
    """Both engines; hivemind must fail, by its name."""
    expected = pytest.mark.xfail(strict=True, raises=AssertionError, reason=LIMITS[HIVEMIND][name])
    limited = pytest.param(HIVEMIND, marks=[NEEDS_HIVEMIND, expected], id=f"hivemind-cannot-hold-{name}")
    return pytest.mark.parametrize("engine", [ATOLL, limited])


def sizes_of(engine: str, codec: str, elements: int = SMALL) -> Sizes:
    return Sizes(elements=elements, buffer_elements=0, part_elements=1024, codec=codec, engine=engine)


def fill(turn: Round) -> list[np.ndarray]:
    rng = np.random.default_rng(turn.number)
    for engine in turn.engines:
        engine.delta[:] = 0.01 * rng.standard_normal(turn.lab.sizes.elements).astype(np.float32)
    return [np.array(engine.delta) for engine in turn.engines]


def averaged(engine: LabEngine, turn: Round, ref: api.PartRef) -> np.ndarray:
    """The part as it lies on this engine's disk."""
    sizes = turn.lab.sizes
    start, stop = ref.part * sizes.part_elements, min((ref.part + 1) * sizes.part_elements, sizes.elements)
    slot = len(reference.encode(sizes.codec, np.zeros(sizes.part_elements, np.float32)))
    with (engine.directory / "parts" / f"{turn.roster_id.hex()}.data").open("rb") as file:
        file.seek(ref.part * slot)
        return reference.decode(sizes.codec, file.read(ref.length), stop - start)


def relative_error(
    engine: LabEngine, turn: Round, deltas: Sequence[np.ndarray], refs: Sequence[api.PartRef | None]
) -> float:
    """Of all parts together, against the float64 mean of the contributions that each part's bitmap names."""
    sizes = turn.lab.sizes
    weights = part_weights([runs[0][1] if runs else 0 for runs in turn.tokens], 3.0)
    wrong = right = 0.0
    for ref in refs:
        if ref is None:
            continue
        start, stop = ref.part * sizes.part_elements, min((ref.part + 1) * sizes.part_elements, sizes.elements)
        inside = [index for index in range(len(deltas)) if ref.bitmap >> index & 1]
        contributions = {
            index: reference.decode(
                sizes.codec, reference.encode(sizes.codec, deltas[index][start:stop]), stop - start
            ).astype(np.float64)
            for index in inside
        }
        mean = sum(weights[index] * contributions[index] for index in inside) / sum(weights[index] for index in inside)
        wrong += float(((averaged(engine, turn, ref) - mean) ** 2).sum())
        right += float((mean**2).sum())
    assert right > 0
    return float(np.sqrt(wrong / right))


def children(engine: LabEngine) -> list[psutil.Process]:
    """All that its process has started, the oldest first."""
    return sorted(psutil.Process(engine.pid).children(recursive=True), key=lambda one: float(one.create_time()))


class Ends:
    """Of processes that live now, whosever children they are."""

    def __init__(self, processes: Sequence[psutil.Process]) -> None:
        self._descriptors = [os.pidfd_open(one.pid) for one in processes]

    async def wait(self) -> None:
        with trio.fail_after(PATIENCE_S / 2):
            for descriptor in self._descriptors:
                await trio.lowlevel.wait_readable(descriptor)
                os.close(descriptor)


async def same_state(turn: Round, refs: tuple[api.PartRef | None, ...], engines: Sequence[LabEngine]) -> bool:
    """Invariant 1: after the outer step all hold the same bytes."""
    return len({answer.state_hash for answer in await turn.apply(refs, engines)}) == 1


# ---------------------------------------------------------------- what both hold


@BOTH
@pytest.mark.parametrize("codec", ["fp32", "fp16", "int8"])
def test_a_mean_is_the_weighted_mean_within_the_codecs_error_and_all_hold_its_bytes(
    tmp_path: Path, engine: str, codec: str
) -> None:
    """One weighs no more than three times the median; one contributes nothing, and receives."""

    async def main() -> None:
        with trio.fail_after(PATIENCE_S):
            async with lab(tmp_path, 4, sizes_of(engine, codec)) as swarm:
                await swarm.load_initial(np.zeros(SMALL, np.float32))
                for number in range(2):
                    turn = flat_round(swarm, number, tokens=[100, 0, 120, 5000])
                    deltas = fill(turn)
                    await turn.start()
                    refs = await turn.finish()
                    assert [ref.bitmap if ref else 0 for ref in refs] == [0b1101] * swarm.sizes.part_count
                    for one in (turn.engines[0], turn.engines[1]):
                        assert relative_error(one, turn, deltas, refs) < MAX_ERROR[engine, codec]
                    assert await same_state(turn, refs, turn.engines)

    trio.run(main)


@BOTH
def test_a_peer_that_is_killed_in_the_exchange_costs_the_others_no_round(tmp_path: Path, engine: str) -> None:
    async def main() -> None:
        with trio.fail_after(PATIENCE_S):
            async with lab(tmp_path, 3, sizes_of(engine, "fp32", MANY)) as swarm:
                await swarm.load_initial(np.zeros(MANY, np.float32))
                turn = flat_round(swarm, 0, duration_s=30.0, progress_s=3.0)
                deltas = fill(turn)
                await turn.start()
                dead = turn.engines[1]
                await dead.until("some parts", lambda: len(dead.held) > 5)
                dead.kill()
                survivors = [turn.engines[0], turn.engines[2]]
                refs = await turn.finish(survivors)
                assert {ref.bitmap for ref in refs if ref is not None} <= {0b111, 0b101}
                assert sum(ref is not None for ref in refs) >= len(refs) / 2
                assert relative_error(survivors[0], turn, deltas, refs) < MAX_ERROR[engine, "fp32"]
                assert await same_state(turn, refs, survivors)

    trio.run(main)


@BOTH
def test_a_peer_that_never_takes_part_is_left_out_and_one_that_comes_late_is_not(tmp_path: Path, engine: str) -> None:
    async def main() -> None:
        with trio.fail_after(PATIENCE_S):
            async with lab(tmp_path, 3, sizes_of(engine, "fp32")) as swarm:
                await swarm.load_initial(np.zeros(SMALL, np.float32))
                turn = flat_round(swarm, 0, duration_s=20.0, progress_s=4.0)
                deltas = fill(turn)
                first, second, third = zip(turn.engines, turn.requests(await turn.encode()), strict=True)
                for one, asked in (first, second):
                    await one.ask.exchange(asked)
                await trio.sleep(1.5)
                await third[0].ask.exchange(third[1])
                refs = await turn.finish()
                assert {ref.bitmap if ref else 0 for ref in refs} == {0b111}, "the third was late, not gone"
                assert relative_error(first[0], turn, deltas, refs) < MAX_ERROR[engine, "fp32"]
                assert await same_state(turn, refs, turn.engines)

                turn = flat_round(swarm, 1, duration_s=8.0, progress_s=1.0)
                deltas = fill(turn)
                first, second, third = zip(turn.engines, turn.requests(await turn.encode()), strict=True)
                for one, asked in (first, second):
                    await one.ask.exchange(asked)
                refs = await turn.finish([first[0], second[0]])
                held = [ref for ref in refs if ref is not None]
                assert {ref.bitmap for ref in held} == {0b011}
                assert {ref.root for ref in held} == {first[0].peer_id, second[0].peer_id}
                assert relative_error(first[0], turn, deltas, refs) < MAX_ERROR[engine, "fp32"]
                for one in (first[0], second[0]):
                    assert third[0].peer_id in one.ended[turn.roster_id].excluded

    trio.run(main)


@BOTH
def test_an_engine_that_was_killed_and_started_again_averages_in_the_next_round(tmp_path: Path, engine: str) -> None:
    async def main() -> None:
        with trio.fail_after(PATIENCE_S):
            async with lab(tmp_path, 2, sizes_of(engine, "fp32")) as swarm:
                state = await swarm.load_initial(np.zeros(SMALL, np.float32))
                again = swarm.engines[1]
                ends = Ends(children(again))
                again.kill()
                await ends.wait()
                await again.start()
                await swarm.introduce()
                assert (await again.ask.resume_state(round=0, state_hash=state)).state_hash == state
                turn = flat_round(swarm, 0)
                deltas = fill(turn)
                await turn.start()
                refs = await turn.finish()
                assert {ref.bitmap if ref else 0 for ref in refs} == {0b11}
                assert relative_error(again, turn, deltas, refs) < MAX_ERROR[engine, "fp32"]
                assert await same_state(turn, refs, turn.engines)

    trio.run(main)


@BOTH
def test_an_exchange_that_is_stopped_makes_room_for_the_next_attempt_at_once(tmp_path: Path, engine: str) -> None:
    """The same contribution again: nothing of the first attempt is in the second."""

    async def main() -> None:
        with trio.fail_after(PATIENCE_S):
            async with lab(tmp_path, 2, sizes_of(engine, "fp32", MANY)) as swarm:
                await swarm.load_initial(np.zeros(MANY, np.float32))
                turn = flat_round(swarm, 0)
                deltas = fill(turn)
                await turn.start()
                for one in turn.engines:
                    await one.ask.stop_exchange(roster_id=turn.roster_id)
                turn.attempt = 1
                await turn.start()
                refs = await turn.finish()
                assert {ref.bitmap if ref else 0 for ref in refs} == {0b11}
                assert relative_error(turn.engines[0], turn, deltas, refs) < MAX_ERROR[engine, "fp32"]
                assert await same_state(turn, refs, turn.engines)

    trio.run(main)


@BOTH
def test_values_beyond_their_declared_bound_are_in_no_mean(tmp_path: Path, engine: str) -> None:
    async def main() -> None:
        with trio.fail_after(PATIENCE_S):
            async with lab(tmp_path, 3, sizes_of(engine, "fp32")) as swarm:
                await swarm.load_initial(np.zeros(SMALL, np.float32))
                turn = flat_round(swarm, 0, duration_s=8.0, progress_s=1.5)
                deltas = fill(turn)
                honest, liar = turn.engines[:2], turn.engines[2]
                for one, asked in zip(turn.engines, turn.requests(await turn.encode()), strict=True):
                    largest = (*asked.largest[:2], asked.largest[2] / 10)
                    await one.ask.exchange(msgspec.structs.replace(asked, largest=largest))
                refs = await turn.finish(honest)
                mine = [ref for ref in refs if ref is not None and ref.root != liar.peer_id]
                assert {ref.bitmap for ref in mine} == {0b011}
                assert relative_error(honest[0], turn, deltas, mine) < MAX_ERROR[engine, "fp32"]
                for one in honest:
                    assert "beyond the declared bound" in one.ended[turn.roster_id].excluded[liar.peer_id]

    trio.run(main)


@BOTH
def test_a_vector_that_is_cut_otherwise_is_in_no_mean(tmp_path: Path, engine: str) -> None:
    async def main() -> None:
        with trio.fail_after(PATIENCE_S):
            async with lab(tmp_path, 3, sizes_of(engine, "fp32")) as swarm:
                await swarm.load_initial(np.zeros(SMALL, np.float32))
                turn = flat_round(swarm, 0, duration_s=8.0, progress_s=1.5)
                deltas = fill(turn)
                honest, odd = turn.engines[:2], turn.engines[2]
                odd.sizes = replace(swarm.sizes, part_elements=512)
                odd.ask.close()
                await odd.connect()
                await swarm.introduce()
                for one, asked in zip(turn.engines, turn.requests(await turn.encode()), strict=True):
                    tokens = asked.tokens if one is not odd else (((2 * swarm.sizes.part_count, 100),),) * 3
                    await one.ask.exchange(msgspec.structs.replace(asked, tokens=tokens))
                refs = await turn.finish(honest)
                held = [ref for ref in refs if ref is not None]
                assert {ref.bitmap for ref in held} == {0b011}
                assert {ref.root for ref in held} == {one.peer_id for one in honest}
                assert relative_error(honest[0], turn, deltas, held) < MAX_ERROR[engine, "fp32"]

    trio.run(main)


# ---------------------------------------------------------------- hivemind's own process


@NEEDS_HIVEMIND
def test_an_averager_or_a_p2pd_that_is_killed_is_replaced_and_costs_the_next_round_nothing(tmp_path: Path) -> None:
    """The engine lives on, nothing of the old ones is left, and peers learn where the new ones are."""

    async def main() -> None:
        with trio.fail_after(2 * PATIENCE_S):
            async with lab(tmp_path, 2, sizes_of(HIVEMIND, "int8")) as swarm:
                await swarm.load_initial(np.zeros(SMALL, np.float32))
                for number in range(2):
                    family = children(swarm.engines[1])
                    assert len(family) == 2, "the averager and its p2pd"
                    ends = Ends(family)
                    family[number].kill()
                    await ends.wait()
                    turn = flat_round(swarm, number, duration_s=2 * PATIENCE_S, progress_s=PATIENCE_S)
                    deltas = fill(turn)
                    await turn.start()
                    refs = await turn.finish()
                    assert {ref.bitmap if ref else 0 for ref in refs} == {0b11}
                    assert relative_error(turn.engines[0], turn, deltas, refs) < MAX_ERROR[HIVEMIND, "int8"]
                    assert await same_state(turn, refs, turn.engines)
                    assert len(list((swarm.engines[1].directory / "averager").iterdir())) == 2, "its own sockets only"

    trio.run(main)


# ---------------------------------------------------------------- what hivemind cannot hold


@cannot_hold("stated-order")
def test_a_mean_is_the_stated_sum_to_the_bit(tmp_path: Path, engine: str) -> None:
    async def main() -> bool:
        with trio.fail_after(PATIENCE_S):
            async with lab(tmp_path, 3, sizes_of(engine, "fp32")) as swarm:
                await swarm.load_initial(np.zeros(SMALL, np.float32))
                turn = flat_round(swarm, 0, tokens=[1009, 1301, 1607])
                deltas = fill(turn)
                await turn.start()
                exact = True
                for ref in await turn.finish():
                    assert ref is not None
                    assert ref.bitmap == 0b111
                    mine = [delta[ref.part * 1024 : (ref.part + 1) * 1024] for delta in deltas]
                    encoded = [reference.encode("fp32", delta) for delta in mine]
                    stated = reference.mean("fp32", encoded, [1009, 1301, 1607], len(mine[0]))
                    exact = exact and np.array_equal(averaged(turn.engines[0], turn, ref), stated)
                return exact

    assert trio.run(main)


@cannot_hold("audit")
def test_others_recompute_a_mean_from_the_contributions(tmp_path: Path, engine: str) -> None:
    async def main() -> set[str]:
        with trio.fail_after(PATIENCE_S):
            async with lab(tmp_path, 2, sizes_of(engine, "fp32")) as swarm:
                await swarm.load_initial(np.zeros(SMALL, np.float32))
                turn = flat_round(swarm, 0)
                fill(turn)
                encoded = await turn.encode()
                await turn.start()
                refs = await turn.finish()
                asked = [recompute_request(turn, encoded, ref) for ref in refs if ref is not None]
                assert len(asked) == swarm.sizes.part_count
                return {(await turn.engines[0].ask.recompute(one)).verdict for one in asked}

    assert trio.run(main) == {"right"}


@cannot_hold("bound-bytes")
def test_other_bytes_than_those_that_a_ready_binds_are_in_no_mean(tmp_path: Path, engine: str) -> None:
    """The third puts others in the place of those that it has frozen, and tells its own engine that they are right."""

    async def main() -> set[int]:
        with trio.fail_after(PATIENCE_S):
            async with lab(tmp_path, 3, sizes_of(engine, "fp32")) as swarm:
                await swarm.load_initial(np.zeros(SMALL, np.float32))
                turn = flat_round(swarm, 0, duration_s=8.0, progress_s=2.0)
                fill(turn)
                bound = await turn.encode()
                liar = turn.engines[2]
                liar.delta[:] = -liar.delta
                sent = await liar.ask.encode(base=bytes(32))
                for suffix in (".data", ".meta"):
                    os.replace(
                        liar.directory / "outbox" / f"{bytes(32).hex()}{suffix}",
                        liar.directory / "outbox" / f"{turn.base.hex()}{suffix}",
                    )
                for one, asked in zip(turn.engines, turn.requests(bound), strict=True):
                    roots = (*asked.parts_roots[:2], sent.parts_root) if one is liar else asked.parts_roots
                    await one.ask.exchange(msgspec.structs.replace(asked, parts_roots=roots))
                refs = await turn.finish(turn.engines[:2])
                honest = {one.peer_id for one in turn.engines[:2]}
                return {ref.bitmap for ref in refs if ref is not None and ref.root in honest}

    assert trio.run(main) == {0b011}
