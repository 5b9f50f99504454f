"""Which peers are near each other: groups by round trips, changed only for something clearly better (design section 7).

Average linkage (Sokal & Michener 1958): the two clusters with the smallest mean distance between their members are
joined, again and again; cutting that tree gives a grouping for each number of groups. A grouping is as good as it is
*separated*: the smallest mean distance between two of its groups, over the largest within one.

Shapes: `n` peers.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import numpy as np

from protocol.links import RatesArray, Reports, round_trips, slow_pairs
from protocol.names import PeerId

Groups = tuple[tuple[PeerId, ...], ...]
"""Peers ascending within each, groups by their first peer. No group at all, or one: all are alike."""

ALIKE_S = 2e-3
"""Shorter distances count as this long: a group is a site, not a rack."""
SEPARATION = 3.0
"""Groups must be so well separated to be taken up, and those in use …"""
SEPARATION_KEPT = 2.0
"""… so well to be kept."""
MARGIN = 1.5
"""A grouping must be better separated than the present one by this factor to replace it, …"""
WINS_NEEDED = 2
"""… so many rounds in a row."""
GROUPED_MOST = 128
"""Peers. More are not clustered: a round among them has groups of another kind (`protocol.grouping`)."""


def distances(peers: Sequence[PeerId], reports: Reports) -> tuple[list[PeerId], RatesArray]:
    """The peers that are known well enough, and the seconds [n, n] between any two of them.

    A pair that is slow by itself is far apart, however short its round trip: no group has both.
    """
    between = round_trips(peers, reports)
    kept = list(range(len(peers)))
    while kept:
        unknown = np.isnan(between[np.ix_(kept, kept)]).sum(axis=1)
        if not unknown.any():
            break
        # The last of those that know least, so that the answer does not depend on whom we began with.
        del kept[len(kept) - 1 - int(np.argmax(unknown[::-1]))]
    between = np.maximum(between[np.ix_(kept, kept)], ALIKE_S)
    slow = np.isfinite(slow_pairs(peers, reports))[np.ix_(kept, kept)]
    if len(kept):
        between[slow | slow.T] = SEPARATION * MARGIN * between.max()
    np.fill_diagonal(between, 0.0)
    return [peers[index] for index in kept], between


def separation(members: Sequence[Sequence[int]], between: RatesArray) -> float:
    """How well groups are separated: 1 and less is not at all. `members`: indices, two groups at least."""
    inside = max((_mean(between, group, group) for group in members if len(group) > 1), default=ALIKE_S)
    outside = min(_mean(between, one, other) for number, one in enumerate(members) for other in members[number + 1 :])
    return outside / max(inside, ALIKE_S)


def _mean(between: RatesArray, one: Sequence[int], other: Sequence[int]) -> float:
    """Mean distance between members of two groups, or between those of one."""
    block = between[np.ix_(one, other)]
    pairs = len(one) * len(other) if one is not other else len(one) * (len(one) - 1)
    return float(block.sum()) / pairs


def best_grouping(between: RatesArray) -> tuple[float, list[list[int]]]:
    """The best separated grouping of peers [n], with its separation; a single group if there is no other."""
    clusters = [[index] for index in range(len(between))]
    distance = between.copy()
    """[g, g] Mean distance between members of two clusters."""
    np.fill_diagonal(distance, np.inf)
    inside = [0.0] * len(clusters)
    """[g] Mean distance within each."""
    best: tuple[float, list[list[int]]] = (0.0, [list(range(len(between)))])
    while len(clusters) > 2:
        first, second = divmod(int(np.argmin(distance)), len(clusters))
        one, other = len(clusters[first]), len(clusters[second])
        whole = inside[first] * one * (one - 1) + inside[second] * other * (other - 1)
        whole += 2 * one * other * float(distance[first, second])
        inside[first] = whole / ((one + other) * (one + other - 1))
        joined = (one * distance[first] + other * distance[second]) / (one + other)
        clusters[first] = sorted(clusters[first] + clusters[second])
        del clusters[second], inside[second]
        distance[first], distance[:, first] = joined, joined
        distance[first, first] = np.inf
        distance = np.delete(np.delete(distance, second, 0), second, 1)
        found = float(distance.min()) / max(*inside, ALIKE_S)
        if found > best[0]:
            best = found, [list(cluster) for cluster in clusters]
    return best


class Grouping:
    """The groups in use, as one node sees them. Every node keeps its own, whether it leads or not."""

    def __init__(self) -> None:
        self.groups: Groups = ()
        self._challenger: Groups = ()
        self._wins = 0

    @property
    def has_sites(self) -> bool:
        """Whether plans over them may be made (`protocol.planner`)."""
        return sum(len(group) > 1 for group in self.groups) > 1

    def update(self, members: Sequence[PeerId], reports: Reports) -> None:
        """Once a round. `members`: who may be in rosters."""
        if not reports or not 2 < len(members) <= GROUPED_MOST:
            self.groups, self._challenger, self._wins = (), (), 0
            return
        peers, between = distances(sorted(members), reports)
        self.groups = restricted(self.groups, set(peers))
        challenger = self._better(peers, between)
        if challenger is None:
            self._wins = 0
            return
        self._wins = self._wins + 1 if challenger == self._challenger else 1
        self._challenger = challenger
        if self._wins >= WINS_NEEDED:
            self.groups, self._wins = challenger, 0

    def _better(self, peers: Sequence[PeerId], between: RatesArray) -> Groups | None:
        """The grouping that should be in place of the present one; None if none should."""
        found, clusters = best_grouping(between)
        best = _named(clusters, peers) if found >= SEPARATION else ()
        if best == self.groups:
            return None
        if not self.groups:
            return best
        place = {peer: index for index, peer in enumerate(peers)}
        present = [[place[peer] for peer in group] for group in self.groups]
        loose = set(range(len(peers))).difference(*present)
        now = separation([*present, *([index] for index in sorted(loose))], between) if len(present) > 1 else 0.0
        return best if now < SEPARATION_KEPT or found > MARGIN * now else None


def restricted(groups: Groups, peers: Set[PeerId]) -> Groups:
    """What is left of the groups with these peers alone."""
    left = (tuple(peer for peer in group if peer in peers) for group in groups)
    return tuple(sorted(group for group in left if group))


def _named(clusters: Sequence[Sequence[int]], peers: Sequence[PeerId]) -> Groups:
    return tuple(sorted(tuple(peers[index] for index in cluster) for cluster in clusters))
