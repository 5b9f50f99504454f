"""Plans: dealt exactly, shuffled by the base, and checked against every rule of section 3."""

from __future__ import annotations

import dataclasses
import math
import random
import time

import pytest
from roster_samples import BASE, PARTS, ready, roster, rules

from protocol.codecs import codec
from protocol.messages import Ready
from protocol.plan import Plan, Shard
from protocol.planning import (
    ASSUMED_RATE_BYTES_S,
    MAX_FAN,
    Tree,
    bytes_of,
    check_plan,
    contributing_of,
    deal,
    flat_plan,
    least_durations,
    level_count,
    level_durations,
)


def test_flat_every_contributor_is_the_root_of_one_shard() -> None:
    plan = flat_plan(4, 0b1011)
    assert plan == Plan(
        shards=(
            Shard(share=1, parents=(-1, 0, 0, 0)),
            Shard(share=1, parents=(1, -1, 1, 1)),
            Shard(share=1, parents=(3, 3, 3, -1)),
        )
    )
    assert flat_plan(1, 1) == Plan(shards=(Shard(share=1, parents=(-1,)),))


def test_flat_shares_may_leave_someone_without_a_shard() -> None:
    plan = flat_plan(3, 0b111, [5, 0, 2])
    assert [(shard.root, shard.share) for shard in plan.shards] == [(0, 5), (2, 2)]


@pytest.mark.parametrize(
    ("peers", "contributing", "shares", "words"),
    [
        (0, 1, None, "1 … 65 READYs, not 0"),
        (66, 1, None, "1 … 65 READYs, not 66"),
        (3, 0, None, "names no contributor"),
        (3, 0b1000, None, "names no contributor"),
        (3, 0b111, [1, 1], "3 READYs need 3 shares"),
        (3, 0b011, [0, 0, 9], "every contributor has share 0"),
    ],
)
def test_flat_plans_that_cannot_be(peers: int, contributing: int, shares: list | None, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        flat_plan(peers, contributing, shares)


def test_parts_are_dealt_in_exact_proportion() -> None:
    plan = flat_plan(3, 0b111, [1, 1, 2])
    for parts in range(40):
        dealt = deal(BASE.digest(), parts, plan)
        counts = [dealt.count(shard) for shard in range(3)]
        assert sum(counts) == len(dealt) == parts
        assert all(abs(count - parts * share / 4) < 1 for count, share in zip(counts, (1, 1, 2), strict=True))


def test_the_deal_is_shuffled_by_the_base_alone() -> None:
    plan = flat_plan(4, 0b1111)
    assert deal(BASE.digest(), 1000, plan) == deal(BASE.digest(), 1000, plan)
    roots_met = {part: set() for part in range(100)}
    for number in range(40):
        dealt = deal(dataclasses.replace(BASE, round=number).digest(), 100, plan)
        for part, shard in enumerate(dealt):
            roots_met[part].add(shard)
    assert all(len(met) == 4 for met in roots_met.values()), "no part meets the same root for ever"


def test_the_deal_is_the_same_on_every_machine() -> None:
    assert deal(BASE.digest(), 16, flat_plan(4, 0b1111)) == (3, 3, 0, 0, 3, 1, 1, 0, 2, 1, 2, 2, 1, 3, 2, 0)


GROUPED = Plan(
    shards=(
        # 0 ← 1, 2 and 3 ← 4, 5; READY 6 does not contribute and hangs below 5
        Shard(share=2, parents=(-1, 0, 0, 0, 3, 3, 5)),
        # 3 ← 4 and 0 ← 1 ← 2; READY 6 below the root
        Shard(share=1, parents=(3, 0, 1, -1, 3, 3, 3)),
    )
)
GROUPED_CONTRIBUTING = 0b0111111


def grouped_readys() -> list[Ready]:
    return [ready() for _ in range(6)] + [ready(0)]


def test_a_trees_slots_heights_and_subtrees() -> None:
    first, second = (Tree(shard.parents, GROUPED_CONTRIBUTING) for shard in GROUPED.shards)
    assert first.slots == ((1, 2, 3), (), (), (4, 5), (), (), ())
    assert first.children[5] == (6,)
    assert first.heights == (2, 0, 0, 1, 0, 0, 0)
    assert first.subtrees == (0b111111, 0b10, 0b100, 0b111000, 0b10000, 0b100000, 0)
    assert second.heights == (2, 1, 0, 3, 0, 0, 0)
    assert level_count(GROUPED, GROUPED_CONTRIBUTING) == 3


def test_bytes_are_counted_edge_by_edge() -> None:
    dealt = (0,) * PARTS
    plan = Plan(shards=(GROUPED.shards[0],))
    traffic = bytes_of(plan, GROUPED_CONTRIBUTING, dealt, rules())
    encoded = 9 * codec("int8").encoded_bytes(1024) + codec("int8").encoded_bytes(512)
    summed = 9 * codec("sum16").encoded_bytes(1024) + codec("sum16").encoded_bytes(512)
    assert [(one.sent, one.received) for one in traffic] == [
        (3 * encoded, 2 * encoded + summed),
        (encoded, encoded),
        (encoded, encoded),
        (summed + 2 * encoded, 3 * encoded),
        (encoded, encoded),
        (2 * encoded, encoded),
        (0, encoded),
    ]


def test_a_flat_round_moves_two_bytes_a_value_and_peer_in_each_direction() -> None:
    """All-to-all reduce-scatter and all-gather: 2·(n−1)/n of the vector, at one byte a value."""
    wide = rules(elements=64 * 65_536, part_elements=65_536)
    plan = flat_plan(4, 0b1111)
    for one in bytes_of(plan, 0b1111, deal(BASE.digest(), 64, plan), wide):
        expected = 2 * 3 / 4 * 64 * codec("int8").encoded_bytes(65_536)
        assert (one.sent, one.received) == (expected, expected)


def test_durations_follow_rates_and_levels_and_never_fall_below_the_least() -> None:
    plan = flat_plan(2, 0b11)
    big = rules(elements=100 * 65_536, part_elements=65_536, level_min_s=0.5)
    dealt = deal(BASE.digest(), 100, plan)
    traffic = bytes_of(plan, 0b11, dealt, big)
    assumed = level_durations(plan, 0b11, dealt, big)
    assert assumed == pytest.approx([2 * traffic[0].sent / ASSUMED_RATE_BYTES_S + step for step in (0, 0.5)])
    slow = level_durations(plan, 0b11, dealt, big, transfer_s=traffic[1].received / 1e5)
    assert slow == pytest.approx([2 * traffic[1].received / 1e5 + step for step in (0, 0.5)])
    far = level_durations(plan, 0b11, dealt, big, transfer_s=0.0, latency_s=2.0)
    assert far == pytest.approx((6, 10), abs=0.01)
    stuck = level_durations(plan, 0b11, dealt, big, transfer_s=1e9)
    assert stuck[0] == big.level_max_s
    assert level_durations(flat_plan(1, 1), 1, (0,) * 100, big) == (0.5,)
    for given in (assumed, slow, far, stuck):
        assert all(a >= b for a, b in zip(given, least_durations(plan, 0b11, dealt, big), strict=True))


@pytest.mark.parametrize("peers", [1, 2, 3, 5, 65])
def test_flat_plans_pass_the_predicate(peers: int) -> None:
    for contributing in {(1 << peers) - 1, 1, 1 << peers - 1}:
        readys = [ready(100 if contributing >> index & 1 else 0) for index in range(peers)]
        assert check_plan(roster(readys, flat_plan(peers, contributing)), rules()) is None


def test_grouped_plans_pass_the_predicate() -> None:
    assert check_plan(roster(grouped_readys(), GROUPED), rules()) is None


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (Plan(shards=()), "need 1 … 7 shards, not 0"),
        (Plan(shards=(GROUPED.shards[0],) * 8), "not 8"),
        (Plan(shards=(GROUPED.shards[0],) * 2), "READY 0 is already the root of another"),
        (Plan(shards=(Shard(share=0, parents=GROUPED.shards[0].parents),)), "has share 0"),
        (Plan(shards=(Shard(share=2**33, parents=GROUPED.shards[0].parents),)), "has share 8589934592"),
        (Plan(shards=(Shard(share=1, parents=(-1, 0, 0, 0, 0, 0)),)), "holds 6 of 7 READYs"),
        (Plan(shards=(Shard(share=1, parents=(-1, 0, 0, 0, 0, 0, -1)),)), "has 2 roots"),
        (Plan(shards=(Shard(share=1, parents=(1, 0, 0, 0, 0, 0, 0)),)), "has 0 roots"),
        (Plan(shards=(Shard(share=1, parents=(-1, 0, 0, 0, 0, 0, 7)),)), "not one of the 7 READYs"),
        (Plan(shards=(Shard(share=1, parents=(-1, 0, 0, 0, 0, 0, -2)),)), "not one of the 7 READYs"),
        (Plan(shards=(Shard(share=1, parents=(-1, 0, 0, 4, 5, 3, 0)),)), "READY 3 is deeper than 3, or in a cycle"),
        (Plan(shards=(Shard(share=1, parents=(-1, 0, 1, 2, 3, 0, 0)),)), "READY 4 is deeper than 3, or in a cycle"),
        (Plan(shards=(Shard(share=1, parents=(6, 6, 6, 6, 6, 6, -1)),)), "its root, READY 6, does not contribute"),
        (Plan(shards=(Shard(share=1, parents=(-1, 0, 0, 0, 0, 6, 0)),)), "READY 5 would send UP to READY 6"),
    ],
)
def test_plans_of_a_wrong_shape_are_refused(plan: Plan, words: str) -> None:
    made = roster(grouped_readys(), plan, durations_s=(2.0, 4.0))
    assert words in (check_plan(made, rules()) or "")


def test_the_fan_is_bounded() -> None:
    wide = Plan(shards=(Shard(share=1, parents=(-1, *[0] * (MAX_FAN + 1))),))
    made = roster([ready() for _ in range(MAX_FAN + 2)], wide, durations_s=(2.0, 4.0))
    assert "READY 0 has 65 children, above 64" in (check_plan(made, rules()) or "")


@pytest.mark.parametrize(
    ("durations", "words"),
    [
        ((), "2 durations (one a level, and DOWN), not 0"),
        ((2.0,), "not 1"),
        ((2.0, 4.0, 6.0), "not 3"),
        ((1.9, 4.0), "level 0 is given 1.9 s; the plan needs at least 2 s"),
        ((2.0, 3.9), "level 1 is given 3.9 s; the plan needs at least 4 s"),
        ((math.nan, 4.0), "level 0"),
        ((2.0, math.nan), "level 1"),
        ((math.inf, math.inf), "level 0 takes inf s, above the maximum of 300 s"),
        ((301.0, 303.0), "level 0 takes 301 s"),
        ((2.0, 303.0), "level 1 takes 301 s"),
        ((9.0, 9.0), "level 1 ends at 9 s, not after"),
    ],
)
def test_durations_outside_the_bounds_are_refused(durations: tuple, words: str) -> None:
    made = dataclasses.replace(roster([ready(), ready()], flat_plan(2, 0b11)), durations_s=durations)
    assert words in (check_plan(made, rules()) or "")


def test_byte_limits_of_a_ready_bind() -> None:
    """Among three, whose roots move 1.3 times the vector each way."""
    plan = flat_plan(3, 0b111)
    traffic = bytes_of(plan, 0b111, deal(BASE.digest(), PARTS, plan), rules())
    for field, bytes_needed, word in [
        ("upload_limit_bytes", traffic[1].sent, "send"),
        ("download_limit_bytes", traffic[1].received, "get"),
    ]:
        for limit, passes in [(0, True), (bytes_needed, True), (bytes_needed - 1, False)]:
            wrong = check_plan(roster([ready(), ready(**{field: limit}), ready()], plan), rules())
            assert (wrong is None) == passes
            if wrong is not None:
                assert wrong == f"READY 1 would {word} {bytes_needed} bytes, above its limit of {limit}"


def test_tokens_must_tile_the_fragment() -> None:
    wrong = check_plan(roster([ready(), ready(tokens=1)], flat_plan(2, 0b11)), rules(elements=1024 * 4))
    assert wrong == "READY 0: the runs of tokens cover 10 parts; the fragment has 4"


def test_a_roster_without_parts_has_no_durations() -> None:
    assert check_plan(roster([ready(0)], None), rules()) is None
    assert check_plan(roster([ready(0)], None, durations_s=(2.0,)), rules()) is not None


def test_who_has_a_slot_follows_from_the_roster_alone() -> None:
    readys = [ready(norm=norm) for norm in (1.0, 1.0, 1.2, 5.1, 4.9)]
    assert contributing_of(roster(readys, None), rules()) == 0b11111  # median 1.2, limit 6
    assert contributing_of(roster([*readys, ready(norm=1.0)], None), rules()) == 0b111111
    assert contributing_of(roster([ready(norm=1.0)] * 3 + [ready(norm=5.1)], None), rules()) == 0b0111
    assert contributing_of(roster([ready()] * 3, None, absent=0b010), rules()) == 0b101
    assert contributing_of(roster([ready(0), ready()], None), rules()) == 0b10
    assert contributing_of(roster([], None), rules()) == 0
    assert contributing_of(roster([ready(norm=0.0, largest=0.0)], None), rules()) == 1


@pytest.mark.parametrize(
    "numbers",
    [
        {"norm": math.nan},
        {"norm": math.inf},
        {"norm": -1.0},
        {"largest": math.nan},
        {"largest": math.inf},
        {"largest": -1.0},
        {"largest": 2.0},
        {"norm": 3e38, "largest": 3e38},
    ],
)
def test_numbers_beyond_sense_have_no_slot(numbers: dict) -> None:
    assert contributing_of(roster([ready(), ready(**numbers), ready()], None), rules()) == 0b101


def test_random_parents_never_break_the_predicate() -> None:
    """A hostile coordinator's plan gets a sentence, never an exception; what passes can be digested."""
    generator = random.Random(4)
    passed = 0
    for _ in range(3000):
        peers = generator.randint(1, 6)
        readys = [ready(generator.choice((0, 50))) for _ in range(peers)]
        shards = tuple(
            Shard(
                share=generator.choice((1, 1, 2, 0)),
                parents=tuple(
                    generator.choice((-1, *range(peers))) for _ in range(generator.choice((peers, peers, 2)))
                ),
            )
            for _ in range(generator.randint(0, 2))
        )
        made = roster(readys, Plan(shards=shards), durations_s=(2.0, 4.0, 6.0)[: generator.randint(1, 3)])
        wrong = check_plan(made, rules())
        assert wrong is None or len(wrong) > 10
        passed += wrong is None
    assert passed > 5


def test_sixty_four_peers_are_planned_and_checked_quickly() -> None:
    large = rules(elements=2000 * 65_536, part_elements=65_536)
    contributing = (1 << 64) - 1
    plan = flat_plan(64, contributing)
    readys = [dataclasses.replace(ready(), tokens=((2000, 100),)) for _ in range(64)]
    dealt = deal(BASE.digest(), 2000, plan)
    made = roster(readys, plan, durations_s=level_durations(plan, contributing, dealt, large))
    started = time.perf_counter()
    assert check_plan(made, large) is None
    assert time.perf_counter() - started < 1
