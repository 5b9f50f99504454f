"""The shipped trainer as a real process, against a real attach socket."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio
from attach_daemon import STEPS, PlayedDaemon, small_run

from node.daemon.trainer_host import Attached, Detached
from node.home import Home
from node.trainer import wire

pytestmark = [pytest.mark.swarm, pytest.mark.slow]


@contextlib.asynccontextmanager
async def trainer(home: Home) -> AsyncIterator[trio.Process]:
    """`python -m node.trainer`, ended by SIGKILL at the latest."""
    environment = {**os.environ, "ATOLL_HOME": str(home.path), "OMP_NUM_THREADS": "1"}
    async with trio.open_nursery() as nursery:
        process = await nursery.start(
            functools.partial(
                trio.run_process,
                [sys.executable, "-m", "node.trainer"],
                env=environment,
                stderr=subprocess.PIPE,
                capture_stderr=False,
                check=False,
            )
        )
        lines: list[str] = []
        process.lines = lines  # type: ignore[attr-defined]
        nursery.start_soon(_read, process, lines)
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()


async def _read(process: trio.Process, lines: list[str]) -> None:
    assert process.stderr is not None
    rest = b""
    async for data in process.stderr:
        *whole, rest = (rest + data).split(b"\n")
        lines += [line.decode() for line in whole]


def test_a_run_of_some_rounds_learns_and_ends(tmp_path: Path) -> None:
    async def main() -> None:
        manifest, theta = small_run(tmp_path / "artifacts")
        daemon = PlayedDaemon(Home(tmp_path), manifest, theta, folder=tmp_path, rounds=5)
        async with daemon.serving(), trainer(Home(tmp_path)) as process:
            with trio.fail_after(90):
                code = await process.wait()
            assert code == 0, process.lines
            contributions = daemon.of(wire.Contribution)
            assert [contribution.steps for contribution in contributions] == [STEPS] * 5
            assert all(contribution.tokens == STEPS * 4 * 32 for contribution in contributions)
            # 24 sequences a round of units of 8: three units each, none twice.
            assert [contribution.ranges_done for contribution in contributions] == [
                (wire.Lease(epoch=0, start=3 * round, stop=3 * round + 3),) for round in range(5)
            ]
            losses = daemon.losses
            assert losses[-1] < losses[0] - 0.5, losses
            validated = daemon.of(wire.Validated)
            assert [message.round for message in validated] == [0, 1, 2, 3, 4, 5]
            assert validated[-1].loss < validated[0].loss - 0.5
            assert all(loaded.fresh for loaded in daemon.of(wire.Loaded))
            assert daemon.events[-1] == Detached(name="atoll trainer", reason="it has finished", failed=False)
            assert daemon.of(wire.Progress)[-1].tokens_per_s > 0

    trio.run(main)


def test_killed_it_resumes_its_optimizer_where_it_was(tmp_path: Path) -> None:
    async def main() -> None:
        home = Home(tmp_path)
        manifest, theta = small_run(tmp_path / "artifacts")
        daemon = PlayedDaemon(home, manifest, theta, folder=tmp_path)
        async with daemon.serving():
            async with trainer(home) as first:
                await daemon.until(lambda: daemon.round >= 3)
                first.send_signal(signal.SIGKILL)
                await daemon.until(lambda: bool(daemon.of(Detached)))
                resumed_at = daemon.round
            daemon.events.clear()
            async with trainer(home) as second:
                await daemon.until(lambda: daemon.round >= resumed_at + 2)
                assert any("resumed the inner optimizer" in line for line in second.lines), second.lines
                assert daemon.of(Attached)[0].round == resumed_at
                second.send_signal(signal.SIGTERM)
                with trio.fail_after(20):
                    assert await second.wait() == 143, second.lines
        assert daemon.losses[-1] < daemon.losses[0] - 0.5

    trio.run(main)


def test_the_daemon_goes_away_and_comes_back(tmp_path: Path) -> None:
    async def main() -> None:
        home = Home(tmp_path)
        manifest, theta = small_run(tmp_path / "artifacts")
        daemon = PlayedDaemon(home, manifest, theta, folder=tmp_path)
        async with trainer(home) as process:
            async with daemon.serving():
                await daemon.until(lambda: daemon.round >= 2)
            interrupted_at = daemon.round
            async with daemon.serving():
                await daemon.until(lambda: daemon.round >= interrupted_at + 3)
            assert process.poll() is None, process.lines
        assert len(set(daemon.pids)) == 1
        assert len(daemon.pids) == 2

    trio.run(main)


def test_a_device_that_is_not_here_is_the_operators_to_mend(tmp_path: Path) -> None:
    async def main() -> None:
        home = Home(tmp_path)
        manifest, theta = small_run(tmp_path / "artifacts")
        daemon = PlayedDaemon(home, manifest, theta, folder=tmp_path, device="cuda:99")
        async with daemon.serving(), trainer(home) as process:
            with trio.fail_after(60):
                assert await process.wait() == 2, process.lines
            await daemon.until(lambda: bool(daemon.of(Detached)))
            (detached,) = daemon.of(Detached)
            assert detached.failed
            assert "'cuda:99' is not here" in detached.reason
            assert detached.reason in process.lines[-1]

    trio.run(main)


def test_data_that_is_missing_is_reported_in_one_sentence(tmp_path: Path) -> None:
    async def main() -> None:
        home = Home(tmp_path)
        manifest, theta = small_run(tmp_path / "artifacts")
        daemon = PlayedDaemon(home, manifest, theta, folder=tmp_path)
        (tmp_path / "artifacts" / manifest.artifacts["training"].hash).unlink()
        async with daemon.serving(), trainer(home) as process:
            with trio.fail_after(60):
                assert await process.wait() != 0
            await daemon.until(lambda: bool(daemon.of(Detached)))
            (detached,) = daemon.of(Detached)
            assert detached.failed
            assert manifest.artifacts["training"].hash in detached.reason
            assert detached.reason in process.lines[-1]

    trio.run(main)
