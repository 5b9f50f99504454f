"""A peer behind its lineage: how it gets to where the others are (protocol sections 5 and 9)."""

from __future__ import annotations

from protocol.events import CatchUp
from protocol.messages import Fetch
from protocol.names import Digest, PeerId
from protocol.record import Record
from protocol.standing import Derived, Standing

COMMITS_KEPT = 8
"""Commits served from memory to peers a few rounds behind."""
FETCH_FAILURES = 3
"""After this many failed attempts to get a commit's parts, a peer ahead of me is caught up with instead."""


class Follower:
    def __init__(self, standing: Standing) -> None:
        self.standing = standing
        self.rules = standing.rules
        self.outbox = standing.outbox
        self._pull_s = self._catch_up_s = self.outbox.now_s
        self._behind_since_s: float | None = None
        self._ahead: Derived[list[tuple[int, PeerId]]] = Derived()
        self._pulls = 0

    def progressed(self) -> None:
        """A commit was applied, or a lineage born: patience starts anew."""
        self._behind_since_s = None

    def ahead(self, record: Record) -> list[tuple[int, PeerId]]:
        """(round, peer) of peers of my lineage in later rounds, the furthest last."""
        found = self._ahead.get(self.standing.presence.version, record.base)
        return self._ahead.put(self._find_ahead(record)) if found is None else found

    def _find_ahead(self, record: Record) -> list[tuple[int, PeerId]]:
        mine = record.base
        return sorted(
            (base.round, peer)
            for base, there in self.standing.presence.places.items()
            if base.lineage == mine.lineage and base.round > mine.round
            for peer in there
        )

    def follow(self, record: Record) -> None:
        """Behind my lineage: ask for the next commit, and if that does not help, have the node catch up."""
        ahead = self.ahead(record)
        if not ahead or record.applying:
            self._behind_since_s = None
            return
        now_s, resend_s = self.outbox.now_s, self.rules.resend_s
        if self._behind_since_s is None:
            self._behind_since_s = now_s
        if record.commit is None and self.outbox.due(self._pull_s):
            self._pull_s = now_s + resend_s / 2
            self.outbox.due(self._pull_s)
            wanted = Fetch(hash=record.base_digest)
            # The nearest ahead is the likeliest to have it still, and the furthest where to go if not. Both may lie
            # about their rounds: everyone else ahead is asked in turn.
            turn = ahead[self._pulls % len(ahead)][1]
            self._pulls += 1
            for peer in dict.fromkeys([ahead[0][1], turn, ahead[-1][1]]):
                self.outbox.tell(peer, wanted)
        failures = max((candidate.fetch_failures for candidate in record.candidates.values()), default=0)
        stuck = record.commit is None and self.outbox.due(self._behind_since_s + 3 * resend_s)
        stuck = stuck or (record.commit is not None and failures >= FETCH_FAILURES)
        if stuck or ahead[-1][0] > record.base.round + COMMITS_KEPT:
            self.catch_up(ahead[-1][1], ahead[-1][0], record.base.lineage)

    def catch_up(self, peer: PeerId, round_: int, lineage: Digest) -> None:
        """Have the node get to where `peer` is; not too often."""
        if self.outbox.due(self._catch_up_s):
            self._catch_up_s = self.outbox.now_s + 5 * self.rules.resend_s
            self.outbox.emit(CatchUp(peer=peer, round=round_, lineage=lineage))
