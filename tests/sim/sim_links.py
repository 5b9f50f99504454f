"""Sites with a line each: what crosses between two sites waits for what others of its site send (no plan knows that).

Peers stand in sites by turns. They report round trips with jitter, their own uplinks and downlinks, and nothing of the
lines. A world without sites draws nothing and delays nothing.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from protocol.links import Link, Report, Reports
from protocol.names import PeerId

if TYPE_CHECKING:
    from sim_world import World

NEAR_S, FAR_S = 0.001, 0.1
JITTER = 0.3
TOLD_EVERY_S = 2.0
"""Everybody's records reach everybody so often."""
CROSSING_S = 0.15
"""A payload's time on a line, which takes one at a time in each direction."""


class Links:
    """Args:
    sites: how many.
    hidden: share of the peers that nobody can dial, without the first: two such peers exchange nothing.
    """

    def __init__(self, world: World, seed: int, *, sites: int, hidden: float) -> None:
        self._world = world
        self._random = random.Random(seed + 1)
        peers = list(world.nodes)
        self.site = {peer: index % sites for index, peer in enumerate(peers)}
        self._rates = {peer: 10 ** self._random.uniform(3.2, 4.4) for peer in peers}
        self._dialable = {peer: self._random.random() >= hidden or peer == peers[0] for peer in peers}
        self._free_s: dict[tuple[int, bool], float] = {}
        """(site, outwards) → when its line is free."""

    def reach(self, sender: PeerId, to: PeerId) -> bool:
        return self._dialable[sender] or self._dialable[to]

    def crossing_s(self, sender: PeerId, to: PeerId) -> float:
        """What the lines add to a transfer that begins now."""
        if self.site[sender] == self.site[to]:
            return 0.0
        now_s = self._world.now_s
        ends = ((self.site[sender], True), (self.site[to], False))
        done_s = max(now_s, *(self._free_s.get(end, 0.0) for end in ends)) + CROSSING_S
        self._free_s |= dict.fromkeys(ends, done_s)
        return done_s - now_s

    def reports(self) -> Reports:
        """What all that are up say of themselves now."""
        up = [node.peer for node in self._world.up()]
        return {
            peer: Report(
                links={other: Link(round_trip_s=self._round_trip_s(peer, other)) for other in up if other != peer},
                up_bytes_s=self._rates[peer] * self._jitter(),
                down_bytes_s=2 * self._rates[peer] * self._jitter(),
                dialable=self._dialable[peer],
            )
            for peer in up
        }

    def _round_trip_s(self, one: PeerId, other: PeerId) -> float:
        return (NEAR_S if self.site[one] == self.site[other] else FAR_S) * self._jitter()

    def _jitter(self) -> float:
        return self._random.uniform(1 - JITTER, 1 + JITTER)
