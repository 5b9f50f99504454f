"""Ten rounds of the product's own modules against plain NumPy (tests/reference.py): the same state, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from protocol.codecs import codec
from protocol.exchange import ExchangeMachine, Reduce
from protocol.names import Base, digest
from protocol.outer import step_range
from protocol.planning import deal, flat_plan
from protocol.rules import Rules
from protocol.state_hash import state_hash
from protocol.stations import ExchangeView
from protocol.sums import PartSum
from tests import reference

ELEMENTS, BUFFERS, PART = 5 * 1024 + 512, 768, 1024


def rules(codec_name: str) -> Rules:
    return Rules(
        run=digest(b"run"),
        founders=(),
        initial_state_hash=digest(b"state"),
        elements=ELEMENTS,
        buffer_elements=BUFFERS,
        part_elements=PART,
        codec=codec_name,
        epoch_units=1,
        lease_cap_units=1,
        unit_tokens=1,
    )


def product_round(
    theta: np.ndarray,
    momentum: np.ndarray,
    deltas: list[np.ndarray],
    runs: list[tuple[tuple[int, int], ...]],
    run_rules: Rules,
    base: Base,
) -> None:
    """Every peer's machine in one process, frames handed over as function calls; steps θ and momentum in place."""
    peers = len(deltas)
    everybody = (1 << peers) - 1
    plan = flat_plan(peers, everybody)
    views = [
        ExchangeView(
            my_index=index,
            contributing=everybody,
            plan=plan,
            dealt=deal(base.digest(), run_rules.part_count, plan),
            tokens=tuple(runs),
            weight_cap_ratio=run_rules.weight_cap_ratio,
            durations_s=(10.0, 20.0),
            progress_s=5.0,
            slack_s=1.0,
            elements=ELEMENTS,
            part_elements=PART,
            codec=run_rules.codec,
            sum_codec="sum16",
        )
        for index in range(peers)
    ]
    machines = [ExchangeMachine(view, 0.0) for view in views]
    encoder = codec(run_rules.codec)
    encoded = [[encoder.encode(delta[slice(*run_rules.part_range(part))]) for part in range(6)] for delta in deltas]
    # The last peer's bytes arrive first: the order of sums must not follow the order of arrival.
    for sender in reversed(range(peers)):
        for part in machines[sender].leaf_parts:
            root = machines[machines[sender].up_target(part)]
            assert root.on_up(sender, part, sender, 1 << sender, len(encoded[sender][part]), 1.0)
            assert root.on_up_done(sender, part, 1 << sender, 1.0)
    stepped = set()
    for machine in machines:
        for decision in machine.poll(2.0):
            assert isinstance(decision, Reduce)
            start, stop = run_rules.part_range(decision.part)
            part_sum = PartSum(stop - start, codec("sum16"))
            weights = machine.weights(decision.part)
            for index in decision.order:
                part_sum.add_leaf(weights[index], encoder, encoded[index][decision.part])
            payload = encoder.encode(part_sum.mean(decision.weight))
            gradient = encoder.decode(payload, stop - start)
            lr = run_rules.outer_lr_for(peers)
            step_range(theta, momentum, gradient, start=start, lr=lr, momentum_factor=run_rules.momentum)
            stepped.add(decision.part)
    assert stepped == set(range(run_rules.part_count))


@pytest.mark.parametrize("codec_name", ["int8", "fp16", "fp32"])
@pytest.mark.parametrize("peers", [1, 2, 3, 4, 5])
def test_ten_rounds_bit_for_bit(peers: int, codec_name: str) -> None:
    generator = np.random.default_rng(peers)
    run_rules = rules(codec_name)
    theta = generator.standard_normal(ELEMENTS).astype(np.float32)
    momentum = np.zeros(ELEMENTS - BUFFERS, np.float32)
    expected_theta, expected_momentum = theta.copy(), momentum.copy()
    base = Base(
        run=run_rules.run, lineage=digest(b"lineage"), round=0, prev=bytes(32), state_hash=run_rules.initial_state_hash
    )
    for number in range(10):
        scale = 10.0 ** generator.uniform(-6, 0, ELEMENTS)
        deltas = [(generator.standard_normal(ELEMENTS) * scale).astype(np.float32) for _ in range(peers)]
        runs = [
            ((2, int(tokens[0])), (4, int(tokens[1]))) for tokens in generator.integers(1, 50_000, (peers, 2)).tolist()
        ]
        product_round(theta, momentum, deltas, runs, run_rules, base)
        expected_theta, expected_momentum = reference.flat_round(
            expected_theta,
            expected_momentum,
            deltas,
            [[first[1]] * 2 + [second[1]] * 4 for first, second in runs],
            codec=codec_name,
            part_elements=PART,
            lr=0.4 if peers == 1 else 0.6,
            factor=0.9,
        )
        assert theta.tobytes() == expected_theta.tobytes(), f"θ differs after round {number}"
        assert momentum.tobytes() == expected_momentum.tobytes(), f"momentum differs after round {number}"
        base = Base(
            run=base.run,
            lineage=base.lineage,
            round=number + 1,
            prev=base.digest(),
            state_hash=state_hash(theta, momentum),
        )


def test_the_comparison_would_notice_one_wrong_weight() -> None:
    theta, momentum = np.zeros(ELEMENTS, np.float32), np.zeros(ELEMENTS - BUFFERS, np.float32)
    deltas = [np.random.default_rng(seed).standard_normal(ELEMENTS).astype(np.float32) for seed in range(2)]
    states = {
        reference.flat_round(
            theta, momentum, deltas, [[7] * 6, [tokens] * 6], codec="int8", part_elements=PART, lr=0.6, factor=0.9
        )[0].tobytes()
        for tokens in (7, 8)
    }
    assert len(states) == 2
