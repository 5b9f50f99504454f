"""What lineage a peer is on: its chain, verified from the newest place on that this node's chain shares with it.

A heartbeat names a lineage; only its chain proves that there is one (protocol section 10). Nothing read here is kept,
but for what the choice between lineages needs: electors, members and counted tokens, place by place. A peer that
answers slowly, wrongly or without end costs one request at a time, and is given up at a deadline.
"""

from __future__ import annotations

from itertools import pairwise

import structlog
import trio

from node.daemon import rpc
from node.daemon.network import Network
from node.daemon.store import Store, StoreError
from node.daemon.streams import RequestFailed
from node.errors import StrangerError
from protocol.commits import InvalidCommit
from protocol.events import LineageLearned, LineageUnproven
from protocol.lineages import Place, Position
from protocol.names import Base, Digest, PeerId

PAGE_TIMEOUT_S = 15.0
PROBE_TIMEOUT_S = 90.0
"""Below the machine's own (`protocol.meeting.INQUIRY_TIMEOUT_S`)."""
MAX_PLACES = 4096
"""Read of a peer's chain; what lies behind is learnt when it matters, if ever."""

log = structlog.get_logger()


async def learn_lineage(network: Network, store: Store, peer: PeerId) -> LineageLearned | LineageUnproven:
    """The answer to `LearnLineage`; never raises for what the peer does."""
    why = f"it took longer than {PROBE_TIMEOUT_S:.0f} s"
    with trio.move_on_after(PROBE_TIMEOUT_S):
        try:
            return await _read(network, store, peer)
        except (RequestFailed, InvalidCommit, StrangerError, StoreError) as error:
            why = str(error)
    log.info("a peer does not prove the lineage that it names", peer=peer, why=why)
    return LineageUnproven(peer=peer)


async def _read(network: Network, store: Store, peer: PeerId) -> LineageLearned:
    shared, page = await _newest_shared(network, store, peer)
    # My chain may grow meanwhile: what is shared stays shared, and the machine adds what it commits itself.
    ahead = await trio.to_thread.run_sync(store.bases_after, shared)
    births = _births(shared, ahead)
    if not page.records:
        return LineageLearned(peer=peer, births=births)  # its chain ends there
    state = branching = await trio.to_thread.run_sync(store.state_at, shared)
    theirs: list[Place] = []
    while page.records:
        for record in page.records:
            state, places = await trio.to_thread.run_sync(store.read_on, state, (record,))
            mine, ahead = ahead[:1], ahead[1:]
            if not theirs and mine and places[0].position == (mine[0].lineage, mine[0].round):
                branching = state
            else:
                theirs.extend(places)
        if not page.more or len(theirs) >= MAX_PLACES:
            break
        page = await _page(network, peer, state.base)
    if not theirs:
        return LineageLearned(peer=peer, births=births)
    course = await trio.to_thread.run_sync(store.course, branching.base)
    return LineageLearned(peer=peer, births=births, mine=course, theirs=(course[0], *theirs))


def _births(shared: Base, ahead: tuple[Base, ...]) -> tuple[tuple[Digest, Position], ...]:
    """The lineages that a chain goes through behind `shared`, and where each was born."""
    return tuple(
        (after.lineage, (before.lineage, before.round))
        for before, after in pairwise((shared, *ahead))
        if after.lineage != before.lineage
    )


async def _newest_shared(network: Network, store: Store, peer: PeerId) -> tuple[Base, rpc.ChainPage]:
    """A place of both chains at or close before the branching, and the peer's first records behind it."""
    for place in await trio.to_thread.run_sync(store.places):
        page = await _page(network, peer, place)
        if page.known:
            return place, page
    raise StrangerError(f"{peer} shares no place with this chain, not even the run's beginning")


async def _page(network: Network, peer: PeerId, after: Base) -> rpc.ChainPage:
    request = rpc.ChainRequest(round=after.round, prev=after.prev, lineage=after.lineage)
    answer = await network.request(peer, rpc.CHAIN, rpc.encode(request), timeout_s=PAGE_TIMEOUT_S)
    return rpc.decode(answer, rpc.ChainPage)
