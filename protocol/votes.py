"""Agreement of one round: votes, locks, valid values, certificates and attempts (protocol section 5).

`Agreement` only remembers and judges; `protocol.round` decides when to act. The rules are those of two-phase voting
with locks (Tendermint, arXiv:1807.04938): a lock is taken with the phase-2 vote and is only given up for a certificate
that is not older.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from protocol.messages import NIL, Certificate, Signed, Vote
from protocol.names import Digest, PeerId

PHASES = (1, 2)
NOTHING_SEEN: Mapping[PeerId, int] = MappingProxyType({})
ATTEMPTS_KEPT = 16
"""Attempts whose votes are kept per elector; a CC may come that many attempts late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    attempt: int
    decision: Digest


class Agreement:
    """The votes of one base as this peer has seen them, and its own lock.

    Args:
        electors: who votes; never empty.
        quorum: how many equal votes make a certificate, `q(len(electors))`.
    """

    def __init__(self, *, electors: Iterable[PeerId], quorum: int) -> None:
        self.electors = frozenset(electors)
        self.quorum = quorum
        self.lock: Lock | None = None
        self._votes: dict[tuple[int, int], dict[PeerId, Signed[Vote]]] = {}
        self._highest: dict[PeerId, int] = {}
        self._attempts_of: dict[PeerId, set[int]] = {}
        self._newest = -1
        """The highest attempt of any vote."""

    # ------------------------------------------------------------ votes

    def add(self, signed: Signed[Vote]) -> str | None:
        """Take in a vote whose signature holds. The first one of an elector per attempt and phase counts.

        Returns why it is misbehaviour, or None; a repetition is neither.
        """
        vote, sender = signed.message, signed.sender
        if sender not in self.electors:
            return f"voted in round {vote.base.round} without being an elector"
        if vote.phase not in PHASES or vote.attempt < 0:
            return f"voted in phase {vote.phase} of attempt {vote.attempt}"
        attempts = self._attempts_of.setdefault(sender, set())
        if vote.attempt not in attempts:
            if len(attempts) >= ATTEMPTS_KEPT:
                oldest = min(attempts)
                if vote.attempt < oldest:
                    return None
                attempts.discard(oldest)
                for phase in PHASES:
                    self._votes.get((oldest, phase), {}).pop(sender, None)
                    if not self._votes.get((oldest, phase)):
                        self._votes.pop((oldest, phase), None)
            attempts.add(vote.attempt)
        cast = self._votes.setdefault((vote.attempt, vote.phase), {})
        known = cast.get(sender)
        if known is not None:
            if known.message.value != vote.value:
                return f"voted twice in phase {vote.phase} of attempt {vote.attempt}"
            return None
        cast[sender] = signed
        self._highest[sender] = max(self._highest.get(sender, -1), vote.attempt)
        self._newest = max(self._newest, vote.attempt)
        return None

    def of(self, sender: PeerId, attempt: int, phase: int) -> Signed[Vote] | None:
        return self._votes.get((attempt, phase), {}).get(sender)

    def cast(self, attempt: int, phase: int) -> list[Signed[Vote]]:
        return list(self._votes.get((attempt, phase), {}).values())

    def nils(self, attempt: int, phase: int) -> int:
        return sum(signed.message.value == NIL for signed in self.cast(attempt, phase))

    # ------------------------------------------------------------ certificates

    def certificate(self, attempt: int, phase: int) -> tuple[Digest, Certificate] | None:
        """The decision that a quorum voted for, with exactly a quorum of its votes in the order of peer ids."""
        by_value: dict[Digest, list[Signed[Vote]]] = {}
        for signed in self._votes.get((attempt, phase), {}).values():
            by_value.setdefault(signed.message.value, []).append(signed)
        for value, votes in by_value.items():
            if value != NIL and len(votes) >= self.quorum:
                chosen = sorted(votes, key=lambda signed: signed.sender)[: self.quorum]
                return value, Certificate(votes=tuple(chosen))
        return None

    def commit_certificates(self) -> list[tuple[int, Digest, Certificate]]:
        """Every CC among the votes: more than one decision here is the alarm of section 5."""
        found = []
        for attempt, phase in sorted(self._votes):
            if phase == 2 and (made := self.certificate(attempt, 2)) is not None:
                found.append((attempt, *made))
        return found

    def undecidable(self, attempt: int, phase: int) -> bool:
        """No decision can reach a quorum any more, whatever the electors not heard from vote."""
        votes = self.cast(attempt, phase)
        counts: dict[Digest, int] = {}
        for signed in votes:
            if signed.message.value != NIL:
                counts[signed.message.value] = counts.get(signed.message.value, 0) + 1
        missing = len(self.electors) - len(votes)
        return max(counts.values(), default=0) + missing < self.quorum

    def later_attempt(self, attempt: int, seen: Mapping[PeerId, int] = NOTHING_SEEN) -> int | None:
        """The highest attempt after `attempt` that more than `n - q` electors have entered.

        Args:
            seen: attempts that peers have shown themselves in other than by a vote (a ROSTER of theirs, a HEARTBEAT).
        """
        if self._newest <= attempt and not any(shown > attempt for shown in seen.values()):
            return None
        needed = len(self.electors) - self.quorum + 1
        entered = (max(self._highest.get(peer, -1), seen.get(peer, -1)) for peer in self.electors)
        later = sorted((highest for highest in entered if highest > attempt), reverse=True)
        return later[needed - 1] if len(later) >= needed else None

    # ------------------------------------------------------------ what I may do

    def may_vote(self, decision: Digest, *, attempt: int, valid_attempt: int | None) -> bool:
        """Phase-1 rule for a proposal that section 6 accepts.

        Args:
            valid_attempt: the attempt of the QC that the proposal carries (verified by the caller), None without one.
        """
        if valid_attempt is None:
            return self.lock is None or self.lock.decision == decision
        if valid_attempt >= attempt:
            return False
        return self.lock is None or self.lock.attempt <= valid_attempt or self.lock.decision == decision
