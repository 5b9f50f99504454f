"""Budgets of steps: whoever is slower makes fewer, so that all are done together."""

from __future__ import annotations

import pytest

from protocol.budgets import budget_steps, usual_speed


def budgets(speeds: list[float], *, least: int = 10, most: int = 400) -> list[int]:
    return [
        budget_steps(100, mine, speeds[:index] + speeds[index + 1 :], least=least, most=most)
        for index, mine in enumerate(speeds)
    ]


def idle_share(speeds: list[float], steps: list[int]) -> float:
    """Of all the time until the last is done, how much is spent waiting for it."""
    took = [count / speed for count, speed in zip(steps, speeds, strict=True)]
    return 1 - sum(took) / (len(took) * max(took))


def test_speeds_of_one_two_and_four_finish_together() -> None:
    speeds = [250.0, 500.0, 1000.0]
    assert budgets(speeds) == [50, 100, 200]
    assert idle_share(speeds, [100] * 3) == pytest.approx(5 / 12)
    assert idle_share(speeds, budgets(speeds)) == 0.0


@pytest.mark.parametrize("speeds", [[100.0, 400.0], [3.0, 1.0, 1.7, 2.2], [1.0, 1.01, 0.99], [7.0]])
def test_others_finish_together_too(speeds: list[float]) -> None:
    assert idle_share(speeds, budgets(speeds)) < 0.02


def test_bounds_hold_and_the_manifest_without_them_gives_everyone_the_same() -> None:
    assert budgets([1.0, 100.0, 10_000.0]) == [10, 100, 400]
    assert budgets([1.0, 100.0, 10_000.0], least=100, most=100) == [100] * 3


def test_who_has_not_measured_makes_the_usual_steps() -> None:
    assert budgets([0.0, 50.0, 200.0]) == [100, 50, 200]
    assert budgets([0.0, 0.0]) == [100, 100]
    assert usual_speed([]) == usual_speed([0.0]) == 0.0
