"""Peers of earlier lives, on disk: with them a node finds its run again when every bootstrap address is dead."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

import structlog

from node.daemon.addresses import Address, parse_strangers_addresses
from node.daemon.identity import is_peer_id
from node.errors import StrangerError
from protocol.names import Digest, PeerId

MAX_REMEMBERED = 200
_MAX_FILE_BYTES = 1024 * 1024
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RememberedPeer:
    peer_id: PeerId
    run: Digest
    addresses: tuple[Address, ...]
    last_seen_s: float
    """Wall clock of this machine; only for the order among these."""


class RememberedPeers:
    """At most 200, the longest unseen give way. A file that cannot be read is set aside, never a reason to stop."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._peers: dict[PeerId, RememberedPeer] = {}
        self._written: object = None
        self._load()

    def of_run(self, run: Digest) -> list[RememberedPeer]:
        """Last seen first."""
        return [peer for peer in self._by_age() if peer.run == run]

    def _by_age(self) -> list[RememberedPeer]:
        return sorted(self._peers.values(), key=lambda peer: -peer.last_seen_s)

    def remember(self, peer_id: PeerId, run: Digest, addresses: tuple[Address, ...]) -> None:
        if not addresses:
            return
        self._peers[peer_id] = RememberedPeer(peer_id=peer_id, run=run, addresses=addresses, last_seen_s=time.time())
        while len(self._peers) > MAX_REMEMBERED:
            del self._peers[min(self._peers, key=lambda one: self._peers[one].last_seen_s)]

    def save(self) -> None:
        """Atomic; nothing is written when nobody new was seen. A full disk is logged, not raised."""
        content = tuple(sorted((peer.peer_id, peer.run, peer.addresses) for peer in self._peers.values()))
        if content == self._written:
            return
        rows = [
            {
                "peer_id": peer.peer_id,
                "run": peer.run.hex(),
                "addresses": [address.endpoint for address in peer.addresses],
                "last_seen": round(peer.last_seen_s, 3),
            }
            for peer in self._by_age()
        ]
        draft = self._path.with_name(f".{self._path.name}.{secrets.token_hex(4)}")
        try:
            draft.write_text(json.dumps({"peers": rows}, indent=1) + "\n")
            os.replace(draft, self._path)
            self._written = content
        except OSError as error:
            _log.warning("the known peers cannot be saved", path=str(self._path), why=error.strerror)
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)

    def _load(self) -> None:
        try:
            with self._path.open("rb") as file:
                rows = json.loads(file.read(_MAX_FILE_BYTES))["peers"]
            for row in rows[:MAX_REMEMBERED]:
                peer_id, run = str(row["peer_id"]), bytes.fromhex(row["run"])
                if not is_peer_id(peer_id):
                    raise ValueError(f"{peer_id!r} is not a peer id")
                addresses = tuple(parse_strangers_addresses(row["addresses"], peer_id))
                last_seen_s = float(row["last_seen"])
                self._peers[peer_id] = RememberedPeer(
                    peer_id=peer_id, run=run, addresses=addresses, last_seen_s=last_seen_s
                )
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, StrangerError) as error:
            _log.warning("the file of known peers is damaged and was set aside", path=str(self._path), why=str(error))
            with contextlib.suppress(OSError):
                os.replace(self._path, self._path.with_name(f"{self._path.name}.damaged"))
