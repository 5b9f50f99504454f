"""Two processes of one machine train one model: rank 0 talks to the daemon and the other one follows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import trio
from attach_daemon import STEPS, PlayedDaemon, small_run

from node.daemon.trainer_host import Attached
from node.home import Home
from node.trainer import wire

pytestmark = [pytest.mark.swarm, pytest.mark.slow]


def test_ranks_act_as_one_trainer(tmp_path: Path) -> None:
    manifest, theta = small_run(tmp_path / "artifacts")
    daemon = PlayedDaemon(Home(tmp_path), manifest, theta, folder=tmp_path, rounds=4)
    program = Path(__file__).with_name("ranks_program.py")

    async def rank(number: int) -> None:
        ended = await trio.run_process(
            [sys.executable, str(program), str(tmp_path), str(number)],
            capture_stderr=True,
            stdout=subprocess.DEVNULL,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr.decode()[-3000:]

    async def main() -> None:
        with trio.fail_after(120):
            async with daemon.serving(), trio.open_nursery() as nursery:
                nursery.start_soon(rank, 0)
                nursery.start_soon(rank, 1)

    trio.run(main)
    first, second = (json.loads((tmp_path / f"rank-{number}.json").read_text()) for number in range(2))
    for spread, round in (("replicated", 2), ("sharded", 4)):
        assert first[spread]["round"] == second[spread]["round"] == round
        assert first[spread]["checksum"] == second[spread]["checksum"]
        assert first[spread]["seen"] != second[spread]["seen"], "each rank trains on its own sequences"
    assert [event.round for event in daemon.of(Attached)] == [0, 2]
    contributions = daemon.of(wire.Contribution)
    assert [contribution.tokens for contribution in contributions] == [STEPS * 4 * 32] * 4
    assert [contribution.ranges_done for contribution in contributions] == [
        (wire.Lease(epoch=0, start=3 * round, stop=3 * round + 3),) for round in range(4)
    ]
    total = daemon.theta.astype(np.float64).sum()
    assert np.isclose(sum(first["sharded"]["checksum"]), total, rtol=0, atol=1e-6)
