"""Keeps the work account of one run: the trainer's news, the chain's commits, the file, and what `status` shows.

What is counted comes from the chain alone: after a restart, and after catching up, from the records on disk.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest

import structlog
import trio

from node.daemon.chain_log import FrameKind
from node.daemon.contribution import Place, WorkLedger, counted_tokens
from node.daemon.observations import Observations
from node.daemon.store import Store
from node.daemon.work_file import WorkFile
from protocol.chain import ChainState
from protocol.messages import Commit
from protocol.names import Base, PeerId
from protocol.rules import Rules
from protocol.wire import decode_commit

log = structlog.get_logger()


class WorkBook:
    """Every change is kept before it is forgotten anywhere else; the sum holds at every moment."""

    def __init__(self, *, file: WorkFile, store: Store, peer: PeerId, rules: Rules, observations: Observations) -> None:
        self._file = file
        self._store = store
        self._peer = peer
        self._observations = observations
        self.ledger = WorkLedger(file.load(rules.part_count), token_cap=3 * rules.lease_cap_units * rules.unit_tokens)

    def report(self, made: int) -> None:
        """The trainers' counter; it needs no keeping, for it is told again."""
        self.ledger.report(made)
        self._observations.work = self.ledger.status()

    def loaded(self, made: int, tokens: int, reason: str) -> None:
        """The trainer's model holds θ and `tokens` of this round's."""
        if lost := self.ledger.loaded(made, tokens, reason):
            log.warning("uncounted work is discarded", why=reason, tokens=lost)
        self._keep()

    def hand_over(self, made: int, tokens: int) -> None:
        self.ledger.hand_over(made, tokens)
        self._keep()

    async def freeze(self, base: bytes, bytes_digest: bytes, *, runs_max: int) -> tuple[tuple[int, int], ...]:
        """At most `runs_max` runs for READY. They are on disk when this returns, unless the disk refuses, which is
        counted.
        """
        runs = self.ledger.freeze(base, bytes_digest, runs_max=runs_max)
        kept = await trio.to_thread.run_sync(partial(self._file.save, self.ledger.snapshot(), durable=True))
        self._keep()  # what changed meanwhile: the thread's may have replaced it
        if not kept:
            self._observations.count(["work account not stored"])
        return runs

    def frozen_for(self, base: bytes) -> bool:
        """Whether bytes are frozen for this very base: its READY binds them, whatever the model holds by now."""
        claim = self.ledger.account.claim
        return claim is not None and claim.base == base

    def settle(self, commit: Commit, after: ChainState) -> list[int]:
        """`commit` is applied and led to `after`. Returns the tokens [P] of this node's that it counts."""
        tokens = counted_tokens(commit, self._peer)
        self.ledger.settle(commit.roster.message.base.digest(), tokens, place_of(after.base))
        self._keep()
        return tokens

    def discard(self, reason: str, *, frozen_stays: bool = False) -> None:
        """A hard reset: what was handed over and is not counted is lost, and said so (`WorkLedger.discard`)."""
        if lost := self.ledger.discard(reason, frozen_stays=frozen_stays):
            log.warning("uncounted work is discarded", why=reason, tokens=lost)
        self._keep()

    async def read_chain(self) -> None:
        """Enter the commits that nobody here saw applied: of a life before this one, or while catching up."""
        reading = await trio.to_thread.run_sync(read_chain, self._store, self._peer, self.ledger.account.through)
        if lost := enter(self.ledger, reading):
            log.error("work that was counted on another lineage is discarded with it", tokens=lost)
        self._keep()

    def _keep(self) -> None:
        self._observations.work = self.ledger.status()
        if not self._file.save(self.ledger.snapshot()):
            self._observations.count(["work account not stored"])


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedRounds:
    """What one commit, or a stretch of them, counts of a peer."""

    base: bytes
    """Digest of the base that the first of them decided."""
    tokens: list[int]
    """[P]"""
    through: Place


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainReading:
    """What a chain says about a peer's work behind a place."""

    rounds: tuple[CountedRounds, ...]
    """The first commit, and the sum of those behind it: only the first can count what is frozen now. Empty if the whole
    chain was read."""
    total: int
    """Part-tokens, all commits that were read."""
    from_start: bool
    """The place is not on this chain: these are all of its commits."""
    tip: Place


def read_chain(store: Store, peer: PeerId, after: Place | None) -> ChainReading:
    """Every commit behind `after`, read from disk one by one; blocks. However long the chain is, one commit is held.

    Raises `StoreError` for a record that went bad.
    """
    known = after is not None and (
        store.records_after(round_number=after.round, prev=after.prev, lineage=after.lineage, limit_bytes=0) is not None
    )
    first: CountedRounds | None = None
    behind: CountedRounds | None = None
    total, tip = 0, place_of(store.state.base)
    for record in store.records(after.round if known and after is not None else 0):
        if record.kind is not FrameKind.COMMIT:
            continue
        commit = decode_commit(record.body)
        base, tokens = commit.roster.message.base, counted_tokens(commit, peer)
        total += sum(tokens)
        if first is None:
            first = CountedRounds(base=base.digest(), tokens=tokens, through=tip)
        elif behind is None:
            first = replace(first, through=place_of(base))
            behind = CountedRounds(base=base.digest(), tokens=tokens, through=tip)
        else:
            # A roster without parts counts nothing, in no part.
            behind = replace(behind, tokens=[sum(both) for both in zip_longest(behind.tokens, tokens, fillvalue=0)])
    rounds = () if not known else tuple(one for one in (first, behind) if one is not None)
    return ChainReading(rounds=rounds, total=total, from_start=not known, tip=tip)


def place_of(base: Base) -> Place:
    return Place(round=base.round, prev=base.prev, lineage=base.lineage)


def enter(ledger: WorkLedger, reading: ChainReading) -> int:
    """Enter what the chain decided since. Returns the tokens that another chain had counted and this one does not."""
    if not reading.from_start:
        for one in reading.rounds:
            ledger.settle(one.base, one.tokens, one.through)
        return 0
    return ledger.recount(reading.total, reading.tip)
