"""The account of this node's work: every token that its trainers made is counted, carried, or reported discarded.

Invariant 3 of the design (section 5), over every life of trainer, engine and daemon. P: parts of the vector. A round
may count some parts of a contribution and not others, so everything is kept in *part-tokens* (one token in one part; a
token that is trained is P of them) and divided only when it is shown:

    produced = counted + carried + discarded

- *produced*: from the trainers' own counter, which outlives them (`node.trainer.made`).
- *counted*: from the chain alone (`node.daemon.work_book`): bitmaps of commits times tokens of this node's READYs.
- *carried*: in the local model, or frozen and on its way through a round, and in no commit.
- *discarded*: gone from every model, by reason.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from node.status import WorkStatus, WorkTotals
from protocol.messages import Commit
from protocol.names import PeerId
from protocol.weights import TokenRuns, tokens_of

WITH_THE_TRAINER = "lost with the trainer"
NOT_FINITE = "NaN or infinity in the model"
STATE_REPLACED = "another state was taken over"
TOO_LATE = "not handed over in time"
OVER_THE_LIMIT = "over the tokens that a READY may claim"
BEHIND_THE_FREEZE = "trained after the round's bytes were frozen"
LINEAGE_LOST = "counted on a lineage that lost"


def run_lengths(values: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """(count, value) runs of `values`, the form in which READY carries tokens per part."""
    runs: list[tuple[int, int]] = []
    for value in values:
        if runs and runs[-1][1] == value:
            runs[-1] = (runs[-1][0] + 1, value)
        else:
            runs.append((1, value))
    return tuple(runs)


def claimable(tokens: Sequence[int], runs_max: int) -> tuple[tuple[int, int], ...]:
    """`tokens` [P] as at most `runs_max` runs, so that they fit a READY (`protocol.ready_limits`).

    After rounds that counted every other part there may be more runs than a READY may hold, and nobody would read it:
    then neighbouring parts claim alike, what the least of them has. What a counted part holds beyond its claim is
    accounted for as over the limit; a part that claims nothing stays carried.
    """
    runs = run_lengths(tokens)
    if len(runs) <= runs_max:
        return runs
    together = -(-len(tokens) // runs_max)
    alike: list[int] = []
    for start in range(0, len(tokens), together):
        block = tokens[start : start + together]
        alike += [min(block)] * len(block)
    return run_lengths(alike)


def from_runs(runs: TokenRuns) -> list[int]:
    """The inverse of `run_lengths`."""
    return [value for count, value in runs for _ in range(count)]


def counted_tokens(commit: Commit, peer: PeerId) -> list[int]:
    """Tokens [P] that `commit` counts of `peer`: what its READY claims where the part's bitmap names it, else 0."""
    for bit, ready in enumerate(commit.roster.message.readys):
        if ready.sender == peer:
            runs = ready.message.tokens
            return [
                tokens_of(runs, part) if header is not None and header.message.bitmap >> bit & 1 else 0
                for part, header in enumerate(commit.headers)
            ]
    return [0] * len(commit.headers)


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where on the chain a commit led to."""

    round: int
    prev: bytes
    lineage: bytes


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """What a READY of this node says for one base; it is on disk before that READY is sent."""

    base: bytes
    """Digest."""
    bytes_digest: bytes
    """Of the encoded parts' hashes: a base frozen again after a crash gives the same bytes, and the same claim."""
    tokens: tuple[tuple[int, int], ...]
    """As READY has them."""
    held: tuple[tuple[int, int], ...]
    """Tokens that the frozen bytes hold: more than claimed where they are over the limit."""
    orphaned: bool = False
    """No model holds this work any more: unless it is counted, it is lost."""


class Account(msgspec.Struct, kw_only=True):
    """What is kept on disk."""

    parts: int
    since_unix_s: float
    produced: int = 0
    """Part-tokens, like `counted` and `discarded`."""
    counted: int = 0
    discarded: dict[str, int] = {}
    reading: int = 0
    """Newest reading of the trainers' counter, in tokens."""
    entered: int = 0
    """The reading up to which tokens were handed over or discarded; the rest is the present round's, in the model."""
    carried: tuple[tuple[int, int], ...] = ()
    """Tokens by part that were handed over, are still in the local model, and in no commit."""
    claim: Claim | None = None
    through: Place | None = None
    """`counted` holds all commits up to here; None: the chain has not been read yet."""


class WorkLedger:
    """The arithmetic of one account. Every method keeps the sum; `node.daemon.work_book` says when which is called."""

    def __init__(self, account: Account, *, token_cap: int) -> None:
        """`token_cap`: the most tokens that a READY may claim for a part (lease and extra cap, `protocol.validity`)."""
        self.account = account
        self._token_cap = token_cap
        self._carried = from_runs(account.carried) or [0] * account.parts

    # ------------------------------------------------------------ what the trainer says

    def report(self, reading: int) -> None:
        """The trainers' counter stands at `reading`. A lower one than before is a new counter."""
        account = self.account
        if reading < account.reading:
            account.entered = reading - self._open
        else:
            account.produced += (reading - account.reading) * account.parts
        account.reading = reading

    def hand_over(self, reading: int, tokens: int) -> None:
        """A contribution with `tokens` of this round's; one that is handed over again changes nothing."""
        self.report(reading)
        new = self._open
        kept = min(new, tokens)
        self._carried = [carried + kept for carried in self._carried]
        self.account.entered = reading
        self._discard(WITH_THE_TRAINER, (new - kept) * self.account.parts)

    def loaded(self, reading: int, tokens: int, reason: str) -> int:
        """The trainer's model is θ and `tokens` of this round's. Returns the tokens lost, for `reason`."""
        self.report(reading)
        account, claim = self.account, self.account.claim
        if claim is not None and not claim.orphaned and any(held > tokens for _, held in claim.held):
            # Its bytes are frozen: they may still be counted, though no model holds them.
            self._carried = [mine - held for mine, held in zip(self._carried, from_runs(claim.held), strict=True)]
            account.claim = msgspec.structs.replace(claim, orphaned=True)
        unfinished = min(self._open, tokens)
        lost = (self._open - unfinished) * account.parts
        account.entered = reading - unfinished
        lost += sum(max(0, carried - (tokens - unfinished)) for carried in self._carried)
        self._carried = [min(carried, tokens - unfinished) for carried in self._carried]
        self._discard(reason, lost)
        return lost // account.parts

    # ------------------------------------------------------------ what becomes of it

    def freeze(self, base: bytes, bytes_digest: bytes, *, runs_max: int) -> tuple[tuple[int, int], ...]:
        """What is carried is frozen for `base`; returns at most `runs_max` runs. Keep it before READY is sent."""
        account, claim = self.account, self.account.claim
        if claim is not None and claim.bytes_digest == bytes_digest:
            # The same work, or a new lineage's name for it; that has other members, and its READY perhaps less room.
            tokens = claim.tokens if len(claim.tokens) <= runs_max else claimable(from_runs(claim.tokens), runs_max)
            account.claim = msgspec.structs.replace(claim, base=base, tokens=tokens)
            return tokens
        self._abandon_claim(WITH_THE_TRAINER)
        tokens = claimable([min(carried, self._token_cap) for carried in self._carried], runs_max)
        account.claim = Claim(base=base, bytes_digest=bytes_digest, tokens=tokens, held=run_lengths(self._carried))
        return tokens

    def settle(self, base: bytes, counted: Sequence[int], through: Place) -> None:
        """A commit of `base` that leads to `through`: `counted` [P] of this node's tokens are in it."""
        account, claim = self.account, self.account.claim
        counted = counted or [0] * account.parts  # a roster without parts counts nothing
        if claim is not None and claim.base == base:
            self._settle_claim(claim, counted)
        else:
            self._abandon_claim(WITH_THE_TRAINER)
            for part, tokens in enumerate(counted):
                known = min(tokens, self._carried[part])
                self._carried[part] -= known
                account.produced += tokens - known  # of a life whose account was lost
        account.claim = None
        account.counted += sum(counted)
        account.through = through

    def _settle_claim(self, claim: Claim, counted: Sequence[int]) -> None:
        account = self.account
        for part, (tokens, held) in enumerate(zip(counted, from_runs(claim.held), strict=True)):
            later = self._carried[part] - (0 if claim.orphaned else held)
            if tokens:
                # The local model became the outer state in this part, whatever else it held there.
                self._carried[part] = 0
                self._discard(OVER_THE_LIMIT, max(0, held - tokens))
                account.produced += max(0, tokens - held)
                self._discard(BEHIND_THE_FREEZE, later)
            elif claim.orphaned:
                self._discard(WITH_THE_TRAINER, held)

    def recount(self, counted: int, through: Place) -> int:
        """The chain is another one now, and counts `counted` part-tokens. Returns the tokens that no chain counts."""
        account = self.account
        left, account.counted, account.through = account.counted - counted, counted, through
        if left >= 0:
            self._discard(LINEAGE_LOST, left)
        else:
            # Back on a lineage that was left, and whose work was reported as lost with it.
            known = min(account.discarded.get(LINEAGE_LOST, 0), -left)
            self._discard(LINEAGE_LOST, -known)
            left += known
            if left < 0:
                self._abandon_claim(WITH_THE_TRAINER)
            for part, carried in enumerate(self._carried):
                known = min(carried, -left)
                self._carried[part] -= known
                left += known
            account.produced -= left
        return max(0, left) // account.parts

    def discard(self, reason: str, *, frozen_stays: bool = False) -> int:
        """All that was handed over and is in no commit is lost; the trainer's next `Loaded` tells of the rest.

        `frozen_stays`: the frozen bytes are kept, with the lineage that they are for; they may be counted yet.
        """
        claim = self.account.claim
        if claim is not None and frozen_stays:
            if not claim.orphaned:
                self._carried = [mine - held for mine, held in zip(self._carried, from_runs(claim.held), strict=True)]
                self.account.claim = msgspec.structs.replace(claim, orphaned=True)
        else:
            self._abandon_claim(reason)
        lost = sum(self._carried)
        self._carried = [0] * self.account.parts
        self._discard(reason, lost)
        return lost // self.account.parts

    def _abandon_claim(self, reason: str) -> None:
        claim, self.account.claim = self.account.claim, None
        if claim is not None and claim.orphaned:
            self._discard(reason, sum(from_runs(claim.held)))

    def _discard(self, reason: str, part_tokens: int) -> None:
        if part_tokens:
            self.account.discarded[reason] = self.account.discarded.get(reason, 0) + part_tokens

    # ------------------------------------------------------------ what it comes to

    @property
    def _open(self) -> int:
        """Tokens of the present round, not handed over."""
        return self.account.reading - self.account.entered

    @property
    def carried(self) -> int:
        """Part-tokens in the local model, or frozen and not decided."""
        claim = self.account.claim
        orphaned = sum(from_runs(claim.held)) if claim is not None and claim.orphaned else 0
        return sum(self._carried) + self._open * self.account.parts + orphaned

    def snapshot(self) -> Account:
        """What is to be kept."""
        return msgspec.structs.replace(
            self.account, carried=run_lengths(self._carried), discarded=dict(self.account.discarded)
        )

    def status(self) -> WorkStatus:
        account, parts = self.account, self.account.parts
        discarded = sum(account.discarded.values())
        return WorkStatus(
            produced_tokens=account.produced // parts,
            counted_tokens=account.counted // parts,
            carried_tokens=self.carried // parts,
            discarded_tokens=discarded // parts,
            discarded={reason: lost // parts for reason, lost in account.discarded.items()},
            since_unix_s=account.since_unix_s,
            exact=WorkTotals(
                parts=parts,
                produced=account.produced,
                counted=account.counted,
                carried=self.carried,
                discarded=dict(account.discarded),
            ),
        )
