"""Does to the swarm what the schedule says, keeps it going, and notes how long each node took to contribute again."""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import psutil

from node.cli.local_swarm import LocalNode
from scripts.soaking.accounts import Account, read_account
from scripts.soaking.said import Said
from scripts.soaking.schedule import ROLES, Happening, Kind
from scripts.soaking.swarm import SoakSwarm
from scripts.soaking.watch import SeenRound, Watch

TURN_S = 0.1
LEAVES_WITHIN_S = 10.0
"""Design section 11."""
NEXT_START_S = 2.0
"""A node that ended by itself is started again after this time."""


@dataclass(kw_only=True)
class Struck:
    """An event as it went."""

    happening: Happening
    peer: str
    at_s: float
    ended_s: float | None = None
    """When the node could go on: it was started, continued, or plugged in again."""
    missed: bool = False
    """There was nothing to strike."""
    overtaken: bool = False
    """The next event of the same node came before it had recovered."""
    for_good: bool = False
    """The node left and does not come back."""
    recovered_s: float | None = None
    """Of the soak's clock: counted in a round that began after `ended_s` (`counted_again_s`)."""

    @property
    def took_s(self) -> float | None:
        return None if self.recovered_s is None or self.ended_s is None else self.recovered_s - self.ended_s

    @property
    def until_s(self) -> float:
        """While it may explain that the node is not counted."""
        return math.inf if self.recovered_s is None else self.recovered_s


def counted_again_s(
    rounds: Mapping[tuple[str, int], SeenRound], lineage: str, peer: str, since_s: float
) -> float | None:
    """When `lineage` first counted work of `peer` that was begun after `since_s`, on the soak's clock.

    The round that was under way then may still count what the peer had promised before: only later ones tell. Rounds
    that a node commits alone, on a lineage of its own, tell nothing.
    """
    of_main = {number: seen for (of, number), seen in rounds.items() if of == lineage}
    before = [number for number, seen in of_main.items() if seen.first_s <= since_s]
    if not before:  # this lineage is younger
        before = [number for (_, number), seen in rounds.items() if seen.first_s <= since_s]
    under_way = max(before, default=-1) + 1
    counted = [seen.first_s for number, seen in of_main.items() if number > under_way and peer in seen.contributors]
    return min(counted, default=None)


@dataclass(kw_only=True)
class Conductor:
    swarm: SoakSwarm
    watch: Watch
    report: Callable[[str], None]
    struck: list[Struck] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    """Sentences about nodes that ended without being told to."""
    late: list[str] = field(default_factory=list)
    """Sentences about nodes that took too long to leave."""
    gone: list[Account] = field(default_factory=list)
    """Of guests whose home was given to another."""
    said: Said = field(default_factory=Said)
    """In the logs of guests whose home was given to another."""
    _frozen: dict[int, list[psutil.Process]] = field(default_factory=dict)
    """By node."""
    _due: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _open: list[Struck] = field(default_factory=list)
    _restarting: set[int] = field(default_factory=set)

    # ------------------------------------------------------------ time

    def at(self, time_s: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._due, (time_s, next(self._numbers), do))

    def begin(self, happenings: tuple[Happening, ...]) -> None:
        for happening in happenings:
            self.at(happening.at_s, lambda happening=happening: self._strike(happening))  # type: ignore[misc]

    @property
    def busy(self) -> bool:
        """Whether anything is still to be done, or undone."""
        return bool(self._due)

    def turn(self) -> None:
        """What is due; a look at the nodes; what that shows."""
        while self._due and self._due[0][0] <= self.watch.now_s:
            heapq.heappop(self._due)[2]()
        self.watch.look()
        self._notice_recoveries()
        self._notice_ends()
        time.sleep(TURN_S)

    # ------------------------------------------------------------ striking

    def _strike(self, happening: Happening) -> None:
        index, kind = happening.node, happening.kind
        if kind is Kind.JOIN:
            self._join(happening)
            return
        node = self.swarm.nodes[index]
        struck = self._note(happening, node)
        if not node.running:
            struck.missed, struck.recovered_s = True, self.watch.now_s
            return
        if kind in ROLES:
            struck.missed = not self.swarm.strike(index, ROLES[kind])
            self._over(struck)
        elif kind is Kind.KILL_NODE:
            self.swarm.kill_whole(index)
            self.at(happening.ends_s, lambda: self._start(index, struck))
        elif kind is Kind.FREEZE:
            self.watch.unseen.add(index)
            self._frozen[index] = self.swarm.freeze(index)
            self.at(happening.ends_s, lambda: self._thaw(index, struck))
        elif kind is Kind.LEAVE:
            self._leave(index, lambda: self.at(happening.ends_s, lambda: self._start(index, struck)))
        elif kind is Kind.CUT:
            self.swarm.unplug(index)
            self.at(happening.ends_s, lambda: self._plug(index, struck))

    def _note(self, happening: Happening, node: LocalNode) -> Struck:
        for earlier in self._open:
            if earlier.peer == node.peer_id:
                earlier.overtaken = True
        struck = Struck(happening=happening, peer=node.peer_id, at_s=self.watch.now_s)
        self.struck.append(struck)
        self._open.append(struck)
        return struck

    def _over(self, struck: Struck) -> None:
        struck.ended_s = self.watch.now_s

    def thaw_all(self) -> None:
        """So that they can leave."""
        for index in list(self._frozen):
            self.swarm.thaw(self._frozen.pop(index))

    def _thaw(self, index: int, struck: Struck) -> None:
        self.swarm.thaw(self._frozen.pop(index, ()))
        self.watch.unseen.discard(index)
        self._over(struck)

    def _plug(self, index: int, struck: Struck) -> None:
        self.swarm.plug(index)
        self._over(struck)

    def _start(self, index: int, struck: Struck) -> None:
        self.swarm.start(index, join=self._door(index))
        self._over(struck)

    def _door(self, index: int) -> int | None:
        """A node to join by: one that nothing is being done to, if there is any."""
        disturbed = {struck.peer for struck in self._open}
        others = [node for node in self.swarm.nodes if node.running and node.index != index]
        others.sort(key=lambda node: (node.peer_id in disturbed, node.index))
        return others[0].index if others else None

    def _leave(self, index: int, then: Callable[[], None]) -> None:
        processes = list(self.swarm.processes(index).values())
        asked_s = self.watch.now_s
        took = self.swarm.ask_to_leave(index)

        def look() -> None:
            if not took.done() and self.watch.now_s - asked_s < LEAVES_WITHIN_S + 2:
                self.at(self.watch.now_s + TURN_S, look)
                return
            if not took.done():
                self.swarm.kill(index)
            if (took_s := took.result(timeout=LEAVES_WITHIN_S)) > LEAVES_WITHIN_S:
                self.late.append(f"node {index} took {took_s:.1f} s to leave")
            self.swarm.has_left(index)
            self.swarm.look_for_survivors(processes)
            then()

        look()

    def _join(self, happening: Happening) -> None:
        index = happening.node
        if index < len(self.swarm.nodes) and self.swarm.nodes[index].running:
            leaving = self._note(happening, self.swarm.nodes[index])
            leaving.for_good = True
            self._leave(index, lambda: self._move_in(happening))
        else:
            self._move_in(happening)

    def _move_in(self, happening: Happening) -> None:
        index = happening.node
        if index < len(self.swarm.nodes):
            before = self.swarm.nodes[index]
            if (account := read_account(before.home)) is not None:
                self.gone.append(account)
            self.said.read(before.home, f"node {index}, before {self.watch.now_s:.0f} s")
        node = self.swarm.make_guest(index)
        self._start(index, self._note(happening, node))

    # ------------------------------------------------------------ noticing

    def _notice_recoveries(self) -> None:
        main = self.watch.main_lineage
        for struck in list(self._open):
            if struck.ended_s is None or struck.for_good or main is None:
                continue
            struck.recovered_s = counted_again_s(self.watch.rounds, main, struck.peer, struck.ended_s)
            if struck.recovered_s is not None:
                self._open.remove(struck)

    def _notice_ends(self) -> None:
        for node in self.swarm.nodes:
            if not node.running or node.index in self.watch.unseen or node.was_ended:
                continue
            assert node.process is not None
            if node.process.poll() is None:
                continue
            node.ended = node.process.poll()
            output = (self.swarm.directory / f"node-{node.index}.out").read_text(errors="replace").splitlines()
            words = output[-1] if output else "it said nothing"
            sentence = f"node {node.index} ended with status {node.ended} after {self.watch.now_s:.0f} s: {words}"
            self.ended.append(sentence)
            self.report(sentence)
            index = node.index
            self.at(
                self.watch.now_s + NEXT_START_S,
                lambda index=index: self.swarm.start(index, join=self._door(index)),  # type: ignore[misc]
            )
