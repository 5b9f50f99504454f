"""Downloads by hash: from several sources, past dead and lying ones, going on where they stopped."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import trio
from blake3 import blake3

from node.daemon.engine_client import EngineFailed
from tests.swarm.engine_lab import Lab, LabEngine, Sizes, lab

pytestmark = [pytest.mark.slow, pytest.mark.swarm]

LARGE = Sizes(elements=6_000_128, buffer_elements=0, part_elements=65_536)
"""48 MB of θ and momentum: 46 chunks."""


async def with_snapshot(swarm: Lab) -> bytes:
    rng = np.random.default_rng(0)
    await swarm.load_initial(rng.standard_normal(LARGE.elements).astype(np.float32))
    hashes = {(await engine.ask.save_snapshot(round=5)).state_hash for engine in swarm.engines}
    assert len(hashes) == 1
    return hashes.pop()


async def some_of(path: Path, size: int) -> None:
    """Wait until a download has grown; its file is all that a test can see of it, so it looks again and again."""
    with trio.fail_after(20):
        while not grown(path, size):  # noqa: ASYNC110
            await trio.sleep(0.001)


def grown(path: Path, size: int) -> bool:
    return path.exists() and path.stat().st_blocks * 512 >= size


def test_a_snapshot_comes_from_those_who_live(tmp_path: Path) -> None:
    async def main() -> None:
        with trio.fail_after(90):
            async with lab(tmp_path, 3, LARGE) as swarm:
                state_hash = await with_snapshot(swarm)
                sources = tuple(engine.peer_id for engine in swarm.engines)
                dying, lying, good = swarm.engines
                # One source is corrupt on its disk: its chunk is refused and comes from another.
                data = lying.directory / "snapshots" / f"5-{state_hash.hex()}" / "data"
                with data.open("r+b") as file:
                    file.seek(20_000_000)
                    file.write(b"corrupt")
                joiner = await swarm.add()
                partial = joiner.directory / "snapshots" / f"5-{state_hash.hex()}.partial" / "data"
                async with trio.open_nursery() as nursery:

                    async def fetch() -> None:
                        await joiner.ask.fetch_snapshot(round=5, state_hash=state_hash, sources=sources, timeout_s=60)

                    nursery.start_soon(fetch)
                    await some_of(partial, 6_000_000)
                    dying.kill()
                await joiner.ask.load_snapshot(round=5, state_hash=state_hash)
                assert np.array_equal(joiner.theta, good.theta)
                assert (await joiner.ask.inventory()).snapshots[0].state_hash == state_hash

    trio.run(main)


def test_a_snapshot_that_nobody_has_fails_with_reasons(tmp_path: Path) -> None:
    async def main() -> None:
        with trio.fail_after(30):
            async with lab(tmp_path, 2) as swarm:
                first, second = swarm.engines
                with pytest.raises(EngineFailed, match="does not have this"):
                    await first.ask.fetch_snapshot(
                        round=5, state_hash=bytes(32), sources=(second.peer_id,), timeout_s=10
                    )

    trio.run(main)


def put_artifact(engine: LabEngine, data: bytes) -> bytes:
    artifact = blake3(data).digest()
    (engine.directory / "artifacts" / artifact.hex()).write_bytes(data)
    return artifact


def test_an_artifact_goes_on_where_its_source_died(tmp_path: Path) -> None:
    async def main() -> None:
        data = np.random.default_rng(1).bytes(30_000_001)
        with trio.fail_after(60):
            async with lab(tmp_path, 3) as swarm:
                dying, other, joiner = swarm.engines
                artifact = put_artifact(dying, data)
                partial = joiner.directory / "artifacts" / f"{artifact.hex()}.partial"
                async with trio.open_nursery() as nursery:

                    async def fetch() -> None:
                        with pytest.raises(EngineFailed, match="could not be fetched"):
                            await joiner.ask.fetch_artifact(
                                hash=artifact, length=len(data), sources=(dying.peer_id,), timeout_s=20
                            )

                    nursery.start_soon(fetch)
                    await some_of(partial, 8_000_000)
                    dying.kill()
                put_artifact(other, data)
                have = partial.stat().st_blocks * 512
                await joiner.ask.fetch_artifact(
                    hash=artifact, length=len(data), sources=(dying.peer_id, other.peer_id), timeout_s=30
                )
                assert (joiner.directory / "artifacts" / artifact.hex()).read_bytes() == data
                sent = (await other.ask.inventory()).bytes_sent
                assert sent < len(data) - have + 6_000_000, "what had come was fetched again"

    trio.run(main)


def test_an_artifact_that_is_not_its_hash_is_refused_and_comes_from_another(tmp_path: Path) -> None:
    async def main() -> None:
        data = np.random.default_rng(1).bytes(5_000_000)
        with trio.fail_after(60):
            async with lab(tmp_path, 3) as swarm:
                liar, honest, joiner = swarm.engines
                artifact = put_artifact(honest, data)
                (liar.directory / "artifacts" / artifact.hex()).write_bytes(data[:-1] + b"?")
                request = {"hash": artifact, "length": len(data), "timeout_s": 20.0}
                with pytest.raises(EngineFailed, match="do not make the artifact"):
                    await joiner.ask.fetch_artifact(sources=(liar.peer_id,), **request)
                assert not (joiner.directory / "artifacts" / artifact.hex()).exists()
                await joiner.ask.fetch_artifact(sources=(liar.peer_id, honest.peer_id), **request)
                assert (joiner.directory / "artifacts" / artifact.hex()).read_bytes() == data

    trio.run(main)


def test_who_cannot_be_dialled_still_fetches_and_is_fetched_from(tmp_path: Path) -> None:
    async def main() -> None:
        data = np.random.default_rng(1).bytes(3_000_000)
        with trio.fail_after(60):
            async with lab(tmp_path, 1) as swarm:
                hidden = await swarm.add(dialable=False)
                open_one = swarm.engines[0]
                artifact = put_artifact(open_one, data)
                await hidden.ask.fetch_artifact(
                    hash=artifact, length=len(data), sources=(open_one.peer_id,), timeout_s=20
                )
                back = put_artifact(hidden, data[:-1])
                # Over the connection that the hidden one made.
                await open_one.ask.fetch_artifact(
                    hash=back, length=len(data) - 1, sources=(hidden.peer_id,), timeout_s=20
                )

    trio.run(main)
