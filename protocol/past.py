"""What lies behind a peer's place in the chain: the last commits, for those who lack them, and its lineage's birth."""

from __future__ import annotations

from collections import OrderedDict

from protocol import chain, commits, wire
from protocol.chain import ChainState
from protocol.following import COMMITS_KEPT
from protocol.messages import Commit, Reformed, Signed
from protocol.names import Base, Digest, PeerId
from protocol.standing import Standing


class Past:
    def __init__(self, standing: Standing) -> None:
        self.standing = standing
        self.rules = standing.rules
        self.outbox = standing.outbox
        self._commits: OrderedDict[Digest, Signed[Commit]] = OrderedDict()
        """By the digest of the base that each extends."""
        self._before: ChainState | None = None
        """The state that my last commit extended."""
        self._birth: tuple[Base, Signed[Reformed]] | None = None
        """The base that my lineage was born from, and the proof, for those of E′ who missed it."""
        self._told_s: dict[PeerId, float] = {}

    def applied(self, before: ChainState, commit: Commit) -> None:
        """`commit` extended `before`."""
        self._commits[before.base.digest()] = self.outbox.sign(commit)
        while len(self._commits) > COMMITS_KEPT:
            self._commits.popitem(last=False)
        self._before = before

    def born(self, old: Base, proof: Signed[Reformed]) -> None:
        self._birth, self._told_s = (old, proof), {}

    def commit_of(self, base_digest: Digest) -> Signed[Commit] | None:
        return self._commits.get(base_digest)

    def decided_twice(self, signed: Signed[Commit], base: Base) -> bool:
        """Whether a commit of a round that is behind me proves a second decision there."""
        kept = self._commits.get(base.digest())
        if kept is None:
            return False
        mine, other = kept.message, signed.message
        decided = [
            chain.decision(base.digest(), wire.roster_id(commit.roster), commit.headers) for commit in (mine, other)
        ]
        before = self._before
        if decided[0] == decided[1] or before is None or before.base != base:
            return False
        try:
            commits.verify_commit(before, self.rules, other, self.outbox.keyring)
        except commits.InvalidCommit as error:
            self.standing.misbehaved(signed.sender, f"sent a commit that is none: {error}")
            return False
        return True

    def help_along(self, peer: PeerId, base: Base, state: ChainState) -> None:
        """A member of my lineage's birth that has missed it gets the proof."""
        if self._birth is None or base != self._birth[0] or chain.member(state, peer) is None:
            return
        if self.outbox.now_s >= self._told_s.get(peer, 0.0):
            self._told_s[peer] = self.outbox.now_s + self.rules.resend_s
            self.outbox.send(peer, self._birth[1])
