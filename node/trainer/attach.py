"""`node.attach()`: how any training program joins the swarm of the daemon on its machine (design section 11).

swarm = node.attach()                          # NoDaemon: "start `atoll daemon`"
outer = swarm.optimizer(model, inner)          # after FSDP / compile; checks the layout, loads θ_r
for batch in outer.batches(dataset, batch_size=8):
    loss = model(**batch).loss; loss.backward()
    inner.step(); inner.zero_grad()
    outer.step(tokens=batch["input_ids"].numel(), loss=loss.detach())
    if outer.done: break
"""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path
from types import TracebackType

import msgspec
import torch

from node import manifest as manifests
from node.home import Home, default_home
from node.trainer import wire
from node.trainer.errors import AttachRefused
from node.trainer.link import Connected, DaemonLink, Lost
from node.trainer.outer_optimizer import OuterOptimizer
from node.trainer.ranks import Ranks

logger = logging.getLogger(__name__)

REMIND_S = 60.0
"""How often the log repeats what attaching waits for."""
_POLL_S = 1.0


def attach(home: str | os.PathLike[str] | None = None, *, name: str | None = None, wait_s: float = 0.0) -> Swarm:
    """Attach this program to the daemon of `home` (default: `ATOLL_HOME`, else the user's own home of atoll).

    Returns once the daemon has a state to train from; until then the log says what it waits for. `name` is what
    `atoll status` calls this program. `wait_s`: how long to wait for a daemon that does not listen yet. Collective
    under `torch.distributed`.

    Raises `NoDaemon`, or `AttachRefused` when another trainer is attached or the versions differ.
    """
    ranks = Ranks()
    if not ranks.leads:
        welcome = ranks.share(None)
        if not welcome:
            raise AttachRefused("rank 0 could not attach: its message says why")
        return Swarm(msgspec.msgpack.decode(welcome, type=wire.Welcome), ranks=ranks, link=None, connected=None)
    place = Home(Path(home).expanduser().absolute()) if home is not None else Home(default_home())
    link = DaemonLink(place, name=name or Path(sys.argv[0] or "python").name)
    try:
        link.start(wait_s)
        connected = _await_welcome(link)
    except BaseException:
        link.close("it gave up before it was welcomed")
        ranks.share(b"")  # or the others would wait for ever
        raise
    ranks.share(msgspec.msgpack.encode(connected.welcome))
    return Swarm(connected.welcome, ranks=ranks, link=link, connected=connected)


def _await_welcome(link: DaemonLink) -> Connected:
    reason, said_at = "", 0.0
    while True:
        if not link.wait(_POLL_S) and time.monotonic() - said_at < REMIND_S:
            continue
        mail = link.take()
        if isinstance(mail, Connected):
            return mail
        if isinstance(mail, wire.Refused):
            raise AttachRefused(mail.reason)
        news = mail.reason if isinstance(mail, (wire.Waiting, Lost, wire.Goodbye)) else reason
        if news and (news != reason or time.monotonic() - said_at >= REMIND_S):
            logger.info("waiting for the daemon: %s", news)
            said_at = time.monotonic()
        reason = news


class Swarm:
    """A program's place in a run. A context manager; `close` when training ends, or let the process end."""

    def __init__(
        self, welcome: wire.Welcome, *, ranks: Ranks, link: DaemonLink | None, connected: Connected | None
    ) -> None:
        self._welcome = welcome
        self.manifest: manifests.Manifest = msgspec.json.decode(welcome.manifest, type=manifests.Manifest)
        """The run's definition: model, data, inner optimizer, schedule."""
        self.ranks = ranks
        self.link = link
        self.connected = connected

    @property
    def run_id(self) -> str:
        """Hex."""
        return self._welcome.run_id

    @property
    def peer_id(self) -> str:
        """Of this machine's daemon."""
        return self._welcome.peer_id

    @property
    def start(self) -> wire.RoundStart:
        """The round that the daemon was in when this program attached."""
        return self._welcome.start

    @property
    def device(self) -> str:
        """What the operator chose: `auto`, `cpu`, `cuda`, `cuda:1`. A program may choose otherwise."""
        return self._welcome.device

    @property
    def threads(self) -> int:
        """CPU threads that the operator allows; 0: PyTorch's default."""
        return self._welcome.threads

    @property
    def allow_functions(self) -> tuple[str, ...]:
        """`module:function` names of the manifest that the operator allows to be called."""
        return self._welcome.allow_functions

    @property
    def artifacts_directory(self) -> Path:
        return Path(self._welcome.artifacts_directory)

    @property
    def directory(self) -> Path:
        """Where a trainer of this run keeps what is its own."""
        return Path(self._welcome.trainer_directory)

    def optimizer(self, model: torch.nn.Module, inner: torch.optim.Optimizer) -> OuterOptimizer:
        """Load θ into `model` and count its steps from now on. Call it after FSDP or `torch.compile`.

        Keep the parameters in fp32 (autocast the products): in a narrower type small updates are lost. Raises
        `LayoutMismatch` when this is not the run's model.
        """
        return OuterOptimizer(self, model, inner)

    def report_failure(self, reason: str) -> None:
        """One sentence for `atoll status`: why this program is about to end."""
        if self.link is not None:
            self.link.send_failure(reason)

    def close(self, reason: str = "it has finished") -> None:
        """Detach. The daemon goes on without a trainer."""
        if self.link is not None:
            self.link.close(reason)

    def __enter__(self) -> Swarm:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close("it has finished" if error is None else f"it ended with {type(error).__name__}")
