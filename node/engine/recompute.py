"""Recomputing a committed part from the bytes that READYs bind: an audit, or the check of a claim (protocol section 7).

One contribution after another is fetched, proved against its READY's root, and added in the stated order: the memory is
that of one part and of what is kept. Where the result differs, the contributions are kept for a while and served like
one's own, so that others can check it even if the culprit, a leaf of its own part, gives its bytes to nobody any more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from functools import partial

import trio

from node.engine import api
from node.engine.dialling import Unreachable
from node.engine.exchange_view import view_of
from node.engine.frames import AskMeta, Subject
from node.engine.geometry import Geometry
from node.engine.outbox import Outbox
from node.engine.requests import NoAnswer, Requester
from node.engine.switchboard import Switchboard
from node.engine.threads import Threads
from protocol.codecs import CodecError
from protocol.commitment import MAX_PROOF_HASHES, proves
from protocol.names import DIGEST_BYTES
from protocol.state_hash import chunk_hash
from protocol.stations import Station
from protocol.sums import PartSum
from protocol.weights import total

REACH_TIMEOUT_S = 5.0
KEPT_BYTES = 64 << 20
"""Of contributions to parts that turned out wrong."""
MAX_PROOF_BYTES = MAX_PROOF_HASHES * DIGEST_BYTES


class Unavailable(Exception):
    """A contribution cannot be had; one sentence that names its peer."""


class KeptLeaves:
    """Proved contributions of others to parts that were no mean, the oldest giving way. For any thread."""

    def __init__(self) -> None:
        self._leaves: OrderedDict[tuple[bytes, int], bytes] = OrderedDict()
        self._bytes = 0

    def keep(self, parts_root: bytes, part: int, leaf: bytes) -> None:
        if (parts_root, part) in self._leaves or len(leaf) > KEPT_BYTES:
            return
        self._leaves[parts_root, part] = leaf
        self._bytes += len(leaf)
        while self._bytes > KEPT_BYTES:
            self._bytes -= len(self._leaves.popitem(last=False)[1])

    def find(self, parts_root: bytes, part: int) -> bytes | None:
        """Payload and proof, as `Outbox.leaf`."""
        return self._leaves.get((parts_root, part))


class Recomputer:
    """Args:
    exchanging: whether a round's exchange has work to do on this node.
    """

    def __init__(
        self,
        *,
        exchanging: Callable[[], bool],
        geometry: Geometry,
        switchboard: Switchboard,
        requester: Requester,
        outbox: Outbox,
        kept: KeptLeaves,
        threads: Threads,
    ) -> None:
        self._exchanging = exchanging
        self._geometry = geometry
        self._switchboard = switchboard
        self._requester = requester
        self._outbox = outbox
        self._kept = kept
        self._threads = threads

    async def run(self, request: api.Recompute) -> api.Recomputed:
        """The verdict; `ValueError` for a request that does not fit the vector."""
        work = _Work(request, geometry=self._geometry, threads=self._threads, leaf=self._leaf)
        verdict, why = "unknown", f"the bytes were not there within {request.timeout_s:g} s"
        with trio.move_on_after(request.timeout_s):
            try:
                data_hash = await work.result_hash()
                verdict, why = ("right", "") if data_hash == request.result_hash else ("wrong", "")
            except Unavailable as error:
                why = str(error)
        if verdict == "wrong":
            work.keep(self._kept)
        return api.Recomputed(id=request.id, verdict=verdict, why=why, bytes_received=work.bytes_received)

    async def _leaf(self, request: api.Recompute, index: int) -> tuple[bytes, int]:
        """Payload and proof of one contribution, and how many bytes came for it. Raises `Unavailable`."""
        parts_root, part, peer = request.parts_roots[index], request.part, request.peers[index]
        if request.yields and self._exchanging():
            raise Unavailable("an exchange began before it was done")
        for store in (self._outbox.leaf, self._kept.find):
            here = await self._threads.disk(partial(store, parts_root, part))
            if here is not None:
                return here, 0
        why = ""
        for source in dict.fromkeys((peer, *request.sources)):
            if source == self._switchboard.peer_id:
                continue
            try:
                link = await self._switchboard.reach(source, within_s=REACH_TIMEOUT_S, eager=True)
                question = AskMeta(Subject.LEAF, chunk=part)
                largest = self._geometry.part_bytes(part) + MAX_PROOF_BYTES
                data = bytes(await self._requester.ask(link, parts_root, question, largest_bytes=largest))
            except (NoAnswer, Unreachable) as error:
                why = why or f"the contribution of {peer} cannot be had: {error}"
                continue
            if await self._threads.compute(partial(self._proved, parts_root, part, data)):
                return data, len(data)
            why = why or f"{source} gave other bytes than the READY of {peer} binds"
        raise Unavailable(
            why or f"the contribution of {peer}, which is this node, cannot be had: it is not here any more"
        )

    def _proved(self, parts_root: bytes, part: int, data: bytes) -> bool:
        size = self._geometry.part_bytes(part)
        return proves(parts_root, part, self._geometry.part_count, chunk_hash(data[:size]), data[size:])


class _Work:
    """One part: its tree walked in the order of sums (section 4.6)."""

    def __init__(
        self,
        request: api.Recompute,
        *,
        geometry: Geometry,
        threads: Threads,
        leaf: Callable[[api.Recompute, int], Awaitable[tuple[bytes, int]]],
    ) -> None:
        """`leaf`: one contribution with its proof, and how many bytes came for it."""
        self._request = request
        self._geometry = geometry
        self._threads = threads
        self._fetch = leaf
        self._station = Station(view_of(request, geometry))
        self._weights = self._station.weights(request.part)
        self._leaves: dict[int, bytes] = {}
        self._kept_bytes = 0
        self.bytes_received = 0

    async def result_hash(self) -> bytes:
        """Of the part's mean, encoded as its root must have."""
        part, bitmap = self._request.part, self._request.bitmap
        root = self._station.root(part)
        order = sorted((root, *self._station.slots_of(root, part)))
        result = await self._sum(root, order)
        try:
            data = await self._threads.compute(
                lambda: self._geometry.codec.encode(result.mean(total(self._weights, bitmap)))
            )
        except (CodecError, ValueError):
            return b""  # bytes that overflow, or a bitmap without weight, have no mean
        return await self._threads.compute(lambda: chunk_hash(data))

    async def _sum(self, node: int, order: list[int]) -> PartSum:
        part, bitmap = self._request.part, self._request.bitmap
        result = PartSum(self._geometry.part_size(part), self._geometry.sum_codec)
        for index in order:
            if index != node and self._station.sends_partial(index, part):
                if bitmap & self._station.subtree(index, part):
                    below = await self._sum(index, [index, *self._station.slots_of(index, part)])
                    await self._threads.compute(lambda below=below: result.add_partial(below.partial()))  # type: ignore[misc]
            elif bitmap >> index & 1:
                payload = await self._leaf(index)
                weight = self._weights[index]
                await self._threads.compute(partial(result.add_leaf, weight, self._geometry.codec, payload))
        return result

    async def _leaf(self, index: int) -> bytes:
        data, received = await self._fetch(self._request, index)
        self.bytes_received += received
        self._kept_bytes += len(data)
        if self._kept_bytes <= KEPT_BYTES:
            self._leaves[index] = data
        return data[: self._geometry.part_bytes(self._request.part)]

    def keep(self, kept: KeptLeaves) -> None:
        for index, data in self._leaves.items():
            kept.keep(self._request.parts_roots[index], self._request.part, data)
