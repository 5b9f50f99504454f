"""Between two lineages: this peer follows the one that won, and keeps its own until it is taken in (section 10).

It is taken in when it is a member there that votes. It goes back when the winner's electors are not heard for `T_fork`,
when several of their commits have passed over its JOIN, or when they are heard and commit nothing.
"""

from __future__ import annotations

from protocol import chain
from protocol.chain import ChainState
from protocol.events import LineageLeft, LineageResumed
from protocol.standing import Standing

COMMITS_AWAITED = 6
"""A member that is barred in the winning lineage is out of `M` after two commits, and its JOIN takes another."""
ATTEMPTS_AWAITED = 4
"""Of maximal length, for a commit of the winner; whoever is heard for ever and commits nothing has won nothing."""
DOUBLINGS = 5
"""That wait doubles with each vain return, at most so often: rounds of a slow run may outlast any fixed one."""


class Probation:
    """Of one machine; without `standing.left` there is none."""

    def __init__(self, standing: Standing, state: ChainState, *, returns: int = 0) -> None:
        self.standing = standing
        self.rules = standing.rules
        self.outbox = standing.outbox
        self._since_round = state.base.round
        self._since_s = self._heard_s = self._committed_s = self.outbox.now_s
        self._round = state.base.round
        rules = self.rules
        attempts_s = ATTEMPTS_AWAITED * (rules.assembly_max_s + rules.attempt_timeout_max_s)
        self._commit_within_s = max(rules.fork_timeout_s, rules.ready_max_s + attempts_s)
        self._commit_within_s *= 2 ** min(returns, DOUBLINGS)
        self.over = False
        """The earlier lineage is resumed: this machine does nothing more."""

    def advance(self, state: ChainState) -> None:
        left = self.standing.left
        if left is None or self.over:
            return
        member = chain.member(state, self.standing.me) is not None
        if (member and self.standing.voting) or state.base.lineage == left.lineage:
            self.standing.left = None
            self.outbox.emit(LineageLeft(left=left))
            return
        now_s, patience_s = self.outbox.now_s, self.rules.fork_timeout_s
        able = self.standing.presence.able_on(state.base.lineage, state.electors, now_s)
        if len(able) >= chain.quorum(state, self.rules):
            self._heard_s = now_s
        if state.base.round != self._round:
            self._round, self._committed_s = state.base.round, now_s
        refused = state.base.round - self._since_round >= COMMITS_AWAITED
        deadline_s = min(self._heard_s + patience_s, self._committed_s + self._commit_within_s)
        if refused:
            deadline_s = min(deadline_s, self._since_s + patience_s)
        if self.outbox.due(deadline_s):
            self.over = True
            self.outbox.emit(LineageResumed(left=left))

    def says(self, state: ChainState) -> str | None:
        """For `reason`; None when there is no earlier lineage."""
        left = self.standing.left
        if left is None:
            return None
        now_s = self.outbox.now_s
        silent_s = max(0.0, self._heard_s + self.rules.fork_timeout_s - now_s)
        waited_s = max(0.0, self._committed_s + self._commit_within_s - now_s)
        return (
            f"lineage {state.base.lineage.hex()[:8]} won: this node's own {left.lineage.hex()[:8]} of round "
            f"{left.round} is kept until its JOIN is committed here, and resumed if no quorum is heard for "
            f"{silent_s:.0f} s or nothing is committed for {waited_s:.0f} s"
        )
