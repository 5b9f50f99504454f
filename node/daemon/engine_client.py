"""The daemon's side of the engine: typed requests, answers awaited by id, events in a channel (`node.engine.api`).

    client = EngineClient(sock)
    nursery.start_soon(client.run)
    opened = await client.open(api.Open(id=0, …), fds=(theta, momentum, delta))
    async for event in client.events: …

One client serves one connection. When the engine dies, requests raise `EngineGone` (a `trio.BrokenResourceError`),
`events` ends and `run` returns; the supervisor's next connection gets a new client, then `open` and `resume_state`.
The caller sets deadlines; a request that is cancelled goes on in the engine and its answer is dropped.
"""

from __future__ import annotations

import itertools
import math
import socket
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
import trio

from node.engine import api
from node.errors import AtollError
from node.ipc import FrameError, FrameStream

AnswerT = TypeVar("AnswerT", bound=api.Answer)


class EngineFailed(AtollError):
    """The engine could not carry a request out; the message is its sentence."""


class EngineGone(trio.BrokenResourceError):
    """The engine's process ended; the supervisor starts a new one."""


class _Waiting:
    def __init__(self) -> None:
        self.event = trio.Event()
        self.answer: api.Answer | None = None


async def ask_engine(engine: EngineClient | None, ask: Callable[[EngineClient], Awaitable[AnswerT]]) -> AnswerT:
    """For a peer's request. Raises `AtollError` with a sentence for it when there is no engine."""
    if engine is None:
        raise AtollError("the engine of this node is not running; try again in a moment")
    try:
        return await ask(engine)
    except EngineGone as error:
        raise AtollError("the engine of this node has just ended; try again in a moment") from error


class EngineClient:
    def __init__(self, sock: socket.socket) -> None:
        """`sock`: the daemon's end of the socket pair; owned by the client from now on."""
        self._stream: FrameStream[api.FromEngine, api.Request] = FrameStream(sock, api.FromEngine)
        self._ids = itertools.count(1)
        self._waiting: dict[int, _Waiting] = {}
        self._gone: str | None = None
        # Without bound: what fills it is our own engine, and a full channel would hold up the answers behind it.
        self._to_events, self.events = trio.open_memory_channel[api.Event](math.inf)

    async def run(self) -> None:
        """Receive until the connection ends."""
        reason = "the engine's process ended"
        try:
            while True:
                message = await self._stream.receive()
                if isinstance(message, api.Answer):
                    waiting = self._waiting.pop(message.id, None)
                    if waiting is not None:
                        waiting.answer = message
                        waiting.event.set()
                else:
                    self._to_events.send_nowait(message)
        except (trio.EndOfChannel, trio.ClosedResourceError):
            pass
        except FrameError as error:
            reason = f"the engine sent something that is no frame of ours: {error}"
        finally:
            self._gone = reason
            for waiting in self._waiting.values():
                waiting.event.set()
            self._waiting.clear()
            self._to_events.close()

    def close(self) -> None:
        self._stream.close()

    async def request(self, request: api.Request, fds: tuple[int, ...] = ()) -> api.Answer:
        """The answer to `request`, whose id is set here. Raises `EngineFailed` or `EngineGone`."""
        if self._gone is not None:
            raise EngineGone(self._gone)
        number = next(self._ids)
        waiting = self._waiting[number] = _Waiting()
        try:
            await self._stream.send(msgspec.structs.replace(request, id=number), fds)
            await waiting.event.wait()
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise EngineGone("the engine's process ended") from error
        finally:
            self._waiting.pop(number, None)
        match waiting.answer:
            case None:
                raise EngineGone(self._gone or "the engine's process ended")
            case api.Failed(reason=reason):
                raise EngineFailed(reason)
            case answer:
                return answer

    async def _ask(self, request: api.Request, kind: type[AnswerT], fds: tuple[int, ...] = ()) -> AnswerT:
        answer = await self.request(request, fds)
        if not isinstance(answer, kind):
            raise EngineFailed(f"the engine answered {type(request).__name__} with {type(answer).__name__}")
        return answer

    # ---------------------------------------------------------------- state

    async def open(self, request: api.Open, fds: tuple[int, int, int]) -> api.Opened:
        """`fds`: theta, momentum, delta; they stay the caller's."""
        return await self._ask(request, api.Opened, fds)

    async def load_initial(self, *, hash: bytes) -> api.StateLoaded:
        return await self._ask(api.LoadInitial(id=0, hash=hash), api.StateLoaded)

    async def load_snapshot(self, *, round: int, state_hash: bytes) -> api.StateLoaded:
        return await self._ask(api.LoadSnapshot(id=0, round=round, state_hash=state_hash), api.StateLoaded)

    async def resume_state(self, *, round: int, state_hash: bytes) -> api.StateLoaded:
        """Raises `EngineFailed` when the memory holds another state: load a snapshot and replay."""
        return await self._ask(api.ResumeState(id=0, round=round, state_hash=state_hash), api.StateLoaded)

    async def save_snapshot(self, *, round: int) -> api.StateLoaded:
        return await self._ask(api.SaveSnapshot(id=0, round=round), api.StateLoaded)

    async def set_aside(self, *, round: int, state_hash: bytes, reason: str) -> api.Done:
        return await self._ask(api.SetAside(id=0, round=round, state_hash=state_hash, reason=reason), api.Done)

    async def encode(self, *, base: bytes) -> api.Encoded:
        return await self._ask(api.Encode(id=0, base=base), api.Encoded)

    async def apply(self, request: api.Apply) -> api.Applied:
        return await self._ask(request, api.Applied)

    async def keep_commits(self, *, round: int, hashes: tuple[bytes, ...]) -> api.Done:
        return await self._ask(api.KeepCommits(id=0, round=round, hashes=hashes), api.Done)

    async def inventory(self) -> api.Inventoried:
        return await self._ask(api.Inventory(id=0), api.Inventoried)

    # ---------------------------------------------------------------- peers and transfers

    async def set_peers(self, peers: tuple[api.Peer, ...]) -> api.Done:
        return await self._ask(api.SetPeers(id=0, peers=peers), api.Done)

    async def accept_token(self, *, peer_id: str, token: bytes, expires_s: float) -> api.Done:
        return await self._ask(api.AcceptToken(id=0, peer_id=peer_id, token=token, expires_s=expires_s), api.Done)

    async def dial_token(self, *, peer_id: str, token: bytes | None) -> api.Done:
        return await self._ask(api.DialToken(id=0, peer_id=peer_id, token=token), api.Done)

    async def call(self, *, peer_id: str, token: bytes, host: str) -> api.Done:
        return await self._ask(api.Call(id=0, peer_id=peer_id, token=token, host=host), api.Done)

    async def call_answered(self, *, peer_id: str, failure: str) -> api.Done:
        return await self._ask(api.CallAnswered(id=0, peer_id=peer_id, failure=failure), api.Done)

    async def open_splice(self, *, first: str, second: str, lanes: int) -> api.SpliceOpened:
        return await self._ask(api.OpenSplice(id=0, first=first, second=second, lanes=lanes), api.SpliceOpened)

    async def accept_splice(self, *, peer_id: str, splice: api.Splice) -> api.Done:
        return await self._ask(api.AcceptSplice(id=0, peer_id=peer_id, splice=splice), api.Done)

    async def splice_answered(self, *, peer_id: str, splice: api.Splice | None, failure: str = "") -> api.Done:
        request = api.SpliceAnswered(id=0, peer_id=peer_id, splice=splice, failure=failure)
        return await self._ask(request, api.Done)

    async def exchange(self, request: api.Exchange) -> api.Done:
        return await self._ask(request, api.Done)

    async def stop_exchange(self, *, roster_id: bytes) -> api.Done:
        return await self._ask(api.StopExchange(id=0, roster_id=roster_id), api.Done)

    async def signed_header(self, *, roster_id: bytes, part: int, header: api.PartRef | None) -> api.Done:
        return await self._ask(api.SignedHeader(id=0, roster_id=roster_id, part=part, header=header), api.Done)

    async def fetch_parts(
        self, *, headers: tuple[api.PartRef, ...], sources: tuple[str, ...], timeout_s: float
    ) -> api.PartsFetched:
        request = api.FetchParts(id=0, headers=headers, sources=sources, timeout_s=timeout_s)
        return await self._ask(request, api.PartsFetched)

    async def recompute(self, request: api.Recompute) -> api.Recomputed:
        return await self._ask(request, api.Recomputed)

    async def probe(self, *, peer_id: str) -> api.Probed:
        return await self._ask(api.Probe(id=0, peer_id=peer_id), api.Probed)

    async def fetch_artifact(self, *, hash: bytes, length: int, sources: tuple[str, ...], timeout_s: float) -> api.Done:
        request = api.FetchArtifact(id=0, hash=hash, length=length, sources=sources, timeout_s=timeout_s)
        return await self._ask(request, api.Done)

    async def fetch_snapshot(
        self, *, round: int, state_hash: bytes, sources: tuple[str, ...], timeout_s: float
    ) -> api.Done:
        request = api.FetchSnapshot(id=0, round=round, state_hash=state_hash, sources=sources, timeout_s=timeout_s)
        return await self._ask(request, api.Done)
