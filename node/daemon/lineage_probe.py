"""What lineage a peer is on: its chain, verified from the newest place on that this node's chain shares with it.

A heartbeat names a lineage; only its chain proves that there is one (protocol section 10). Nothing read here is kept,
but for what the choice between lineages needs: electors, members and counted tokens, place by place. A peer that
answers slowly, wrongly or without end costs one request at a time, and is given up at a deadline. This node's own chain
is read only when a verified record of the peer's has shown where the two part, and only so far.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import TypeVar, TypeVarTuple

import structlog
import trio

from node.daemon import rpc
from node.daemon.network import Network
from node.daemon.store import Store, StoreError
from node.daemon.streams import RequestFailed
from node.errors import StrangerError
from protocol.chain import ChainState
from protocol.commits import InvalidCommit
from protocol.events import LineageLearned, LineageUnproven
from protocol.lineages import Place, Position
from protocol.names import Base, Digest, PeerId

PAGE_TIMEOUT_S = 15.0
PROBE_TIMEOUT_S = 90.0
"""Below the machine's own (`protocol.meeting.INQUIRY_TIMEOUT_S`)."""
MAX_PLACES = 4096
"""Read of a peer's chain; what lies behind is learnt when it matters, if ever. A peer that branches further behind the
tip here proves nothing: what it would take to read that could be asked for again and again."""
PLACES_AT_ONCE = 16
"""Read of this node's chain in one go: each takes milliseconds to decode."""
SHARED_RECORDS = 16
"""At most so many are of both chains behind the newest place that a peer says it knows."""

Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")

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
    chain = await _in_thread(_bases, store)
    place, page = await _newest_shared(network, chain, peer)
    # My chain may grow meanwhile: what is shared stays shared, and the machine adds what it commits itself.
    births = _births(chain[place:])
    if not page.records:
        return LineageLearned(peer=peer, births=births)  # its chain ends there
    if len(chain) - place > MAX_PLACES + SHARED_RECORDS:
        raise StrangerError(f"it branches {len(chain) - place} records behind the tip here, {MAX_PLACES} at most count")
    state = branching = await _in_thread(store.state_at, chain[place])
    theirs: list[Place] = []
    shared = 0
    while page.records:
        for record in page.records:
            state, places = await _in_thread(store.read_on, state, (record,))
            mine = chain[place + shared + 1 : place + shared + 2]
            same = mine and (mine[0].prev, mine[0].lineage) == (state.base.prev, state.base.lineage)
            if not theirs and same:
                branching, shared = state, shared + 1
                if shared > SHARED_RECORDS:
                    raise StrangerError("it knows places of this chain that it has denied")
            else:
                theirs.extend(places)
        if not page.more or len(theirs) >= MAX_PLACES:
            break
        page = await _page(network, peer, state.base)
    if not theirs:
        return LineageLearned(peer=peer, births=births)
    at = Place.of(branching, store.rules)
    return LineageLearned(
        peer=peer, births=births, mine=(at, *await _own_course(store, branching)), theirs=(at, *theirs)
    )


async def _own_course(store: Store, state: ChainState) -> list[Place]:
    course: list[Place] = []
    while True:
        state, places = await _in_thread(store.course, state, PLACES_AT_ONCE)
        course.extend(places)
        if len(places) < PLACES_AT_ONCE:
            return course


async def _in_thread(call: Callable[[*Arguments], Result], *arguments: *Arguments) -> Result:
    """Nobody waits for it once this inquiry is given up."""
    thread = partial(trio.to_thread.run_sync, abandon_on_cancel=True)  # type: ignore[call-arg]  # older stubs
    return await thread(partial(call, *arguments))


def _bases(store: Store) -> tuple[Base, ...]:
    """Every place of the chain here, oldest first."""
    first = store.places()[-1]
    return (first, *store.bases_after(first))


def _births(chain: tuple[Base, ...]) -> tuple[tuple[Digest, Position], ...]:
    """The lineages that a chain goes through, and where each was born."""
    return tuple(
        (after.lineage, (before.lineage, before.round))
        for before, after in pairwise(chain)
        if after.lineage != before.lineage
    )


async def _newest_shared(network: Network, chain: tuple[Base, ...], peer: PeerId) -> tuple[int, rpc.ChainPage]:
    """Number in `chain` of a place of both chains, at the branching or close before it, and the peer's first records
    behind it: back in ever longer steps to one that it knows, then by halves between that and one that it denies."""
    known, denied, back = -1, len(chain), 1
    found = rpc.ChainPage(known=False)
    while denied > 0 and denied - known > SHARED_RECORDS // 2:
        asked = max(len(chain) - back, 0) if known < 0 else (known + denied) // 2
        page = await _page(network, peer, chain[asked])
        if page.known:
            known, found = asked, page
        else:
            denied, back = asked, 2 * back
    while known < 0 and denied > 0:
        page = await _page(network, peer, chain[denied - 1])
        if page.known:
            return denied - 1, page
        denied -= 1
    if known < 0:
        raise StrangerError(f"{peer} shares no place with this chain, not even the run's beginning")
    return known, found


async def _page(network: Network, peer: PeerId, after: Base) -> rpc.ChainPage:
    request = rpc.ChainRequest(round=after.round, prev=after.prev, lineage=after.lineage)
    answer = await network.request(peer, rpc.CHAIN, rpc.encode(request), timeout_s=PAGE_TIMEOUT_S)
    return rpc.decode(answer, rpc.ChainPage)
