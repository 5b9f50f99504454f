"""Bytes of no use, so that something is known of a link on which nothing was sent (design section 7).

Who wants to know asks for them, so a probe measures the way from the other to here; `node.engine.gauge` sees it at both
ends, like any transfer. Bounded by both: the one that asks stops after so many bytes or so long, or when an exchange
begins; the one that answers gives no more than that, to nobody more often, and nothing while it exchanges. A probe
proves at most its bytes over the few round trips that TCP needs to get going: on a long fast line the first exchange
knows better, and is believed.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import trio

from node.engine import api
from node.engine.dialling import LANES, Unreachable
from node.engine.frames import AskMeta, Subject
from node.engine.link import Link
from node.engine.requests import NoAnswer, Requester
from node.engine.switchboard import Switchboard
from protocol.names import ZERO_DIGEST

PROBE_BYTES = 4 << 20
PROBE_S = 1.0
FIRST_CHUNK_BYTES = 1 << 14
MAX_CHUNK_BYTES = 1 << 18
REACH_TIMEOUT_S = 10.0
ANSWER_S = 10.0
"""For what was asked for before the time was over: a line of 7 kB/s."""

ANSWERED_S = 3.0
"""From a peer's first question to the last that is answered: the probe's time, and a round trip on slow links."""
PEER_INTERVAL_S = 300.0
"""Between two probes that one peer is answered."""
REFILL_BYTES_S = PROBE_BYTES / 60
"""What all peers together may ask for in the long run: keys cost nothing."""
SAVED_BYTES = 2 * PROBE_BYTES
MAX_PEERS = 2048

_FILLING = os.urandom(MAX_CHUNK_BYTES)
"""Nothing on the way shall make it smaller."""


def filling(size: int) -> memoryview:
    """The answer to a question that was allowed."""
    return memoryview(_FILLING)[:size]


class Prober:
    def __init__(self, *, exchanging: Callable[[], bool], switchboard: Switchboard, requester: Requester) -> None:
        """`exchanging`: whether a round's exchange has work to do on this node."""
        self._exchanging = exchanging
        self._switchboard = switchboard
        self._requester = requester

    async def run(self, request: api.Probe) -> api.Probed:
        try:
            link = await self._switchboard.reach(request.peer_id, within_s=REACH_TIMEOUT_S)
        except Unreachable as error:
            return api.Probed(id=request.id, bytes_received=0, why=str(error))
        probe = _Probe(link, self._requester, self._exchanging)
        with trio.move_on_after(PROBE_S + ANSWER_S):
            async with trio.open_nursery() as nursery:
                for _ in range(LANES):
                    nursery.start_soon(probe.ask)
        return api.Probed(id=request.id, bytes_received=probe.bytes_received, why=probe.why)


class _Probe:
    def __init__(self, link: Link, requester: Requester, exchanging: Callable[[], bool]) -> None:
        self._link = link
        self._requester = requester
        self._exchanging = exchanging
        self._ends_s = trio.current_time() + PROBE_S
        self._left_bytes = PROBE_BYTES
        self.bytes_received = 0
        self.why = ""

    async def ask(self) -> None:
        """One question after another, each for twice as much, as on one lane of several."""
        size = FIRST_CHUNK_BYTES
        while not self.why and trio.current_time() < self._ends_s and self._left_bytes >= size:
            if self._exchanging():
                self.why = "an exchange began"
                return
            self._left_bytes -= size
            question = AskMeta(Subject.PROBE, chunk=size)
            try:
                data = await self._requester.ask(self._link, ZERO_DIGEST, question, largest_bytes=size)
            except NoAnswer as error:
                self.why = str(error)
                return
            self.bytes_received += len(data)
            size = min(2 * size, MAX_CHUNK_BYTES)


@dataclass(slots=True)
class _Asked:
    first_s: float
    bytes: int = 0


class ProbeAllowance:
    """What this node gives others that probe."""

    def __init__(self, exchanging: Callable[[], bool]) -> None:
        self._exchanging = exchanging
        self._peers: OrderedDict[str, _Asked] = OrderedDict()
        """In the order of their newest probe."""
        self._saved_bytes = float(SAVED_BYTES)
        self._counted_at_s = trio.current_time()

    def grant(self, peer_id: str, size: int) -> bool:
        """Whether to answer a question for `size` bytes."""
        if self._exchanging() or not 0 < size <= MAX_CHUNK_BYTES:
            return False
        now_s = trio.current_time()
        refill_bytes = (now_s - self._counted_at_s) * REFILL_BYTES_S
        self._saved_bytes = min(SAVED_BYTES, self._saved_bytes + refill_bytes)
        self._counted_at_s = now_s
        asked = self._peers.get(peer_id)
        if asked is None or now_s - asked.first_s >= PEER_INTERVAL_S:
            asked = self._peers[peer_id] = _Asked(now_s)
            self._peers.move_to_end(peer_id)
            while len(self._peers) > MAX_PEERS:
                self._peers.popitem(last=False)
        if now_s - asked.first_s > ANSWERED_S or asked.bytes + size > PROBE_BYTES or size > self._saved_bytes:
            return False
        asked.bytes += size
        self._saved_bytes -= size
        return True
