"""Rounds over real engine processes against plain NumPy (tests/reference.py): the same state, bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import trio

from protocol.state_hash import state_hash
from tests import reference
from tests.swarm.engine_lab import Sizes, flat_round, lab

pytestmark = [pytest.mark.slow, pytest.mark.swarm]


@pytest.mark.parametrize("peers", [1, 2, 3, 4, 5])
def test_ten_flat_rounds_are_those_of_the_reference(tmp_path: Path, peers: int) -> None:
    codec = ("int8", "fp16", "fp32")[peers % 3]

    async def main() -> None:
        sizes = Sizes(codec=codec)
        rng = np.random.default_rng(peers)
        theta = rng.standard_normal(sizes.elements).astype(np.float32)
        momentum = np.zeros(sizes.elements - sizes.buffer_elements, np.float32)
        with trio.fail_after(60):
            async with lab(tmp_path, peers, sizes) as swarm:
                assert await swarm.load_initial(theta) == state_hash(theta, momentum)
                for number in range(10):
                    tokens = [int(count) for count in rng.integers(1, 5000, peers)]
                    turn = flat_round(swarm, number, tokens=tokens)
                    deltas = []
                    for engine in turn.engines:
                        engine.delta[:] = 0.01 * rng.standard_normal(sizes.elements).astype(np.float32)
                        deltas.append(np.array(engine.delta))
                    await turn.start()
                    refs = await turn.finish()
                    assert all(ref is not None and ref.bitmap == (1 << peers) - 1 for ref in refs)
                    applied = await turn.apply(refs)
                    theta, momentum = reference.flat_round(
                        theta,
                        momentum,
                        deltas,
                        [[count] * sizes.part_count for count in tokens],
                        codec=codec,
                        part_elements=sizes.part_elements,
                        lr=0.6,
                        factor=0.9,
                    )
                    expected = state_hash(theta, momentum)
                    for engine, answer in zip(turn.engines, applied, strict=True):
                        assert answer.state_hash == expected
                        assert all(answer.counted)
                        assert np.array_equal(engine.theta, theta)
                        assert not engine.delta.any()

    trio.run(main)
