"""A simulated swarm: the real machines of `protocol.peer` over a virtual clock, a bad network and mortal nodes."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass

from sim_model import CheapKeyring
from sim_node import Node
from sim_oracle import Oracle, Violation

from protocol import chain
from protocol.messages import Evidence
from protocol.names import PeerId
from protocol.rules import Rules


@dataclass(frozen=True, slots=True, kw_only=True)
class Weather:
    """Faults of a schedule. Rates are per simulated second and peer unless said otherwise."""

    delay_s: tuple[float, float] = (0.005, 0.05)
    loss: float = 0.0
    duplication: float = 0.0
    late: float = 0.0
    """Share of messages that are delayed by up to `late_s` more."""
    late_s: float = 3.0
    transfer_loss: float = 0.0
    """Share of bulk transfers between engines that break off."""
    crashes: float = 0.0
    crash_in_effects: float = 0.0
    """Chance, per event that has effects, to die between two of them."""
    down_s: tuple[float, float] = (0.5, 20.0)
    journal_losses: float = 0.0
    """Chance, per restart, that the journal is gone."""
    partitions: float = 0.0
    """Per second, for the whole swarm."""
    partition_s: tuple[float, float] = (5.0, 60.0)
    one_way: float = 0.0
    """Share of partitions that cut one direction only."""
    isolations: float = 0.0
    """Chance that the first peer to commit a round is cut off at that very moment, what it last sent included."""
    isolation_crashes: float = 0.0
    """Chance of each other peer to die at that moment."""
    leaves: float = 0.0
    training_s: tuple[float, float] = (0.5, 2.0)
    apply_s: tuple[float, float] = (0.0, 0.02)
    stalls: float = 0.0
    """Chance that a trainer does not answer in time: READY goes out without work, the work comes later."""
    stall_s: tuple[float, float] = (0.0, 15.0)


@dataclass(slots=True)
class Switches:
    """Ways to break the protocol on purpose; the suite must notice each (`test_mutants.py`)."""

    forget_votes: bool = False
    freeze_twice: bool = False
    accuse: bool = True
    """False: a peer may accuse an honest one, so that only the invariants speak."""


class World:
    """Args:
    seed: decides everything.
    founders: peers of the manifest; `joiners` come later, one after another.
    """

    def __init__(
        self,
        *,
        seed: int,
        rules: Rules,
        weather: Weather,
        joiners: tuple[PeerId, ...] = (),
        switches: Switches | None = None,
        trace: bool = False,
    ) -> None:
        self.random = random.Random(seed)
        self.rules = rules
        self.weather = weather
        self.calm = Weather(training_s=weather.training_s, apply_s=weather.apply_s)
        self.switches = switches or Switches()
        self.oracle = Oracle()
        self.hostile: set[PeerId] = set()
        """Peers that a test has turned against the others: they may be convicted, and nobody else."""
        self.convictions: list[tuple[PeerId, Evidence]] = []
        """(who, of what) in the order in which they were verified."""
        self.now_s = 0.0
        self.trace: list[str] | None = [] if trace else None
        self.events = 0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0
        self._cut: set[tuple[PeerId, PeerId]] = set()
        self._decided_round = -1
        genesis = chain.genesis(rules)
        self.oracle.births.add(genesis.base.lineage)
        self.nodes: dict[PeerId, Node] = {}
        for peer in (*rules.founders, *joiners):
            self.nodes[peer] = Node(world=self, peer=peer, keyring=CheapKeyring(peer), state=genesis)

    # ------------------------------------------------------------ time

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        self._sequence += 1
        heapq.heappush(self._queue, (self.now_s + delay_s, self._sequence, action))

    def run(self, until_s: float, *, stop: Callable[[], bool] | None = None) -> None:
        """Let time pass until `until_s`, or until `stop` says so; checked after every action."""
        while self._queue and self._queue[0][0] <= until_s:
            at_s, _, action = heapq.heappop(self._queue)
            self.now_s = max(self.now_s, at_s)
            action()
            self.events += 1
            if stop is not None and stop():
                return
        self.now_s = max(self.now_s, until_s)

    def note(self, peer: PeerId, text: str) -> None:
        if self.trace is not None:
            self.trace.append(f"{self.now_s:9.3f}  {peer}  {text}")

    # ------------------------------------------------------------ network

    def connected(self, sender: PeerId, to: PeerId) -> bool:
        return (sender, to) not in self._cut

    def delay_s(self) -> float:
        low, high = self.weather.delay_s
        delay_s = self.random.uniform(low, high) if high > low else low
        if self.weather.late and self.random.random() < self.weather.late:
            delay_s += self.random.uniform(0, self.weather.late_s)
        return delay_s

    def send(self, sender: PeerId, to: PeerId | None, data: bytes) -> None:
        for peer, node in self.nodes.items():
            if peer == sender or (to is not None and peer != to) or node.machine is None:
                continue
            copies = 1
            if self.weather.loss and self.random.random() < self.weather.loss:
                copies = 0
            elif self.weather.duplication and self.random.random() < self.weather.duplication:
                copies = 2
            for _ in range(copies):
                self.after(self.delay_s(), lambda node=node: self._deliver(sender, node, data))

    def _deliver(self, sender: PeerId, node: Node, data: bytes) -> None:
        if self.connected(sender, node.peer):
            node.receive(data, sender)

    def transfer(self, sender: PeerId, to: PeerId, action: Callable[[], None], *, lost: Callable[[], None]) -> None:
        """Bulk bytes: ordered and reliable while both ends live and are connected, else `lost`."""
        lives = (self.nodes[sender].life, self.nodes[to].life)

        def arrive() -> None:
            alive = lives == (self.nodes[sender].life, self.nodes[to].life) and self.nodes[to].machine is not None
            broken = self.weather.transfer_loss and self.random.random() < self.weather.transfer_loss
            (action if alive and self.connected(sender, to) and not broken else lost)()

        self.after(self.delay_s() * 2, arrive)

    # ------------------------------------------------------------ faults

    def start(self) -> None:
        """Founders start at once, joiners one after another, and the weather sets in."""
        for peer, node in self.nodes.items():
            if peer in self.rules.founders:
                node.start()
            else:
                self.after(self.random.uniform(0.0, 20.0), node.start)
        for peer in self.nodes:
            self._doom(peer)
        self._next_partition()

    def _doom(self, peer: PeerId) -> None:
        for rate, doom in ((self.weather.crashes, self._crash), (self.weather.leaves, self._depart)):
            if rate:
                self.after(self.random.expovariate(rate), lambda doom=doom: doom(peer))

    def _crash(self, peer: PeerId) -> None:
        if not self.weather.crashes:
            return
        self.nodes[peer].crash()
        self.after(self.random.expovariate(self.weather.crashes), lambda: self._crash(peer))

    def _depart(self, peer: PeerId) -> None:
        if not self.weather.leaves:
            return
        self.nodes[peer].leave()
        self.after(self.random.expovariate(self.weather.leaves), lambda: self._depart(peer))

    def _next_partition(self) -> None:
        if self.weather.partitions:
            self.after(self.random.expovariate(self.weather.partitions), self._partition)

    def _partition(self) -> None:
        if not self.weather.partitions:
            return
        peers = list(self.nodes)
        self.random.shuffle(peers)
        at = self.random.randrange(1, len(peers)) if len(peers) > 1 else 1
        left, right = peers[:at], peers[at:]
        self._cut = {(a, b) for a in left for b in right}
        if self.random.random() >= self.weather.one_way:
            self._cut |= {(b, a) for a, b in self._cut}
        self.note("------", f"partition {left} | {right}")
        self.after(self.random.uniform(*self.weather.partition_s), self._heal)

    def _heal(self) -> None:
        self._cut = set()
        self.note("------", "healed")
        self._next_partition()

    def decided(self, peer: PeerId, round_: int) -> None:
        """The moment that tells protocols apart: one peer knows the decision and nobody else does."""
        first, self._decided_round = round_ > self._decided_round, max(self._decided_round, round_)
        if not first or not self.weather.isolations or self.random.random() >= self.weather.isolations:
            return
        self.note("------", f"{peer} is cut off")
        others = [other for other in self.nodes if other != peer]
        self._cut = {(peer, other) for other in others} | {(other, peer) for other in others}
        self.after(self.random.uniform(*self.weather.partition_s), self._heal)
        for other in others:
            if self.random.random() < self.weather.isolation_crashes:
                self.nodes[other].crash()

    def clear(self) -> None:
        """The weather ends: everything is connected, everyone who is down comes back."""
        self.weather = self.calm
        self._cut = set()
        self.note("------", "the weather clears")
        for node in self.nodes.values():
            if node.machine is None and node.started:
                node.start()

    # ------------------------------------------------------------ progress

    def up(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.machine is not None]

    def furthest(self) -> int:
        return max((node.state.base.round for node in self.nodes.values()), default=0)

    def together(self, round_: int) -> bool:
        """Whether all who are up are on one lineage, in `round_` or later."""
        up = self.up()
        return (
            len({node.state.base.lineage for node in up}) == 1
            and all(node.state.base.round >= round_ for node in up)
            and all(chain.member(node.state, node.peer) is not None for node in up if not node.left)
        )

    def expect_progress(self, rounds: int, within_s: float) -> None:
        """I5: in fair weather everyone gets `rounds` further together."""
        goal, deadline_s = self.furthest() + rounds, self.now_s + within_s
        self.run(deadline_s, stop=lambda: self.together(goal))
        if not self.together(goal):
            where = ", ".join(
                f"{node.peer}: round {node.state.base.round} of {node.state.base.lineage.hex()[:6]}, "
                f"{node.machine.phase} ({node.machine.reason})"
                for node in self.up()
                if node.machine is not None
            )
            raise Violation(f"I5: not everyone reached round {goal} within {within_s:.0f} s of fair weather: {where}")
