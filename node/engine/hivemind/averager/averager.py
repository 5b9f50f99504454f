"""`DecentralizedAverager` over a roster, instead of over a group that it finds by itself.

Its matchmaking (0.6 to 0.8 s, and a group that may leave somebody out) is not used: the roster is the group, and its id
the group's. Peers go by their ids in the roster; which libp2p identity is whose, the engines told each other over
channels that prove it. What it does to average is hivemind's own: butterfly all-reduce, codecs, streams, bans.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

# hivemind reads the hints of `rpc_…` and knows these by their names in `typing`.
from typing import Any, AsyncIterator, Protocol  # noqa: UP035

import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.allreduce import AllReduceRunner
from hivemind.averaging.group_info import GroupInfo
from hivemind.averaging.partition import AllreduceException
from hivemind.compression import CompressionBase
from hivemind.p2p import P2P, P2PContext, P2PDaemonError, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure
from hivemind.proto import averaging_pb2
from hivemind.utils.multiaddr import Multiaddr

from .job import Job, Piece
from .reducer import PieceReducer

PREFIX = "atoll"
UNKNOWN_WAIT_S = 10.0
"""A peer may reach us before its engine has told ours who it is."""
MAX_UNKNOWN = 32
"""Streams of peers that nobody has told us of, at a time."""
CONNECT_S = 10.0
CONNECT_ATTEMPTS = 4
RETRY_S = 0.5


class Report(Protocol):
    """What the engine is told of a roster. Positions are among its contributors."""

    def delivered(self, piece: Piece, sender: int) -> None: ...

    def reduced(self, piece: Piece, mean: torch.Tensor, senders: tuple[int, ...] | None) -> None: ...

    def lost(self, sender: int, why: str, *, is_its_fault: bool) -> None: ...

    def unreached(self, reducer: int, why: str) -> None: ...


class Contacts:
    """Which libp2p identity belongs to which name in rosters."""

    def __init__(self) -> None:
        self._names: dict[PeerID, str] = {}
        self._ids: dict[str, PeerID] = {}
        self._news = asyncio.Event()
        self._unknown = 0

    def learn(self, name: str, transport_id: PeerID) -> None:
        before = self._ids.get(name)
        if before is not None:
            self._names.pop(before, None)
        self._ids[name] = transport_id
        self._names[transport_id] = name
        self._news.set()
        self._news = asyncio.Event()

    def id_of(self, name: str) -> PeerID:
        return self._ids[name]

    async def name_of(self, transport_id: PeerID) -> str | None:
        """Waits a little for an identity that is not known yet; None: a stranger."""
        if transport_id not in self._names and self._unknown < MAX_UNKNOWN:
            self._unknown += 1
            try:
                async with asyncio.timeout(UNKNOWN_WAIT_S):
                    while transport_id not in self._names:
                        await self._news.wait()
            except TimeoutError:
                return None
            finally:
                self._unknown -= 1
        return self._names.get(transport_id)


class RosterRunner(AllReduceRunner):  # type: ignore[misc]
    def __init__(
        self, *, job: Job, pieces: Sequence[Piece], contacts: Contacts, report: Report, **settings: Any
    ) -> None:
        super().__init__(**settings)
        mine = job.mine(pieces)
        if self.tensor_part_container.num_parts_by_peer[job.me] != len(mine):
            raise AllreduceException("hivemind has cut the vector in another way than the roster's plan")
        unused: Any = self.tensor_part_reducer
        unused.num_parts = 0  # so that it does not complain of what it never got
        self.tensor_part_reducer: Any = PieceReducer(job, mine, report.delivered, report.reduced, self._refuse)
        self.job = job
        self._contacts = contacts
        self._report = report
        self._ready = [asyncio.Event() for _ in job.names]
        self._given_up = [False] * len(job.names)
        self._why: dict[PeerID, str] = {}
        """Whose pieces were refused."""

    def ready(self, position: int) -> None:
        """It takes part in this roster, and its contact is known."""
        self._ready[position].set()

    async def give_up(self, position: int) -> None:
        """What it has not sent by now is not waited for; nor is it, as a reducer that was never reached."""
        self._given_up[position] = True
        self._ready[position].set()
        await self._ban_sender(self.ordered_peer_ids[position])

    async def _communicate_with_peer(self, peer_id: PeerID) -> None:
        position = self.ordered_peer_ids.index(peer_id)
        if peer_id == self.peer_id:
            await super()._communicate_with_peer(peer_id)
            return
        await self._ready[position].wait()
        if self._given_up[position]:
            self.tensor_part_container.register_failed_reducer(position)
            return
        try:
            await super()._communicate_with_peer(peer_id)
        except Exception as error:
            self._report.unreached(position, f"{type(error).__name__}: {error}")
            raise

    def _get_peer_stub(self, peer: PeerID) -> Any:
        name = self.job.names[self.ordered_peer_ids.index(peer)]
        return self._servicer_type.get_stub(self._p2p, self._contacts.id_of(name), namespace=self._prefix)

    def _refuse(self, position: int, why: str) -> None:
        self._why[self.ordered_peer_ids[position]] = why

    async def _ban_sender(self, peer_id: PeerID) -> None:
        news = peer_id not in self.banned_senders
        await super()._ban_sender(peer_id)
        if news and not self._future.done():
            sender, why = self.sender_peer_ids.index(peer_id), self._why.get(peer_id)
            if why is not None:
                self._report.lost(sender, why, is_its_fault=True)
            else:
                why = "its stream to hivemind's averager broke or fell silent"
                self._report.lost(sender, why, is_its_fault=False)


class _NoDHT:
    """The averager asks its DHT for nothing but this."""

    client_mode = False

    def __init__(self, peer_id: PeerID) -> None:
        self.peer_id = peer_id


class RosterAverager(DecentralizedAverager):  # type: ignore[misc]
    """Never started as a process: its coroutines run in the loop of this one."""

    def __init__(self, p2p: P2P, compression: CompressionBase) -> None:
        super().__init__(
            [torch.zeros(1)],
            _NoDHT(p2p.peer_id),
            start=False,
            prefix=PREFIX,
            compression=compression,
            allow_state_sharing=False,
            client_mode=False,
        )
        self.contacts = Contacts()
        self._p2p = p2p
        self._pending_groups_registered = asyncio.Event()
        self._pending_groups_registered.set()

    async def serve(self) -> None:
        """Take streams from now on."""
        await self.add_p2p_handlers(self._p2p, namespace=self.prefix)

    async def connect(self, name: str, transport_id: str, addresses: Sequence[str]) -> None:
        """Both ends of a pair try: one connection is enough, whoever made it."""
        peer = PeerID.from_base58(transport_id)
        self.contacts.learn(name, peer)
        for attempt in range(CONNECT_ATTEMPTS):
            if attempt:
                await asyncio.sleep(RETRY_S * 2**attempt)
            with contextlib.suppress(ControlFailure, P2PDaemonError, TimeoutError, OSError):
                async with asyncio.timeout(CONNECT_S):
                    await self._p2p._client.connect(peer, [Multiaddr(address) for address in addresses])
                return

    @contextlib.asynccontextmanager
    async def roster(
        self, job: Job, vector: torch.Tensor, pieces: Sequence[Piece], report: Report
    ) -> AsyncIterator[RosterRunner]:
        """Take part in it; `vector` [elements] holds this node's contribution, and is only read."""
        names = [PeerID.from_base58(name) for name in job.names]
        names[job.me] = self.peer_id
        group = GroupInfo(bytes.fromhex(job.roster), tuple(names), ())
        largest = max(piece.stop - piece.start for piece in pieces)
        with self._register_allreduce_group(group):
            runner = RosterRunner(
                job=job,
                pieces=pieces,
                contacts=self.contacts,
                report=report,
                p2p=self._p2p,
                servicer_type=type(self),
                prefix=self.prefix,
                group_id=group.group_id,
                tensors=[vector[piece.start : piece.stop] for piece in pieces],
                ordered_peer_ids=group.peer_ids,
                peer_fractions=job.shares(pieces),
                weight=1.0,
                sender_timeout=job.sender_timeout_s,
                reducer_timeout=max(job.deadline_s, 2 * job.sender_timeout_s),
                compression=self.allreduce_kwargs["compression"],
                part_size_bytes=largest * vector.element_size(),
            )
            self._running_groups[group.group_id].set_result(runner)
            yield runner

    async def rpc_aggregate_part(
        self, stream: AsyncIterator[averaging_pb2.AveragingData], context: P2PContext
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        name = await self.contacts.name_of(context.remote_id)
        if name is None:
            yield averaging_pb2.AveragingData(code=averaging_pb2.PROTOCOL_VIOLATION)
            return
        member = P2PContext(
            handle_name=context.handle_name, local_id=context.local_id, remote_id=PeerID.from_base58(name)
        )
        async for message in super().rpc_aggregate_part(stream, member):
            yield message

    async def rpc_join_group(
        self, request: averaging_pb2.JoinRequest, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.MessageFromLeader]:
        yield averaging_pb2.MessageFromLeader(code=averaging_pb2.NOT_LOOKING_FOR_GROUP)
