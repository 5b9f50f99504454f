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
        self._counts: dict[tuple[int, int], dict[Digest, int]] = {}
        """(attempt, phase) → value → votes for it."""
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
                    self._forget(sender, oldest, phase)
            attempts.add(vote.attempt)
        cast = self._votes.setdefault((vote.attempt, vote.phase), {})
        known = cast.get(sender)
        if known is not None:
            if known.message.value != vote.value:
                return f"voted twice in phase {vote.phase} of attempt {vote.attempt}"
            return None
        cast[sender] = signed
        counts = self._counts.setdefault((vote.attempt, vote.phase), {})
        counts[vote.value] = counts.get(vote.value, 0) + 1
        self._highest[sender] = max(self._highest.get(sender, -1), vote.attempt)
        self._newest = max(self._newest, vote.attempt)
        return None

    def _forget(self, sender: PeerId, attempt: int, phase: int) -> None:
        cast = self._votes.get((attempt, phase), {})
        forgotten = cast.pop(sender, None)
        if forgotten is not None:
            self._counts[attempt, phase][forgotten.message.value] -= 1
        if not cast:
            self._votes.pop((attempt, phase), None)
            self._counts.pop((attempt, phase), None)

    def of(self, sender: PeerId, attempt: int, phase: int) -> Signed[Vote] | None:
        cast = self._votes.get((attempt, phase))
        return None if cast is None else cast.get(sender)

    def failed_edges(self) -> dict[PeerId, set[PeerId]]:
        """Electors → peers that their NILs name: exchanges with those failed."""
        named: dict[PeerId, set[PeerId]] = {}
        for cast in self._votes.values():
            for sender, signed in cast.items():
                if signed.message.failed_edges:
                    named.setdefault(sender, set()).update(signed.message.failed_edges)
        return named

    def cast(self, attempt: int, phase: int) -> int:
        """How many have voted."""
        cast = self._votes.get((attempt, phase))
        return 0 if cast is None else len(cast)

    def nils(self, attempt: int, phase: int) -> int:
        """How many of them for NIL."""
        counts = self._counts.get((attempt, phase))
        return 0 if counts is None else counts.get(NIL, 0)

    # ------------------------------------------------------------ certificates

    def certificate(self, attempt: int, phase: int) -> tuple[Digest, Certificate] | None:
        """The decision that a quorum voted for, with exactly a quorum of its votes in the order of peer ids."""
        for value, count in self._counts.get((attempt, phase), {}).items():
            if count >= self.quorum and value != NIL:
                votes = [one for one in self._votes[attempt, phase].values() if one.message.value == value]
                chosen = sorted(votes, key=lambda signed: signed.sender)[: self.quorum]
                return value, Certificate(votes=tuple(chosen))
        return None

    def commit_certificates(self) -> list[tuple[int, Digest, Certificate]]:
        """Every CC among the votes: more than one decision here is the alarm of section 5."""
        decided = [key for key, cast in self._votes.items() if key[1] == 2 and len(cast) >= self.quorum]
        made = ((attempt, self.certificate(attempt, 2)) for attempt, _ in sorted(decided))
        return [(attempt, *found) for attempt, found in made if found is not None]

    def undecidable(self, attempt: int, phase: int) -> bool:
        """No decision can reach a quorum any more, whatever the electors not heard from vote."""
        missing = len(self.electors) - self.cast(attempt, phase)
        if missing >= self.quorum:
            return False
        counts = self._counts.get((attempt, phase), {})
        return max((count for value, count in counts.items() if value != NIL), default=0) + missing < self.quorum

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
