"""Resident memory of an engine: at most 12 bytes a parameter (θ, momentum, Δ, shared) and 250 MB (design section 2).

`ATOLL_TEST_PARAMETERS=50000000` measures the size that the design names; the default keeps the suite quick.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import trio

from tests.swarm.engine_lab import Lab, Sizes, flat_round, lab

pytestmark = [pytest.mark.slow, pytest.mark.swarm]

PARAMETERS = int(os.environ.get("ATOLL_TEST_PARAMETERS", "4000000")) // 256 * 256
OWN_LIMIT_BYTES = 250 * 1000 * 1000
CONTRIBUTORS = 4


class Watch:
    """The largest memory seen of every engine; sampled, and the kernel's own high-water mark."""

    def __init__(self, swarm: Lab) -> None:
        self.swarm = swarm
        self.own = [0] * len(swarm.engines)
        self.shared = [0] * len(swarm.engines)

    def look(self) -> None:
        for index, engine in enumerate(self.swarm.engines):
            own, shared = engine.resident()
            self.own[index] = max(self.own[index], own)
            self.shared[index] = max(self.shared[index], shared)

    async def run(self) -> None:
        while True:
            self.look()
            await trio.sleep(0.02)  # memory sends no event


def megabytes(sizes: list[int]) -> list[int]:
    return [size // 1_000_000 for size in sizes]


def report(line: str) -> None:
    """Measured figures, for those who run this with `pytest -s`."""
    sys.stderr.write(line + "\n")


def test_twelve_bytes_a_parameter_and_a_fixed_rest(tmp_path: Path) -> None:
    async def main() -> None:
        sizes = Sizes(elements=PARAMETERS, buffer_elements=0, part_elements=65_536)
        rng = np.random.default_rng(0)
        with trio.fail_after(300):
            async with lab(tmp_path, CONTRIBUTORS, sizes) as swarm:
                watch = Watch(swarm)
                watch.look()
                report(f"at start: own MB {megabytes(watch.own)}")
                theta = rng.standard_normal(PARAMETERS, dtype=np.float32)
                await swarm.load_initial(theta)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(watch.run)
                    for number in range(2):
                        for engine in swarm.engines:
                            np.multiply(theta, np.float32(0.01), out=engine.delta)
                        turn = flat_round(swarm, number, duration_s=60.0, progress_s=20.0)
                        started = trio.current_time()
                        await turn.start()
                        encoded = trio.current_time()
                        refs = await turn.finish()
                        exchanged = trio.current_time()
                        assert all(ref is not None and ref.bitmap == (1 << CONTRIBUTORS) - 1 for ref in refs)
                        applied = await turn.apply(refs)
                        assert len({answer.state_hash for answer in applied}) == 1
                        report(
                            f"round {number}: encode {encoded - started:.2f} s, exchange {exchanged - encoded:.2f} s, "
                            f"apply {trio.current_time() - exchanged:.2f} s"
                        )
                    await swarm.engines[0].ask.save_snapshot(round=2)
                    nursery.cancel_scope.cancel()
                report(f"largest: own MB {megabytes(watch.own)}, shared MB {megabytes(watch.shared)}")
                assert max(watch.own) <= OWN_LIMIT_BYTES
                assert max(watch.shared) <= 12 * PARAMETERS + 1_000_000

    trio.run(main)
