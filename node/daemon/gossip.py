"""How membership records spread: each node sends its own to all it is connected to and passes others' news on once."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from typing import Protocol

import msgspec
import structlog
import trio

from node.daemon.link import Link
from node.daemon.membership import MAX_LINKS, LinkSummary, Membership, Verdict, link_key
from node.daemon.reputation import Reputation
from node.daemon.streams import RequestFailed
from node.errors import StrangerError
from protocol.names import Digest, PeerId

PUBLISH_INTERVAL_S = 10.0
MIN_PUBLISH_INTERVAL_S = 1.0
FORWARDED_TO = 4
"""Of the connected peers, chosen at random, those that get another's news from here."""

MAX_RECORDS_A_FRAME = 1000
MAX_RATES = 1000
MAX_TABLE_BYTES = 3 * 1024 * 1024
TABLE_METHOD = "membership"
TABLE_TIMEOUT_S = 20.0
BAD_RECORD = 2.0
"""Points of blame for whoever hands over a forged or malformed record; ten shut a peer out."""

_log = structlog.get_logger(__name__)


class GossipOwner(Protocol):
    """What gossip asks of the network."""

    counts: Counter[str]
    run_id: Digest | None
    membership: Membership

    @property
    def peers(self) -> Mapping[PeerId, Link]: ...

    def is_member(self, link: Link) -> bool: ...


class Gossip:
    def __init__(self, owner: GossipOwner, reputation: Reputation) -> None:
        self._owner = owner
        self._reputation = reputation
        self._rates: dict[PeerId, tuple[float | None, float | None]] = {}

    async def run(self) -> None:
        """Until cancelled: publish this node's record, let others' expire."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._publish)
            nursery.start_soon(self._expire)

    async def welcome(self, link: Link) -> None:
        """A peer of the run: it gets this node's record; if it is new here, it is asked for the whole table."""
        link.send_gossip((self._owner.membership.newest(),))
        if link.peer_id in self._owner.membership.records:
            return
        try:
            answer = await link.request(TABLE_METHOD, b"", TABLE_TIMEOUT_S)
            records = msgspec.msgpack.decode(answer, type=tuple[bytes, ...])
        except (RequestFailed, msgspec.DecodeError) as error:
            _log.debug("no membership table", peer=link.peer_id, why=str(error))
            return
        self.receive(link, records)

    def receive(self, link: Link, records: tuple[bytes, ...]) -> None:
        """Records from a peer: its own, others' news, or the table."""
        if not self._owner.is_member(link):
            self._owner.counts["membership records from outside the run"] += len(records)
            return
        news: list[bytes] = []
        for data in records[:MAX_RECORDS_A_FRAME]:
            try:
                verdict = self._owner.membership.accept(data)
            except StrangerError as error:
                self._owner.counts["bad membership records"] += 1
                self._reputation.blame(link.peer_id, BAD_RECORD, str(error))
                if self._reputation.is_banned(link.peer_id):
                    link.close("it is shut out for breaking rules")
                    break
                continue
            if verdict is Verdict.NEWS:
                news.append(data)
            elif verdict is Verdict.OUTDATED and (newer := self._owner.membership.data_of(link.peer_id)):
                link.send_gossip((newer,))
        if news:
            others = [other for other in self._owner.peers.values() if other is not link]
            for other in random.sample(others, min(FORWARDED_TO, len(others))):
                other.send_gossip(tuple(news))

    async def answer_table(self, peer: PeerId, payload: bytes) -> bytes:
        """The request `membership`: every record with its signature."""
        if peer not in self._owner.peers or self._owner.run_id is None:
            raise RequestFailed("the membership table is for peers of the run")
        table: list[bytes] = []
        size = 0
        for data in self._owner.membership.table():
            size += len(data)
            if size > MAX_TABLE_BYTES:
                break
            table.append(data)
        return msgspec.msgpack.encode(table)

    def record_rate(self, peer: PeerId, sent_bytes_s: float | None, received_bytes_s: float | None) -> None:
        sent, received = self._rates.pop(peer, (None, None))
        self._rates[peer] = (sent_bytes_s or sent, received_bytes_s or received)
        while len(self._rates) > MAX_RATES:
            del self._rates[next(iter(self._rates))]

    def _link_summaries(self) -> dict[str, LinkSummary]:
        summaries: dict[str, LinkSummary] = {}
        for peer, link in self._owner.peers.items():
            if link.round_trip_s is not None and len(summaries) < MAX_LINKS:
                sent, received = self._rates.get(peer, (None, None))
                summaries[link_key(peer)] = LinkSummary(round(link.round_trip_s, 5), sent, received)
        return summaries

    async def _publish(self) -> None:
        """This node's record to everyone connected, regularly and soon after a change."""
        membership = self._owner.membership
        while True:
            with trio.move_on_after(PUBLISH_INTERVAL_S * random.uniform(0.8, 1.2)):
                await membership.unpublished.wait()
            if self._owner.run_id is None:
                await trio.sleep(MIN_PUBLISH_INTERVAL_S)
                continue
            membership.publish(links=self._link_summaries())
            record = membership.renew()
            for link in self._owner.peers.values():
                link.send_gossip((record,))
            await trio.sleep(MIN_PUBLISH_INTERVAL_S)

    async def _expire(self) -> None:
        while True:
            await trio.sleep(1.0)
            self._owner.membership.expire()
