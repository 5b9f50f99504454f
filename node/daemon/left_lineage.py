"""What is kept of the lineage that this node left, until the one that it follows has taken it in (protocol section 10).

    chain.left                 where the chains part, and the tip here: a promise to end on one of the two
    chain.log.left-OFFSET      the records behind that place, as they lay in the log; they stay when all is over
    left-state/ROUND-HASH      the outer state at the tip: the engine's snapshot, linked, so that no pruning takes it

The marker is written when the records are safe and before the log is cut, and removed last.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog

from node.daemon.chain_checkpoint import framed, unframed
from node.daemon.chain_log import Frame, FrameKind, frames_of
from node.engine.disk import remove_tree, sync_directory, write_atomic
from node.status import LostLineage
from protocol.chain import counted_tokens
from protocol.names import Base, Digest, PeerId
from protocol.rules import Rules
from protocol.wire import decode_commit

_MAGIC = b"ATOLLX1\0"

log = structlog.get_logger()


class LeftChain(msgspec.Struct, frozen=True, kw_only=True):
    place: Base
    """The newest place that it shares with the chain that is followed."""
    tip: Base
    tail: str
    """Name of the file with its records behind `place`."""
    resuming: bool = False
    """The way back has begun: it is finished, whatever happens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftLineage:
    """The files, in the run's directory."""

    directory: Path

    @property
    def _marker(self) -> Path:
        return self.directory / "chain.left"

    @property
    def _state(self) -> Path:
        return self.directory / "left-state"

    # ------------------------------------------------------------ the chain

    def load(self) -> LeftChain | None:
        """None: nothing was left, or the marker or the records are damaged, which is logged."""
        try:
            payload = unframed(_MAGIC, self._marker.read_bytes())
            found = None if payload is None else msgspec.msgpack.decode(payload, type=LeftChain)
        except FileNotFoundError:
            return None
        except msgspec.DecodeError:
            found = None
        if found is None or not (self.directory / found.tail).exists():
            log.error("what was kept of a lineage that lost is damaged: it cannot be resumed", file=str(self._marker))
            return None
        return found

    def save(self, left: LeftChain) -> None:
        """Durably. Raises `OSError`."""
        write_atomic(self._marker, framed(_MAGIC, msgspec.msgpack.encode(left)))

    def frames(self, left: LeftChain) -> Iterator[Frame]:
        """The records behind `left.place`, oldest first."""
        return frames_of(self.directory / left.tail)

    def forget(self) -> None:
        """It is decided: neither the marker nor the state is needed any more."""
        self._marker.unlink(missing_ok=True)
        sync_directory(self.directory)
        remove_tree(self._state)

    # ------------------------------------------------------------ the state

    def keep_state(self, snapshot: Path) -> None:
        """Link the engine's `snapshot` (a folder ROUND-HASH), so that it outlives there. Raises `OSError`."""
        self._link(snapshot, self._state / snapshot.name)

    def give_state_back(self, snapshots: Path) -> None:
        """The reverse, where the engine no longer has it. Raises `OSError`."""
        if self._state.is_dir():
            for kept in self._state.iterdir():
                self._link(kept, snapshots / kept.name)

    def _link(self, source: Path, target: Path) -> None:
        if target.is_dir() or source.suffix == ".partial":
            return
        partial = target.with_name(f"{target.name}.partial")
        remove_tree(partial)
        partial.mkdir(parents=True)
        for file in source.iterdir():
            os.link(file, partial / file.name)
        sync_directory(partial)
        partial.rename(target)
        sync_directory(target.parent)

    # ------------------------------------------------------------ the loss

    def lost(self, left: LeftChain, rules: Rules, me: PeerId, followed: Digest) -> LostLineage:
        """What goes with it, in this node's terms."""
        tokens = mine = 0
        for frame in self.frames(left):
            if frame.kind is FrameKind.COMMIT:
                counted = counted_tokens(rules, decode_commit(frame.payload))
                tokens += sum(counted.values())
                mine += counted.get(me, 0)
        return LostLineage(
            lineage=left.tip.lineage.hex(),
            followed=followed.hex(),
            since_round=left.place.round,
            rounds=left.tip.round - left.place.round,
            tokens=tokens,
            own_tokens=mine,
        )
