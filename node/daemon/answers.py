"""What this daemon answers to others: its tip, its chain, a token for its engine's data channel (`node.daemon.rpc`)."""

from __future__ import annotations

import secrets
from functools import partial

import trio

from node.daemon import rpc
from node.daemon.engine_client import EngineClient, ask_engine
from node.daemon.network import Network
from node.daemon.store import Store
from node.engine import api
from node.errors import AtollError


class Answers:
    def __init__(self, store: Store) -> None:
        self._store = store
        self.engine: EngineClient | None = None
        self.inventory: api.Inventoried | None = None
        self.catching_up = False

    def serve(self, network: Network) -> None:
        network.serve(rpc.TIP, self._tip)
        network.serve(rpc.CHAIN, self._chain)
        network.serve(rpc.DATA_TOKEN, self._token)
        network.serve(rpc.DATA_CALL, partial(self._call, network))

    async def _tip(self, peer: str, payload: bytes) -> bytes:
        base = self._store.state.base
        inventory = self.inventory
        snapshots = inventory.snapshots if inventory is not None else ()
        return rpc.encode(
            rpc.Tip(
                lineage=base.lineage,
                round=base.round,
                prev=base.prev,
                state_hash=base.state_hash,
                snapshots=tuple(rpc.SnapshotOffer(round=one.round, state_hash=one.state_hash) for one in snapshots),
                part_rounds=inventory.part_rounds if inventory is not None else (),
                catching_up=self.catching_up,
            )
        )

    async def _chain(self, peer: str, payload: bytes) -> bytes:
        request = rpc.decode(payload, rpc.ChainRequest)
        page = await trio.to_thread.run_sync(
            partial(
                self._store.records_after,
                round_number=request.round,
                prev=request.prev,
                lineage=request.lineage,
                limit_bytes=rpc.MAX_CHAIN_PAGE_BYTES,
            )
        )
        if page is None:
            return rpc.encode(rpc.ChainPage(known=False))
        records, more = page
        return rpc.encode(rpc.ChainPage(known=True, records=tuple(records), more=more))

    async def _token(self, peer: str, payload: bytes) -> bytes:
        token = secrets.token_bytes(rpc.TOKEN_BYTES)
        await ask_engine(
            self.engine, lambda engine: engine.accept_token(peer_id=peer, token=token, expires_s=rpc.TOKEN_EXPIRES_S)
        )
        return token

    async def _call(self, network: Network, peer: str, payload: bytes) -> bytes:
        """The engine dials the address that the peer's connection leads to, no more often than it allows itself."""
        link = network.peers.get(peer)
        if link is None or link.is_spliced or peer not in network.membership.records:
            raise AtollError("only a peer of the run that is connected directly is dialled on its wish")
        if len(payload) != rpc.TOKEN_BYTES:
            raise AtollError(f"a wish to be dialled has a token of {rpc.TOKEN_BYTES} bytes, not {len(payload)}")
        await ask_engine(self.engine, lambda engine: engine.call(peer_id=peer, token=payload, host=link.remote_host))
        return b""
