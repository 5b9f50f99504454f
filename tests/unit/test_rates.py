"""What is made of measurements that jitter, lie or grow old: round trips, rates, and what others are told of them."""

from __future__ import annotations

import random
import statistics

import pytest

from node.daemon.rates import FORGOTTEN_S, HALVED_S, NOISE, RateEstimate, Steady, two_digits
from node.daemon.round_trips import LOST_AFTER_S, WINDOW, RoundTrips
from node.daemon.training_speed import TrainingSpeed


def trips(*samples: float | None) -> RoundTrips:
    made = RoundTrips()
    for at_s, sample in enumerate(samples):
        if sample is None:
            made.lost()
        else:
            made.answered(sample, float(at_s))
    return made


def smoothed(measured: RoundTrips) -> float:
    assert measured.smoothed_s is not None
    return measured.smoothed_s


def test_nothing_is_known_before_the_first_answer() -> None:
    assert RoundTrips().smoothed_s is None
    assert RoundTrips().lost_share == 0.0
    assert trips(0.1).smoothed_s == 0.1
    assert trips(0.1, 0.2).answered_at_s == 1.0


def test_a_round_trip_that_jitters_by_30_percent_is_told_once() -> None:
    draw = random.Random(1)
    measured, told = RoundTrips(), Steady(0.002)
    smooth, changes = [], 0
    for at_s in range(10_000):
        measured.answered(0.1 * draw.uniform(0.7, 1.3), float(at_s))
        if at_s >= WINDOW:
            before = told.told
            changes += told.settle(measured.smoothed_s) != before
            smooth.append(smoothed(measured))
    assert changes == 1, "fourteen hours of pings, one every five seconds"
    assert told.told == pytest.approx(0.1, rel=0.15)
    assert statistics.pstdev(smooth) < 0.006
    assert statistics.fmean(smooth) == pytest.approx(0.1, rel=0.01)


def test_what_waited_behind_a_rounds_bytes_moves_nothing() -> None:
    assert smoothed(trips(*[0.02] * 12, *[1.5] * 4)) == pytest.approx(0.02)


def test_a_real_change_is_told_within_ten_pings() -> None:
    measured, told = trips(*[0.02] * WINDOW), Steady(0.002)
    told.settle(measured.smoothed_s)
    pings = 0
    while told.settle(measured.smoothed_s) == 0.02:
        measured.answered(0.08, 0.0)
        pings += 1
    assert pings <= 10


def test_answers_that_do_not_come_count_as_slow_ones() -> None:
    few = trips(*[0.02] * 14, None, None)
    assert smoothed(few) == pytest.approx(0.02)
    assert few.lost_share == pytest.approx(2 / 16)
    assert smoothed(trips(*[0.02] * 8, *[None] * 8)) > 1.0
    assert smoothed(trips(*[None] * 20)) == LOST_AFTER_S
    assert smoothed(trips(*[60.0] * 20)) == LOST_AFTER_S


def test_more_is_believed_at_once_and_less_by_half_an_observation() -> None:
    estimate = RateEstimate()
    assert estimate.at(0.0) is None
    estimate.observe(1e6, sure=False, now_s=0.0)
    assert estimate.at(0.0) == 1e6
    estimate.observe(2e5, sure=False, now_s=0.0)
    assert estimate.at(0.0) == 1e6, "a short transfer proves what it reached and nothing more"
    estimate.observe(1e6 / 16, sure=True, now_s=0.0)
    assert estimate.at(0.0) == pytest.approx(1e6 / 4)
    estimate.observe(1e6 / 16, sure=True, now_s=0.0)
    assert estimate.at(0.0) == pytest.approx(1e6 / 8)
    estimate.observe(9e6, sure=False, now_s=0.0)
    assert estimate.at(0.0) == 9e6


def test_what_is_old_weighs_less_and_is_forgotten() -> None:
    fresh, old = RateEstimate(), RateEstimate()
    for estimate, seen_at_s in ((fresh, 0.0), (old, -3 * HALVED_S)):
        estimate.observe(1e6, sure=True, now_s=seen_at_s)
        estimate.observe(1e4, sure=True, now_s=0.0)
    assert (fresh.at(0.0) or 0.0) == pytest.approx(1e5)
    assert (old.at(0.0) or 0.0) < 2e4
    assert old.age_s(5.0) == 5.0
    assert old.at(FORGOTTEN_S - 1.0) is not None
    assert old.at(FORGOTTEN_S) is None
    old.observe(1e3, sure=False, now_s=FORGOTTEN_S)
    assert old.at(FORGOTTEN_S) == 1e3


def test_an_observation_that_says_nothing_makes_nothing_younger() -> None:
    estimate = RateEstimate()
    estimate.observe(1e6, sure=True, now_s=0.0)
    estimate.observe(1e3, sure=False, now_s=FORGOTTEN_S - 1.0)
    assert estimate.at(FORGOTTEN_S) is None


def test_a_line_that_is_seen_with_up_to_30_percent_less_is_told_anew_once_in_hundreds_of_rounds() -> None:
    draw, estimate, told = random.Random(2), RateEstimate(), Steady()
    changes = 0
    for number in range(1000):
        estimate.observe(1e6 * draw.uniform(0.7, 1.0), sure=True, now_s=60.0 * number)
        before = told.told
        changes += told.settle(estimate.at(60.0 * number)) != before
    assert changes <= 8
    assert told.told == pytest.approx(0.85e6, rel=0.2)


def test_a_line_that_lost_nine_tenths_is_told_at_once_and_known_after_three_rounds() -> None:
    estimate, told = RateEstimate(), Steady()
    estimate.observe(1e7, sure=True, now_s=0.0)
    told.settle(estimate.at(0.0))
    seen = []
    for number in range(1, 4):
        estimate.observe(1e6, sure=True, now_s=60.0 * number)
        seen.append(told.settle(estimate.at(60.0 * number)) or 0.0)
    assert seen[0] < 0.4e7
    assert seen[2] < 0.15e7


def test_figures_hold_still_within_noise_and_below_the_least_change() -> None:
    figure = Steady(0.002)
    assert figure.settle(None) is None
    assert figure.settle(0.01234) == 0.012
    assert figure.settle(0.012 * NOISE * 0.99) == 0.012
    assert figure.settle(0.012 / NOISE * 1.01) == 0.012
    assert figure.settle(0.012 * NOISE * 1.01) == 0.015
    small = Steady(0.002)
    small.settle(0.0004)
    assert small.settle(0.0020) == 0.0004
    assert small.settle(0.0030) == 0.003
    assert small.settle(None) is None
    assert [two_digits(value) for value in (123456.0, 0.0, 0.009876, 99.9)] == [120000.0, 0.0, 0.0099, 100.0]


def test_a_round_in_which_the_machine_stood_still_is_not_its_speed() -> None:
    speed = TrainingSpeed()
    assert speed.tell() == 0.0
    for number, measured in enumerate((1000.0, 1040.0, 3.0, 990.0, 1010.0)):
        speed.saw(number, 1.0)  # the first step of the round
        speed.saw(number, measured)
    speed.saw(5, 0.0)
    assert speed.tell() == 1000.0
    for number in range(6, 9):
        speed.saw(number, 4000.0)
    assert speed.tell() == 4000.0
