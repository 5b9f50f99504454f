"""What is done to whom and when: drawn before anything runs, so that a seed names one schedule. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum

QUIET_AFTER_S = 5.0
"""Between the end of one disturbance of a node and the next one of the same node, at least."""


class Kind(StrEnum):
    KILL_TRAINER = "kill trainer"
    KILL_ENGINE = "kill engine"
    KILL_DAEMON = "kill daemon"
    KILL_NODE = "kill node"
    """Its supervisor, as a power cut; it is started again after a pause."""
    FREEZE = "freeze"
    """SIGSTOP to all its processes, SIGCONT later."""
    LEAVE = "leave"
    """SIGTERM; it comes back after a pause."""
    JOIN = "join"
    """A node with a new identity. When all homes for such are in use, the oldest of them leaves first, for good."""
    CUT = "cut"
    """Its network cable is out for a while."""


ROLES = {Kind.KILL_TRAINER: "trainer", Kind.KILL_ENGINE: "engine", Kind.KILL_DAEMON: "daemon"}

LASTS_S: dict[Kind, tuple[float, float]] = {
    Kind.KILL_NODE: (1.0, 5.0),
    Kind.FREEZE: (1.0, 20.0),
    Kind.LEAVE: (3.0, 15.0),
    Kind.CUT: (2.0, 20.0),
}
"""Least and most of how long it lasts, uniformly; the others are over at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """One event. `node` counts homes: first the founders, then those of nodes that join."""

    at_s: float
    kind: Kind
    node: int
    lasts_s: float = 0.0

    @property
    def ends_s(self) -> float:
        return self.at_s + self.lasts_s


def draw(
    *, seed: int, length_s: float, nodes: int, guests: int, every_s: float, cuts: bool, kinds: tuple[Kind, ...] = ()
) -> tuple[Happening, ...]:
    """A Poisson process of mean interval `every_s`; kinds and targets uniform. `guests`: homes of nodes that join.

    Nobody is disturbed twice at once; an event that finds nobody to disturb is left out.
    """
    drawn = random.Random(seed)
    possible = [kind for kind in kinds or tuple(Kind) if cuts or kind is not Kind.CUT]
    possible = [kind for kind in possible if guests or kind is not Kind.JOIN]
    quiet_from_s = dict.fromkeys(range(nodes), 0.0)
    joined: list[int] = []
    events: list[Happening] = []
    now_s = 0.0
    while (now_s := now_s + drawn.expovariate(1.0 / every_s)) < length_s:
        kind = drawn.choice(possible)
        least, most = LASTS_S.get(kind, (0.0, 0.0))
        lasts_s = round(drawn.uniform(least, most), 2)
        choice = drawn.random()
        if kind is Kind.JOIN:
            node = nodes + len(joined) if len(joined) < guests else joined.pop(0)
            if quiet_from_s.get(node, 0.0) > now_s:
                joined.insert(0, node)
                continue
            joined.append(node)
        else:
            idle = [node for node, quiet_s in sorted(quiet_from_s.items()) if quiet_s <= now_s]
            if not idle:
                continue
            node = idle[int(choice * len(idle))]
        events.append(Happening(at_s=round(now_s, 2), kind=kind, node=node, lasts_s=lasts_s))
        quiet_from_s[node] = now_s + lasts_s + QUIET_AFTER_S
    return tuple(events)
