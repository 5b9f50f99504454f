"""The outer state outlives its engine: a killed outer step is finished exactly; a new daemon finds everything again."""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
import pytest
import trio

from node.daemon.engine_client import EngineFailed, EngineGone
from protocol.state_hash import state_hash
from tests import reference
from tests.swarm.engine_lab import LabEngine, Sizes, flat_round, lab

pytestmark = [pytest.mark.slow, pytest.mark.swarm]

LARGE = Sizes(elements=6_000_128, buffer_elements=100_352, part_elements=65_536, threads=2)


@pytest.mark.parametrize("progress", [0.0, 0.2, 0.5, 0.9])
def test_an_engine_killed_in_the_outer_step_finishes_it_exactly(tmp_path: Path, progress: float) -> None:
    watched = int(progress * LARGE.elements)

    async def main() -> None:
        rng = np.random.default_rng(1)
        theta = rng.standard_normal(LARGE.elements).astype(np.float32)
        momentum = np.zeros(LARGE.elements - LARGE.buffer_elements, np.float32)
        with trio.fail_after(60):
            async with lab(tmp_path, 1, LARGE) as swarm:
                engine = swarm.engines[0]
                initial = await swarm.load_initial(theta)
                turn = flat_round(swarm, 0)
                engine.delta[:] = 0.01 * rng.standard_normal(LARGE.elements).astype(np.float32)
                delta = np.array(engine.delta)
                await turn.start()
                refs = await turn.finish()
                request = turn.apply_request(engine, refs)
                async with trio.open_nursery() as nursery:

                    async def apply() -> None:
                        with suppress(EngineGone):  # it may have been faster than the signal
                            await engine.ask.apply(request)

                    nursery.start_soon(apply)
                    with trio.fail_after(20):
                        while engine.theta[watched] == theta[watched]:  # shared memory tells nobody
                            await trio.lowlevel.checkpoint()
                    engine.kill()
                await engine.start()
                await engine.ask.resume_state(round=0, state_hash=initial)
                applied = await engine.ask.apply(request)
                expected = reference.flat_round(
                    theta,
                    momentum,
                    [delta],
                    [[1000] * LARGE.part_count],
                    codec="int8",
                    part_elements=LARGE.part_elements,
                    lr=0.6,
                    factor=0.9,
                )
                assert applied.state_hash == state_hash(*expected)
                assert np.array_equal(engine.theta, expected[0])
                assert not engine.delta.any()
                # Once more: the daemon died before it noted the answer.
                again = await engine.ask.apply(request)
                assert again.state_hash == applied.state_hash
                assert np.array_equal(engine.theta, expected[0])
                await engine.ask.resume_state(round=1, state_hash=applied.state_hash)

    trio.run(main)


def test_a_new_daemon_finds_state_parts_and_contribution(tmp_path: Path) -> None:
    async def main() -> None:
        sizes = Sizes()
        rng = np.random.default_rng(2)
        with trio.fail_after(60):
            async with lab(tmp_path, 2, sizes) as swarm:
                await swarm.load_initial(rng.standard_normal(sizes.elements).astype(np.float32))
                turn = flat_round(swarm, 0)
                for engine in turn.engines:
                    engine.delta[:] = rng.standard_normal(sizes.elements).astype(np.float32)
                await turn.start()
                refs = await turn.finish()
                applied = (await turn.apply(refs))[0]
                engine = turn.engines[0]
                frozen = await engine.ask.encode(base=turn.base)
                pid = engine.pid
                engine.ask.close()
                await engine.connect()
                await swarm.introduce()
                assert engine.pid == pid
                await engine.ask.resume_state(round=1, state_hash=applied.state_hash)
                assert (await engine.ask.inventory()).part_rounds == (0,)
                # Frozen once: whatever delta holds now, the bytes of that base stay the same.
                engine.delta[:] = 1
                assert (await engine.ask.encode(base=turn.base)).parts_root == frozen.parts_root
                second = flat_round(swarm, 1)
                await second.start()
                await second.apply(await second.finish())

    trio.run(main)


def open_files(engine: LabEngine, place: str) -> int:
    return sum(place in os.readlink(link) for link in Path(f"/proc/{engine.pid}/fd").iterdir())


def test_exchanges_that_nobody_stops_end_by_themselves(tmp_path: Path) -> None:
    async def main() -> None:
        with trio.fail_after(60):
            async with lab(tmp_path, 2) as swarm:
                await swarm.load_initial(np.zeros(Sizes().elements, np.float32))
                for engine in swarm.engines:
                    engine.delta[:] = 0.25
                for attempt in range(6):
                    turn = flat_round(swarm, 0, attempt=attempt)
                    await turn.start()
                    assert all(await turn.finish())
                # Each exchange holds the contribution open: two old ones and the newest.
                assert [open_files(engine, "/outbox/") for engine in swarm.engines] == [3, 3]

    trio.run(main)


def test_what_is_not_finite_is_not_encoded(tmp_path: Path) -> None:
    async def main() -> None:
        with trio.fail_after(30):
            async with lab(tmp_path, 1) as swarm:
                engine = swarm.engines[0]
                engine.delta[:] = 0.5
                engine.delta[4321] = np.nan
                encoded = await engine.ask.encode(base=bytes(32))
                assert not encoded.finite
                assert not encoded.parts_root
                engine.delta[4321] = -2.0
                encoded = await engine.ask.encode(base=bytes(32))
                assert encoded.finite
                assert encoded.largest == 2.0
                assert encoded.norm == pytest.approx(float(np.linalg.norm(engine.delta.astype(np.float64))))

    trio.run(main)


def test_refusals_are_sentences(tmp_path: Path) -> None:
    async def main() -> None:
        with trio.fail_after(30):
            async with lab(tmp_path, 1) as swarm:
                ask = swarm.engines[0].ask
                with pytest.raises(EngineFailed, match="S_0"):
                    await ask.load_initial(hash=bytes(32))
                with pytest.raises(EngineFailed, match="no snapshot of round 3"):
                    await ask.load_snapshot(round=3, state_hash=bytes(32))
                with pytest.raises(EngineFailed, match="load a snapshot"):
                    await ask.resume_state(round=3, state_hash=bytes(32))
                with pytest.raises(EngineFailed, match="no state to copy"):
                    await ask.save_snapshot(round=3)
                turn = flat_round(swarm, 0)
                encoded = await turn.encode()
                request = msgspec.structs.replace(turn.requests(encoded)[0], base=bytes(32))
                with pytest.raises(EngineFailed, match="that its READY binds"):
                    await ask.exchange(request)

    trio.run(main)


async def save(engine: LabEngine, number: int) -> bytes:
    return (await engine.ask.save_snapshot(round=number)).state_hash


def test_snapshots_survive_and_corrupt_ones_are_set_aside(tmp_path: Path) -> None:
    async def main() -> None:
        sizes = Sizes(elements=600_064, buffer_elements=256, part_elements=65_536)
        rng = np.random.default_rng(4)
        with trio.fail_after(30):
            async with lab(tmp_path, 1, sizes) as swarm:
                engine = swarm.engines[0]
                saved = []
                for number in range(3):
                    turn = flat_round(swarm, number)
                    if not number:
                        await swarm.load_initial(rng.standard_normal(sizes.elements).astype(np.float32))
                    saved.append((await save(engine, number), np.array(engine.theta)))
                    engine.delta[:] = rng.standard_normal(sizes.elements).astype(np.float32)
                    await turn.start()
                    await turn.apply(await turn.finish())
                kept = (await engine.ask.inventory()).snapshots
                assert [one.round for one in kept] == [1, 2]
                newest = engine.directory / "snapshots" / f"2-{saved[2][0].hex()}" / "data"
                with newest.open("r+b") as file:
                    file.seek(1_500_000)
                    file.write(b"\xff")
                with pytest.raises(EngineFailed, match=r"chunk 1 .* corrupt"):
                    await engine.ask.load_snapshot(round=2, state_hash=saved[2][0])
                assert [one.round for one in (await engine.ask.inventory()).snapshots] == [1]
                await engine.ask.load_snapshot(round=1, state_hash=saved[1][0])
                assert np.array_equal(engine.theta, saved[1][1])

    trio.run(main)


def test_disk_use_stays_within_its_limit_and_the_newest_state_stays(tmp_path: Path) -> None:
    async def main() -> None:
        sizes = Sizes(elements=100_096, buffer_elements=0, part_elements=8192)
        limit = 2_500_000  # S_0, two snapshots of 0.8 MB, and few of the rounds of 0.1 MB
        rng = np.random.default_rng(6)
        with trio.fail_after(60):
            async with lab(tmp_path, 1, sizes, disk_limit_bytes=limit) as swarm:
                engine = swarm.engines[0]
                await swarm.load_initial(np.zeros(sizes.elements, np.float32))
                for number in range(8):
                    turn = flat_round(swarm, number)
                    engine.delta[:] = rng.standard_normal(sizes.elements).astype(np.float32)
                    await turn.start()
                    await turn.apply(await turn.finish())
                    await engine.ask.save_snapshot(round=number + 1)
                inventory = await engine.ask.inventory()
                assert inventory.disk_bytes <= limit
                assert inventory.part_rounds[-1] == 7
                assert 0 not in inventory.part_rounds
                assert inventory.snapshots[-1].round == 8

    trio.run(main)


def test_a_disk_that_refuses_bytes_is_reported_and_the_next_round_is_held(tmp_path: Path) -> None:
    async def main() -> None:
        sizes = Sizes(elements=200_192, buffer_elements=0, part_elements=8192)
        rng = np.random.default_rng(5)
        with trio.fail_after(60):
            async with lab(tmp_path, 2, sizes) as swarm:
                await swarm.load_initial(rng.standard_normal(sizes.elements).astype(np.float32))
                turn = flat_round(swarm, 0, duration_s=5.0, progress_s=2.0)
                for engine in turn.engines:
                    engine.delta[:] = rng.standard_normal(sizes.elements).astype(np.float32)
                encoded = await turn.encode()
                full, other = turn.engines
                # No file of this process may grow beyond 16 KiB: the parts behind that cannot be written.
                resource.prlimit(full.pid, resource.RLIMIT_FSIZE, (16_384, resource.RLIM_INFINITY))
                for engine, request in zip(turn.engines, turn.requests(encoded), strict=True):
                    await engine.ask.exchange(request)
                for engine in turn.engines:
                    await engine.until("the end", lambda engine=engine: turn.roster_id in engine.ended)
                assert any("could not be stored" in event.reason for event in full.storage if event is not None)
                assert len(full.held) < sizes.part_count
                resource.prlimit(full.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
                again = flat_round(swarm, 0, attempt=1)
                await full.ask.stop_exchange(roster_id=turn.roster_id)
                await other.ask.stop_exchange(roster_id=turn.roster_id)
                await again.start()
                refs = await again.finish()
                assert all(refs)
                assert full.storage[-1] is None, "it says that storing works again"
                assert len({answer.state_hash for answer in await again.apply(refs)}) == 1

    trio.run(main)
