"""Plans beyond one root's children: two levels, spread evenly, the same on every machine."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from roster_samples import BASE, ready, roster, rules

from protocol.grouping import grouped_plan, plan_for
from protocol.names import digest
from protocol.plan import Plan
from protocol.planning import MAX_FAN, MAX_GROUPED_SHARDS, bytes_of, check_plan, deal, flat_plan, level_count, trees
from protocol.weights import bits

BASE_DIGEST = BASE.digest()
LARGE = rules(elements=1024 * 65_536, part_elements=65_536)


def names(count: int) -> list[str]:
    return [f"peer{index:04}" for index in range(count)]


def planned(peers: int, contributing: int) -> Plan:
    draft = roster([ready() for _ in range(peers)], None)
    return plan_for(draft, contributing, LARGE)


@pytest.mark.parametrize("peers", [1, 3, 64, 65])
def test_whoever_fits_below_one_root_gets_a_flat_plan(peers: int) -> None:
    everyone = (1 << peers) - 1
    assert planned(peers, everyone) == flat_plan(peers, everyone)


@pytest.mark.parametrize("peers", [66, 67, 100, 200, 333, 1000, 1024])
def test_more_are_cut_into_groups_and_pass_the_predicate(peers: int) -> None:
    draw = random.Random(peers)
    everyone = (1 << peers) - 1
    for contributing in (everyone, 1 << peers - 1, 0b111, everyone ^ 1, draw.getrandbits(peers) | 1, everyone >> 20):
        plan = planned(peers, contributing)
        assert len(plan.shards) == min(MAX_GROUPED_SHARDS, contributing.bit_count())
        made = roster([ready(100 if contributing >> index & 1 else 0) for index in range(peers)], plan)
        assert check_plan(made, rules()) is None
        for tree in trees(plan, contributing):
            assert max(tree.heights) <= 2
            assert tree.subtrees[tree.root] == contributing
            assert max(len(children) for children in tree.children) <= MAX_FAN


@pytest.mark.parametrize("peers", [66, 200, 1024])
def test_nobody_carries_much_more_than_its_share(peers: int) -> None:
    """Everyone must receive the vector once and send its contribution once; sums and forwarding are spread."""
    everyone = (1 << peers) - 1
    plan = planned(peers, everyone)
    traffic = bytes_of(plan, everyone, deal(BASE_DIGEST, LARGE.part_count, plan), LARGE)
    whole = LARGE.part_count * 65_536
    for direction in ([one.sent for one in traffic], [one.received for one in traffic]):
        assert 2 * whole < sum(direction) / peers < 2.2 * whole
        assert max(direction) < 1.3 * sum(direction) / peers
        assert min(direction) > 0.85 * sum(direction) / peers


def test_roots_and_heads_take_turns() -> None:
    """Other roots and heads in each attempt: nobody's loss hits the same peers for ever."""
    everyone = (1 << 200) - 1
    roots: Counter[int] = Counter()
    for number in range(20):
        plan = plan_for(replace(roster([ready()] * 200, None), attempt=number), everyone, LARGE)
        roots.update(shard.root for shard in plan.shards)
        duties = Counter(parent for shard in plan.shards for parent in set(shard.parents) - {-1, shard.root})
        assert max(duties.values()) <= 64 * 14 / 200 * 2
    assert set(roots) == set(range(200))


def test_groups_stay_together_from_round_to_round() -> None:
    """Most connections serve again: who is below whom changes, who is in one group does not."""
    everyone = (1 << 200) - 1
    pairs = []
    for number in range(2):
        plan = grouped_plan(names(200), everyone, LARGE.part_count, digest(b"draw", bytes([number])))
        pairs.append(
            {
                (index, parent)
                for shard in plan.shards
                for index, parent in enumerate(shard.parents)
                if parent not in (-1, shard.root)
            }
        )
    first, second = ({tuple(sorted(pair)) for pair in of_round} for of_round in pairs)
    assert len(first & second) > 0.8 * len(first)


def test_a_plan_is_the_same_on_every_machine() -> None:
    plan = grouped_plan(names(70), (1 << 70) - 1, 3, digest(b"draw"))
    assert [shard.root for shard in plan.shards] == [3, 9, 18]
    assert digest(b"plan", repr([shard.parents for shard in plan.shards]).encode()).hex()[:16] == "337149e12bdd0612"


def test_few_contributors_among_many_who_only_vote() -> None:
    plan = planned(1024, 1 << 500)
    (shard,) = plan.shards
    assert shard.root == 500
    assert level_count(plan, 1 << 500) == 0, "there is nothing to sum"
    # Whole groups without a contributor: one of them passes the result down to the others.
    assert len(set(shard.parents)) == 33


def test_a_lost_head_costs_its_group_in_its_shards_and_nobody_else() -> None:
    everyone = (1 << 200) - 1
    plan = planned(200, everyone)
    lost = next(parent for parent in plan.shards[0].parents if parent not in (-1, plan.shards[0].root))
    reached = [tree.subtrees[tree.root] & ~tree.subtrees[lost] for tree in trees(plan, everyone) if tree.root != lost]
    assert min(bitmap.bit_count() for bitmap in reached) >= 200 - 15
    assert sum(everyone & ~bitmap == 1 << lost for bitmap in reached) > len(reached) // 2, "elsewhere it is a leaf"


def test_plans_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="names no contributor among 70"):
        grouped_plan(names(70), 0, 3, BASE_DIGEST)
    with pytest.raises(ValueError, match="names no contributor among 70"):
        grouped_plan(names(70), 1 << 70, 3, BASE_DIGEST)
    with pytest.raises(ValueError, match="give a root 66 children, above 64"):
        grouped_plan(names(1140), (1 << 1140) - 1, 3, BASE_DIGEST)


def test_more_trees_than_a_large_roster_may_have() -> None:
    plan = planned(200, (1 << 200) - 1)
    extra = next(index for index in range(200) if index not in {shard.root for shard in plan.shards})
    shard = plan.shards[0]
    more = replace(
        shard,
        parents=tuple(
            extra if index == shard.root else -1 if index == extra else parent
            for index, parent in enumerate(shard.parents)
        ),
    )
    made = roster(
        [ready() for _ in range(200)], replace(plan, shards=(*plan.shards, more)), durations_s=(2.0, 4.0, 6.0)
    )
    assert check_plan(made, rules()) == "200 READYs need 1 … 64 shards, not 65"


def test_every_contribution_goes_up_once() -> None:
    everyone = (1 << 150) - 1
    for tree in trees(planned(150, everyone), everyone):
        assert sorted(index for slots in tree.slots for index in slots) == [i for i in bits(everyone) if i != tree.root]


@pytest.mark.parametrize("peers", [2, 5, 65, 70, 200])
def test_a_limit_spares_duties_and_stops_nobody(peers: int) -> None:
    """One READY with a limit of a byte made every roster invalid: the planner did not look, and the predicate did."""
    everyone = (1 << peers) - 1
    stingy = {1, peers - 1}
    for contributing in (everyone, everyone & ~2 | 1):
        readys = [
            ready(
                100 if contributing >> index & 1 else 0,
                upload_limit_bytes=int(index in stingy),
                download_limit_bytes=int(index == 1),
            )
            for index in range(peers)
        ]
        plan = plan_for(roster(readys, None), contributing, rules())
        made = roster(readys, plan)
        assert check_plan(made, rules()) is None
        if peers in (5, 200):  # of two, a root moves no more than a leaf; of 65, most roots have none of ten parts
            leaders = {parent for shard in plan.shards for parent in (*shard.parents, shard.root)}
            assert not leaders & stingy


def test_limits_that_only_a_lighter_duty_keeps() -> None:
    """Whoever is spared leaves more for the others, whose limits may then be too low in turn."""
    moved = 2 * 10 * 1024
    readys = [ready(upload_limit_bytes=int(moved * (0.8 + 0.02 * index))) for index in range(20)] + [ready()]
    plan = plan_for(roster(readys, None), (1 << 21) - 1, rules())
    assert check_plan(roster(readys, plan), rules()) is None


def test_where_all_are_limited_there_is_no_plan_that_passes() -> None:
    readys = [ready(upload_limit_bytes=1) for _ in range(3)]
    made = roster(readys, plan_for(roster(readys, None), 0b111, rules()))
    assert "above its limit of 1" in (check_plan(made, rules()) or "")
