"""When a link is probed: seldom, one at a time, between exchanges, and only where no transfer has told anything."""

from __future__ import annotations

import random
from collections.abc import Callable

import structlog
import trio

from node.daemon.engine_client import EngineClient, EngineFailed
from node.daemon.network import Network
from protocol.names import PeerId

FIRST_AFTER_S = 10.0
"""A node that starts has better things to do; and its first round may tell."""
EVERY_S = 60.0
LOOK_AGAIN_S = 5.0
AGAIN_AFTER_S = 600.0
"""For a peer that was probed: it may have had nothing to give, or been too far to tell anything."""
KNOWN_ENOUGH = 16
"""Peers whose way to here is known. A planner needs the lines, and a sample of the links; not a probe of each pair."""

log = structlog.get_logger()


class Prober:
    def __init__(self, *, network: Network, engine: EngineClient, idle: Callable[[], bool]) -> None:
        """`idle`: this node trains, and no exchange or vote is under way."""
        self._network = network
        self._engine = engine
        self._idle = idle
        self._probed_at_s: dict[PeerId, float] = {}

    async def run(self) -> None:
        """Until cancelled, or until the engine is gone."""
        await trio.sleep(FIRST_AFTER_S * random.uniform(0.5, 1.5))
        while True:
            peer = self.next_peer() if self._idle() else None
            if peer is None:
                await trio.sleep(LOOK_AGAIN_S)
                continue
            self._probed_at_s[peer] = trio.current_time()
            try:
                probed = await self._engine.probe(peer_id=peer)
            except EngineFailed as error:
                log.debug("a link was not probed", peer=peer, why=str(error))
            except trio.BrokenResourceError:
                return
            else:
                log.debug("a link was probed", peer=peer, bytes=probed.bytes_received, why=probed.why)
            await trio.sleep(EVERY_S * random.uniform(0.75, 1.25))

    def next_peer(self) -> PeerId | None:
        """One of those from which nothing is known, the one whose turn is longest ago."""
        now_s = trio.current_time()
        records = self._network.membership.records
        candidates = [peer for peer in self._network.peers if peer in records and records[peer].certificate_sha256]
        self._probed_at_s = {peer: at_s for peer, at_s in self._probed_at_s.items() if peer in candidates}
        unknown = [peer for peer in candidates if self._network.link_table.rates_of(peer).received_bytes_s is None]
        if len(candidates) - len(unknown) >= KNOWN_ENOUGH:
            return None
        due = [peer for peer in unknown if now_s - self._probed_at_s.get(peer, -AGAIN_AFTER_S) >= AGAIN_AFTER_S]
        return min(due, key=lambda peer: (self._probed_at_s.get(peer, 0.0), random.random()), default=None)
