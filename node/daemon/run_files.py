"""Small files of a run's directory that are replaced whole: the vote journal and the manifest."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

import msgspec

from node.daemon.chain_checkpoint import framed, unframed
from node.daemon.chain_log import StoreError
from node.engine.disk import write_atomic
from node.manifest import MAX_MANIFEST_BYTES, SignedManifest

_JOURNAL_MAGIC = b"ATOLLV1\0"


class JournalState(StrEnum):
    MISSING = "missing"
    TORN = "torn"
    OK = "ok"


def write_journal(path: Path, journal: bytes) -> None:
    """Replace the journal durably: a crash in between leaves the one before, for which alone anything was sent."""
    write_atomic(path, framed(_JOURNAL_MAGIC, journal))


def read_journal(path: Path) -> tuple[bytes | None, JournalState]:
    """The newest journal; None unless it is `OK`."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None, JournalState.MISSING
    journal = unframed(_JOURNAL_MAGIC, data)
    return journal, JournalState.TORN if journal is None else JournalState.OK


def save_manifest(path: Path, signed: SignedManifest) -> None:
    """Durably, creating the run's directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, msgspec.msgpack.encode(signed))


def load_manifest(path: Path) -> SignedManifest | None:
    """None: there is none. Raises `StoreError` if the file is damaged; whether it is signed, the caller checks."""
    try:
        with path.open("rb") as file:
            data = file.read(2 * MAX_MANIFEST_BYTES)
    except FileNotFoundError:
        return None
    try:
        return msgspec.msgpack.decode(data, type=SignedManifest)
    except msgspec.DecodeError as error:
        raise StoreError(f"{path} is damaged ({error}); remove it and join the run again") from error
