"""The work account on disk (`node.daemon.contribution` has the arithmetic).

`runs/RUN_ID/work` is replaced whole: durably before a READY leaves, so that no crash forgets a claim that others may
count, and without waiting for the disk otherwise: a killed process loses nothing by that, and what a power cut takes is
told again by the trainer's counter and the chain. A torn file starts a new account from what the chain counts.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec
import structlog

from node.daemon.chain_checkpoint import framed, unframed
from node.daemon.contribution import Account
from node.engine.disk import write_atomic

MAGIC = b"ATOLLW1\0"

log = structlog.get_logger()


class WorkFile:
    """One run's account. `save` may fail: the node goes on with what it has in memory, and says so."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._failing = False

    def load(self, parts: int) -> Account:
        """The account as it was kept; a new one when there is none, or none that can be used."""
        try:
            payload = unframed(MAGIC, self._path.read_bytes())
            found = None if payload is None else msgspec.msgpack.decode(payload, type=Account)
        except FileNotFoundError:
            return Account(parts=parts, since_unix_s=time.time())
        except (OSError, msgspec.DecodeError) as error:
            log.error("the work account cannot be read", file=str(self._path), why=str(error))
            found = None
        if found is not None and found.parts == parts:
            return found
        aside = self._path.with_name(f"{self._path.name}.unusable")
        log.error("the work account is unusable: a new one begins with what the chain counts", set_aside=str(aside))
        try:
            self._path.replace(aside)
        except OSError as error:
            log.error("the unusable work account cannot be moved away", why=str(error))
        return Account(parts=parts, since_unix_s=time.time())

    def save(self, account: Account, *, durable: bool = False) -> bool:
        """Blocks on the disk when `durable`. False: the disk refuses; logged once, until it takes it again."""
        data = framed(MAGIC, msgspec.msgpack.encode(account))
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if durable:
                write_atomic(self._path, data)
            else:
                temporary = self._path.with_name(self._path.name + ".next")
                temporary.write_bytes(data)
                os.replace(temporary, self._path)
        except OSError as error:
            if not self._failing:
                log.error("the work account cannot be written: free disk", file=str(self._path), why=str(error))
            self._failing = True
            return False
        self._failing = False
        return True
