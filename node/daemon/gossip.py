"""How membership records spread: each node sends its own to all it is connected to and passes others' news on once."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping
from typing import Protocol

import msgspec
import structlog
import trio

from node.daemon.link import Link
from node.daemon.link_table import LinkTable
from node.daemon.membership import LIFETIME_S, MAX_LINKS, Membership, Verdict
from node.daemon.reputation import Reputation
from node.daemon.streams import RequestFailed
from node.errors import StrangerError
from protocol.names import Digest, PeerId
from protocol.planning import MAX_FAN

PUBLISH_INTERVAL_S = 10.0
MIN_PUBLISH_INTERVAL_S = 1.0
PUBLISH_INTERVAL_EACH_S = 1.0
"""With every record more, each is sent so much less often: a node gets about five copies of each, so five records a
second in a run of any size. Records are 0.5 kB and 37 bytes a link: 11 kB/s up to 65 nodes, 5 kB/s beyond."""
FEW_LINKS = 12
LIVES = 3
"""Records of a large run that may be lost in a row before their owner is believed no longer."""
FORWARDED_TO = 4
"""Of the connected peers, chosen at random, those that get another's news from here."""

MAX_RECORDS_A_FRAME = 1000
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
    link_table: LinkTable

    @property
    def peers(self) -> Mapping[PeerId, Link]: ...

    def is_member(self, link: Link) -> bool: ...


class Gossip:
    def __init__(self, owner: GossipOwner, reputation: Reputation) -> None:
        self._owner = owner
        self._reputation = reputation

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

    @property
    def _spacing_s(self) -> float:
        """Between two records of this node, of which the second is in no hurry."""
        return max(MIN_PUBLISH_INTERVAL_S, PUBLISH_INTERVAL_EACH_S * len(self._owner.membership.records))

    @property
    def _most_links(self) -> int:
        """In this node's record: records of large runs are many, and nobody plans by single links there."""
        return MAX_LINKS if len(self._owner.membership.records) <= MAX_FAN + 1 else FEW_LINKS

    async def _turn(self, last_s: float) -> None:
        """Until this node's record is to be sent again, after `last_s`: at once what is urgent, the rest in turn."""
        membership, spacing_s = self._owner.membership, self._spacing_s
        with trio.move_on_at(last_s + spacing_s) as hurried:
            await membership.urgent.wait()
        if hurried.cancelled_caught:
            with trio.move_on_at(last_s + max(PUBLISH_INTERVAL_S * random.uniform(0.8, 1.2), spacing_s)):
                await membership.unpublished.wait()

    async def _publish(self) -> None:
        """This node's record to everyone connected, regularly and after a change."""
        membership, table = self._owner.membership, self._owner.link_table
        last_s = -math.inf
        while True:
            await self._turn(last_s)
            last_s = trio.current_time()
            if self._owner.run_id is not None:
                up_bytes_s, down_bytes_s = table.line.tell()
                membership.publish(
                    links=table.summaries(self._owner.peers, self._most_links),
                    up_bytes_s=up_bytes_s,
                    down_bytes_s=down_bytes_s,
                    lifetime_s=max(LIFETIME_S, LIVES * self._spacing_s),
                )
                record = membership.renew()
                for link in self._owner.peers.values():
                    link.send_gossip((record,))
            await trio.sleep(MIN_PUBLISH_INTERVAL_S)

    async def _expire(self) -> None:
        while True:
            await trio.sleep(1.0)
            self._owner.membership.expire()
