"""The chain in memory: where each record lies in the log, where the chain stood behind it, and where it stands."""

from __future__ import annotations

from dataclasses import replace

from node.daemon.chain_checkpoint import Checkpoint, Entry
from node.daemon.chain_log import FrameKind, StoreError
from protocol.chain import ChainState, genesis
from protocol.names import ZERO_DIGEST, Base, Digest
from protocol.rules import Rules

STATES_KEPT = 64
"""States of the chain behind the newest records; where lineages part lies mostly there."""
MARK_EVERY_RECORDS = 256
"""And behind every so many for good, so that no replay of the log is long."""


class ChainIndex:
    """Not safe for two threads at once: `node.daemon.store.Store` serialises."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self.entries: list[Entry] = []
        self.state = genesis(rules)
        """Where the chain stands. Its state hash is zero, or a peer's claim, while nobody has told it for certain."""
        self.states: dict[int, ChainState] = {}
        """Number of records → where the chain stood behind them, for some. The state hash may be certain by now."""
        self._commits: list[int] = []
        """By round: the commit's place in `entries`."""

    # ------------------------------------------------------------ growing, shrinking

    def take(self, found: Checkpoint) -> None:
        self.entries = list(found.entries)
        self._commits = [place for place, entry in enumerate(found.entries) if entry.kind is FrameKind.COMMIT]
        self.state = found.state
        self.states = dict(found.marks)

    def push(self, kind: FrameKind, offset: int, state: ChainState) -> None:
        """A record at `offset` of the log that led to `state`."""
        if kind is FrameKind.COMMIT:
            self._commits.append(len(self.entries))
        self.entries.append(Entry(kind=kind, offset=offset, after=state.base))
        self.state = self.states[len(self.entries)] = state
        outdated = len(self.entries) - STATES_KEPT
        if outdated % MARK_EVERY_RECORDS:
            self.states.pop(outdated, None)

    def go_back(self, position: int, state: ChainState) -> None:
        """Only the first `position` records stay; `state` is where the chain stood behind them."""
        del self.entries[position:]
        self._commits = [number for number in self._commits if number < position]
        self.states = {count: known for count, known in self.states.items() if count <= position}
        self.state = state

    def move(self, behind: int, by: int) -> None:
        """The records from place `behind` on lie `by` bytes further back in the log."""
        self.entries[behind:] = [replace(entry, offset=entry.offset + by) for entry in self.entries[behind:]]

    @property
    def marks(self) -> dict[int, ChainState]:
        """Of `states`, those that are kept for good."""
        return {count: known for count, known in self.states.items() if count % MARK_EVERY_RECORDS == 0}

    # ------------------------------------------------------------ state hashes

    @property
    def hash_is_open(self) -> bool:
        """Whether nobody has yet told for certain which outer state the newest commit gave."""
        return bool(self.entries) and self.entries[-1].after.state_hash == ZERO_DIGEST

    def learn(self, state_hash: Digest) -> None:
        """The outer state of the newest round is certain from now on."""
        self.state = replace(self.state, base=replace(self.state.base, state_hash=state_hash))
        for place in range(len(self.entries) - 1, -1, -1):
            entry = self.entries[place]
            if entry.after.round != self.state.base.round:
                break
            self.entries[place] = replace(entry, after=replace(entry.after, state_hash=state_hash))

    def state_hash_at(self, round_number: int) -> Digest | None:
        """The outer state that round `round_number` starts from, if that is certain; None: unknown here."""
        if round_number == 0:
            return self._rules.initial_state_hash
        if not 0 < round_number <= len(self._commits):
            return None
        known = self.entries[self._commits[round_number - 1]].after.state_hash
        return None if known == ZERO_DIGEST else known

    # ------------------------------------------------------------ places

    def commit_entry(self, round_number: int) -> Entry:
        """Raises `StoreError` if there is no commit of that round."""
        if not 0 <= round_number < len(self._commits):
            raise StoreError(f"the chain here has no commit of round {round_number}; fetch it from a peer")
        return self.entries[self._commits[round_number]]

    def before(self, place: int) -> Base:
        """Where the chain stood before the record at `place`."""
        return self.entries[place - 1].after if place else genesis(self._rules).base

    def places(self) -> tuple[Base, ...]:
        """Places of the chain, the newest first, ever further apart, the beginning last."""
        places: list[Base] = []
        back = 1
        while back <= len(self.entries):
            places.append(self.entries[-back].after)
            back = 2 * back if back > 8 else back + 1
        return (*places, genesis(self._rules).base)

    def position_after(self, round_number: int, prev: Digest, lineage: Digest) -> int | None:
        """Place in `entries` of the first record behind the given place; None: that is not on the chain here."""
        first = genesis(self._rules).base
        if (round_number, prev, lineage) == (0, first.prev, first.lineage):
            return 0
        if not 0 <= round_number <= len(self._commits):
            return None
        start = self._commits[round_number - 1] if round_number else 0
        for place in range(start, len(self.entries)):
            after = self.entries[place].after
            if after.round != round_number:
                return None
            if (after.prev, after.lineage) == (prev, lineage):
                return place + 1
        return None

    def has(self, place: Base) -> bool:
        return self.position_after(place.round, place.prev, place.lineage) is not None

    def position_of(self, place: Base) -> int:
        """As `position_after`. Raises `StoreError` if the place is not on the chain here."""
        position = self.position_after(place.round, place.prev, place.lineage)
        if position is None:
            raise StoreError(f"round {place.round} after {place.prev.hex()[:16]} is not on the chain here")
        return position
