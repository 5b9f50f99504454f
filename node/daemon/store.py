"""What a daemon must not forget: the chain of its run and the journal of its votes, in the run's directory.

    chain.log           every commit and reform since the start (`node.daemon.chain_log`)
    chain.checkpoint    where the chain stood lately, so that opening reads only the log's tail; made again if lost
    journal             the newest vote journal, replaced atomically

A commit goes to disk before it is applied; the hash of the outer state that it gives is added once it is known: applied
here, or certified by a commit that follows. All calls block on the disk and may come from any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import structlog

from node.daemon.chain_checkpoint import load_checkpoint, save_checkpoint
from node.daemon.chain_index import ChainIndex
from node.daemon.chain_log import HEADER_BYTES, ChainLog, Frame, FrameKind, StoreError
from node.daemon.chain_reader import ChainReader
from node.daemon.chain_records import Record, misplaced, vouched, with_hash
from node.daemon.left_lineage import LeftChain, LeftLineage
from node.daemon.run_files import JournalState, load_manifest, read_journal, save_manifest, write_journal
from node.errors import StrangerError
from node.status import LostLineage
from protocol.chain import ChainState, lineage_of, reform_state
from protocol.messages import Commit, Reformed
from protocol.names import DIGEST_BYTES, ZERO_DIGEST, Base, Digest, Keyring, PeerId
from protocol.rules import Rules
from protocol.wire import WireError, decode_body, decode_commit, encode_body, encode_commit

__all__ = ["JournalState", "Record", "StateMismatch", "Store", "StoreError", "load_manifest", "save_manifest"]

CHECKPOINT_EVERY_RECORDS = 64
log = structlog.get_logger()


class StateMismatch(StoreError):
    """The outer state computed here is not the one that the chain certifies: it is corrupt, load another."""


class Store(ChainReader):
    """The durable chain and journal of one run. Call `open` before anything else."""

    def __init__(self, directory: Path, rules: Rules, keyring: Keyring) -> None:
        super().__init__(directory, rules, keyring)
        self._checkpointed = 0
        self.left_files = LeftLineage(directory=directory)
        self._left: LeftChain | None = None

    # ------------------------------------------------------------ opening and closing

    def open(self) -> None:
        """Reads the chain and sets a torn or damaged tail aside. Raises `StoreError` or `OSError`. Idempotent."""
        with self._lock:
            if self._log is not None:
                return
            self._directory.mkdir(parents=True, exist_ok=True)
            chain_log = ChainLog(self._directory / "chain.log", self.rules.run)
            try:
                self._read(chain_log)
            except BaseException:
                chain_log.close()
                self._index = ChainIndex(self.rules)  # the next try begins anew
                raise
            self._log = chain_log
            self._load_left()

    def _read(self, chain_log: ChainLog) -> None:
        end = self._load(chain_log)
        for frame in chain_log.frames(end):
            try:
                self._take(frame)
            except (WireError, ValueError, StoreError) as error:
                log.error("a record of the chain cannot be used", offset=frame.offset, why=str(error))
                break
            end = frame.end
        chain_log.cut(end)
        if chain_log.set_aside is not None:
            log.error("the end of the chain log was damaged: set aside", file=str(chain_log.set_aside))

    def close(self) -> None:
        """Writes a checkpoint, so that the next opening is quick. Idempotent."""
        with self._lock:
            if self._log is not None:
                self._save(self._log)
                self._log.close()
                self._log = None

    # ------------------------------------------------------------ where the chain stands

    @property
    def set_aside(self) -> Path | None:
        """Where a damaged end of the log was moved at this opening."""
        return self._opened().set_aside

    # ------------------------------------------------------------ growing

    def append_commit(self, commit: Commit, commit_hash: Digest) -> None:
        """Before the commit is applied. Verified by the caller; the newest one again changes nothing.

        Raises `StoreError` if it does not follow the chain here, `OSError` if the disk fails: then it is not here.
        """
        with self._lock:
            if commit_hash == self._index.state.base.prev:
                return
            self._certify(commit.roster.message.base)
            state = self._records.after_commit(self._index.state, commit)
            if state.base.prev != commit_hash:
                raise StoreError(
                    f"the commit of round {state.base.round - 1} hashes to {state.base.prev.hex()[:16]} here, not to "
                    f"{commit_hash.hex()[:16]}; run the same version as your peers"
                )
            self._push(FrameKind.COMMIT, self._write(FrameKind.COMMIT, encode_commit(commit)), state)

    def append_reform(self, reformed: Reformed) -> None:
        """The birth of a lineage, verified by the caller; one that is here already changes nothing. Raises alike."""
        with self._lock:
            lineage = lineage_of(reformed)
            if any(entry.after.lineage == lineage for entry in self._index.entries):
                return
            self._certify(reformed.reform.base)
            state = reform_state(self._index.state, self.rules, reformed)
            self._push(FrameKind.REFORM, self._write(FrameKind.REFORM, encode_body(reformed)), state)

    def extend(self, records: Sequence[bytes], tip_state_hash: Digest) -> None:
        """Verify and append what a peer sent (`records_after`), oldest first.

        `tip_state_hash`: the outer state that the peer claims for the newest; it stands in `state` until one of ours
        or a later record makes it certain. Raises `StrangerError` or `InvalidCommit` at the first record that is no
        record or does not follow; those before it stay.
        """
        with self._lock:
            for record in records:
                kind, content = self._records.verified(self._index.state, record)
                if isinstance(content, Commit):
                    self._certify(content.roster.message.base)
                    state = self._records.after_commit(self._index.state, content)
                else:
                    self._certify(content.reform.base)
                    state = reform_state(self._index.state, self.rules, content)
                self._push(kind, self._write(kind, record[1:]), state)
            if self._index.hash_is_open:
                self._index.state = with_hash(self._index.state, tip_state_hash)
            if self._left is not None and self._index.has(self._left.tip):
                self._forget_left()  # what was followed has come back to it

    def switch(self, place: Base, records: Sequence[bytes], tip_state_hash: Digest) -> None:
        """Leave this lineage behind `place` and follow `records` from there (protocol section 10, the loser).

        What is left is kept (`left`) until `give_up_left` or `resume_left`. Nothing is left for a record that does not
        verify; otherwise as `extend`. Raises `StoreError` if `place` is not on the chain here.
        """
        with self._lock:
            position = self._index.position_of(place)
            if records and position < len(self._index.entries):
                self._records.verified(self._state_behind(position), records[0])
                self._keep_left(position)
                self._go_back(position)
            self.extend(records, tip_state_hash)

    @property
    def left(self) -> LeftChain | None:
        """The chain that was left last, if it is not decided yet whether it is given up."""
        return self._left

    def resume_left(self, snapshots: Path) -> None:
        """Go back to the chain that was left; its outer state goes to the engine's folder `snapshots`.

        Raises `StoreError`, `OSError`: then call it again, also in a later life (`LeftChain.resuming`).
        """
        with self._lock:
            left = self._left
            if left is None:
                raise StoreError(f"no lineage that was left is kept in {self._directory}")
            self._left = msgspec.structs.replace(left, resuming=True)
            self.left_files.save(self._left)
            self._go_back(self._index.position_of(left.place))
            for frame in self.left_files.frames(left):
                self._take(replace(frame, offset=self._write(frame.kind, frame.payload)))
            self.left_files.give_state_back(snapshots)
            self._forget_left()

    def give_up_left(self, me: PeerId) -> LostLineage | None:
        """The lineage that was left is given up for good: what is lost with it. Raises `OSError`."""
        with self._lock:
            if self._left is None:
                return None
            lost = self.left_files.lost(self._left, self.rules, me, self._index.state.base.lineage)
            self._forget_left()
            return lost

    def _forget_left(self) -> None:
        self._left = None
        self.left_files.forget()

    def _keep_left(self, position: int) -> None:
        """Before the log is cut behind the first `position` records."""
        chain_log, entry = self._opened(), self._index.entries[position]
        left = self._left
        place = self._index.before(position)
        if left is None:
            tail = chain_log.copy(entry.offset, chain_log.end, "left")
            left = LeftChain(place=place, tip=self._index.state.base, tail=tail.name)
        else:
            # A second lineage is followed before the first has taken this node in: what it left first is its own.
            parted = self._index.position_of(left.place)
            if parted <= position:
                return
            older = self._directory / left.tail
            tail = chain_log.copy(entry.offset, self._index.entries[parted].offset, "left", behind=older)
            left = LeftChain(place=place, tip=left.tip, tail=tail.name)
        self.left_files.save(left)
        self._left = left

    def _load_left(self) -> None:
        """What a life before this one left."""
        left = self.left_files.load()
        if left is not None and not self._index.has(left.place):
            log.error(
                "the chain here ends before the lineage that was left: it cannot be resumed", round=left.place.round
            )
            self.left_files.forget()
            return
        if left is not None and not left.resuming and self._index.has(left.tip):
            self.left_files.forget()
            return
        here = self._index.state.base
        at_place = left is not None and (here.round, here.prev, here.lineage) == (
            left.place.round,
            left.place.prev,
            left.place.lineage,
        )
        if left is not None and at_place:
            # Nothing was followed yet when an earlier life ended: what it had left is taken up again.
            left = msgspec.structs.replace(left, resuming=True)
        self._left = left

    def _go_back(self, position: int) -> None:
        """Only the first `position` records stay."""
        if position < len(self._index.entries):
            state = self._state_behind(position)
            (self._directory / "chain.checkpoint").unlink(missing_ok=True)
            self._opened().truncate(self._index.entries[position].offset)
            self._index.go_back(position, state)
            self._checkpointed = 0

    def mark_applied(self, round_number: int, state_hash: Digest) -> None:
        """The newest commit is applied: round `round_number` starts from `state_hash`. Raises `StoreError`."""
        here = self.state.base.round
        if round_number != here:
            raise StoreError(f"round {round_number} was applied, but the chain here is at {here}; catch up first")
        self.verify_state(round_number, state_hash)

    def verify_state(self, round_number: int, state_hash: Digest) -> None:
        """Compare a state computed here with the chain's; where the chain does not know it yet, it is learnt.

        Raises `StateMismatch` if they differ, `StoreError` if the chain has no such round.
        """
        with self._lock:
            known = self.state_hash_at(round_number)
            if known is None and round_number == self._index.state.base.round:
                self._index.learn(state_hash)
                self._note_applied(state_hash)
            elif known is None:
                raise StoreError(f"the chain here has no round {round_number}; catch up first")
            elif known != state_hash:
                raise StateMismatch(
                    f"the state of round {round_number} is {state_hash.hex()[:16]} here, but the run agreed on "
                    f"{known.hex()[:16]}; load a snapshot from a peer"
                )

    def correct_state(self, base: Base, agreed: Digest) -> None:
        """A quorum of electors names `agreed` as the outer state of `base`'s place, not the one computed here.

        Nothing changes unless `base` is where the chain here stands.
        """
        with self._lock:
            here = self._index.state.base
            same_place = (here.round, here.prev, here.lineage) == (base.round, base.prev, base.lineage)
            if same_place and self._index.entries:
                self._index.learn(agreed)
                self._note_applied(agreed)

    def _note_applied(self, state_hash: Digest) -> None:
        """On a full disk it is known until this process ends; afterwards the commit that follows tells it again."""
        try:
            self._write(FrameKind.APPLIED, state_hash)
        except OSError as error:
            log.error("the newest state's hash cannot be noted on disk", why=str(error))

    # ------------------------------------------------------------ records that went bad on disk

    def mend(self, place: int, record: bytes) -> None:
        """Put a peer's `record` in the place of one that went bad. Nothing changes if it is good, or is not there.

        Raises `StrangerError` or `InvalidCommit` when it is another record than the one that was there, `OSError` when
        the disk fails.
        """
        with self._lock:
            if place >= len(self._index.entries) or self._frame(self._index.entries[place]) is not None:
                return
            entry, state = self._index.entries[place], self._state_behind(place)
            kind, content = self._records.verified(state, record)
            after = self._records.followed(state, content).base
            if kind is not entry.kind or (after.round, after.prev, after.lineage) != (
                entry.after.round,
                entry.after.prev,
                entry.after.lineage,
            ):
                raise StrangerError(f"a peer's record of round {entry.round} is not the one that went bad here")
            chain_log, behind = self._opened(), place + 1
            stop = self._index.entries[behind].offset if behind < len(self._index.entries) else chain_log.end
            (self._directory / "chain.checkpoint").unlink(missing_ok=True)  # its offsets are about to be wrong
            moved = chain_log.replace(entry.offset, stop, kind, record[1:])
            self._index.move(behind, moved)
            self._save(chain_log)

    # ------------------------------------------------------------ the vote journal

    def write_journal(self, journal: bytes) -> None:
        """Replace the journal: when this returns, no crash brings the old one back. Raises `OSError`."""
        write_journal(self._directory / "journal", journal)

    def read_journal(self) -> tuple[bytes | None, JournalState]:
        """The newest journal; None unless it is `OK`."""
        return read_journal(self._directory / "journal")

    # ------------------------------------------------------------ inside

    def _write(self, kind: FrameKind, payload: bytes) -> int:
        return self._opened().append(kind, payload)

    def _take(self, frame: Frame) -> None:
        """Follow a record of my own log, which was verified before it was written."""
        match frame.kind:
            case FrameKind.COMMIT:
                commit = decode_commit(frame.payload)
                self._certify(commit.roster.message.base)
                self._push(frame.kind, frame.offset, self._records.after_commit(self._index.state, commit))
            case FrameKind.REFORM:
                reformed = decode_body(Reformed, frame.payload)
                self._certify(reformed.reform.base)
                self._push(frame.kind, frame.offset, reform_state(self._index.state, self.rules, reformed))
            case FrameKind.APPLIED:
                if len(frame.payload) != DIGEST_BYTES:
                    raise StoreError(f"a state hash of {len(frame.payload)} bytes lies in the chain log")
                self._index.learn(frame.payload)

    def _push(self, kind: FrameKind, offset: int, state: ChainState) -> None:
        self._index.push(kind, offset, state)
        if self._log is not None and len(self._index.entries) - self._checkpointed >= CHECKPOINT_EVERY_RECORDS:
            self._save(self._log)

    def _certify(self, base: Base) -> None:
        """A verified record builds on `base`: that makes its state hash certain. Raises `StoreError`."""
        if vouched(self._index.state, base).base != base:
            raise misplaced(base, self._index.state.base)
        if self._index.hash_is_open:
            self._index.learn(base.state_hash)
        elif base.state_hash != self._index.state.base.state_hash:
            log.error(
                "the state computed here is not the one that the run agreed on",
                round=base.round,
                here=self._index.state.base.state_hash.hex(),
                agreed=base.state_hash.hex(),
            )
            self._index.learn(base.state_hash)

    def _load(self, chain_log: ChainLog) -> int:
        """Where to read on in the log: behind what the checkpoint holds, or at the log's first frame."""
        found = load_checkpoint(self._directory / "chain.checkpoint", chain_log, self.rules.run)
        if found is None:
            return HEADER_BYTES
        self._index.take(found)
        self._checkpointed = len(found.entries)
        return found.log_end

    def _save(self, chain_log: ChainLog) -> None:
        # A peer's claim of the newest state hash is not kept.
        state = with_hash(self._index.state, ZERO_DIGEST) if self._index.hash_is_open else self._index.state
        path = self._directory / "chain.checkpoint"
        save_checkpoint(path, chain_log, self._index.entries, state, self._index.marks)
        self._checkpointed = len(self._index.entries)
