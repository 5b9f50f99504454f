"""One engine in the service of one daemon connection: requests in, answers and events out (`node.engine.api`).

State requests are carried out one after another, in the order of their arrival. Fetches and exchanges run beside them;
a snapshot is copied beside encoding and exchanges, and only the next change of the state waits for it.
"""

from __future__ import annotations

import ssl
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import trio

from node.engine import api, tls
from node.engine.artifacts import ArtifactStore
from node.engine.dialling import Wants
from node.engine.drops import Drops
from node.engine.exchange import Exchange
from node.engine.exchange_tools import Tools
from node.engine.fetch import Fetcher, FetchFailed
from node.engine.gauge import Gauge
from node.engine.geometry import Geometry
from node.engine.outbox import Outbox, OutboxReader
from node.engine.parts import PartStore
from node.engine.probing import ProbeAllowance, Prober, filling
from node.engine.recompute import KeptLeaves, Recomputer
from node.engine.requests import Requester, Responder
from node.engine.serving import Serving
from node.engine.snapshots import SnapshotError, SnapshotStore
from node.engine.splice import Splicer, SpliceRefused
from node.engine.state import OuterState, StateError
from node.engine.storing import PartKeeper
from node.engine.switchboard import Switchboard
from node.engine.threads import Threads
from node.engine.traffic import Traffic

StateRequest = (
    api.LoadInitial | api.LoadSnapshot | api.ResumeState | api.SaveSnapshot | api.SetAside | api.Encode | api.Apply
)
FetchRequest = api.FetchParts | api.FetchArtifact | api.FetchSnapshot
QUEUE_LENGTH = 64
MAX_OLD_EXCHANGES = 2
"""Exchanges that go on beside a new one, should the daemon not stop them."""

Say = Callable[[api.FromEngine], Awaitable[None]]
Failures = (StateError, SnapshotError, FetchFailed, SpliceRefused, OSError, ValueError)


class Engine:
    """Made by `Open`; lives as long as the daemon's connection."""

    def __init__(self, request: api.Open, memory: tuple[int, ...], nursery: trio.Nursery, say: Say) -> None:
        """`memory`: descriptors of θ, momentum, Δ. Raises `StateError`, `ValueError`, `OSError`."""
        if len(memory) != 3:
            raise StateError(f"Open came with {len(memory)} descriptors; it needs theta, momentum and delta")
        self.dropped = Drops()
        self._request = request
        self._nursery = nursery
        self._say = say
        directory = Path(request.directory)
        directory.mkdir(parents=True, exist_ok=True)
        self._geometry = Geometry.of(request)
        self._threads = Threads(request.threads)
        self._state = OuterState(self._geometry, memory, directory, self._threads)
        self._artifacts = ArtifactStore(directory / "artifacts")
        self._parts = PartStore(directory / "parts", self._geometry.slot_bytes)
        self._snapshots = SnapshotStore(directory / "snapshots", self._geometry)
        self._outbox = Outbox(directory / "outbox", self._geometry)
        self._directory = directory
        self._keeper = PartKeeper(self._parts, self._threads, say, self._give_up_oldest)
        self._requester = Requester()
        self._serving = Serving(exchanging=lambda: self._traffic.exchanging, dropped=self.dropped)
        kept = KeptLeaves()
        responder = Responder(
            parts=self._parts,
            artifacts=self._artifacts,
            snapshots=self._snapshots,
            leaves=lambda parts_root, part: self._outbox.leaf(parts_root, part) or kept.find(parts_root, part),
            threads=self._threads,
            serving=self._serving,
            may_probe=ProbeAllowance(exchanging=lambda: self._traffic.exchanging).grant,
            probe=filling,
            dropped=self.dropped,
        )
        self._gauge = Gauge(lambda: self._switchboard.links(), say)
        self._traffic = Traffic(
            geometry=self._geometry,
            requester=self._requester,
            responder=responder,
            gauge=self._gauge,
            dropped=self.dropped,
        )
        self._splicer = Splicer(request.relay_bytes_s)
        self._switchboard = Switchboard(
            nursery=nursery,
            peer_id=request.peer_id,
            watcher=self._traffic,
            wants=Wants(token=self._want_token, call=self._want_call, splice=self._want_splice),
            splicer=self._splicer,
            dropped=self.dropped,
        )
        self._fetcher = Fetcher(
            me=request.peer_id,
            dropped=self.dropped,
            geometry=self._geometry,
            switchboard=self._switchboard,
            requester=self._requester,
            keeper=self._keeper,
            artifacts=self._artifacts,
            snapshots=self._snapshots,
            threads=self._threads,
        )
        self._recomputer = Recomputer(
            exchanging=lambda: self._traffic.exchanging,
            geometry=self._geometry,
            switchboard=self._switchboard,
            requester=self._requester,
            outbox=self._outbox,
            kept=kept,
            threads=self._threads,
        )
        self._prober = Prober(
            exchanging=lambda: self._traffic.exchanging, switchboard=self._switchboard, requester=self._requester
        )
        self._exchange_scopes: dict[bytes, trio.CancelScope] = {}
        self._headers: dict[tuple[bytes, int], _Pending] = {}
        self._to_state, self._state_requests = trio.open_memory_channel[StateRequest](QUEUE_LENGTH)
        self._state_idle = trio.Semaphore(1, max_value=1)
        """Held by whoever changes the state or copies it."""

    async def open(self) -> int:
        """Listen; returns the port. Raises `OSError` or `ssl.SSLError`."""
        context = tls.server_context(self._request.certificate_pem, self._request.key_pem)
        port = await self._switchboard.listen(self._request.listen_host, self._request.listen_port, context)
        self._nursery.start_soon(self._keeper.run)
        self._nursery.start_soon(self._serving.run)
        self._nursery.start_soon(self._gauge.run)
        self._nursery.start_soon(self._run_state_requests)
        return port

    def close(self) -> None:
        self._parts.close()
        self._outbox.close()

    # ---------------------------------------------------------------- requests

    async def handle(self, request: api.Request) -> None:
        """Carry out a request, or start to; never waits for the network or the disk."""
        match request:
            case api.SetPeers():
                self._switchboard.set_peers(request.peers)
            case api.AcceptToken():
                self._switchboard.tokens.add(request.peer_id, request.token, request.expires_s)
            case api.DialToken():
                self._switchboard.dialler.answer_token(request.peer_id, request.token)
            case api.Call():
                self._switchboard.dialler.call(request.peer_id, request.token, request.host)
            case api.CallAnswered():
                self._switchboard.dialler.answer_call(request.peer_id, request.failure)
            case api.AcceptSplice():
                self._switchboard.dialler.meet(request.peer_id, request.splice)
            case api.SpliceAnswered():
                self._switchboard.dialler.answer_splice(request.peer_id, request.splice or request.failure)
            case api.OpenSplice():
                await self._answer(request.id, partial(self._open_splice, request))
                return
            case api.Exchange():
                await self._answer(request.id, partial(self._start_exchange, request))
                return
            case api.StopExchange():
                if scope := self._exchange_scopes.get(request.roster_id):
                    scope.cancel()
            case api.SignedHeader():
                if pending := self._headers.get((request.roster_id, request.part)):
                    pending.header = request.header
                    pending.arrived.set()
            case api.FetchParts() | api.FetchArtifact() | api.FetchSnapshot():
                self._nursery.start_soon(self._answer, request.id, partial(self._fetch, request))
                return
            case api.Recompute():
                self._nursery.start_soon(self._answer, request.id, partial(self._recompute, request))
                return
            case api.Probe():
                self._nursery.start_soon(self._answer, request.id, partial(self._prober.run, request))
                return
            case api.KeepCommits():
                self._nursery.start_soon(self._answer, request.id, partial(self._keep_commits, request))
                return
            case api.Inventory():
                self._nursery.start_soon(self._answer, request.id, partial(self._inventory, request))
                return
            case api.Open():
                await self._say(api.Failed(id=request.id, reason="the engine is open already; restart it to reopen"))
                return
            case _:
                try:
                    self._to_state.send_nowait(request)
                except trio.WouldBlock:
                    reason = f"{QUEUE_LENGTH} state requests are waiting already; wait for their answers"
                    await self._say(api.Failed(id=request.id, reason=reason))
                return
        await self._say(api.Done(id=request.id))

    async def _answer(self, number: int, work: Callable[[], Awaitable[api.Answer]]) -> None:
        try:
            answer = await work()
        except Failures as error:
            answer = api.Failed(id=number, reason=_sentence(error))
        await self._say(answer)

    # ---------------------------------------------------------------- state

    async def _run_state_requests(self) -> None:
        async for request in self._state_requests:
            if isinstance(request, api.SaveSnapshot):
                # Taken here, so that no later request can come between; given back by the task that copies.
                await self._state_idle.acquire()
                self._nursery.start_soon(self._save_snapshot, request)
            else:
                await self._answer(request.id, partial(self._change_state, request))

    async def _change_state(self, request: StateRequest) -> api.Answer:
        if isinstance(request, api.Encode):
            contribution = await self._state.encode(self._outbox, request.base)
            if contribution is None:
                return api.Encoded(id=request.id, parts_root=b"", norm=0.0, largest=0.0, finite=False)
            return api.Encoded(
                id=request.id,
                parts_root=contribution.parts_root,
                norm=contribution.norm,
                largest=contribution.largest,
                finite=True,
            )
        async with self._state_idle:
            match request:
                case api.LoadInitial():
                    state_hash = await self._state.load_initial(self._artifacts, request.hash)
                case api.LoadSnapshot():
                    state_hash = await self._state.load_snapshot(self._snapshots, request.round, request.state_hash)
                case api.ResumeState():
                    state_hash = await self._state.resume(request.round, request.state_hash)
                case api.Apply():
                    state_hash, counted = await self._state.apply(request, self._parts)
                    return api.Applied(id=request.id, state_hash=state_hash, counted=counted)
                case api.SetAside():
                    self._state.forget()
                    await self._threads.disk(
                        partial(self._snapshots.set_aside, request.round, request.state_hash, request.reason)
                    )
                    return api.Done(id=request.id)
                case _:
                    raise ValueError(f"{type(request).__name__} is no request of a daemon")
        return api.StateLoaded(id=request.id, state_hash=state_hash)

    async def _save_snapshot(self, request: api.SaveSnapshot) -> None:
        try:
            await self._answer(request.id, partial(self._copy_state, request))
        finally:
            self._state_idle.release()

    async def _copy_state(self, request: api.SaveSnapshot) -> api.Answer:
        state = self._state
        if state.state_hash is None:
            raise StateError("there is no state to copy; load one first")
        expected = state.state_hash
        check = trio.from_thread.check_cancelled
        await self._threads.bulk(
            lambda: self._snapshots.save(request.round, state.theta, state.momentum, expected=expected, check=check)
        )
        await self._threads.bulk(self._make_room)
        return api.StateLoaded(id=request.id, state_hash=expected)

    # ---------------------------------------------------------------- disk

    def _make_room(self) -> None:
        """In a thread: as many snapshots as asked for, then as few bytes as allowed."""
        self._snapshots.prune(self._request.keep_snapshots)
        limit = self._request.disk_limit_bytes
        while limit and self._disk_bytes() > limit:
            if not self._give_up_oldest():
                return

    def _give_up_oldest(self) -> bool:
        """In a thread: what is kept only for others goes first; the newest round and the newest state stay."""
        return self._parts.drop_oldest_round() or self._snapshots.drop_oldest()

    def _disk_bytes(self) -> int:
        stores = (self._artifacts, self._parts, self._snapshots, self._outbox)
        return sum(store.disk_bytes() for store in stores)

    async def _keep_commits(self, request: api.KeepCommits) -> api.Answer:
        keep = partial(self._parts.keep, request.round, request.hashes, self._request.keep_rounds)
        await self._threads.bulk(keep)
        await self._threads.bulk(self._make_room)
        return api.Done(id=request.id)

    async def _inventory(self, request: api.Inventory) -> api.Answer:
        snapshots = await self._threads.bulk(self._snapshots.complete)
        links = self._switchboard.links()
        return api.Inventoried(
            id=request.id,
            snapshots=tuple(snapshots),
            partial=tuple(await self._threads.bulk(self._snapshots.partial)),
            part_rounds=await self._threads.bulk(self._parts.complete_rounds),
            disk_bytes=await self._threads.bulk(self._disk_bytes),
            resident_bytes=psutil.Process().memory_info().rss,
            connections=self._switchboard.connections,
            bytes_sent=self._switchboard.closed_sent_bytes + sum(link.sending.bytes for link in links),
            bytes_received=self._switchboard.closed_received_bytes + sum(link.receiving.bytes for link in links),
            relayed_bytes=self._splicer.relayed_bytes,
            relayed_pairs=self._splicer.pairs,
            dropped=self.dropped + self._exchange_drops(),
        )

    def _exchange_drops(self) -> Counter[str]:
        drops: Counter[str] = Counter()
        for exchange in self._traffic.exchanges.values():
            drops.update(exchange.dropped)
        return drops

    # ---------------------------------------------------------------- network

    async def _fetch(self, request: FetchRequest) -> api.Answer:
        match request:
            case api.FetchParts():
                return api.PartsFetched(id=request.id, missing=await self._fetcher.parts(request))
            case api.FetchArtifact():
                await self._fetcher.artifact(request)
            case api.FetchSnapshot():
                await self._fetcher.snapshot(request)
        return api.Done(id=request.id)

    async def _start_exchange(self, request: api.Exchange) -> api.Answer:
        if request.roster_id in self._exchange_scopes:
            raise StateError(f"the exchange of roster {request.roster_id.hex()} is under way already")
        outbox = None
        if request.contributing >> request.my_index & 1:
            outbox = await self._threads.disk(partial(self._outbox.read, request.base))
            if outbox is None or outbox.contribution.parts_root != request.parts_roots[request.my_index]:
                raise StateError(
                    f"this node is to contribute but does not hold the encoded contribution of base "
                    f"{request.base.hex()} that its READY binds; the round goes on without it"
                )
        exchange = self._make_exchange(request, outbox)
        # An earlier roster's exchange serves those who still want its parts, but not for ever.
        for old in list(self._exchange_scopes.values())[:-MAX_OLD_EXCHANGES]:
            old.cancel()
        scope = self._exchange_scopes[request.roster_id] = trio.CancelScope()
        self._nursery.start_soon(self._run_exchange, exchange, scope)
        return api.Done(id=request.id)

    def _make_exchange(self, request: api.Exchange, outbox: OutboxReader | None) -> Exchange:
        return Exchange(request, tools=self._tools(), outbox=outbox)

    def _tools(self) -> Tools:
        return Tools(
            geometry=self._geometry,
            switchboard=self._switchboard,
            keeper=self._keeper,
            threads=self._threads,
            emit=self._say,
            want_header=self._want_header,
        )

    async def _recompute(self, request: api.Recompute) -> api.Answer:
        return await self._recomputer.run(request)

    async def _run_exchange(self, exchange: Exchange, scope: trio.CancelScope) -> None:
        try:
            with scope:
                self._traffic.add(exchange)
                await exchange.run()
        finally:
            self._traffic.remove(exchange.roster_id)
            del self._exchange_scopes[exchange.roster_id]

    async def _want_header(self, wanted: api.HeaderWanted) -> api.PartRef | None:
        """The daemon's signature under a part's header; None: refused. The caller sets the deadline."""
        key = (wanted.roster_id, wanted.part)
        pending = self._headers[key] = _Pending()
        try:
            await self._say(wanted)
            await pending.arrived.wait()
        finally:
            del self._headers[key]
        header = pending.header
        if header is not None and (header.part, header.hash, header.length, header.bitmap) != (
            wanted.part,
            wanted.hash,
            wanted.length,
            wanted.bitmap,
        ):
            return None
        return header

    async def _want_token(self, peer_id: str) -> None:
        await self._say(api.TokenWanted(peer_id=peer_id))

    async def _want_call(self, peer_id: str) -> None:
        await self._say(api.CallWanted(peer_id=peer_id))

    async def _want_splice(self, peer_id: str) -> None:
        await self._say(api.SpliceWanted(peer_id=peer_id))

    async def _open_splice(self, request: api.OpenSplice) -> api.Answer:
        tickets = self._splicer.open(request.first, request.second, request.lanes)
        return api.SpliceOpened(id=request.id, tickets=tickets)


class _Pending:
    def __init__(self) -> None:
        self.arrived = trio.Event()
        self.header: api.PartRef | None = None


def _sentence(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        place = f" ({error.filename})" if error.filename else ""
        return f"{error.strerror}{place}"
    if isinstance(error, ssl.SSLError):
        return f"the TLS certificate does not load: {error}"
    return str(error) or type(error).__name__
