"""The home of one node: where identity, config and the state of its run live.

    identity.key            ed25519, mode 0600; identity.lock beside it is held while in use
    config.toml             the operator's settings (optional)
    peers.json              remembered peers of the run
    run                     text file: hex run id that plain `atoll daemon` resumes
    runs/RUN_ID/            manifest.msgpack, chain.log, journal, membership; engine/ and trainer/ (their own folders)
    manifests/              runs created here
    daemon.json             live daemon: pid, sockets, addresses, http (removed at exit)
    daemon.log, .1          all processes' logs, bounded
    last_status.json        how the last daemon's run stood when it ended
    listen_port             the control plane's port of last time, tried first next time
    supervisor.lock         held while a supervisor runs

Sockets have short paths: a kernel's limit is 108 bytes, and a home may be deep.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


def default_home() -> Path:
    """`ATOLL_HOME`, else `$XDG_DATA_HOME/atoll`, else `~/.local/share/atoll`."""
    if home := os.environ.get("ATOLL_HOME"):
        return Path(home).expanduser().absolute()
    data = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(data).expanduser().absolute() / "atoll"


def cache_directory() -> Path:
    """For what can be made again: `$XDG_CACHE_HOME/atoll`, else `~/.cache/atoll`."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser().absolute() / "atoll"


@dataclass(frozen=True, slots=True)
class Home:
    path: Path

    @property
    def identity_file(self) -> Path:
        return self.path / "identity.key"

    @property
    def identity_lock(self) -> Path:
        return self.path / "identity.lock"

    @property
    def config_file(self) -> Path:
        return self.path / "config.toml"

    @property
    def peers_file(self) -> Path:
        return self.path / "peers.json"

    @property
    def current_run_file(self) -> Path:
        return self.path / "run"

    @property
    def daemon_file(self) -> Path:
        return self.path / "daemon.json"

    @property
    def last_status_file(self) -> Path:
        """How the last daemon's run stood when it ended."""
        return self.path / "last_status.json"

    @property
    def log_file(self) -> Path:
        return self.path / "daemon.log"

    def run_directory(self, run_id: bytes) -> Path:
        return self.path / "runs" / run_id.hex()

    def manifest_file(self, run_id: bytes) -> Path:
        return self.run_directory(run_id) / "manifest.msgpack"

    def engine_directory(self, run_id: bytes) -> Path:
        return self.run_directory(run_id) / "engine"

    def trainer_directory(self, run_id: bytes) -> Path:
        return self.run_directory(run_id) / "trainer"

    @property
    def socket_directory(self) -> Path:
        """`$XDG_RUNTIME_DIR/atoll/…` or `/tmp/atoll-UID/…`, one short name per home."""
        runtime = os.environ.get("XDG_RUNTIME_DIR")
        parent = Path(runtime) / "atoll" if runtime else Path(f"/tmp/atoll-{os.getuid()}")
        return parent / hashlib.blake2b(str(self.path).encode(), digest_size=6).hexdigest()

    @property
    def control_socket(self) -> Path:
        """HTTP over a Unix socket: status, peers, stop."""
        return self.socket_directory / "control"

    @property
    def attach_socket(self) -> Path:
        """Trainers attach here (`node.trainer.wire`)."""
        return self.socket_directory / "attach"

    def live_socket(self, name: Literal["control_socket", "attach_socket"]) -> Path:
        """Where the live daemon says that it listens: its `XDG_RUNTIME_DIR` may be another than this process's."""
        try:
            return Path(json.loads(self.daemon_file.read_bytes())[name])
        except (OSError, ValueError, KeyError, TypeError):
            return self.control_socket if name == "control_socket" else self.attach_socket
