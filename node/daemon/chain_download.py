"""The chain of another peer: downloaded, verified record by record, and stored (protocol sections 9 and 10)."""

from __future__ import annotations

import enum
from collections.abc import Callable

import structlog
import trio

from node.daemon import rpc
from node.daemon.network import Network
from node.daemon.observations import Observations
from node.daemon.store import Store, StoreError
from node.daemon.streams import RequestFailed
from node.daemon.tips import PeerTip
from node.errors import AtollError, StrangerError
from protocol.commits import InvalidCommit
from protocol.names import Base, PeerId

CHAIN_TIMEOUT_S = 30.0

log = structlog.get_logger()


class StateUnavailable(AtollError):
    """No peer offers what is missing at the moment; worth another try."""


class Followed(enum.Enum):
    NOTHING = enum.auto()
    """The peer could not help."""
    MINE = enum.auto()
    ANOTHER_LINEAGE = enum.auto()
    """The outer state here belongs to rounds that are no longer on the chain."""


async def is_ahead(network: Network, store: Store, peer: PeerId) -> bool:
    """Whether `peer` proves that the chain goes on behind this node's newest record."""
    after = store.state.base
    request = rpc.ChainRequest(round=after.round, prev=after.prev, lineage=after.lineage)
    try:
        answer = await network.request(peer, rpc.CHAIN, rpc.encode(request), timeout_s=CHAIN_TIMEOUT_S)
        page = rpc.decode(answer, rpc.ChainPage)
        if page.known and page.records:
            await trio.to_thread.run_sync(store.check, page.records[0])
            return True
    except (RequestFailed, InvalidCommit, StrangerError) as error:
        log.debug("a peer does not prove that it is ahead", peer=peer, why=str(error))
    return False


class ChainDownload:
    def __init__(
        self, *, network: Network, store: Store, observations: Observations, say: Callable[[str], None]
    ) -> None:
        """`say`: tells the operator what is done now."""
        self._network = network
        self._store = store
        self._observations = observations
        self._say = say

    async def extend(self, tip: PeerTip, *, may_leave: bool) -> Followed:
        """Download, verify and store the records between my tip and the peer's."""
        self._say(f"fetching rounds {self._store.state.base.round} to {tip.tip.round} of the chain")
        followed = Followed.NOTHING
        try:
            while True:
                page = await self._page(tip.peer, self._store.state.base)
                if not page.known:
                    if not may_leave:
                        log.warning("a peer is on another lineage than this node", peer=tip.peer, round=tip.tip.round)
                        self._observations.count(["peer on another lineage"])
                        return followed
                    page = await self._leave_lineage(tip)
                    followed = Followed.ANOTHER_LINEAGE
                else:
                    await trio.to_thread.run_sync(self._store.extend, page.records, tip.tip.state_hash)
                if followed is Followed.NOTHING and page.records:
                    followed = Followed.MINE
                if not page.more or not page.records:
                    return followed
        except (RequestFailed, InvalidCommit, StrangerError, StoreError) as error:
            log.warning("a peer's chain cannot be used", peer=tip.peer, why=str(error))
            self._observations.count(["chain refused"])
            return followed
        except OSError as error:
            raise StateUnavailable(f"the chain cannot be stored ({error.strerror}): free disk") from error

    async def _page(self, peer: PeerId, after: Base) -> rpc.ChainPage:
        request = rpc.ChainRequest(round=after.round, prev=after.prev, lineage=after.lineage)
        answer = await self._network.request(peer, rpc.CHAIN, rpc.encode(request), timeout_s=CHAIN_TIMEOUT_S)
        return rpc.decode(answer, rpc.ChainPage)

    async def _leave_lineage(self, tip: PeerTip) -> rpc.ChainPage:
        """Go back to the newest place that the peer's chain shares with this one, and follow it from there."""
        before = self._store.state.base
        for place in self._store.places():
            page = await self._page(tip.peer, place)
            if not page.known:
                continue
            place, same = await trio.to_thread.run_sync(self._store.shared, place, page.records)
            while same == len(page.records):
                # Nothing is left for a peer whose chain only ends earlier than this one, whatever it says of itself.
                if not page.more or not page.records:
                    raise StrangerError(f"{tip.peer} shows no record that is not on this chain too")
                page = await self._page(tip.peer, place)
                place, same = await trio.to_thread.run_sync(self._store.shared, place, page.records)
            page = rpc.ChainPage(known=True, records=page.records[same:], more=page.more)
            await self._check_winner(tip, place, page)
            await trio.to_thread.run_sync(self._store.switch, place, page.records, tip.tip.state_hash)
            log.error(
                "this node's lineage lost: another is followed, and this one kept until that has taken the node in",
                rounds=before.round - place.round,
                since_round=place.round,
                left=before.lineage.hex()[:16],
                followed=tip.tip.lineage.hex()[:16],
            )
            self._observations.count(["lineage left"])
            return page
        raise StrangerError(f"{tip.peer} shares no place with this chain, not even the run's beginning")

    async def _check_winner(self, tip: PeerTip, place: Base, page: rpc.ChainPage) -> None:
        """That a peer names the lineage that won is a claim: its records lead there, or nothing is left for it."""
        state = await trio.to_thread.run_sync(self._store.state_at, place)
        while True:
            state, places = await trio.to_thread.run_sync(self._store.read_on, state, page.records)
            if any(one.lineage == tip.tip.lineage for one in places):
                return
            if not page.more or not page.records:
                raise StrangerError(f"the chain of {tip.peer} does not lead to the lineage that it names")
            page = await self._page(tip.peer, state.base)
