"""A simulated swarm: the real machines of `protocol.peer` over a virtual clock, a bad network and mortal nodes."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from sim_faults import Faults
from sim_hostile import Mischief
from sim_links import Links
from sim_model import CheapKeyring
from sim_node import Node
from sim_oracle import Oracle, QuorumWatch, Violation
from sim_weather import Weather

from protocol import chain, wire
from protocol.messages import Commit, Evidence, Vote
from protocol.names import PeerId
from protocol.rules import Rules

WATCH_S = 5.0
"""How often the oracle looks whether a quorum could commit."""


@dataclass(slots=True)
class Switches:
    """Ways to break the protocol on purpose; the suite must notice each (`test_mutants.py`)."""

    forget_votes: bool = False
    freeze_twice: bool = False
    resend_parts: bool = False
    """A new root sums anew what a dead one had counted: takeover."""
    wrong_bitmap: bool = False
    fill_empty: bool = False
    keep_counted: bool = False
    drop_uncounted: bool = False
    early_ready: bool = False
    accuse: bool = True
    """False: a peer may accuse an honest one, so that only the invariants speak."""


class World:
    """Args:
    seed: decides everything.
    founders: peers of the manifest; `joiners` come later, one after another.
    hostile: peers that do mischief, and which.
    """

    def __init__(
        self,
        *,
        seed: int,
        rules: Rules,
        weather: Weather,
        joiners: tuple[PeerId, ...] = (),
        hostile: Mapping[PeerId, frozenset[str]] | None = None,
        switches: Switches | None = None,
        trace: bool = False,
    ) -> None:
        self.random = random.Random(seed)
        self.rules = rules
        self.weather = weather
        self.calm = weather.cleared()
        self.switches = switches or Switches()
        self.oracle = Oracle()
        self.hostile: set[PeerId] = set()
        """Peers that are turned against the others: they may be convicted, and nobody else."""
        self.convictions: list[tuple[PeerId, Evidence]] = []
        """(who, of what) in the order in which they were verified."""
        self.watch = QuorumWatch(self)
        self.faults = Faults(self)
        self.now_s = 0.0
        self.clear_s = 0.0
        """When the weather cleared."""
        self.trace: list[str] | None = [] if trace else None
        self.events = 0
        self.moves = 0
        """Counts what `together` depends on: states, lives."""
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0
        self.cut: set[tuple[PeerId, PeerId]] = set()
        """(from, to) between whom nothing passes."""
        genesis = chain.genesis(rules)
        self.oracle.births.add(genesis.base.lineage)
        self.nodes: dict[PeerId, Node] = {}
        for peer in (*rules.founders, *joiners):
            self.nodes[peer] = Node(world=self, peer=peer, keyring=CheapKeyring(peer), state=genesis)
        self.links = Links(self, seed, sites=weather.sites, hidden=weather.hidden) if weather.sites else None
        for peer, kinds in (hostile or {}).items():
            self.hostile.add(peer)
            self.nodes[peer].mischief = Mischief(self.nodes[peer], kinds)

    # ------------------------------------------------------------ time

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        self._sequence += 1
        heapq.heappush(self._queue, (self.now_s + delay_s, self._sequence, action))

    def run(self, until_s: float, *, stop: Callable[[], bool] | None = None) -> None:
        """Let time pass until `until_s`, or until `stop` says so; checked after every action."""
        queue = self._queue
        while queue and queue[0][0] <= until_s:
            at_s, _, action = heapq.heappop(queue)
            if at_s > self.now_s:
                self.now_s = at_s
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
        return not self.cut or (sender, to) not in self.cut

    def delay_s(self) -> float:
        low, high = self.weather.delay_s
        delay_s = low + (high - low) * self.random.random()
        if self.weather.late and self.random.random() < self.weather.late:
            delay_s += self.random.uniform(0, self.weather.late_s)
        return delay_s

    def send(self, sender: PeerId, to: PeerId | None, data: bytes) -> None:
        weather, chance = self.weather, self.random.random
        receivers = self.nodes.values() if to is None else (self.nodes[to],) if to in self.nodes else ()
        late_s = 0.0
        if weather.late_votes and chance() < weather.late_votes and _decides(data):
            late_s = self.random.uniform(*weather.late_votes_s)
        if weather.stale and chance() < weather.stale:
            self.after(self.random.uniform(*weather.stale_s), partial(self._hand_over_again, data))
        for node in receivers:
            if node.peer == sender or node.machine is None:
                continue
            copies = 1
            if weather.loss and chance() < weather.loss:
                copies = 0
            elif weather.duplication and chance() < weather.duplication:
                copies = 2
            for _ in range(copies):
                self.after(self.delay_s() + late_s, partial(self._deliver, sender, node, data))

    def _deliver(self, sender: PeerId, node: Node, data: bytes) -> None:
        if node.machine is not None and (not self.cut or (sender, node.peer) not in self.cut):
            node.receive(data, sender)

    def _hand_over_again(self, data: bytes) -> None:
        """Gossip forwards what it has, however old; the neighbour is not the signer."""
        try:
            author = wire.decode(data).sender
        except wire.WireError:
            return
        neighbours = [peer for peer in self.nodes if peer != author]
        if neighbours:
            neighbour = self.random.choice(neighbours)
            for node in self.nodes.values():
                if node.peer not in (neighbour, author):
                    self._deliver(neighbour, node, data)

    def transfer(self, sender: PeerId, to: PeerId, action: Callable[[], None], *, lost: Callable[[], None]) -> None:
        """Bulk bytes: ordered and reliable while both ends live and are connected, else `lost`."""
        lives = (self.nodes[sender].life, self.nodes[to].life)

        def arrive() -> None:
            alive = lives == (self.nodes[sender].life, self.nodes[to].life) and self.nodes[to].machine is not None
            broken = self.weather.transfer_loss and self.random.random() < self.weather.transfer_loss
            apart = self.links is not None and not self.links.reach(sender, to)
            (action if alive and self.connected(sender, to) and not broken and not apart else lost)()

        delay_s = self.delay_s() * 2
        if self.links is not None:
            delay_s += self.links.crossing_s(sender, to)
        if self.faults.dripping and (sender in self.faults.dripping or to in self.faults.dripping):
            delay_s += self.random.uniform(*self.weather.drip_s)
        self.after(delay_s, arrive)

    # ------------------------------------------------------------ weather

    def start(self) -> None:
        """Founders start at once, joiners one after another, and the weather sets in."""
        for peer, node in self.nodes.items():
            if peer in self.rules.founders:
                node.start()
            else:
                self.after(self.random.uniform(0.0, 12.0), node.start)
        self.faults.begin()
        self._watch()

    def _watch(self) -> None:
        self.watch.look()
        self.after(WATCH_S, self._watch)

    def clear(self) -> None:
        """The weather ends: everything is connected, everyone who is down comes back."""
        self.weather = self.calm
        self.clear_s = self.now_s
        self.cut = set()
        self.faults.end()
        self.note("------", "the weather clears")
        for node in self.nodes.values():
            node.storage_fails = False
            if node.machine is None and node.started and not node.finished:
                node.start()
            elif node.machine is not None:
                node.tell_storage()

    # ------------------------------------------------------------ progress

    def honest(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.mischief is None]

    def up(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.machine is not None]

    def furthest(self) -> int:
        return max((node.state.base.round for node in self.honest()), default=0)

    def together(self, round_: int) -> bool:
        """Whether all honest peers that are up are on one lineage, in `round_` or later, and members."""
        up = [node for node in self.nodes.values() if node.machine is not None and node.mischief is None]
        return (
            all(node.state.base.round >= round_ for node in up)
            and len({node.state.base.lineage for node in up}) == 1
            and all(chain.member(node.state, node.peer) is not None for node in up if not node.left)
        )

    def expect_progress(self, rounds: int, within_s: float) -> None:
        """I4, I5: in fair weather everyone gets `rounds` further together, on one lineage."""
        goal, deadline_s, moves = self.furthest() + rounds, self.now_s + within_s, -1
        if self.rules.final_round is not None:
            goal = min(goal, self.rules.final_round)

        def there() -> bool:
            nonlocal moves
            if moves == self.moves:
                return False
            moves = self.moves
            return self.together(goal)

        self.run(deadline_s, stop=there)
        if not self.together(goal):
            where = ", ".join(
                f"{node.peer}: round {node.state.base.round} of {node.state.base.lineage.hex()[:6]}, "
                f"{node.machine.phase} ({node.machine.reason})"
                for node in self.up()
                if node.machine is not None
            )
            raise Violation(f"I5: not everyone reached round {goal} within {within_s:.0f} s of fair weather: {where}")


def _decides(data: bytes) -> bool:
    try:
        message = wire.decode(data).message
    except wire.WireError:
        return False
    return isinstance(message, Commit) or (isinstance(message, Vote) and message.phase == 2)
