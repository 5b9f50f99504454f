"""What an exchange works with, of the engine that it is a part of."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from node.engine import api
from node.engine.geometry import Geometry
from node.engine.storing import PartKeeper
from node.engine.switchboard import Switchboard
from node.engine.threads import Threads

WantHeader = Callable[[api.HeaderWanted], Awaitable[api.PartRef | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    geometry: Geometry
    switchboard: Switchboard
    keeper: PartKeeper
    threads: Threads
    emit: Callable[[api.Event], Awaitable[None]]
    want_header: WantHeader
    """Has a part's header signed; None: refused."""
