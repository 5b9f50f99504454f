"""How the life of one state machine ends (`node.daemon.driver`), and what its session does then."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from node.errors import AtollError
from protocol import events
from protocol.names import Digest, PeerId


class Fallen(AtollError):
    """The node must stop: the chain or its state is not what it must be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Behind:
    """The machine cannot go on from what it holds: catch up with `peer`, on its lineage."""

    peer: PeerId
    lineage: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Corrupt:
    """The outer state here is not the run's: set it aside, then catch up."""

    effect: events.StateCorrupt


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The lineage that was followed did not take this node in: back to the one that it left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Over:
    """The run is over, or `--max-rounds` is reached."""


Outcome: TypeAlias = Behind | Corrupt | Refused | Over
