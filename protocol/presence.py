"""Who is heard, where they are in the chain, and who said that it leaves (protocol sections 2, 3 and 10)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from protocol import validity
from protocol.chain import ChainState
from protocol.messages import Heartbeat, Leave, Signed
from protocol.names import Base, Digest, PeerId

PEERS_KEPT = 4096
"""Peers remembered; the one heard longest ago makes room."""
LEAVES_KEPT = 1024


@dataclass(slots=True, kw_only=True)
class Heard:
    """The newest heartbeat of one peer."""

    base: Base
    attempt: int
    able: bool
    incarnation: bytes
    at_s: float


class Presence:
    """Heartbeats and leaves of everyone else.

    A heartbeat counts only from the neighbour that signed it: it carries no sequence number, so that a stored one could
    keep a dead peer alive.
    """

    def __init__(self, *, me: PeerId, timeout_s: float) -> None:
        self.me = me
        self.timeout_s = timeout_s
        self.heard: dict[PeerId, Heard] = {}
        self.leaves: dict[PeerId, Signed[Leave]] = {}

    def note(self, sender: PeerId, beat: Heartbeat, now_s: float) -> None:
        if sender not in self.heard and len(self.heard) >= PEERS_KEPT:
            del self.heard[min(self.heard, key=lambda peer: self.heard[peer].at_s)]
        self.heard[sender] = Heard(
            base=beat.base, attempt=beat.attempt, able=beat.able, incarnation=beat.incarnation, at_s=now_s
        )

    def fresh(self, now_s: float) -> dict[PeerId, Heard]:
        """Everyone heard within the timeout, whatever their lineage; never me."""
        horizon_s = now_s - self.timeout_s
        return {peer: heard for peer, heard in self.heard.items() if heard.at_s >= horizon_s}

    def next_silence_s(self, now_s: float) -> float | None:
        """When the next fresh peer falls silent unless it is heard again."""
        times_s = [heard.at_s for heard in self.heard.values() if heard.at_s >= now_s - self.timeout_s]
        return min(times_s) + self.timeout_s if times_s else None

    # ------------------------------------------------------------ leaves

    def leave(self, signed: Signed[Leave], state: ChainState) -> bool:
        """Remember a LEAVE (whose signature holds) of a member that it binds; whether it was news."""
        if validity.check_leave(state, signed) is not None:
            return False
        if signed.sender in self.leaves or len(self.leaves) >= LEAVES_KEPT:
            return False
        self.leaves[signed.sender] = signed
        return True

    def forget_leaves(self, state: ChainState) -> None:
        """Drop what the chain has settled: leaves of peers that are members no more, or of another lineage."""
        kept = self.leaves.items()
        self.leaves = {peer: signed for peer, signed in kept if validity.check_leave(state, signed) is None}

    # ------------------------------------------------------------ views

    def able_on(self, lineage: Digest, among: Iterable[PeerId], now_s: float) -> set[PeerId]:
        """Those of `among` that are heard on `lineage`, able, and not leaving. I am not looked at."""
        fresh = self.fresh(now_s)
        return {
            peer
            for peer in among
            if peer != self.me
            and peer not in self.leaves
            and (heard := fresh.get(peer)) is not None
            and heard.base.lineage == lineage
            and heard.able
        }
