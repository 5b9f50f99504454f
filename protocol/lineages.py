"""When lineages meet: which one goes on (protocol section 10).

The full choice, by live electors of each branching, needs the other side's headers. Until a node fetches those, this
stands in its place: the lineage with more peers heard on it, then the one that is further, then the smaller name. Both
sides of a healed partition hear the same heartbeats, so they come to the same verdict; it must hold for a while before
the loser follows, and the winner never pauses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from protocol.names import Base, Digest, PeerId
from protocol.presence import Heard


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Another lineage is to be followed; `peer` is the furthest on it."""

    peer: PeerId
    round: int
    lineage: Digest


def choose(mine: Base, fresh: Mapping[PeerId, Heard]) -> Verdict | None:
    """The lineage that wins over mine among those heard, or None while mine does.

    Args:
        mine: the base I work on; I count for its lineage.
        fresh: everyone else heard of late.
    """
    peers: dict[Digest, int] = {mine.lineage: 1}
    furthest: dict[Digest, tuple[int, PeerId]] = {mine.lineage: (mine.round, "")}
    for peer, heard in fresh.items():
        lineage = heard.base.lineage
        peers[lineage] = peers.get(lineage, 0) + 1
        furthest[lineage] = max(furthest.get(lineage, (-1, "")), (heard.base.round, peer))
    if len(peers) == 1:
        return None
    most = max(peers.values())
    level = [lineage for lineage, count in peers.items() if count == most]
    furthest_round = max(furthest[lineage][0] for lineage in level)
    best = min(lineage for lineage in level if furthest[lineage][0] == furthest_round)
    if best == mine.lineage:
        return None
    round_, peer = furthest[best]
    return Verdict(peer=peer, round=round_, lineage=best)
