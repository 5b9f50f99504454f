"""Records of the chain that went bad on this disk, replaced by a peer's: found once after the start, in the background.

What the records led to is known (it stands in the checkpoint, or later records built on it), so that rounds go on
meanwhile; only whoever asks for such a record, or goes back behind it, has to wait.
"""

from __future__ import annotations

from functools import partial

import structlog
import trio

from node.daemon import rpc
from node.daemon.network import Network
from node.daemon.observations import Observations
from node.daemon.store import Store, StoreError
from node.daemon.streams import RequestFailed
from node.errors import StrangerError
from protocol.commits import InvalidCommit

ASK_TIMEOUT_S = 30.0
RETRY_S = 10.0

log = structlog.get_logger()


async def mend_chain(store: Store, network: Network, observations: Observations) -> None:
    """Reads the whole log; returns when no record of it is bad."""
    damaged = await trio.to_thread.run_sync(partial(store.damaged, trio.from_thread.check_cancelled))
    if not damaged:
        return
    observations.count(["records of the chain that went bad on disk"])
    log.error("records of the chain log went bad on disk: they are fetched again", records=len(damaged))
    for place in damaged:
        while not await _mended(place, store, network):  # noqa: ASYNC110 - a peer that has it may connect any time
            await trio.sleep(RETRY_S)
    log.info("the chain log is whole again", records=len(damaged))


async def _mended(place: int, store: Store, network: Network) -> bool:
    before = store.before(place)
    question = rpc.encode(rpc.ChainRequest(round=before.round, prev=before.prev, lineage=before.lineage))
    for peer in list(network.peers):
        try:
            page = rpc.decode(await network.request(peer, rpc.CHAIN, question, timeout_s=ASK_TIMEOUT_S), rpc.ChainPage)
            if page.known and page.records:
                await trio.to_thread.run_sync(store.mend, place, page.records[0])
                return True
        except (RequestFailed, InvalidCommit, StrangerError, StoreError) as error:
            log.debug("a peer's record does not mend the chain log", peer=peer, why=str(error))
        except OSError as error:
            log.warning("the chain log cannot be mended yet", why=error.strerror)
    return False
