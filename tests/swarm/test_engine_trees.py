"""Exchanges over trees by real engine processes: two levels as the planner groups many peers, and three."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import trio

from node.engine import api
from protocol.grouping import grouped_plan
from protocol.names import digest
from protocol.plan import Plan, Shard
from protocol.planning import Tree, deal
from protocol.sites import site_plan
from protocol.state_hash import state_hash
from tests import reference
from tests.swarm.engine_lab import Round, Sizes, lab

pytestmark = [pytest.mark.slow, pytest.mark.swarm]

PEERS = 7
EVERYONE = (1 << PEERS) - 1
GROUPED = grouped_plan([f"peer{index}" for index in range(PEERS)], EVERYONE, 64, digest(b"a draw"))
"""Three groups of two or three: a root has a head of each other group below it."""
SITES = site_plan(
    [[0, 3, 5], [1, 2], [4], [6]],
    EVERYONE,
    EVERYONE,
    np.arange(PEERS, dtype=np.float64),
    np.zeros((PEERS, PEERS), np.bool_),
)
"""As a coordinator plans over sites of its peers, with shares that follow their lines."""
WEIGHTED = Plan(shards=tuple(replace(shard, share=1 + 7 * shard.root) for shard in SITES.shards))
DEEP = Plan(
    shards=(
        # 0 ← 1, 2; 2 ← 3, 4; 4 ← 5, 6
        Shard(share=2, parents=(-1, 0, 0, 2, 2, 4, 4)),
        # 6 ← 5 ← 0 ← 1, 2, 3 and 6 ← 4
        Shard(share=1, parents=(5, 0, 0, 0, 6, 6, -1)),
    )
)


def tree_round(swarm: object, number: int, plan: Plan, tokens: list[int], **settings: float) -> Round:
    engines = sorted(swarm.engines, key=lambda engine: engine.peer_id)  # type: ignore[attr-defined]
    runs = [((swarm.sizes.part_count, count),) for count in tokens]  # type: ignore[attr-defined]
    return Round(lab=swarm, number=number, engines=engines, tokens=runs, plan=plan, **settings)  # type: ignore[arg-type]


def expected(
    turn: Round,
    theta: np.ndarray,
    momentum: np.ndarray,
    deltas: list[np.ndarray],
    refs: tuple[api.PartRef | None, ...],
) -> tuple[np.ndarray, np.ndarray]:
    """θ and momentum after the round, in plain NumPy, each part's mean over exactly what its bitmap names."""
    sizes = turn.lab.sizes
    tokens = [runs[0][1] for runs in turn.tokens]
    dealt = deal(turn.base, sizes.part_count, turn.plan)
    theta, momentum = theta.copy(), momentum.copy()
    for part, ref in enumerate(refs):
        if ref is None:
            continue
        start, stop = part * sizes.part_elements, min((part + 1) * sizes.part_elements, sizes.elements)
        encoded = [reference.encode(sizes.codec, delta[start:stop]) for delta in deltas]
        parents = turn.plan.shards[dealt[part]].parents
        g = reference.tree_mean(sizes.codec, encoded, tokens, parents, ref.bitmap, stop - start)
        end = min(stop, len(momentum))
        theta[start:stop], momentum[start:end] = reference.outer_step(
            theta[start:stop], momentum[start:end], g, 0.6, 0.9
        )
    return theta, momentum


@pytest.mark.parametrize(
    ("plan", "codec"), [(GROUPED, "int8"), (WEIGHTED, "int8"), (DEEP, "fp16")], ids=["grouped", "sites", "three-levels"]
)
def test_rounds_over_trees_are_those_of_the_reference(tmp_path: Path, plan: Plan, codec: str) -> None:
    async def main() -> None:
        sizes = Sizes(codec=codec, elements=64 * 1024 - 256)
        rng = np.random.default_rng(3)
        theta = rng.standard_normal(sizes.elements).astype(np.float32)
        momentum = np.zeros(sizes.elements - sizes.buffer_elements, np.float32)
        with trio.fail_after(120):
            async with lab(tmp_path, PEERS, sizes) as swarm:
                assert await swarm.load_initial(theta) == state_hash(theta, momentum)
                for number in range(3):
                    turn = tree_round(swarm, number, plan, [int(count) for count in rng.integers(1, 5000, PEERS)])
                    deltas = []
                    for engine in turn.engines:
                        engine.delta[:] = 0.01 * rng.standard_normal(sizes.elements).astype(np.float32)
                        deltas.append(np.array(engine.delta))
                    await turn.start()
                    refs = await turn.finish()
                    assert all(ref is not None and ref.bitmap == EVERYONE for ref in refs)
                    applied = await turn.apply(refs)
                    theta, momentum = expected(turn, theta, momentum, deltas, refs)
                    assert {answer.state_hash for answer in applied} == {state_hash(theta, momentum)}
                    for engine in turn.engines:
                        assert np.array_equal(engine.theta, theta)
                        assert not engine.ended[turn.roster_id].excluded

    trio.run(main)


def test_a_head_that_dies_takes_only_what_it_carried(tmp_path: Path) -> None:
    """Its group's contributions are missing where it was their head; the parts below it are fetched from others."""
    victim = next(parent for parent in GROUPED.shards[0].parents if parent not in (-1, GROUPED.shards[0].root))
    sizes = Sizes(elements=750_000, buffer_elements=0, part_elements=4096, codec="fp32")

    async def main() -> None:
        with trio.fail_after(120):
            async with lab(tmp_path, PEERS, sizes) as swarm:
                theta = np.zeros(sizes.elements, np.float32)
                await swarm.load_initial(theta)
                turn = tree_round(swarm, 0, GROUPED, [1000] * PEERS, duration_s=15.0, progress_s=3.0)
                rng, deltas = np.random.default_rng(11), []
                for engine in turn.engines:
                    engine.delta[:] = 0.01 * rng.standard_normal(sizes.elements).astype(np.float32)
                    deltas.append(np.array(engine.delta))
                await turn.start()
                dead = turn.engines[victim]
                await dead.until("some parts", lambda: len(dead.held) > 20)
                dead.kill()
                survivors = [engine for engine in turn.engines if engine is not dead]
                refs = await turn.finish(survivors)
                dealt = deal(turn.base, sizes.part_count, GROUPED)
                trees = [Tree(shard.parents, EVERYONE) for shard in GROUPED.shards]
                lost = 0
                for part, ref in enumerate(refs):
                    tree = trees[dealt[part]]
                    if tree.root == victim:
                        continue
                    assert ref is not None, "the others are more than half"
                    assert ref.bitmap in (EVERYONE, EVERYONE & ~tree.subtrees[victim])
                    lost += ref.bitmap != EVERYONE
                assert lost
                applied = await turn.apply(refs, survivors)
                after = expected(turn, theta, np.zeros(sizes.elements, np.float32), deltas, refs)
                assert {answer.state_hash for answer in applied} == {state_hash(*after)}

    trio.run(main)
