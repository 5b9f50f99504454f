"""Downloads: content by hash, in chunks, from several sources at once, that outlive any source (design section 5)."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

import trio
from blake3 import blake3

from node.engine import api
from node.engine.artifacts import ArtifactStore, chunk_bytes, chunk_count
from node.engine.dialling import Unreachable
from node.engine.drops import Drops
from node.engine.exchange_checks import why_bad_part
from node.engine.frames import AskMeta, Subject
from node.engine.gathering import Gathering
from node.engine.geometry import Geometry
from node.engine.link import Link
from node.engine.requests import Lied, NoAnswer, Requester
from node.engine.snapshots import SnapshotStore, split_hashes
from node.engine.storing import PartKeeper
from node.engine.switchboard import Switchboard
from node.engine.threads import Threads
from node.errors import AtollError
from protocol.names import DIGEST_BYTES, digest

REACH_TIMEOUT_S = 10.0
LISTS_ASKED = 16
"""Sources asked for a list of chunk hashes."""

log = logging.getLogger("atoll.engine")

Item = TypeVar("Item")


class FetchFailed(AtollError):
    """No source gave it; one sentence with the reasons."""


class Fetcher:
    def __init__(
        self,
        *,
        me: str,
        dropped: Drops,
        geometry: Geometry,
        switchboard: Switchboard,
        requester: Requester,
        keeper: PartKeeper,
        artifacts: ArtifactStore,
        snapshots: SnapshotStore,
        threads: Threads,
    ) -> None:
        self._me = me
        self._dropped = dropped
        self._geometry = geometry
        self._switchboard = switchboard
        self._requester = requester
        self._keeper = keeper
        self._artifacts = artifacts
        self._snapshots = snapshots
        self._threads = threads

    # ---------------------------------------------------------------- parts

    async def parts(self, request: api.FetchParts) -> tuple[int, ...]:
        """Get parts by hash; returns the numbers of those that no source gave. Held ones are announced again."""
        missing = []
        for ref in request.headers:
            if ref.length != self._geometry.part_bytes(ref.part):
                continue
            known = self._keeper.parts.find(ref.hash)
            if known is None:
                missing.append(ref)
            elif known == ref:
                self._keeper.announce(ref)
            else:
                # The same bytes under another header (of another roster): keep them under this one too.
                data = await self._threads.disk(partial(self._keeper.parts.read, ref.hash))
                if data is None or not await self._keep_part(ref, bytearray(data)):
                    missing.append(ref)

        async def get(link: Link, ref: api.PartRef) -> None:
            data = await self._requester.ask(link, ref.hash, AskMeta(Subject.PART), largest_bytes=ref.length)
            await self._keep_asked(ref, data)

        if missing:
            with trio.move_on_after(request.timeout_s):
                await self._gather(missing, request.sources, get, missing[0].roster_id)
        return tuple(sorted(ref.part for ref in request.headers if self._keeper.parts.find(ref.hash) is None))

    async def _keep_asked(self, ref: api.PartRef, data: bytearray) -> None:
        """Raises `Lied` for what is not the part, `NoAnswer` when the disk refuses it."""
        if await self._threads.compute(self._check_of(ref, data)):
            raise Lied("a part is not what its header says")
        if not await self._keeper.write(ref, data):
            raise NoAnswer("what it sent could not be stored")

    async def _keep_part(self, ref: api.PartRef, data: bytearray) -> bool:
        return not await self._threads.compute(self._check_of(ref, data)) and await self._keeper.write(ref, data)

    def _check_of(self, ref: api.PartRef, data: bytearray) -> Callable[[], str]:
        return partial(
            why_bad_part,
            data,
            part=ref.part,
            part_hash=ref.hash,
            root=ref.root,
            body=ref.body,
            signature=ref.signature,
            geometry=self._geometry,
        )

    # ---------------------------------------------------------------- artifacts

    async def artifact(self, request: api.FetchArtifact) -> None:
        """Raises `FetchFailed`; what came so far stays and the next request goes on from it."""
        was_here = self._artifacts.has(request.hash)
        if await self._threads.bulk(partial(self._artifacts.is_whole, request.hash)):
            return
        if was_here:
            log.error("artifact %s was damaged on this disk: its bad chunks are fetched again", request.hash.hex())
            self._dropped.count("an artifact that was damaged on this disk")
        why = [f"no source within {request.timeout_s:g} s"]
        with trio.move_on_after(request.timeout_s):
            sources = list(request.sources)
            while sources:
                hashes, agreeing = await self._chunk_list(
                    sources,
                    request.hash,
                    AskMeta(Subject.ARTIFACT_CHUNKS),
                    chunk_count(request.length) * DIGEST_BYTES,
                    why,
                )
                if hashes is None:
                    break
                await self._artifact_by_list(request, hashes, agreeing, why)
                if self._artifacts.has(request.hash):
                    return
                sources = [source for source in sources if source not in agreeing]
        raise FetchFailed(f"artifact {request.hash.hex()} could not be fetched: {'; '.join(dict.fromkeys(why))}")

    async def _artifact_by_list(
        self, request: api.FetchArtifact, hashes: list[bytes], sources: Sequence[str], why: list[str]
    ) -> None:
        artifact, length = request.hash, request.length
        missing = await self._threads.bulk(partial(self._artifacts.begin_download, artifact, length, hashes))

        async def get(link: Link, index: int) -> None:
            data = await self._requester.ask(
                link, artifact, AskMeta(Subject.ARTIFACT, chunk=index), largest_bytes=chunk_bytes(index, length)
            )
            if blake3(data).digest() != hashes[index]:
                raise Lied("it sent a chunk that does not match its list")
            await self._threads.bulk(partial(self._artifacts.put_chunk, artifact, index, data))

        left = await self._gather(sorted(missing), sources, get, artifact, why)
        if not left and not await self._threads.bulk(partial(self._artifacts.finish_download, artifact)):
            why.append("the chunks of " + ", ".join(sources) + " do not make the artifact")

    # ---------------------------------------------------------------- snapshots

    async def snapshot(self, request: api.FetchSnapshot) -> None:
        """Raises `FetchFailed`; what came so far stays and the next request goes on from it."""
        number, state_hash = request.round, request.state_hash
        if await self._threads.bulk(partial(self._snapshots.has, number, state_hash)):
            return
        why = [f"no source within {request.timeout_s:g} s"]
        with trio.move_on_after(request.timeout_s):
            hashes, _ = await self._chunk_list(
                list(request.sources),
                state_hash,
                AskMeta(Subject.SNAPSHOT_CHUNKS, round=number),
                self._snapshots.chunk_count * DIGEST_BYTES,
                why,
                fits=partial(self._snapshots.fits, state_hash=state_hash),
            )
            if hashes is not None:
                known = hashes
                begin = partial(self._snapshots.begin_download, number, state_hash, known)
                missing = await self._threads.bulk(begin)

                async def get(link: Link, index: int) -> None:
                    data = await self._requester.ask(
                        link,
                        state_hash,
                        AskMeta(Subject.SNAPSHOT, chunk=index, round=number),
                        largest_bytes=self._snapshots.chunk_bytes(index),
                    )
                    if blake3(data).digest() != known[index]:
                        raise Lied("a chunk does not match the state's hash")
                    await self._threads.bulk(partial(self._snapshots.put_chunk, number, state_hash, index, data))

                if not await self._gather(sorted(missing), request.sources, get, state_hash, why):
                    await self._threads.bulk(partial(self._snapshots.finish_download, number, state_hash, known))
                    return
        raise FetchFailed(f"the snapshot of round {number} could not be fetched: {'; '.join(dict.fromkeys(why))}")

    # ---------------------------------------------------------------- inside

    async def _chunk_list(
        self,
        sources: Sequence[str],
        content: bytes,
        question: AskMeta,
        size: int,
        why: list[str],
        fits: Callable[[list[bytes]], bool] | None = None,
    ) -> tuple[list[bytes] | None, list[str]]:
        """The list of chunk hashes that most sources give, and these sources. `fits` proves a list, if it can be."""
        answers: dict[bytes, list[str]] = {}
        found = trio.Event()

        async def ask(source: str) -> None:
            try:
                link = await self._switchboard.reach(source, within_s=REACH_TIMEOUT_S, eager=True)
                data = bytes(await self._requester.ask(link, content, question, largest_bytes=size))
            except (NoAnswer, Unreachable) as error:
                why.append(f"{source}: {error}")
                return
            if len(data) != size or (fits is not None and not fits(split_hashes(data))):
                why.append(f"{source}: its list of chunk hashes is wrong")
                return
            answers.setdefault(data, []).append(source)
            if fits is not None:
                found.set()

        async with trio.open_nursery() as nursery:

            async def stop_when_found() -> None:
                await found.wait()
                nursery.cancel_scope.cancel()

            if fits is not None:
                nursery.start_soon(stop_when_found)
            async with trio.open_nursery() as asking:
                for source in self._in_turn(sources, content)[:LISTS_ASKED]:
                    asking.start_soon(ask, source)
            nursery.cancel_scope.cancel()
        if not answers:
            return None, []
        best = max(answers, key=lambda data: len(answers[data]))
        return split_hashes(best), answers[best]

    def _in_turn(self, sources: Sequence[str], content: bytes) -> list[str]:
        """An order of its own for each peer and content: not all joiners start with the same few."""
        return sorted(dict.fromkeys(sources), key=lambda source: digest(content, self._me.encode(), source.encode()))

    async def _gather(
        self,
        items: Sequence[Item],
        sources: Sequence[str],
        get: Callable[[Link, Item], Awaitable[None]],
        content: bytes,
        why: list[str] | None = None,
    ) -> list[Item]:
        """Get every item from some source; returns the items that none gave.

        Raises `OSError` when what came cannot be written.
        """
        gathering = Gathering(
            items,
            self._in_turn(sources, content),
            reach=partial(self._switchboard.reach, within_s=REACH_TIMEOUT_S, eager=True),
            get=get,
            dropped=self._dropped,
        )
        left = await gathering.run()
        if why is not None:
            why.extend(gathering.why)
            given = ", ".join(f"{count} from {source}" for source, count in gathering.got.most_common())
            log.info("%d of %d chunks of %s: %s", len(items) - len(left), len(items), content.hex()[:16], given)
        return left
