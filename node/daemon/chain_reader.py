"""Reading the chain of a run from disk: where it stands, its records, and how those of others compare with them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from node.daemon.chain_checkpoint import Entry
from node.daemon.chain_index import ChainIndex
from node.daemon.chain_log import ChainLog, Frame, FrameKind, StoreError
from node.daemon.chain_records import Follower, Record, vouched, with_hash
from protocol.chain import ChainState, genesis, reform_state
from protocol.lineages import Place
from protocol.messages import Commit, Reformed
from protocol.names import Base, Digest, Keyring
from protocol.rules import Rules
from protocol.wire import decode_body, decode_commit


class ChainReader:
    """What a `Store` knows without changing anything. The log must be open."""

    def __init__(self, directory: Path, rules: Rules, keyring: Keyring) -> None:
        self._directory = directory
        self.rules = rules
        self._records = Follower(rules, keyring)
        self._index = ChainIndex(rules)
        self._lock = threading.RLock()
        self._log: ChainLog | None = None

    @property
    def state(self) -> ChainState:
        """The newest. Its `state_hash` is zero, or a peer's claim, between a commit and its application here."""
        return self._index.state

    def state_hash_at(self, round_number: int) -> Digest | None:
        """The outer state that round `round_number` starts from, if that is certain; None: unknown here."""
        with self._lock:
            return self._index.state_hash_at(round_number)

    def commit_at(self, round_number: int) -> Commit:
        """The commit of round `round_number`. Raises `StoreError` if this log has none, or it went bad on disk."""
        with self._lock:
            return decode_commit(self._body(self._index.commit_entry(round_number)))

    def records(self, from_round: int = 0) -> Iterator[Record]:
        """Records from round `from_round` on, oldest first, read from disk one by one."""
        for entry in tuple(self._index.entries):
            if entry.round >= from_round:
                with self._lock:
                    body = self._body(entry)
                yield Record(kind=entry.kind, round=entry.round, body=body)

    def records_after(
        self, *, round_number: int, prev: Digest, lineage: Digest, limit_bytes: int
    ) -> tuple[list[bytes], bool] | None:
        """Records that follow the given place, each as kind and body, and whether there are more than fit.

        At least one if there is any, whatever its size. None: that place is not on the chain here.
        """
        with self._lock:
            position = self._index.position_after(round_number, prev, lineage)
            if position is None:
                return None
            records: list[bytes] = []
            size = 0
            for entry in self._index.entries[position:]:
                record = entry.kind.to_bytes(1, "little") + self._body(entry)
                size += len(record)
                if records and size > limit_bytes:
                    return records, True
                records.append(record)
            return records, False

    def bases_after(self, place: Base) -> tuple[Base, ...]:
        """Where the chain stood behind each record that follows `place`. Raises `StoreError` if that is not on it."""
        with self._lock:
            return tuple(entry.after for entry in self._index.entries[self._index.position_of(place) :])

    def state_at(self, place: Base) -> ChainState:
        """Where the chain stood at `place`, decoded without the lock. Raises `StoreError` if it is not on the chain."""
        with self._lock:
            position = self._index.position_of(place)
        return self._state_behind(position)

    def replay(self) -> ChainState:
        """Verify every record again, signatures included, from the beginning. Raises `InvalidCommit`, `StoreError`."""
        with self._lock:
            return self._state_behind(len(self._index.entries), verify=True)

    def places(self) -> tuple[Base, ...]:
        """Places of this chain, the newest first, ever further apart, the beginning last.

        For `records_after` of a peer on another lineage: the first that it knows is close behind the branching.
        """
        with self._lock:
            return self._index.places()

    def course(self, state: ChainState, count: int) -> tuple[ChainState, tuple[Place, ...]]:
        """The next `count` places of this chain behind `state`, and where it stood at the last: fewer at its tip.

        Others use the store meanwhile: nothing is decoded under its lock. Raises `StoreError` if `state` is not on it.
        """
        with self._lock:
            position = self._index.position_of(state.base)
            entries = tuple(self._index.entries[position : position + count])
        places = []
        for entry, body in self._bodies(position, entries):
            commit = decode_commit(body) if entry.kind is FrameKind.COMMIT else None
            state = self._records.followed(state, commit or decode_body(Reformed, body))
            state = with_hash(state, entry.after.state_hash)
            places.append(Place.of(state, self.rules, commit))
        return state, tuple(places)

    # ------------------------------------------------------------ what peers send

    def check(self, record: bytes) -> None:
        """Whether a peer's record follows this chain; nothing is kept. Raises `StrangerError` or `InvalidCommit`."""
        with self._lock:
            self._records.verified(self._index.state, record)

    def shared(self, place: Base, records: Sequence[bytes]) -> tuple[Base, int]:
        """How many of a peer's `records` behind `place` are this chain's too, and the place behind those.

        The first that is another's is verified: it proves that the chain branches there. Raises `StoreError` if `place`
        is not on the chain here, `StrangerError` or `InvalidCommit`.
        """
        with self._lock:
            position = self._index.position_of(place)
            state = self._state_behind(position)
            for count, record in enumerate(records):
                _, content = self._records.verified(state, record)
                state = self._records.followed(state, content)
                following = self._index.entries[position + count : position + count + 1]
                mine = following[0].after if following else None
                theirs = state.base
                if mine is None or (mine.round, mine.prev, mine.lineage) != (theirs.round, theirs.prev, theirs.lineage):
                    return place, count
                state, place = with_hash(state, mine.state_hash), mine
            return place, len(records)

    def read_on(self, state: ChainState, records: Sequence[bytes]) -> tuple[ChainState, tuple[Place, ...]]:
        """Follow a peer's `records` from `state`, verified, without keeping anything: where they lead, and by which
        places. Raises `StrangerError` or `InvalidCommit`."""
        places = []
        for record in records:
            _, content = self._records.verified(state, record)
            state = self._records.followed(state, content)
            places.append(Place.of(state, self.rules, content if isinstance(content, Commit) else None))
        return state, tuple(places)

    # ------------------------------------------------------------ records that went bad on disk

    def damaged(self, check: Callable[[], None] = lambda: None) -> list[int]:
        """Places of the records, counted from the first, whose bytes on disk are not those that were written.

        Reads the whole log; `check` is called before every record and may raise.
        """
        found = []
        for place in range(len(self._index.entries)):
            check()
            with self._lock:
                if place < len(self._index.entries) and self._frame(self._index.entries[place]) is None:
                    found.append(place)
        return found

    def before(self, place: int) -> Base:
        """Where the chain stood before the record at `place`: what to ask a peer for."""
        with self._lock:
            return self._index.before(place)

    # ------------------------------------------------------------ inside

    def _state_behind(self, position: int, *, verify: bool = False) -> ChainState:
        """Where the chain stood behind the first `position` records."""
        state, start = genesis(self.rules), 0
        with self._lock:
            if not verify:
                start = max((count for count in self._index.states if count <= position), default=0)
                if start:
                    state = with_hash(self._index.states[start], self._index.entries[start - 1].after.state_hash)
            entries = tuple(self._index.entries[start:position])
        for entry, body in self._bodies(start, entries):
            if verify:
                self._records.verified(state, entry.kind.to_bytes(1, "little") + body)
            if entry.kind is FrameKind.COMMIT:
                commit = decode_commit(body)
                state = self._records.after_commit(vouched(state, commit.roster.message.base), commit)
            else:
                state = reform_state(state, self.rules, decode_body(Reformed, body))
            state = with_hash(state, entry.after.state_hash)
        return state

    def _bodies(self, position: int, entries: Sequence[Entry]) -> Iterator[tuple[Entry, bytes]]:
        """Each of `entries`, which lie from `position` on, with its record. Raises `StoreError` if they do no more."""
        for number, entry in enumerate(entries, position):
            with self._lock:
                # A record that was mended moves those behind it; a lineage that is left takes them away.
                now = self._index.entries[number] if number < len(self._index.entries) else None
                if now is None or (now.after.prev, now.after.lineage) != (entry.after.prev, entry.after.lineage):
                    raise StoreError(f"the chain here was left behind round {entry.round} while it was read; try again")
                body = self._body(now)
            yield entry, body

    def _body(self, entry: Entry) -> bytes:
        frame = self._frame(entry)
        if frame is None:
            raise StoreError(
                f"the record of round {entry.round} at {entry.offset} of {self._directory / 'chain.log'} went bad on "
                "disk; it is fetched again when a peer that has it is connected"
            )
        return frame.payload

    def _frame(self, entry: Entry) -> Frame | None:
        frame = self._opened().read(entry.offset)
        return frame if frame is not None and frame.kind is entry.kind else None

    def _opened(self) -> ChainLog:
        if self._log is None:
            raise StoreError(f"the chain in {self._directory} is not open; call open() first")
        return self._log
