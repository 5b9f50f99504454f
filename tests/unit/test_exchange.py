"""The tree executor, rule by rule (protocol section 4)."""

from __future__ import annotations

import dataclasses
import math

import pytest
from roster_samples import PARTS as ROSTER_PARTS
from roster_samples import ready, roster, rules

from protocol.codecs import codec
from protocol.exchange import ExchangeMachine, LeaveEmpty, Reduce, SendPartial
from protocol.plan import Plan, Shard
from protocol.planning import flat_plan
from protocol.stations import ExchangeView, Role

PART = 512
PARTS = 4
LEAF_BYTES = codec("int8").encoded_bytes(PART)
SUM_BYTES = codec("sum16").encoded_bytes(PART)
PROGRESS_S, SLACK_S = 5.0, 1.0

FLAT = Plan(shards=(flat_plan(4, 0b0111).shards[0],))
"""READY 0 reduces everything; 1 and 2 contribute, 3 only listens."""

GROUPED = Plan(shards=(Shard(share=1, parents=(-1, 0, 1, 1, 0, 4)),))
"""0 ← (1 ← 2, 3), (4 ← 5)"""


def view(plan: Plan, me: int, contributing: int, **changes: object) -> ExchangeView:
    values: dict = {
        "my_index": me,
        "contributing": contributing,
        "plan": plan,
        "dealt": (0,) * PARTS,
        "tokens": (((PARTS, 10),),) * len(plan.shards[0].parents),
        "weight_cap_ratio": 3.0,
        "durations_s": (20.0, 40.0),
        "progress_s": PROGRESS_S,
        "slack_s": SLACK_S,
        "elements": PART * PARTS,
        "part_elements": PART,
        "codec": "int8",
        "sum_codec": "sum16",
    }
    return ExchangeView(**(values | changes))


def flat(me: int = 0, now_s: float = 0.0, **changes: object) -> ExchangeMachine:
    return ExchangeMachine(view(FLAT, me, 0b0111, **changes), now_s)


def grouped(me: int, **changes: object) -> ExchangeMachine:
    return ExchangeMachine(view(GROUPED, me, 0b111111, durations_s=(20.0, 30.0, 40.0), **changes), 0.0)


def fill(machine: ExchangeMachine, sender: int, part: int, now_s: float, bitmap: int | None = None) -> None:
    bitmap = 1 << sender if bitmap is None else bitmap
    verdict = machine.on_up(sender, part, sender, bitmap, machine.up_bytes(sender, part), now_s)
    assert verdict, verdict.why
    assert machine.on_up_done(sender, part, bitmap, now_s)


# ---------------------------------------------------------------- what the plan says


def test_roles_targets_and_lengths_on_a_flat_plan() -> None:
    root, leaf, listener = flat(0), flat(1), flat(3)
    assert (root.role(0), leaf.role(0), listener.role(0)) == (Role.ROOT, Role.LEAF, Role.RECEIVER)
    assert (root.up_target(0), leaf.up_target(0), listener.up_target(0)) == (None, 0, None)
    assert (root.down_source(0), leaf.down_source(0), listener.down_source(0)) == (None, 0, 0)
    assert root.slots(0) == (1, 2)
    assert root.receivers(0) == (1, 2, 3)
    assert leaf.leaf_parts == (0, 1, 2, 3)
    assert (listener.leaf_parts, listener.summing_parts) == ((), ())
    assert root.summing_parts == (0, 1, 2, 3)
    assert (root.up_bytes(1, 0), root.down_bytes(0)) == (LEAF_BYTES, LEAF_BYTES)
    assert root.weights(0) == (10, 10, 10, 0)


def test_roles_targets_and_lengths_on_a_grouped_plan() -> None:
    owner = grouped(1)
    assert owner.role(0) is Role.INNER
    assert owner.up_target(0) == owner.down_source(0) == owner.root(0) == 0
    assert owner.slots(0) == owner.receivers(0) == (2, 3)
    assert owner.up_bytes(2, 0) == LEAF_BYTES
    root = grouped(0)
    assert [root.sends_partial(slot, 0) for slot in root.slots(0)] == [True, True]
    assert root.up_bytes(1, 0) == SUM_BYTES


def test_the_last_part_may_be_shorter() -> None:
    machine = flat(elements=PART * 3 + 256)
    assert machine.part_range(3) == (PART * 3, PART * 3 + 256)
    assert machine.up_bytes(1, 3) == codec("int8").encoded_bytes(256)


# ---------------------------------------------------------------- closing


def test_a_part_closes_when_its_slots_are_filled_and_sums_in_bit_order() -> None:
    machine = ExchangeMachine(view(Plan(shards=(flat_plan(4, 0b1111).shards[1],)), 1, 0b1111), 0.0)
    for sender in (3, 0):
        fill(machine, sender, 2, 1.0)
        assert machine.poll(1.0) == []
    fill(machine, 2, 2, 1.0)
    assert machine.next_wakeup_s() <= 1.0, "decided, not yet handed out"
    assert machine.poll(1.0) == [Reduce(part=2, order=(0, 1, 2, 3), bitmap=0b1111, weight=40)]
    assert machine.poll(1.0) == []


def test_an_inner_node_adds_its_own_first_and_a_root_in_ascending_order() -> None:
    inner = ExchangeMachine(
        view(Plan(shards=(Shard(share=1, parents=(2, 2, 3, -1)),)), 2, 0b1111, durations_s=(20.0, 30.0, 40.0)), 0.0
    )
    fill(inner, 1, 0, 1.0)
    fill(inner, 0, 0, 1.0)
    assert inner.poll(1.0) == [SendPartial(part=0, order=(2, 0, 1), bitmap=0b0111, parent=3)]
    root = grouped(0)
    fill(root, 4, 0, 1.0, 0b110000)
    fill(root, 1, 0, 1.0, 0b001110)
    assert root.poll(1.0) == [Reduce(part=0, order=(0, 1, 4), bitmap=0b111111, weight=60)]


def test_a_peer_alone_reduces_at_once() -> None:
    machine = ExchangeMachine(view(flat_plan(1, 1), 0, 1, durations_s=(2.0,)), 7.0)
    assert machine.poll(7.0) == [Reduce(part=part, order=(0,), bitmap=1, weight=10) for part in range(PARTS)]
    assert machine.finished
    assert machine.next_wakeup_s() == math.inf


def test_who_only_listens_waits_for_downs_alone() -> None:
    machine = flat(3)
    assert machine.poll(0.0) == []
    assert machine.expected_downs == (0, 1, 2, 3)
    assert machine.waiting_for == (0,)
    for part in range(PARTS):
        assert machine.on_down(0, part, 0b011, LEAF_BYTES, 1.0)
        machine.on_down_done(part, 1.0)
    assert machine.finished


def test_the_deadline_grows_with_the_part_and_a_slot_missed_once_is_skipped() -> None:
    machine = flat(durations_s=(40.0, 80.0), now_s=100.0)
    for second in range(12):  # bytes trickle, so silence is not the reason
        machine.on_progress(1, 100.0 + second)
        machine.on_progress(2, 100.0 + second)
    fill(machine, 1, 0, 105.0)
    fill(machine, 2, 3, 105.0)
    assert machine.next_wakeup_s() == pytest.approx(100 + 40 * 1 / 4 + SLACK_S)
    assert machine.poll(110.9) == []
    assert machine.poll(111.0) == [Reduce(part=0, order=(0, 1), bitmap=0b011, weight=20)]
    assert machine.excluded == {2: "its bytes of part 0 came too late"}
    assert machine.on_up(2, 1, 2, 0b100, LEAF_BYTES, 111.0).why == "UP for a slot that missed an earlier part"
    fill(machine, 1, 1, 112.0)
    fill(machine, 1, 3, 112.0)
    assert machine.poll(112.0) == [
        Reduce(part=1, order=(0, 1), bitmap=0b011, weight=20),
        Reduce(part=3, order=(0, 1, 2), bitmap=0b111, weight=30),
    ], "what a slot brought before it missed one still counts"


def test_early_parts_of_a_long_exchange_are_not_due_before_silence_counts() -> None:
    machine = flat(durations_s=(6.0, 12.0))
    assert machine.next_wakeup_s() == pytest.approx(min(PROGRESS_S, 6.0) + SLACK_S)


def test_higher_levels_close_later() -> None:
    deadlines = []
    for me in (1, 0):
        machine = grouped(me)
        now_s, decisions = 0.0, []
        while not decisions:
            for peer in range(6):
                machine.on_progress(peer, now_s)
            decisions = machine.poll(now_s)
            now_s += 0.25
        deadlines.append(now_s)
    assert deadlines[0] < deadlines[1]


def test_a_leafs_silence_excludes_it_everywhere_and_takes_its_downs_along() -> None:
    plan = flat_plan(3, 0b111)
    machine = ExchangeMachine(view(plan, 0, 0b111, dealt=(1, 2, 1, 0), durations_s=(100.0, 200.0)), 0.0)
    machine.on_progress(2, 4.0)
    assert machine.next_wakeup_s() == SLACK_S + PROGRESS_S
    assert machine.expected_downs == (0, 1, 2)
    assert machine.poll(5.9) == []
    assert machine.excluded == {}
    assert machine.poll(6.0) == []
    assert machine.excluded == {1: "it delivered nothing for 5 s"}
    assert machine.expected_downs == (1,)
    fill(machine, 2, 3, 8.0)
    assert machine.poll(8.0) == [Reduce(part=3, order=(0, 2), bitmap=0b101, weight=20)]
    assert machine.on_down(1, 0, 0b111, LEAF_BYTES, 9.0), "a part that comes after all is welcome"


def test_any_bytes_break_the_silence() -> None:
    machine = flat(durations_s=(100.0, 200.0))
    now_s = 0.0
    while now_s < 24:
        now_s += 4
        machine.on_progress(1, now_s)
        machine.on_progress(2, now_s)
        assert machine.poll(now_s) == []
    assert machine.excluded == {}


def test_an_inner_nodes_silence_counts_from_its_own_deadline() -> None:
    machine = grouped(0)
    fill(machine, 4, 0, 1.0, 0b110000)
    assert machine.poll(10.0) == [], "READY 1 may still be waiting for its own slots"
    # Level 1 closes part 0 at 5 + 1; silence may last 5 more.
    assert machine.poll(10.9) == []
    assert machine.poll(11.0)[0] == Reduce(part=0, order=(0, 4), bitmap=0b110001, weight=30)
    assert machine.excluded[1] == "it delivered nothing for 5 s"


def test_a_lost_connection_reopens_what_was_arriving_and_a_failed_redial_gives_up() -> None:
    machine = flat()
    assert machine.on_up(1, 0, 1, 0b010, LEAF_BYTES, 1.0)
    machine.on_connection_lost(1)
    assert not machine.on_up_done(1, 0, 0b010, 1.0), "that payload broke off"
    fill(machine, 1, 0, 2.0)
    machine.on_redial_failed(2)
    assert machine.poll(2.0) == [Reduce(part=0, order=(0, 1), bitmap=0b011, weight=20)]
    assert machine.excluded == {2: "its connection died and could not be made again"}
    machine.on_redial_failed(1)
    assert machine.poll(2.0) == [LeaveEmpty(part=part, bitmap=0b001) for part in (1, 2, 3)]
    assert machine.finished


def test_below_half_of_the_rosters_weight_there_is_no_header() -> None:
    tokens = (((PARTS, 10),), ((2, 10), (2, 30)), ((PARTS, 10),), ())
    machine = flat(tokens=tokens)
    for part in range(PARTS):
        fill(machine, 2, part, 1.0)
    machine.on_redial_failed(1)
    assert machine.poll(1.0) == [
        Reduce(part=0, order=(0, 2), bitmap=0b101, weight=20),
        Reduce(part=1, order=(0, 2), bitmap=0b101, weight=20),
        LeaveEmpty(part=2, bitmap=0b101),
        LeaveEmpty(part=3, bitmap=0b101),
    ]


def test_what_is_missing_inside_a_partial_sum_is_named() -> None:
    root = grouped(0)
    fill(root, 1, 0, 1.0, 0b000110)
    fill(root, 4, 0, 1.0, 0b110000)
    assert root.poll(1.0) == [Reduce(part=0, order=(0, 1, 4), bitmap=0b110111, weight=50)]
    assert root.excluded == {3: "it is in no partial sum that reached the root"}


def test_an_inner_node_without_any_child_still_sends_its_own() -> None:
    inner = grouped(1)
    inner.on_redial_failed(2)
    inner.on_redial_failed(3)
    assert inner.poll(1.0) == [SendPartial(part=part, order=(1,), bitmap=0b10, parent=0) for part in range(PARTS)]


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        ((1, -1, 1, 0b010, LEAF_BYTES), "UP for a part that does not exist"),
        ((1, PARTS, 1, 0b010, LEAF_BYTES), "UP for a part that does not exist"),
        ((1, 0, 2, 0b100, LEAF_BYTES), "UP from a peer that has no such slot"),
        ((3, 0, 3, 0b1000, LEAF_BYTES), "UP from a peer that has no such slot"),
        ((0, 0, 0, 0b1, LEAF_BYTES), "UP from a peer that has no such slot"),
        ((1, 0, 1, 0b010, LEAF_BYTES - 1), "UP of the wrong length"),
        ((1, 0, 1, 0b010, SUM_BYTES), "UP of the wrong length"),
        ((1, 0, 1, 0, LEAF_BYTES), "UP whose bitmap is empty or reaches outside its slot's subtree"),
        ((1, 0, 1, 0b110, LEAF_BYTES), "UP whose bitmap is empty or reaches outside its slot's subtree"),
        ((1, 0, 1, 1 << 200, LEAF_BYTES), "UP whose bitmap is empty or reaches outside its slot's subtree"),
        ((1, 0, 1, -2, LEAF_BYTES), "UP whose bitmap is empty or reaches outside its slot's subtree"),
    ],
)
def test_frames_that_break_a_rule_are_dropped_and_the_slot_stays_open(frame: tuple, why: str) -> None:
    machine = flat()
    assert machine.on_up(*frame, 1.0).why == why
    assert machine.dropped == {why: 1}
    fill(machine, 1, 0, 1.0)


def test_a_leaf_and_an_inner_node_take_no_up_meant_for_others() -> None:
    assert flat(1).on_up(2, 0, 2, 0b100, LEAF_BYTES, 1.0).why == "UP from a peer that has no such slot"
    inner = grouped(1)
    assert inner.on_up(5, 0, 5, 0b100000, LEAF_BYTES, 1.0).why == "UP from a peer that has no such slot"
    root = grouped(0)
    assert root.on_up(1, 0, 1, 0b010010, SUM_BYTES, 1.0).why.startswith("UP whose bitmap is empty or reaches outside")


def test_one_up_a_slot() -> None:
    machine = flat()
    assert machine.on_up(1, 0, 1, 0b010, LEAF_BYTES, 1.0)
    assert machine.on_up(1, 0, 1, 0b010, LEAF_BYTES, 1.0).why == "UP for a slot whose payload is already on its way"
    assert machine.on_up_done(1, 0, 0b010, 1.0)
    assert machine.on_up_done(1, 0, 0b010, 1.0).why == "UP that was not accepted"
    assert machine.on_up(1, 0, 1, 0b010, LEAF_BYTES, 1.0).why == "UP for a slot that is filled"
    fill(machine, 2, 0, 1.0)
    assert machine.on_up(1, 0, 1, 0b010, LEAF_BYTES, 1.0).why == "UP for a part that is closed"
    assert machine.poll(1.0) == [Reduce(part=0, order=(0, 1, 2), bitmap=0b111, weight=30)]


def test_a_bad_payload_leaves_the_slot_open_until_its_deadline() -> None:
    machine = flat()
    fill(machine, 2, 0, 1.0)
    assert machine.on_up(1, 0, 1, 0b010, LEAF_BYTES, 1.0)
    machine.on_up_bad(1, 0, "payload holds NaN")
    assert machine.dropped == {"payload holds NaN": 1}
    machine.on_up_bad(1, 0, "payload holds NaN")
    assert machine.dropped == {"payload holds NaN": 1}, "only what was accepted can turn out bad"
    assert machine.poll(1.0) == []
    fill(machine, 1, 0, 2.0)
    assert machine.poll(2.0) == [Reduce(part=0, order=(0, 1, 2), bitmap=0b111, weight=30)]


def test_what_was_arriving_when_its_time_ended_does_not_count() -> None:
    machine = flat()
    fill(machine, 2, 0, 1.0)
    machine.on_progress(2, 5.9)
    assert machine.on_up(1, 0, 1, 0b010, LEAF_BYTES, 5.9)
    assert machine.poll(6.5) == [Reduce(part=0, order=(0, 2), bitmap=0b101, weight=20)]
    assert machine.on_up_done(1, 0, 0b010, 6.6).why == "UP for a part that is closed"
    assert machine.poll(6.6) == []


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        ((0, 9, 0b111, LEAF_BYTES), "DOWN for a part that does not exist"),
        ((0, -1, 0b111, LEAF_BYTES), "DOWN for a part that does not exist"),
        ((2, 0, 0b111, LEAF_BYTES), "DOWN from a peer that is not my parent"),
        ((0, 0, 0b111, LEAF_BYTES + 1), "DOWN of the wrong length"),
        ((0, 0, 0b1111, LEAF_BYTES), "DOWN whose bitmap holds strangers or less than half of the weight"),
        ((0, 0, 0b001, LEAF_BYTES), "DOWN whose bitmap holds strangers or less than half of the weight"),
        ((0, 0, 0, LEAF_BYTES), "DOWN whose bitmap holds strangers or less than half of the weight"),
        ((0, 0, -1, LEAF_BYTES), "DOWN whose bitmap holds strangers or less than half of the weight"),
    ],
)
def test_downs_that_break_a_rule_are_dropped(frame: tuple, why: str) -> None:
    machine = flat(1)
    assert machine.on_down(*frame, 1.0).why == why
    assert machine.on_down(0, 0, 0b011, LEAF_BYTES, 1.0)
    machine.on_down_done(0, 1.0)
    assert machine.on_down(0, 0, 0b011, LEAF_BYTES, 1.0).why == "DOWN of a part that I hold"


def test_downs_are_awaited_until_the_last_duration() -> None:
    machine = flat(1)
    assert machine.poll(0.0) == []
    assert machine.next_wakeup_s() == pytest.approx(2 * PROGRESS_S + SLACK_S)
    machine.poll(11.0)
    assert machine.expected_downs == (1, 2, 3)
    machine.poll(40.9)
    assert machine.expected_downs == (3,)
    machine.poll(41.0)
    assert machine.finished


def test_a_root_takes_no_down_and_forgets_it_when_told() -> None:
    machine = flat(0)
    assert machine.on_down(1, 0, 0b111, LEAF_BYTES, 1.0).why == "DOWN from a peer that is not my parent"
    machine.on_down_done(0, 1.0)


def test_views_of_rosters_without_parts_do_not_exist() -> None:
    with pytest.raises(ValueError, match="has no exchange"):
        ExchangeView.of(roster([ready(0)], None), rules(), 0)


def test_a_view_follows_from_the_roster() -> None:
    made = roster([ready(10), ready(0), ready(30)], flat_plan(3, 0b101))
    machine = ExchangeMachine(ExchangeView.of(made, rules(), 2), 0.0)
    assert machine.view.contributing == 0b101
    assert len(machine.leaf_parts) + len(machine.summing_parts) == ROSTER_PARTS
    assert machine.weights(0) == (10, 0, 30)
    assert dataclasses.replace(machine.view, my_index=1) == ExchangeView.of(made, rules(), 1)
