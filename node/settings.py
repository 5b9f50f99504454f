"""What the operator decided, resolved: the form in which settings reach the daemon and its siblings.

The command line resolves flag > `ATOLL_*` > `config.toml` > default (`node.cli.options`) and hands the result to the
supervisor's children as JSON in `ATOLL_SETTINGS`. This module stays cheap: the daemon must not pay for pydantic.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from node.errors import OperatorError
from node.home import Home

SETTINGS_VARIABLE = "ATOLL_SETTINGS"


class DaemonSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One node's settings. Nothing in here is part of the run: two peers may differ in all of it."""

    home: str
    """Absolute path."""
    run_id: str | None = None
    """Hex; its signed manifest lies in the home. None: the manifest comes from the peers in `join`."""
    resume_run_id: str | None = None
    """Hex, with `run_id` None: the run that this home was in before; it goes on when no peer in `join` answers."""
    join: tuple[str, ...] = ()
    """Multiaddrs ending in `/p2p/PEER_ID`; dialled again for as long as the node lives."""
    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    """Multiaddrs of the control plane (TCP)."""
    announce: tuple[str, ...] = ()
    """Multiaddrs told to others instead of what was found by itself."""
    announce_data: tuple[str, ...] = ()
    """`HOST:PORT` told to others for the data channels, instead of the announced hosts with this node's data port."""
    data_port: int = 0
    """TCP port of the data channels, on the host of the first `listen`; 0: any free one."""
    http: str = "off"
    """`HOST:PORT` for status and metrics over TCP, or `off`. The Unix control socket is always there."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda`, `cuda:N`, or `none`: no trainer is started (a user's own process attaches)."""
    max_rounds: int | None = None
    """Leave after this many rounds seen by this process."""
    name: str | None = None
    """What people call this machine; shown in `status` and to peers."""
    threads: int = 0
    """CPU threads of the trainer, and the bound of the engine's; 0: what the libraries choose."""
    max_disk_bytes: int = 0
    """Disk for parts and snapshots; 0: no limit."""
    hivemind_python: str = ""
    """Interpreter whose environment holds hivemind, for runs that average by it; empty: Atoll's own."""
    max_relay_bytes_s: int = 10_000_000
    """Passed on a second for pairs of peers that cannot dial each other, both ways together; 0: nothing."""
    allow_functions: tuple[str, ...] = ()
    """`module:function` names of the manifest that may be imported and called."""
    log_level: str = "info"
    log_json: bool = False

    @property
    def home_directory(self) -> Home:
        return Home(Path(self.home))

    @property
    def starts_trainer(self) -> bool:
        return self.device != "none"

    @property
    def run_digest(self) -> bytes | None:
        return bytes.fromhex(self.run_id) if self.run_id else None

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()


def from_json(text: str) -> DaemonSettings:
    """Raises `OperatorError` when `text` is not what `DaemonSettings.to_json` writes."""
    try:
        return msgspec.json.decode(text, type=DaemonSettings)
    except msgspec.DecodeError as error:
        raise OperatorError(
            f"the settings handed to this process do not decode ({error}); start it by `atoll daemon`"
        ) from error


def from_environment() -> DaemonSettings:
    """The settings of a child of the supervisor. Raises `OperatorError` when it was started by hand."""
    text = os.environ.get(SETTINGS_VARIABLE)
    if text is None:
        raise OperatorError(f"{SETTINGS_VARIABLE} is not set: this process is started by `atoll daemon`, not by hand")
    return from_json(text)
