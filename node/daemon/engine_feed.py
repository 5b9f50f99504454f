"""What the engine asks and tells, passed on to where it belongs; who its peers are, kept up to date."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import aclosing

import structlog
import trio

from node.daemon import rpc
from node.daemon.engine_client import EngineClient, EngineFailed
from node.daemon.network import Network
from node.daemon.observations import Observations
from node.daemon.requests import signed_header
from node.daemon.splicing import SpliceFailed
from node.daemon.storage import Storage
from node.daemon.streams import RequestFailed
from node.engine import api
from protocol import events
from protocol.messages import PartHeader

PARTS = "received parts"
LINK_RETURNS_S = 4.0

log = structlog.get_logger()


class EngineFeed:
    """Both tasks end with the engine they serve."""

    def __init__(
        self,
        *,
        network: Network,
        observations: Observations,
        storage: Storage,
        post: Callable[[events.Event], None],
    ) -> None:
        self._network = network
        self._observations = observations
        self._storage = storage
        self._post = post

    async def pump(self, engine: EngineClient) -> None:
        self._storage.works(PARTS)  # as far as this engine has seen
        async with trio.open_nursery() as nursery:
            async for event in engine.events:
                match event:
                    case api.TokenWanted():
                        nursery.start_soon(self._fetch_token, engine, event.peer_id)
                    case api.CallWanted():
                        nursery.start_soon(self._have_call, engine, event.peer_id)
                    case api.SpliceWanted():
                        nursery.start_soon(self._have_splice, engine, event.peer_id)
                    case api.HeaderWanted():
                        self._post(
                            events.HeaderDraft(
                                header=PartHeader(
                                    roster_id=event.roster_id,
                                    part=event.part,
                                    bitmap=event.bitmap,
                                    hash=event.hash,
                                    length=event.length,
                                )
                            )
                        )
                    case api.PartHeld():
                        self._post(events.PartHeld(header=signed_header(event.header)))
                    case api.PayloadDropped():
                        self._observations.misbehaved(f"{event.peer_id} sent an {event.why}")
                        log.warning("a payload is dropped", peer=event.peer_id, part=event.part, why=event.why)
                    case api.ExchangeEnded():
                        self._observations.saw_exchange(event.bytes_sent, event.bytes_received, event.excluded)
                        self._post(
                            events.ExchangeEnded(
                                roster_id=event.roster_id,
                                failed_edges=event.failed_edges,
                                missed=tuple(event.excluded),
                            )
                        )
                    case api.StorageFailed():
                        self._storage.refused(PARTS, event.reason)
                    case api.StorageWorks():
                        self._storage.works(PARTS)
                    case api.LinkMeasured():
                        self._network.link_table.saw_peer(event.peer_id, event.rates)
                    case api.LineMeasured():
                        self._network.link_table.saw_line(event.rates)

    async def _fetch_token(self, engine: EngineClient, peer_id: str) -> None:
        token: bytes | None = None
        # A volunteer that died took the control connection along: another one joins the pair in a moment.
        await self._network.wait_for_link(peer_id, LINK_RETURNS_S)
        try:
            token = await self._network.request(peer_id, rpc.DATA_TOKEN, b"", timeout_s=rpc.TOKEN_EXPIRES_S / 2)
        except RequestFailed as error:
            log.debug("no token for a data channel", peer=peer_id, why=str(error))
        try:
            await engine.dial_token(peer_id=peer_id, token=token)
        except (EngineFailed, trio.BrokenResourceError) as error:
            log.debug("the engine did not take a token", peer=peer_id, why=str(error))

    async def _have_call(self, engine: EngineClient, peer_id: str) -> None:
        """Ask the peer's daemon to have its engine dial this node's."""
        token, failure = secrets.token_bytes(rpc.TOKEN_BYTES), ""
        try:
            await engine.accept_token(peer_id=peer_id, token=token, expires_s=rpc.TOKEN_EXPIRES_S)
            await self._network.request(peer_id, rpc.DATA_CALL, token, timeout_s=rpc.TOKEN_EXPIRES_S / 2)
        except RequestFailed as error:
            failure = str(error)
        except (EngineFailed, trio.BrokenResourceError) as error:
            log.debug("the engine did not take a token", peer=peer_id, why=str(error))
            return
        try:
            await engine.call_answered(peer_id=peer_id, failure=failure)
        except (EngineFailed, trio.BrokenResourceError) as error:
            log.debug("the engine did not take an answer", peer=peer_id, why=str(error))

    async def _have_splice(self, engine: EngineClient, peer_id: str) -> None:
        splice, failure = None, ""
        try:
            splice = await self._network.splicing.data_splice(peer_id)
        except SpliceFailed as error:
            failure = str(error)
        try:
            await engine.splice_answered(peer_id=peer_id, splice=splice, failure=failure)
        except (EngineFailed, trio.BrokenResourceError) as error:
            log.debug("the engine did not take a splice", peer=peer_id, why=str(error))

    async def keep_peers(self, engine: EngineClient) -> None:
        """The engine's directory of other engines follows the membership records."""
        async with aclosing(self._network.membership.changes()) as changes:
            async for _ in changes:
                peers = tuple(
                    api.Peer(
                        peer_id=record.peer_id,
                        addresses=record.data_addresses,
                        certificate_sha256=record.certificate_sha256,
                        dialable=self._network.reachability.data_dialable(record),
                        dials=self._network.reachability.data_dials(record),
                    )
                    for record in self._network.membership.records.values()
                    if record.peer_id != self._network.peer_id and record.certificate_sha256
                )
                try:
                    await engine.set_peers(peers)
                except trio.BrokenResourceError:
                    return
