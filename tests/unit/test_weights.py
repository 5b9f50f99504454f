"""Weights: capped tokens, exact integers, the same on every machine."""

from __future__ import annotations

import numpy as np
import pytest

from protocol.weights import (
    TOKENS_MAX,
    RosterWeights,
    as_float32,
    bits,
    check_runs,
    enough,
    part_weights,
    tokens_of,
    total,
)


def test_runs_give_each_part_its_tokens() -> None:
    runs = ((2, 100), (1, 0), (3, 7))
    assert [tokens_of(runs, part) for part in range(7)] == [100, 100, 0, 7, 7, 7, 0]
    assert tokens_of((), 0) == 0


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        (((5, 1),), "cover 5 parts; the fragment has 6"),
        (((6, 1), (1, 0)), "cover 7 parts"),
        (((0, 1), (6, 1)), "at least one part"),
        (((7, 1), (-1, 1)), "at least one part"),
        (((6, -1),), "0 …"),
        (((6, TOKENS_MAX),), "0 …"),
    ],
)
def test_runs_that_do_not_tile_the_fragment_are_refused(runs: tuple, words: str) -> None:
    assert words in (check_runs(runs, 6) or "")
    assert check_runs((), 6) is None
    assert check_runs(((1, 0), (5, TOKENS_MAX - 1)), 6) is None


@pytest.mark.parametrize(
    ("tokens", "ratio", "expected"),
    [
        ([], 3.0, []),
        ([0, 0], 3.0, [0, 0]),
        ([5], 3.0, [5]),
        ([10, 1000], 3.0, [10, 1000]),  # median 505
        ([10, 10, 1000], 3.0, [10, 10, 30]),
        ([10, 0, 11, 1000, 0], 3.0, [10, 0, 11, 33, 0]),  # who contributes nothing does not pull the median down
        ([1, 2, 3, 1000], 3.0, [1, 2, 3, 7]),  # median 2½, cap ⌊7½⌋
        ([1, 1, 1], 0.5, [1, 1, 1]),  # a contributor's weight is at least 1
        ([2**53 - 1] * 3, 3.0, [2**53 - 1] * 3),
        ([10, 10, 100], 0.1 + 0.2, [3, 3, 3]),  # the ratio is the exact double, 0.3000000000000000444
        ([10, 10, 100], 0.3, [2, 2, 2]),  # 0.299999999999999988…
    ],
)
def test_weights_are_capped_at_a_multiple_of_the_median(tokens: list, ratio: float, expected: list) -> None:
    assert part_weights(tokens, ratio) == expected


def test_order_does_not_matter() -> None:
    generator = np.random.default_rng(0)
    for _ in range(50):
        tokens = generator.integers(0, 10_000, generator.integers(1, 20)).tolist()
        order = generator.permutation(len(tokens)).tolist()
        weights = part_weights(tokens, 3.0)
        assert part_weights([tokens[index] for index in order], 3.0) == [weights[index] for index in order]


def test_totals_and_the_half_rule_over_bitmaps() -> None:
    weights = [5, 0, 7, 12]
    assert total(weights, 0b1101) == 24
    assert total(weights, 0) == 0
    assert enough(weights, 0b1000)
    assert enough(weights, 0b0101)
    assert not enough(weights, 0b0111 & ~0b0001)
    assert not enough([0, 0], 0b11)
    assert list(bits(0b1000_0000_0101)) == [0, 2, 11]
    assert list(bits(1 << 64 | 1)) == [0, 64]


def test_a_weight_rounds_to_float32_once() -> None:
    assert as_float32(2**24 + 1) == np.float32(2**24)
    assert as_float32(2**24 + 3) == np.float32(2**24 + 4)
    assert type(as_float32(3)) is np.float32


def test_a_roster_weighs_part_by_part_and_only_those_with_a_slot() -> None:
    weights = RosterWeights([((2, 10), (1, 40)), ((3, 10),), ((3, 10),), ((3, 9999),)], 0b0111, 3.0)
    assert weights.at(0) == (10, 10, 10, 0)
    assert weights.at(1) is weights.at(0)
    assert weights.at(2) == (30, 10, 10, 0)
