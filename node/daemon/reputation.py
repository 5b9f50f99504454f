"""How peers behaved: who is shut out for a while, and who refused this node and is left alone for a while."""

from __future__ import annotations

from dataclasses import dataclass

import structlog
import trio

from protocol.names import PeerId

MAX_BLAME = 10.0
BLAME_FORGIVEN_PER_S = 1 / 60
BAN_S = 600.0
REFUSAL_PAUSE_S = 30.0
MAX_PEERS = 2000
_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Standing:
    blame: float = 0.0
    at_s: float = 0.0
    banned_until_s: float = 0.0
    paused_until_s: float = 0.0
    why: str = ""


class Reputation:
    """Of at most 2,000 peers; the longest unmentioned are forgotten."""

    def __init__(self) -> None:
        self._peers: dict[PeerId, _Standing] = {}

    def blame(self, peer: PeerId, points: float, why: str) -> None:
        """Bad input; ten points within a short time shut the peer out for ten minutes. Logged once a peer."""
        standing = self._of(peer)
        now = trio.current_time()
        if not standing.why:
            _log.warning("a peer broke a rule", peer=peer, why=why)
        standing.blame = max(0.0, standing.blame - (now - standing.at_s) * BLAME_FORGIVEN_PER_S) + points
        standing.at_s = now
        standing.why = why
        if standing.blame >= MAX_BLAME:
            standing.banned_until_s = now + BAN_S
            standing.blame = 0.0
            _log.warning("a peer is shut out", peer=peer, seconds=BAN_S, why=why)

    def refused(self, peer: PeerId, why: str) -> None:
        """The peer refused this node, or the other way round: asking again at once changes nothing."""
        standing = self._of(peer)
        standing.paused_until_s = trio.current_time() + REFUSAL_PAUSE_S
        standing.why = why

    def is_banned(self, peer: PeerId) -> bool:
        standing = self._peers.get(peer)
        return standing is not None and trio.current_time() < standing.banned_until_s

    def why_not_dial(self, peer: PeerId) -> str | None:
        """One sentence; None: it may be dialled."""
        standing = self._peers.get(peer)
        if standing is None or trio.current_time() >= max(standing.banned_until_s, standing.paused_until_s):
            return None
        return standing.why

    def _of(self, peer: PeerId) -> _Standing:
        standing = self._peers.pop(peer, None) or _Standing()
        self._peers[peer] = standing
        while len(self._peers) > MAX_PEERS:
            del self._peers[next(iter(self._peers))]
        return standing
