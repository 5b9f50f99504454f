"""What a peer says of itself again and again: that it lives, leaves, or wants to join (protocol section 3)."""

from __future__ import annotations

from protocol import chain
from protocol.chain import ChainState
from protocol.messages import Heartbeat, Join, Leave, Signed
from protocol.standing import Standing


class Announcer:
    """Args:
    incarnation: random bytes drawn at this start.
    """

    def __init__(self, standing: Standing, incarnation: bytes) -> None:
        self.standing = standing
        self.rules = standing.rules
        self.outbox = standing.outbox
        self.me = standing.me
        self._incarnation = incarnation
        self._beat: Signed[Heartbeat] | None = None
        self._heartbeat_s = self._join_s = self._leave_s = self.outbox.now_s

    def at_once(self) -> None:
        """What there is to say has changed."""
        self._heartbeat_s = self._join_s = self._leave_s = self.outbox.now_s

    def beat(self, state: ChainState, attempt: int) -> None:
        if self.outbox.due(self._heartbeat_s):
            self._heartbeat_s = self.outbox.now_s + self.rules.heartbeat_s
            self.outbox.due(self._heartbeat_s)
            self.outbox.broadcast(self.heartbeat(state, attempt))

    def heartbeat(self, state: ChainState, attempt: int) -> Signed[Heartbeat]:
        """What there is to say now; signed anew only when that has changed."""
        able = self.standing.able and (self.standing.voting or chain.member(state, self.me) is None)
        beat = Heartbeat(base=state.base, attempt=attempt, able=able, incarnation=self._incarnation)
        if self._beat is None or self._beat.message != beat:
            self._beat = self.outbox.sign(beat)
        return self._beat

    def leave(self, state: ChainState) -> None:
        if not self.standing.leaving or chain.member(state, self.me) is None:
            return
        if self.outbox.due(self._leave_s):
            self._leave_s = self.outbox.now_s + self.rules.resend_s
            self.outbox.due(self._leave_s)
            leaves = self.standing.presence.leaves
            if self.me not in leaves:
                leaves[self.me] = self.outbox.sign(Leave(base=state.base))
                self.standing.presence.version += 1
            self.outbox.broadcast(leaves[self.me])

    def join(self, state: ChainState) -> None:
        """Ask for membership, unless it is had, or not to be had."""
        allowed = self.rules.allowed_peers is None or self.me in self.rules.allowed_peers
        allowed = allowed and self.me not in state.banned
        if not allowed or self.standing.leaving or chain.member(state, self.me) is not None:
            return
        if self.outbox.due(self._join_s):
            self._join_s = self.outbox.now_s + self.rules.resend_s
            self.outbox.due(self._join_s)
            units = min(self.standing.units_wanted or self.rules.lease_cap_units, self.rules.lease_cap_units)
            self.outbox.broadcast(self.outbox.sign(Join(base=state.base, units_wanted=units)))
