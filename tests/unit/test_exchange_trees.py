"""Whole exchanges over flat and grouped trees under a virtual clock, with random losses: every root's mean is exactly
the mean over its bitmap, in the stated order, and nothing is counted twice (protocol section 12, I2).

Replay a failing seed by itself: `pytest tests/unit/test_exchange_trees.py -k 'faults and 17'`.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from protocol.codecs import CodecError, codec
from protocol.exchange import ExchangeMachine, LeaveEmpty, Reduce, SendPartial
from protocol.plan import Plan, Shard
from protocol.planning import Tree, flat_plan, level_count
from protocol.stations import ExchangeView
from protocol.sums import PartSum, partial_bound
from protocol.weights import enough, part_weights, total

PART, PARTS = 256, 6
PROGRESS_S, SLACK_S = 5.0, 1.0
LEAF, SUM = codec("int8"), codec("sum16")


def random_tree(generator: random.Random, peers: int, contributing: int, depth: int) -> tuple[int, ...]:
    """Parents of a random tree of at most `depth` in which non-contributors hang below anyone."""
    contributors = [index for index in range(peers) if contributing >> index & 1]
    generator.shuffle(contributors)
    others = [index for index in range(peers) if not contributing >> index & 1]
    parents, depths = [-1] * peers, {contributors[0]: 0}
    for index in contributors[1:] + others:
        parents[index] = generator.choice([node for node, level in depths.items() if level < depth])
        depths[index] = depths[parents[index]] + 1
    return tuple(parents)


@dataclass(kw_only=True)
class Frame:
    kind: str
    part: int
    bitmap: int
    payload: bytes


@dataclass(kw_only=True)
class Node:
    machine: ExchangeMachine
    own: list[bytes]
    alive: bool = True
    kept: dict[tuple[int, int], bytes] = field(default_factory=dict)
    """(part, slot) → checked payload, encoded."""
    parts: dict[int, tuple[int, bytes]] = field(default_factory=dict)
    """Part → (bitmap, payload) held."""
    empty: set[int] = field(default_factory=set)
    reduced: dict[int, int] = field(default_factory=dict)
    sent_up: set[int] = field(default_factory=set)
    next_poll_s: float = -1.0
    finished_s: float | None = None


class Swarm:
    """One exchange. Faults are drawn from the seed: delays, deaths, silence, broken, corrupt and repeated frames."""

    def __init__(self, plan: Plan, contributing: int, seed: int, *, faults: bool) -> None:
        self.generator = generator = random.Random(seed)
        self.peers = peers = len(plan.shards[0].parents)
        self.now_s = 0.0
        self.plan, self.contributing, self.faults = plan, contributing, faults
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.count = itertools.count()
        self.trees = [Tree(shard.parents, contributing) for shard in plan.shards]
        self.dealt = tuple(generator.randrange(len(plan.shards)) for _ in range(PARTS))
        self.tokens = [generator.randint(1, 400) for _ in range(peers)]
        values = np.random.default_rng(seed)
        own = [
            [LEAF.encode(values.standard_normal(PART).astype(np.float32)) for _ in range(PARTS)] for _ in range(peers)
        ]
        durations = tuple(4.0 + 3.0 * level for level in range(level_count(plan, contributing) + 1))
        self.end_s = durations[-1] + SLACK_S + PROGRESS_S + 1
        self.nodes: list[Node] = []
        for index in range(peers):
            view = ExchangeView(
                my_index=index,
                contributing=contributing,
                plan=plan,
                dealt=self.dealt,
                tokens=tuple(((PARTS, tokens),) for tokens in self.tokens),
                weight_cap_ratio=3.0,
                durations_s=durations,
                progress_s=PROGRESS_S,
                slack_s=SLACK_S,
                elements=PART * PARTS,
                part_elements=PART,
                codec="int8",
                sum_codec="sum16",
            )
            self.nodes.append(Node(machine=ExchangeMachine(view, 0.0), own=own[index]))
        self.slow = {index: generator.choice((1, 1, 1, 8)) for index in range(peers)} if faults else {}
        for index, node in enumerate(self.nodes):
            self.later(generator.uniform(0, 0.3), lambda index=index, node=node: self.start(index, node))
            if faults and generator.random() < 0.25:
                self.later(generator.uniform(0, 6), lambda index=index: self.kill(index))

    def later(self, delay_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now_s + delay_s, next(self.count), act))

    def run(self) -> None:
        while self.events:
            self.now_s, _, act = heapq.heappop(self.events)
            assert self.now_s < 100, "nothing may go on for ever"
            act()

    def start(self, index: int, node: Node) -> None:
        for part in node.machine.leaf_parts:
            parent = node.machine.up_target(part)
            assert parent is not None
            self.send(index, parent, Frame(kind="up", part=part, bitmap=1 << index, payload=node.own[part]))
        self.act(index)

    def kill(self, index: int) -> None:
        """Half of the deaths are noticed by a connection that cannot be made again, half only by silence."""
        self.nodes[index].alive = False
        if self.generator.random() < 0.5:
            for other, node in enumerate(self.nodes):
                if other != index and node.alive:
                    self.later(self.generator.uniform(0.1, 1), lambda other=other: self.give_up(other, index))

    def give_up(self, index: int, peer: int) -> None:
        self.nodes[index].machine.on_redial_failed(peer)
        self.act(index)

    def send(self, sender: int, to: int, frame: Frame) -> None:
        generator = self.generator
        delay_s = generator.uniform(0.01, 0.4) * self.slow.get(sender, 1)
        if self.faults:
            fate = generator.random()
            if fate < 0.02:
                return
            if fate < 0.05:
                self.later(delay_s, lambda: self.break_off(sender, to, frame))
                delay_s *= 2
            elif fate < 0.09:
                broken = bytearray(frame.payload)
                broken[3] = 0xFF  # a scale that is not finite, or half a value beyond any bound
                broken[1] ^= 0x7F
                corrupt = Frame(kind=frame.kind, part=frame.part, bitmap=frame.bitmap, payload=bytes(broken))
                self.later(delay_s / 2, lambda: self.receive(sender, to, corrupt))
            elif fate < 0.15:
                self.later(delay_s * 1.5, lambda: self.receive(sender, to, frame))
            elif fate < 0.18:
                liar = Frame(kind=frame.kind, part=frame.part, bitmap=frame.bitmap | 1 << to, payload=frame.payload)
                self.later(delay_s / 2, lambda: self.receive(sender, to, liar))
        self.later(delay_s, lambda: self.receive(sender, to, frame))

    def break_off(self, sender: int, to: int, frame: Frame) -> None:
        node = self.nodes[to]
        if node.alive and self.nodes[sender].alive and frame.kind == "up":
            node.machine.on_up(sender, frame.part, sender, frame.bitmap, len(frame.payload), self.now_s)
            node.machine.on_connection_lost(sender)

    def receive(self, sender: int, to: int, frame: Frame) -> None:
        node = self.nodes[to]
        if not (node.alive and self.nodes[sender].alive):
            return
        machine, part = node.machine, frame.part
        if frame.kind == "up":
            if machine.on_up(sender, part, sender, frame.bitmap, len(frame.payload), self.now_s):
                try:
                    if machine.sends_partial(sender, part):
                        bound = partial_bound(machine.weights(part), frame.bitmap, [6.0] * self.peers)
                        SUM.check(frame.payload, PART, largest=bound)
                    else:
                        LEAF.check(frame.payload, PART, largest=6.0)
                except CodecError as error:
                    machine.on_up_bad(sender, part, str(error))
                else:
                    assert (part, sender) not in node.kept
                    if machine.on_up_done(sender, part, frame.bitmap, self.now_s):
                        node.kept[part, sender] = frame.payload
        elif machine.on_down(sender, part, frame.bitmap, len(frame.payload), self.now_s):
            if (frame.bitmap, frame.payload) == self.signed_by_root(part):
                self.hold(to, part, frame.bitmap, frame.payload)
            else:
                assert self.faults, "only a corrupted frame fails the root's signature"
        self.act(to)

    def signed_by_root(self, part: int) -> tuple[int, bytes]:
        return self.nodes[self.trees[self.dealt[part]].root].parts[part]

    def hold(self, index: int, part: int, bitmap: int, payload: bytes) -> None:
        node = self.nodes[index]
        node.parts[part] = (bitmap, payload)
        node.machine.on_down_done(part, self.now_s)
        for receiver in node.machine.receivers(part):
            self.send(index, receiver, Frame(kind="down", part=part, bitmap=bitmap, payload=payload))

    def act(self, index: int) -> None:
        node = self.nodes[index]
        if not node.alive:
            return
        for decision in node.machine.poll(self.now_s):
            part = decision.part
            assert part not in node.sent_up | node.reduced.keys() | node.empty, "a part is decided once"
            if isinstance(decision, LeaveEmpty):
                node.empty.add(part)
                continue
            part_sum = PartSum(PART, SUM)
            for slot in decision.order:
                if slot == index:
                    part_sum.add_leaf(node.machine.weights(part)[index], LEAF, node.own[part])
                elif node.machine.sends_partial(slot, part):
                    part_sum.add_partial(node.kept.pop((part, slot)))
                else:
                    part_sum.add_leaf(node.machine.weights(part)[slot], LEAF, node.kept.pop((part, slot)))
            if isinstance(decision, SendPartial):
                node.sent_up.add(part)
                up = Frame(kind="up", part=part, bitmap=decision.bitmap, payload=part_sum.partial())
                self.send(index, decision.parent, up)
            else:
                assert isinstance(decision, Reduce)
                node.reduced[part] = decision.bitmap
                self.hold(index, part, decision.bitmap, LEAF.encode(part_sum.mean(decision.weight)))
        if node.machine.finished and node.finished_s is None:
            node.finished_s = self.now_s
        wakeup_s = node.machine.next_wakeup_s()
        if wakeup_s < float("inf") and wakeup_s != node.next_poll_s:
            node.next_poll_s = wakeup_s
            self.later(max(wakeup_s - self.now_s, 0), lambda: self.act(index))

    # ---------------------------------------------------------------- what must hold

    def expected(self, part: int, bitmap: int) -> bytes:
        """The part's payload, from leaf bytes, the tree and the bitmap alone: as an auditor recomputes it."""
        tree = self.trees[self.dealt[part]]
        weights = part_weights(
            [tokens if self.contributing >> index & 1 else 0 for index, tokens in enumerate(self.tokens)], 3.0
        )

        def leaf(index: int) -> np.ndarray:
            return np.float32(weights[index]) * LEAF.decode(self.nodes[index].own[part], PART)

        def summed(index: int, order: list[int]) -> np.ndarray:
            acc = np.zeros(PART, np.float32)
            for child in order:
                if child != index and tree.slots[child]:
                    present = [slot for slot in tree.slots[child] if tree.subtrees[slot] & bitmap]
                    acc = acc + SUM.decode(SUM.encode(summed(child, [child, *present])), PART)
                else:
                    acc = acc + leaf(child)
            return acc

        present = [slot for slot in tree.slots[tree.root] if tree.subtrees[slot] & bitmap]
        acc = summed(tree.root, sorted([tree.root, *present]))
        return LEAF.encode(acc / np.float32(total(weights, bitmap)))

    def check(self) -> None:
        for index, node in enumerate(self.nodes):
            for part, (bitmap, payload) in node.parts.items():
                root = self.trees[self.dealt[part]].root
                assert (bitmap, payload) == self.nodes[root].parts[part], "everybody holds the root's bytes"
                if root != index:
                    continue
                assert bitmap & ~self.contributing == 0
                assert enough(node.machine.weights(part), bitmap)
                assert payload == self.expected(part, bitmap), f"part {part} is not the mean over {bitmap:#b}"
                exact = sum(
                    float(node.machine.weights(part)[one]) * LEAF.decode(self.nodes[one].own[part], PART).astype(float)
                    for one in range(self.peers)
                    if bitmap >> one & 1
                ) / total(node.machine.weights(part), bitmap)
                assert np.abs(LEAF.decode(payload, PART) - exact).max() < 0.03, (
                    "one int8 step and the sum codec's error"
                )
            if node.alive:
                decided = node.sent_up | node.reduced.keys() | node.empty
                assert decided == set(node.machine.summing_parts)
                assert node.finished_s is not None, "who lives comes to an end"
                assert node.finished_s <= self.end_s


def plans(generator: random.Random, depth: int) -> tuple[Plan, int]:
    peers = generator.randint(2, 12)
    contributing = generator.randrange(1, 1 << peers)
    if depth == 1:
        return flat_plan(peers, contributing), contributing
    shards = generator.randint(1, 3)
    return (
        Plan(
            shards=tuple(
                Shard(share=1, parents=random_tree(generator, peers, contributing, depth)) for _ in range(shards)
            )
        ),
        contributing,
    )


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("seed", range(10))
def test_without_faults_everybody_is_counted_and_holds_everything(depth: int, seed: int) -> None:
    plan, contributing = plans(random.Random(seed), depth)
    swarm = Swarm(plan, contributing, seed, faults=False)
    swarm.run()
    swarm.check()
    for node in swarm.nodes:
        assert {part: bitmap for part, (bitmap, _) in node.parts.items()} == dict.fromkeys(range(PARTS), contributing)
        assert node.machine.excluded == {}
        assert not node.machine.dropped
        assert not node.kept


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("seed", range(40))
def test_with_faults_every_part_is_exact_over_its_bitmap(depth: int, seed: int) -> None:
    plan, contributing = plans(random.Random(1000 + seed), depth)
    swarm = Swarm(plan, contributing, seed, faults=True)
    swarm.run()
    swarm.check()


def test_the_faults_do_bite() -> None:
    """Guards the simulation itself: partial bitmaps, empty parts, refusals and give-ups must all occur."""
    partial = empty = held = 0
    dropped: set[str] = set()
    why: set[str] = set()
    for seed in range(30):
        for depth in (1, 3):
            plan, contributing = plans(random.Random(2000 + seed), depth)
            swarm = Swarm(plan, contributing, seed, faults=True)
            swarm.run()
            for node in swarm.nodes:
                partial += sum(bitmap != contributing for bitmap in node.reduced.values())
                empty += len(node.empty)
                held += len(node.parts)
                dropped |= set(node.machine.dropped)
                why |= {reason.split(" ")[0] + reason[-8:] for reason in node.machine.excluded.values()}
    assert min(partial, empty, held) > 10
    assert {"UP that broke off", "UP for a slot that is filled", "UP for a part that is closed"} <= dropped
    assert any("not finite" in reason for reason in dropped)
    assert any("reaches outside" in reason for reason in dropped)
    assert len(why) >= 4
