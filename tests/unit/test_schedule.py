"""The inner learning rate: warm-up, descent, and a joiner's entry in the middle."""

from __future__ import annotations

import math

import pytest

from node.manifest import Inner
from node.trainer.schedule import learning_rate


def test_warm_up_is_linear_and_reaches_the_full_rate_at_its_last_step() -> None:
    inner = Inner(lr=1e-3, schedule="constant", warmup_steps=4)
    assert [learning_rate(inner, step) for step in range(6)] == pytest.approx(
        [0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3, 1e-3]
    )


def test_cosine_goes_from_the_full_rate_to_the_final_one_and_stays() -> None:
    inner = Inner(lr=1.0, schedule="cosine", warmup_steps=10, total_steps=110, final_lr_ratio=0.1)
    assert learning_rate(inner, 10) == 1.0
    assert learning_rate(inner, 60) == pytest.approx(0.55)
    assert learning_rate(inner, 35) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert learning_rate(inner, 110) == pytest.approx(0.1)
    assert learning_rate(inner, 10_000) == pytest.approx(0.1)
    rates = [learning_rate(inner, step) for step in range(10, 200)]
    assert rates == sorted(rates, reverse=True)


def test_linear_is_a_straight_line() -> None:
    inner = Inner(lr=2.0, schedule="linear", total_steps=100, final_lr_ratio=0.0)
    assert [learning_rate(inner, step) for step in (0, 25, 50, 100, 101)] == pytest.approx([2.0, 1.5, 1.0, 0.0, 0.0])


def test_a_joiners_fresh_optimizer_rises_to_the_rate_of_the_run() -> None:
    inner = Inner(lr=1.0, schedule="linear", total_steps=1000, final_lr_ratio=0.0, rejoin_warmup_steps=5)
    of_the_run = [learning_rate(inner, 500 + step) for step in range(8)]
    of_a_joiner = [learning_rate(inner, 500 + step, fresh_steps=step) for step in range(8)]
    assert [mine / others for mine, others in zip(of_a_joiner, of_the_run, strict=True)] == pytest.approx(
        [0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 1.0, 1.0]
    )


def test_a_schedule_that_does_not_exist_is_named() -> None:
    with pytest.raises(ValueError, match="'staircase': choose cosine, linear or constant"):
        learning_rate(Inner(lr=1.0, schedule="staircase", total_steps=10), 5)
