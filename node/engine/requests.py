"""Requests between engines: asking one peer for a part, a chunk or a list of chunk hashes, and answering such."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from functools import partial

import msgspec
import trio

from node.engine.artifacts import ArtifactStore
from node.engine.drops import Drops
from node.engine.frames import AskMeta, Header, Kind, MetaDecoder, Subject
from node.engine.link import Buffer, Link, Outgoing
from node.engine.parts import PartStore
from node.engine.serving import Serving
from node.engine.snapshots import SnapshotStore
from node.engine.threads import Threads
from node.errors import StrangerError

ANSWER_TIMEOUT_S = 30.0
"""For one chunk of at most 1 MiB, or a part."""
MAX_ASKED_AT_ONCE = 32
"""Answers that one peer may have us owe; our own fetches ask for far fewer."""


class NoAnswer(Exception):
    """The peer did not answer in time, is gone, or sent something else; the message says which."""


class Lied(NoAnswer):
    """What the peer sent is not what it was asked for."""


class NotThere(NoAnswer):
    """The peer answered that it does not have it."""


class Requester:
    """Numbers requests and matches answers to them."""

    def __init__(self) -> None:
        self._pending: dict[Link, dict[int, _Pending]] = {}
        self._given_up: dict[Link, deque[int]] = {}
        """Requests that are not waited for any more, the newest."""
        self._next = 0

    async def ask(self, link: Link, content: bytes, question: AskMeta, *, largest_bytes: int) -> bytearray:
        """The peer's answer, at most `largest_bytes`, not verified. Raises `NoAnswer`."""
        self._next = (self._next + 1) & 0xFFFFFFFF
        number, pending = self._next, _Pending(largest_bytes)
        self._pending.setdefault(link, {})[number] = pending

        async def load() -> tuple[bytes, Buffer]:
            return msgspec.msgpack.encode(question), b""

        try:
            link.send(Outgoing(kind=Kind.ASK, id=content, part=number, load=load))
            if link.closed:
                raise NoAnswer("the connection is gone")
            with trio.move_on_after(ANSWER_TIMEOUT_S):
                await pending.arrived.wait()
            if pending.not_there:
                raise NotThere("it does not have this")
            if pending.answer is None:
                raise NoAnswer(pending.why)
            return pending.answer
        except trio.Cancelled:
            # Another peer was faster, or the download is over: what comes all the same is nobody's fault.
            self._given_up.setdefault(link, deque(maxlen=MAX_ASKED_AT_ONCE)).append(number)
            raise
        finally:
            waiting = self._pending.get(link, {})
            waiting.pop(number, None)
            if not waiting:
                self._pending.pop(link, None)

    def admit(self, link: Link, header: Header) -> bool:
        """Whether an answer was asked for and is no longer than it may be."""
        pending = self._pending.get(link, {}).get(header.part)
        return pending is not None and header.payload_bytes <= pending.largest_bytes

    def gave_up(self, link: Link, header: Header) -> bool:
        """Whether this answers a request that was asked here and is not waited for any more."""
        return header.part in self._given_up.get(link, ())

    def answered(self, link: Link, header: Header, payload: bytearray) -> None:
        pending = self._pending.get(link, {}).get(header.part)
        if pending is None:
            return
        if header.kind is Kind.ANSWER:
            pending.answer = payload
        else:
            pending.not_there = True
        pending.arrived.set()

    def link_down(self, link: Link) -> None:
        self._given_up.pop(link, None)
        for pending in self._pending.get(link, {}).values():
            pending.why = "the connection broke"
            pending.arrived.set()


class _Pending:
    def __init__(self, largest_bytes: int) -> None:
        self.largest_bytes = largest_bytes
        self.arrived = trio.Event()
        self.answer: bytearray | None = None
        self.not_there = False
        self.why = f"no answer within {ANSWER_TIMEOUT_S:g} s"


class Responder:
    """Answers requests of authenticated peers from the stores. Payloads are read when a lane takes the answer."""

    def __init__(
        self,
        *,
        parts: PartStore,
        artifacts: ArtifactStore,
        snapshots: SnapshotStore,
        leaves: Callable[[bytes, int], bytes | None],
        threads: Threads,
        serving: Serving,
        may_probe: Callable[[str, int], bool],
        probe: Callable[[int], Buffer],
        dropped: Drops,
    ) -> None:
        """`leaves`: a contribution's part with its proof, by its READY's root and the part's number.

        `may_probe`: whether a peer gets so many bytes of no meaning; `probe`: these.
        """
        self._may_probe = may_probe
        self._probe = probe
        self._leaves = leaves
        self._serving = serving
        self._parts = parts
        self._artifacts = artifacts
        self._snapshots = snapshots
        self._threads = threads
        self._dropped = dropped
        self._meta = MetaDecoder()
        self._owed: Counter[Link] = Counter()

    def asked(self, link: Link, header: Header, meta: bytes) -> None:
        """Queue the answer. Raises `StrangerError` for a request that makes no sense."""
        question = self._meta.ask(meta)
        if question.subject not in tuple(Subject):
            raise StrangerError("a request for an unknown kind of thing")
        if self._owed[link] >= MAX_ASKED_AT_ONCE:
            self._dropped.count("too many requests at once", link.peer_id)
            return
        self._owed[link] += 1
        answer = Outgoing(kind=Kind.ANSWER, id=header.id, part=header.part, load=_nothing)

        may_probe = question.subject == Subject.PROBE and self._may_probe(link.peer_id, question.chunk)

        async def load() -> tuple[bytes, Buffer]:
            data: Buffer | None
            if question.subject == Subject.PROBE:
                data = self._probe(question.chunk) if may_probe else None
            else:
                data = await self._threads.bulk(partial(self._read, header.id, question))
            if link in self._owed:
                self._owed[link] -= 1
            if data is None:
                answer.kind = Kind.HAVE_NOT
            return b"", data or b""

        answer.load = load
        if question.subject == Subject.PART:
            link.send(answer, later=True)  # a round, or a peer that is a round behind, waits for it
        else:
            self._serving.put(link, answer)

    def link_down(self, link: Link) -> None:
        self._owed.pop(link, None)
        self._serving.link_down(link)

    def _read(self, content: bytes, question: AskMeta) -> bytes | None:
        try:
            match Subject(question.subject):
                case Subject.PART:
                    return self._parts.read(content)
                case Subject.ARTIFACT:
                    return self._artifacts.read_chunk(content, max(0, question.chunk))
                case Subject.ARTIFACT_CHUNKS:
                    return self._artifacts.chunk_list(content)
                case Subject.SNAPSHOT:
                    return self._snapshots.read_chunk(question.round, content, question.chunk)
                case Subject.LEAF:
                    return self._leaves(content, question.chunk)
                case Subject.SNAPSHOT_CHUNKS:
                    hashes = self._snapshots.chunk_hashes(question.round, content)
                    return None if hashes is None else b"".join(hashes)
                case Subject.PROBE:
                    return None  # nothing is read for it
        except (OSError, OverflowError) as error:
            self._dropped.count(f"a read for a peer failed: {error}")
            return None


async def _nothing() -> tuple[bytes, Buffer] | None:
    return None
