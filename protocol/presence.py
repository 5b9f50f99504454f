"""Who is heard, where they are in the chain, and who said that it leaves (protocol sections 2, 3 and 10)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
    envelope: bytes = b""
    """The heartbeat as received: the same bytes again say nothing but that the peer lives."""
    elsewhere: tuple[Base, float] | None = None
    """The last place that it named on another lineage, and when."""


class Presence:
    """Heartbeats and leaves of everyone else.

    A heartbeat counts only from the neighbour that signed it: it carries no sequence number, so that a stored one could
    keep a dead peer alive.
    """

    def __init__(self, *, me: PeerId, timeout_s: float) -> None:
        self.me = me
        self.timeout_s = timeout_s
        self.heard: dict[PeerId, Heard] = {}
        """In the order in which they were heard last."""
        self._fresh: dict[PeerId, Heard] = {}
        """Of these, in the same order, those within the timeout."""
        self.places: dict[Base, dict[PeerId, Heard]] = {}
        """The same by where they are: there are far fewer places than peers."""
        self.leaves: dict[PeerId, Signed[Leave]] = {}
        self.version = 0
        """Rises with every change but of times: what is derived from presence holds while it stands still."""

    def note(self, sender: PeerId, beat: Heartbeat, now_s: float, envelope: bytes = b"") -> bool:
        """A heartbeat whose signature holds; whether it says anything new but that the peer still lives."""
        before = self._fresh.get(sender)
        if sender not in self.heard and len(self.heard) >= PEERS_KEPT:
            longest_ago = next(iter(self.heard))
            self._drop(longest_ago)
        elsewhere = None
        if before is not None:
            moved = before.base.lineage != beat.base.lineage
            elsewhere = (before.base, before.at_s) if moved else before.elsewhere
        heard = Heard(
            base=beat.base,
            attempt=beat.attempt,
            able=beat.able,
            incarnation=beat.incarnation,
            at_s=now_s,
            envelope=envelope,
            elsewhere=elsewhere,
        )
        self._put(sender, heard)
        said = (heard.base, heard.attempt, heard.able, heard.incarnation)
        news = before is None or (before.base, before.attempt, before.able, before.incarnation) != said
        self.version += news
        return news

    def forget(self, peer: PeerId) -> None:
        """As if it had never been heard."""
        self._drop(peer)

    def _drop(self, peer: PeerId) -> None:
        self.heard.pop(peer, None)
        self._fade(peer)
        self.version += 1

    def _fade(self, peer: PeerId) -> None:
        """It is not fresh any more."""
        known = self._fresh.pop(peer, None)
        if known is not None:
            there = self.places[known.base]
            del there[peer]
            if not there:
                del self.places[known.base]

    def repeated(self, sender: PeerId, envelope: bytes, now_s: float) -> Heard | None:
        """What a fresh peer said last, if `envelope` are the very same bytes again; it is heard anew."""
        known = self._fresh.get(sender)
        if known is None or known.envelope != envelope:
            return None
        known.at_s = now_s
        self._put(sender, known)
        return known

    def _put(self, sender: PeerId, heard: Heard) -> None:
        self.heard.pop(sender, None)
        self.heard[sender] = heard
        if self._fresh.get(sender) is heard:
            del self._fresh[sender]
        else:
            self._fade(sender)
            self.places.setdefault(heard.base, {})[sender] = heard
        self._fresh[sender] = heard

    def fresh(self, now_s: float) -> Mapping[PeerId, Heard]:
        """Everyone heard within the timeout, whatever their lineage; never me. A view that stays up to date until time
        passes; `now_s` never goes back.
        """
        horizon_s = now_s - self.timeout_s
        while self._fresh:
            longest_ago = next(iter(self._fresh))
            if self._fresh[longest_ago].at_s >= horizon_s:
                break
            self._fade(longest_ago)
            self.version += 1
        return self._fresh

    def bases(self, peer: PeerId, now_s: float) -> list[Base]:
        """Where `peer` was heard within the timeout: its newest place, and one on another lineage if there is any."""
        heard = self.heard[peer]
        recent = [(heard.base, heard.at_s)] + ([] if heard.elsewhere is None else [heard.elsewhere])
        return [base for base, at_s in recent if at_s >= now_s - self.timeout_s]

    def next_silence_s(self, now_s: float) -> float | None:
        """When the next fresh peer falls silent unless it is heard again."""
        fresh = self.fresh(now_s)
        return fresh[next(iter(fresh))].at_s + self.timeout_s if fresh else None

    # ------------------------------------------------------------ leaves

    def leave(self, signed: Signed[Leave], state: ChainState) -> bool:
        """Remember a LEAVE (whose signature holds) of a member that it binds; whether it was news."""
        if validity.check_leave(state, signed) is not None:
            return False
        if signed.sender in self.leaves or len(self.leaves) >= LEAVES_KEPT:
            return False
        self.leaves[signed.sender] = signed
        self.version += 1
        return True

    def forget_leaves(self, state: ChainState) -> None:
        """Drop what the chain has settled: leaves of peers that are members no more, or of another lineage."""
        self.version += 1
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
