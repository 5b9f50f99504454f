"""Brings a schedule's faults about: deaths, departures, partitions, failing disks."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from protocol import chain
from protocol.names import PeerId

if TYPE_CHECKING:
    from sim_node import Node
    from sim_world import World


class Faults:
    def __init__(self, world: World) -> None:
        self.world = world
        self.random = world.random
        self.dripping: set[PeerId] = set()
        self._decided_round = -1
        self._ready_round = -1

    def begin(self) -> None:
        weather, peers = self.world.weather, list(self.world.nodes)
        if weather.drips:
            self.dripping = set(self.random.sample(peers, max(1, round(len(peers) * weather.drips))))
        for peer in peers:
            self._each("crashes", peer)
            self._each("leaves", peer)
            self._each("failing_storage", peer)
        self._each("partitions", "")
        self._each("mass_losses", "")

    def end(self) -> None:
        self.dripping = set()

    # ------------------------------------------------------------ at random times

    def _each(self, what: str, peer: PeerId) -> None:
        rate = getattr(self.world.weather, what)
        if rate:
            self.world.after(self.random.expovariate(rate), lambda: self._strike(what, peer))

    def _strike(self, what: str, peer: PeerId) -> None:
        if not getattr(self.world.weather, what):
            return
        match what:
            case "crashes":
                self.world.nodes[peer].crash()
            case "leaves":
                self.world.nodes[peer].leave()
            case "failing_storage":
                self.world.nodes[peer].fail_storage(self.random.uniform(*self.world.weather.failing_s))
            case "mass_losses":
                self._lose_many()
            case "partitions":
                # The next one comes after it has healed.
                self._partition()
                return
        self._each(what, peer)

    def _lose_many(self) -> None:
        furthest = max(self.world.honest(), key=lambda node: node.state.base.round).state
        electors = list(furthest.electors)
        self.random.shuffle(electors)
        for peer in electors[: chain.quorum(furthest, self.world.rules) - 1]:
            self.world.nodes[peer].crash()

    def _partition(self) -> None:
        world = self.world
        peers = list(world.nodes)
        self.random.shuffle(peers)
        if world.weather.split:
            ends = [0, *itertools.accumulate(world.weather.split)]
            at = [round(len(peers) * end / ends[-1]) for end in ends]
        else:
            at = [0, self.random.randrange(1, len(peers)) if len(peers) > 1 else 1, len(peers)]
        sides = [peers[start:stop] for start, stop in itertools.pairwise(at)]
        one_way = self.random.random() < world.weather.one_way
        world.cut = {
            (a, b)
            for (i, left), (j, right) in itertools.permutations(enumerate(sides), 2)
            if i < j or not one_way
            for a in left
            for b in right
        }
        world.note("------", f"partition {' | '.join(' '.join(side) for side in sides)}")
        self._heal_later()

    def _heal_later(self) -> None:
        def heal() -> None:
            self.world.cut = set()
            self.world.note("------", "healed")
            self._each("partitions", "")

        self.world.after(self.random.uniform(*self.world.weather.partition_s), heal)

    # ------------------------------------------------------------ at chosen moments

    def decided(self, peer: PeerId, round_: int) -> None:
        """The moment that tells protocols apart: one peer knows the decision and nobody else does."""
        world, weather = self.world, self.world.weather
        first, self._decided_round = round_ > self._decided_round, max(self._decided_round, round_)
        if not first:
            return
        if weather.isolations and self.random.random() < weather.isolations:
            world.note("------", f"{peer} is cut off")
            others = [other for other in world.nodes if other != peer]
            world.cut = {(peer, other) for other in others} | {(other, peer) for other in others}
            self._heal_later()
            for other in others:
                if self.random.random() < weather.isolation_crashes:
                    world.nodes[other].crash()
        if weather.turnover and self.random.random() < weather.turnover:
            up = world.up()
            for node in self.random.sample(up, len(up) // 2):
                if self.random.random() < 0.5:
                    node.crash()
                else:
                    node.leave()

    def ready(self, node: Node) -> None:
        """`node` has just sent READY with its work."""
        weather, round_ = self.world.weather, node.state.base.round
        fastest, self._ready_round = round_ > self._ready_round, max(self._ready_round, round_)
        if (fastest and weather.fastest_dies and self.random.random() < weather.fastest_dies) or (
            weather.vanishing and self.random.random() < weather.vanishing
        ):
            node.crash()

    def step(self, node: Node) -> None:
        """A step of an exchange is done at `node`."""
        chance = self.world.weather.exchange_deaths
        if chance and self.random.random() < chance:
            node.later(0.0, node.crash)
