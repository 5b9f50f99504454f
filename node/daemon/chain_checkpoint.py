"""The chain's checkpoint: where the chain stood lately, so that opening reads only the tail of the log.

It holds nothing that the log does not give again; a lost or damaged one costs time only.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog
from blake3 import blake3

from node.daemon.chain_log import ChainLog, FrameKind
from node.engine.disk import write_atomic
from protocol.chain import ChainState
from protocol.names import DIGEST_BYTES, Base, Digest

_MAGIC = b"ATOLLK2\0"

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A record's place in the log, and where the chain stood after it."""

    kind: FrameKind
    offset: int
    after: Base
    """`state_hash` is zero while it is not certain."""

    @property
    def round(self) -> int:
        """The round that a commit decided; of a reform, the round that the new lineage starts with."""
        return self.after.round - 1 if self.kind is FrameKind.COMMIT else self.after.round


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    log_end: int
    last_record: Digest
    """BLAKE3 of the last entry's payload: the log beside this checkpoint is the one it was made of."""
    entries: tuple[Entry, ...]
    state: ChainState
    marks: dict[int, ChainState] = {}
    """Number of records → where the chain stood behind them, every so often: going back decodes few records."""


def framed(magic: bytes, payload: bytes) -> bytes:
    """`payload` behind `magic` and its BLAKE3, so that a torn file is known for one."""
    return magic + blake3(payload).digest() + payload


def unframed(magic: bytes, data: bytes) -> bytes | None:
    """What `framed` was given; None: these bytes are not as it wrote them."""
    start = len(magic) + DIGEST_BYTES
    payload = data[start:]
    return payload if data[:start] == magic + blake3(payload).digest() else None


def save_checkpoint(
    path: Path, chain_log: ChainLog, entries: list[Entry], state: ChainState, marks: dict[int, ChainState]
) -> None:
    """Durably. A disk that is full is no reason to fail: it is logged."""
    last = chain_log.read(entries[-1].offset) if entries else None
    if last is None:
        return
    payload = msgspec.msgpack.encode(
        Checkpoint(
            log_end=chain_log.end,
            last_record=blake3(last.payload).digest(),
            entries=tuple(entries),
            state=state,
            marks=marks,
        )
    )
    try:
        write_atomic(path, framed(_MAGIC, payload))
    except OSError as error:
        log.warning("the chain's checkpoint cannot be written", file=str(path), why=str(error))


def load_checkpoint(path: Path, chain_log: ChainLog, run: Digest) -> Checkpoint | None:
    """None: there is none that belongs to this log."""
    try:
        payload = unframed(_MAGIC, path.read_bytes())
        found = None if payload is None else msgspec.msgpack.decode(payload, type=Checkpoint)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
    if found is None or not found.entries or found.log_end > chain_log.end or found.state.base.run != run:
        return None
    last = chain_log.read(found.entries[-1].offset)
    return found if last is not None and blake3(last.payload).digest() == found.last_record else None
