"""Plans from measured links: the slowest peer is done first, and without measurements nothing changes."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from roster_samples import ready, roster, rules

from protocol.experience import Experience
from protocol.grouping import plan_for
from protocol.links import Link, Report, Reports
from protocol.messages import Roster
from protocol.plan import Plan
from protocol.planner import Outlook, Planned, make_plan, predicted_transfer
from protocol.planning import (
    ASSUMED_RATE_BYTES_S,
    bytes_of,
    check_plan,
    contributing_of,
    deal,
    flat_plan,
    level_durations,
)
from protocol.rules import Rules
from protocol.shares import flat_shares, program_shares, seconds_of, whole_shares
from protocol.weights import bits

LARGE = rules(elements=400 * 65_536, part_elements=65_536)
"""25M values."""
WHOLE = 26.2e6
"""Bytes of it in int8, about."""


def name(index: int) -> str:
    return f"peer{index:03}"


def draft(peers: int, contributing: int | None = None, **of_first: object) -> Roster:
    contributing = (1 << peers) - 1 if contributing is None else contributing
    readys = [ready() if contributing >> index & 1 else ready(0) for index in range(peers)]
    readys = [replace(one, tokens=((400, 100),)) if one.contributes else one for one in readys]
    readys[0] = replace(readys[0], **of_first)
    return roster(readys, None)


def planned(made: Roster, outlook: Outlook, contributing: int | None = None, of: Rules = LARGE) -> Planned:
    contributing = (1 << len(made.readys)) - 1 if contributing is None else contributing
    answer = make_plan(made, contributing, of, outlook)
    assert check_plan(replace(made, plan=answer.plan, durations_s=answer.durations_s), of) is None
    return answer


def rated(rates: list[tuple[float, float]]) -> Reports:
    return {name(index): Report(up_bytes_s=up, down_bytes_s=down) for index, (up, down) in enumerate(rates)}


def slowest_s(plan: Plan, contributing: int, rates: list[tuple[float, float]], made: Roster) -> float:
    traffic = bytes_of(plan, contributing, deal(made.base.digest(), LARGE.part_count, plan), LARGE)
    return max(max(one.sent / up, one.received / down) for one, (up, down) in zip(traffic, rates, strict=True))


@pytest.mark.parametrize("peers", [1, 2, 5, 65, 70])
def test_without_reports_a_plan_is_what_it_was(peers: int) -> None:
    made, everyone = draft(peers), (1 << peers) - 1
    answer = planned(made, Outlook())
    assert answer.plan == plan_for(made, everyone, LARGE)
    dealt = deal(made.base.digest(), LARGE.part_count, answer.plan)
    assert answer.durations_s == level_durations(answer.plan, everyone, dealt, LARGE)


@pytest.mark.parametrize("peers", [1, 2, 3, 4, 9, 64])
def test_equal_rates_give_equal_shares(peers: int) -> None:
    assert planned(draft(peers), Outlook(reports=rated([(2e7, 2e7)] * peers))).plan == flat_plan(
        peers, (1 << peers) - 1
    )


def test_where_bytes_take_no_time_rates_give_nobody_less() -> None:
    """Four nodes on one busy machine, as it measured its own memory; on slow lines the same vector follows rates."""
    small = rules(elements=11 * 4096, part_elements=4096)
    rates = [(1.5e7, 1.2e7), (4e6, 9e6), (1.2e7, 5e6), (2e6, 3e6)]
    slow = [(up / 100, down / 100) for up, down in rates]
    assert make_plan(draft(4), 0b1111, small, Outlook(reports=rated(rates))).plan == flat_plan(4, 0b1111)
    assert make_plan(draft(4), 0b1111, small, Outlook(reports=rated(slow))).plan != flat_plan(4, 0b1111)


def test_a_slow_uplink_owns_little_and_the_round_is_not_held_hostage() -> None:
    """One uplink a tenth of the others: its contribution alone takes all the time there is."""
    rates = [(2.5e6, 2.5e7), *[(2.5e7, 2.5e7)] * 3]
    made = draft(4)
    plan = planned(made, Outlook(reports=rated(rates))).plan
    assert slowest_s(plan, 0b1111, rates, made) == pytest.approx(WHOLE / 2.5e6, rel=0.02)
    assert slowest_s(flat_plan(4, 0b1111), 0b1111, rates, made) > 1.45 * WHOLE / 2.5e6
    # The others share the rest evenly.
    assert [shard.share for shard in plan.shards if shard.root != 0] == [1] * 3


def test_shares_follow_bandwidth() -> None:
    rates = [(1e7, 1e8), (2e7, 1e8), (3e7, 1e8), (4e7, 1e8)]
    plan = planned(draft(4), Outlook(reports=rated(rates))).plan
    shares = {shard.root: shard.share for shard in plan.shards}
    assert shares[0] < shares[1] < shares[2] < shares[3] if 0 in shares else shares[1] < shares[2] < shares[3]


def test_the_closed_form_is_the_linear_program() -> None:
    draw = random.Random(1)
    for _ in range(40):
        peers = draw.randint(2, 12)
        contributing = draw.getrandbits(peers) | 3
        roots = contributing & draw.getrandbits(peers) or contributing
        reports = rated([(10 ** draw.uniform(5, 8), 10 ** draw.uniform(5, 8)) for _ in range(peers)])
        made = draft(peers, contributing)
        terrain = Outlook(reports=reports).terrain(made)
        cap = max(0.45, 1 / roots.bit_count())
        most = np.array([cap if roots >> index & 1 else 0.0 for index in range(peers)])
        closed = flat_shares(peers, contributing, most, terrain, LARGE)
        plan = flat_plan(peers, contributing, [roots >> index & 1 for index in range(peers)])
        seconds = seconds_of(plan, contributing, terrain, LARGE)
        solved = program_shares(seconds, most[list(bits(roots))])
        assert closed.sum() == pytest.approx(1.0)
        assert (closed <= most + 1e-9).all()
        time_closed = (seconds @ closed[list(bits(roots))]).max()
        assert time_closed == pytest.approx((seconds @ solved).max(), rel=1e-4)
        assert closed[list(bits(roots))] == pytest.approx(solved, abs=1e-3)


def test_no_root_owns_so_much_that_its_death_ends_the_attempt() -> None:
    rates = [(1e9, 1e9), (1e6, 1e6), (1e6, 1e6), (1e6, 1e6)]
    made = draft(4)
    plan = planned(made, Outlook(reports=rated(rates))).plan
    parts = np.bincount(deal(made.base.digest(), 400, plan))
    assert parts.max() <= 200


def test_a_slow_pair_moves_next_to_nothing() -> None:
    """Among five, one pair at a hundredth of what both ends move to others: neither owns a shard."""
    links = {
        (row, column): Link(sent_bytes_s=1e5 if {row, column} == {0, 1} else 1e7)
        for row in range(5)
        for column in range(5)
        if row != column
    }
    reports = {
        name(row): Report(
            up_bytes_s=4e7,
            down_bytes_s=4e7,
            links={name(column): link for (of, column), link in links.items() if of == row},
        )
        for row in range(5)
    }
    made = draft(5)
    plan = planned(made, Outlook(reports=reports)).plan
    whole = sum(shard.share for shard in plan.shards)
    assert sum(shard.share for shard in plan.shards if shard.root in (0, 1)) / whole < 0.03
    assert {2, 3, 4} <= {shard.root for shard in plan.shards}


def test_who_cannot_be_dialled_owns_nothing_that_another_such_peer_must_send_to() -> None:
    reports = {name(0): Report(dialable=False), name(2): Report(dialable=False), name(3): Report(dialable=True)}
    plan = planned(draft(4), Outlook(reports=reports)).plan
    assert [shard.root for shard in plan.shards] == [1, 3]
    alone = planned(draft(4), Outlook(reports={name(0): Report(dialable=False)})).plan
    assert [shard.root for shard in alone.shards] == [0, 1, 2, 3], "whoever can dial does"
    nobody = planned(draft(3), Outlook(reports={name(index): Report(dialable=False) for index in range(3)})).plan
    assert len(nobody.shards) == 3, "there is no better plan, and one may work"


def test_edges_that_failed_are_avoided() -> None:
    made = draft(4, failed_edges=(name(1),))
    plan = planned(made, Outlook(nils={name(1): {name(0)}})).plan
    assert [shard.root for shard in plan.shards] == [2, 3]
    assert len(planned(made, Outlook()).plan.shards) == 4, "one voice is not enough"


def test_who_came_back_from_the_dead_is_the_trouble_and_not_those_who_missed_it() -> None:
    """All but the newcomer name the third of five: it owns nothing, and the newcomer not everything."""
    made = draft(5)
    named = {name(index): {name(2)} for index in (0, 1, 3)}
    assert [shard.root for shard in planned(made, Outlook(nils=named)).plan.shards] == [0, 1, 3, 4]
    halves = {name(one): {name(other) for other in range(4) if (one < 2) != (other < 2)} for one in range(4)}
    assert len(planned(draft(4), Outlook(nils=halves)).plan.shards) == 4, "two halves that meet again"


def test_among_very_many_the_slow_and_the_hidden_have_no_duties() -> None:
    peers, slow, hidden = 100, {3, 50, 99}, {4, 51}
    reports = {
        name(index): Report(up_bytes_s=1e6 if index in slow else 2e7, down_bytes_s=2e7, dialable=index not in hidden)
        for index in range(peers)
    }
    plan = planned(draft(peers), Outlook(reports=reports)).plan
    duties = {parent for shard in plan.shards for parent in (*shard.parents, shard.root)}
    assert not duties & (slow | hidden)
    assert len(plan.shards) == 64
    nobody = {name(index): Report(dialable=False) for index in range(peers)}
    assert len(planned(draft(peers), Outlook(reports=nobody)).plan.shards) == 64


def test_byte_limits_bound_a_share_instead_of_ending_it() -> None:
    rates = [(2.5e7, 2.5e7)] * 4
    made = draft(4, upload_limit_bytes=int(1.2 * WHOLE))
    plan = planned(made, Outlook(reports=rated(rates))).plan
    whole = sum(shard.share for shard in plan.shards)
    assert 0.05 < next(shard.share for shard in plan.shards if shard.root == 0) / whole < 0.1
    stingy = draft(4, upload_limit_bytes=1)
    assert 0 not in [shard.root for shard in planned(stingy, Outlook(reports=rated(rates))).plan.shards]


def test_the_same_reports_give_the_same_plan_whatever_their_order() -> None:
    draw = random.Random(3)
    rates = [(10 ** draw.uniform(6, 8), 10 ** draw.uniform(6, 8)) for _ in range(9)]
    reports = rated(rates)
    made = draft(9)
    plans = set()
    for _ in range(5):
        items = list(reports.items())
        draw.shuffle(items)
        plans.add(planned(made, Outlook(reports=dict(items))).plan)
    assert len(plans) == 1


def test_durations_follow_measured_rates() -> None:
    made = draft(4)
    slow = planned(made, Outlook(reports=rated([(1e6, 1e6)] * 4)))
    fast = planned(made, Outlook(reports=rated([(1e8, 1e8)] * 4)))
    assert slow.plan == fast.plan
    assert slow.durations_s[0] == pytest.approx(2 * 1.5 * WHOLE / 1e6, rel=0.02)
    believed_s = 1.5 * WHOLE / math.sqrt(1e8 * ASSUMED_RATE_BYTES_S)
    assert fast.durations_s[0] == pytest.approx(2 * believed_s, rel=0.02), "by half: nodes may share a line"
    far = {name(index): Report(links={name(0): Link(round_trip_s=2.0)}) for index in range(4)}
    patient = planned(made, Outlook(reports=far)).durations_s
    unmeasured = planned(made, Outlook()).durations_s
    assert [late - usual for late, usual in zip(patient, unmeasured, strict=True)] == pytest.approx([6.0, 8.0])


def test_shares_that_a_solver_rounds_differently_are_the_same_whole_numbers() -> None:
    exact = np.array([1 / 16, 3 / 16, 1 / 4, 1 / 2])
    for noise in (0.0, 1e-9, -1e-9):
        assert whole_shares(exact + noise) == whole_shares(exact)
    assert whole_shares(np.full(7, 1 / 7)) == (1,) * 7
    assert whole_shares(np.array([1e-9, 2e-9])) == (0, 1)


def test_the_prediction_is_what_the_bytes_take() -> None:
    rates = [(1e7, 2e7), (2e7, 1e7), (3e7, 3e7)]
    made = draft(3)
    plan = planned(made, Outlook(reports=rated(rates))).plan
    seconds = seconds_of(plan, 0b111, Outlook(reports=rated(rates)).terrain(made), LARGE)
    dealt = deal(made.base.digest(), LARGE.part_count, plan)
    assert predicted_transfer(seconds, dealt) == pytest.approx(slowest_s(plan, 0b111, rates, made), rel=1e-3)


def any_outlook(draw: random.Random, peers: int) -> Outlook:
    """Reports as peers of all kinds could sign them, lies among them."""

    def some(low: float, high: float, chance: float) -> float | None:
        return 10 ** draw.uniform(low, high) if draw.random() < chance else None

    names = [name(index) for index in range(peers)]
    chance = draw.random()
    reports = {
        one: Report(
            up_bytes_s=some(-3, 15, chance),
            down_bytes_s=some(-3, 15, chance),
            dialable=draw.choice((None, True, False)),
            links={
                other: Link(
                    round_trip_s=some(-4, 3, chance),
                    sent_bytes_s=some(0, 10, chance),
                    received_bytes_s=some(0, 10, chance),
                )
                for other in [*names, "stranger", one]
                if draw.random() < chance
            },
        )
        for one in names
        if draw.random() < chance
    }
    left = list(names)
    draw.shuffle(left)
    groups = []
    while left and draw.random() < 0.8:
        size = draw.randint(1, len(left))
        groups.append(tuple(sorted(left[:size])))
        left = left[size:]
    return Outlook(
        reports=reports,
        groups=tuple(sorted(groups)),
        experience=Experience(gain=draw.choice((None, -1.0, 1.0))),
        nils={one: {draw.choice(names)} for one in names if draw.random() < 0.1},
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_whatever_is_reported_a_plan_passes_the_predicate(seed: int) -> None:
    draw = random.Random(seed)
    small = rules(elements=40 * 65_536, part_elements=65_536)
    for _ in range(4):
        peers = draw.choice((1, 2, 3, 5, 8, 13, 40, 65, 70))
        names = [name(index) for index in range(peers)]
        readys = [
            ready(
                draw.choice((0, 1, 100)),
                upload_limit_bytes=draw.choice((0, 0, 0, 1, 4_000_000)),
                download_limit_bytes=draw.choice((0, 0, 0, 6_000_000)),
                failed_edges=tuple(draw.sample(names, min(peers, draw.randint(0, 3)))),
            )
            for _ in range(peers)
        ]
        # One without limits, at least: where all are limited there may be no plan that passes.
        readys[-1] = ready()
        readys = [replace(one, tokens=((40, 100),) if one.contributes else ()) for one in readys]
        made = replace(roster(readys, None), attempt=draw.randrange(4))
        contributing = contributing_of(made, small)
        answer = make_plan(made, contributing, small, any_outlook(draw, peers))
        assert check_plan(replace(made, plan=answer.plan, durations_s=answer.durations_s), small) is None
