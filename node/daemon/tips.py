"""Where the connected peers say that they are."""

from __future__ import annotations

from dataclasses import dataclass

import structlog
import trio

from node.daemon import rpc
from node.daemon.network import Network
from node.daemon.streams import RequestFailed
from node.errors import StrangerError
from protocol.names import Digest, PeerId

TIP_TIMEOUT_S = 5.0
TIP_GRACE_S = 0.5
"""When half of the peers have said where they are, the others get as long again, and no less than this: who is cut off
or frozen holds nobody else's return up for the whole timeout."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerTip:
    peer: PeerId
    tip: rpc.Tip


async def ask_tips(network: Network, lineage: Digest | None) -> list[PeerTip]:
    """What the connected peers say of themselves; those that do not answer in time are left out.

    Half of them are enough to go by, if one of those is on `lineage` (the one that won; None: any).
    """
    tips: list[PeerTip] = []
    peers = list(network.peers)
    enough = trio.Event()
    began_s = trio.current_time()

    async def ask(peer: PeerId) -> None:
        try:
            answer = await network.request(peer, rpc.TIP, rpc.encode(rpc.Empty()), timeout_s=TIP_TIMEOUT_S)
            tips.append(PeerTip(peer=peer, tip=rpc.decode(answer, rpc.Tip)))
            if 2 * len(tips) >= len(peers) and (lineage is None or any(one.tip.lineage == lineage for one in tips)):
                enough.set()
        except (RequestFailed, StrangerError) as error:
            log.debug("a peer's tip cannot be had", peer=peer, why=str(error))

    async def wait_no_longer() -> None:
        await enough.wait()
        await trio.sleep(max(TIP_GRACE_S, trio.current_time() - began_s))
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as waiting:
        waiting.start_soon(wait_no_longer)
        async with trio.open_nursery() as nursery:
            for peer in peers:
                nursery.start_soon(ask, peer)
        waiting.cancel_scope.cancel()
    return tips
