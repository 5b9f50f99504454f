"""What a node tells others of its links: the same figures while only noise moves them, few links, few records."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from node.daemon import gossip
from node.daemon.gossip import Gossip
from node.daemon.identity import Identity
from node.daemon.link_table import LinkTable
from node.daemon.membership import MAX_LINKS, Membership, link_key, parse_record
from node.daemon.reputation import Reputation
from node.daemon.round_trips import RoundTrips
from node.engine.api import Rates

RUN = b"r" * 32


def in_virtual_time(main: Callable[[], Awaitable[None]]) -> None:
    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


class Link:
    def __init__(self, round_trip_s: float) -> None:
        self.round_trips = RoundTrips()
        self.round_trip_s = round_trip_s
        self.ping()

    def ping(self, factor: float = 1.0) -> None:
        self.round_trips.answered(self.round_trip_s * factor, trio.current_time())


def name(number: int) -> str:
    return f"12D3KooW{number:044}"


def test_a_link_is_told_with_what_is_known_of_it() -> None:
    async def main() -> None:
        table = LinkTable(name(0))
        links: dict[str, Any] = {name(1): Link(0.1234), name(2): Link(0.05)}
        table.saw_peer(name(1), Rates(sent_bytes_s=1_234_567.0, received_bytes_s=None))
        table.saw_peer(name(3), Rates(sent_bytes_s=1e6))  # not connected now
        table.saw_line(Rates(sent_bytes_s=2e6, received_bytes_s=3e6))
        told = table.summaries(links)
        assert set(told) == {link_key(name(1)), link_key(name(2))}
        one, other = told[link_key(name(1))], told[link_key(name(2))]
        assert (one.round_trip_s, one.sent_bytes_s, one.received_bytes_s) == (0.12, 1.2e6, None)
        assert (other.round_trip_s, other.sent_bytes_s) == (0.05, None)
        assert table.line.tell() == (2e6, 3e6)
        assert table.rates_of(name(1)).age_s == 0.0
        assert table.rates_of(name(9)).age_s is None

    in_virtual_time(main)


def test_a_link_without_an_answer_is_not_told_and_what_was_known_outlives_it() -> None:
    async def main() -> None:
        table = LinkTable(name(0))
        silent = Link(0.1)
        silent.round_trips = RoundTrips()
        assert table.summaries({name(1): silent}) == {}
        table.saw_peer(name(1), Rates(sent_bytes_s=1e6))
        assert table.summaries({}) == {}
        assert table.summaries({name(1): Link(0.1)})[link_key(name(1))].sent_bytes_s == 1e6

    in_virtual_time(main)


def test_of_many_links_the_nearest_and_a_lasting_sample_are_told() -> None:
    async def main() -> None:
        draw = random.Random(3)
        table = LinkTable(name(0))
        near = {name(number): Link(0.001 * number) for number in range(1, MAX_LINKS // 2 + 1)}
        far = {name(100 + number): Link(0.5) for number in range(150)}
        links: dict[str, Any] = near | far
        told = table.summaries(links)
        assert len(told) == MAX_LINKS
        assert {link_key(peer) for peer in near} <= set(told)
        for _ in range(50):
            for link in links.values():
                link.ping(draw.uniform(0.7, 1.3))
        assert set(table.summaries(dict(draw.sample(list(links.items()), len(links))))) == set(told)

    in_virtual_time(main)


class Owner:
    """A node with `peers` connected peers and as many records: in the place of the network."""

    def __init__(self, peers: int) -> None:
        self.counts: Counter[str] = Counter()
        self.run_id = RUN
        identity = Identity.generate()
        self.membership = Membership(peer_id=identity.peer_id, keyring=identity, version="0.1.0", incarnation=b"i" * 16)
        self.link_table = LinkTable(identity.peer_id)
        self.sent: list[tuple[float, bytes]] = []
        self.peers: dict[str, Any] = {}
        for number in range(peers):
            link = Link(0.1)
            link.send_gossip = self._first_gets if number == 0 else lambda _: None  # type: ignore[attr-defined]
            self.peers[name(number)] = link
            self.membership._records[name(number)] = SimpleNamespace()  # type: ignore[assignment]
        self.membership.publish(run=RUN, addresses=("/ip4/203.0.113.5/tcp/1",))

    def _first_gets(self, records: tuple[bytes, ...]) -> None:
        self.sent += [(trio.current_time(), one) for one in records]

    def is_member(self, link: Any) -> bool:
        return True


async def jitter(owner: Owner) -> None:
    draw = random.Random(4)
    while True:
        await trio.sleep(5.0)
        for link in owner.peers.values():
            link.ping(draw.uniform(0.7, 1.3))


async def lives(owner: Owner, seconds: float, *tasks: Callable[[Owner], Awaitable[None]]) -> None:
    with trio.move_on_after(seconds):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(Gossip(owner, Reputation()).run)  # type: ignore[arg-type]
            for task in tasks:
                nursery.start_soon(task, owner)


@pytest.mark.slow
def test_noise_makes_no_record_and_a_large_run_few() -> None:
    async def main() -> None:
        for peers, most in ((3, 460), (50, 80), (1000, 6)):
            owner = Owner(peers)
            # Rates make a link's entry as long as it can be.
            for peer in owner.peers:
                owner.link_table.saw_peer(peer, Rates(sent_bytes_s=1e6, received_bytes_s=1e6))
            started_s = trio.current_time()
            await lives(owner, 3600.0, jitter)
            assert 2 <= len(owner.sent) <= most, f"{peers} peers: renewed {len(owner.sent)} times in an hour"
            records = [parse_record(data)[0] for at_s, data in owner.sent if at_s - started_s > 1200.0]
            told = {tuple(sorted(one.links.items())) for one in records}
            assert len(told) <= 1 + peers / 10, "a figure that few pings began is told anew once"
            largest = max(len(data) for _, data in owner.sent)
            # A node gets its own copy and one of each of the four that pass on what is news to them.
            control_bytes_s = 5 * peers * largest * len(owner.sent) / 3600.0
            assert control_bytes_s < 12_000, f"{control_bytes_s:.0f} bytes a second with {peers} peers"

    in_virtual_time(main)


@pytest.mark.slow
def test_what_others_need_at_once_does_not_wait_for_its_turn() -> None:
    async def main() -> None:
        owner = Owner(1000)

        async def changes(owner: Owner) -> None:
            await trio.sleep(100.0)
            owner.membership.publish(round=7, tokens_per_s=12.0)
            await trio.sleep(100.0)
            owner.membership.publish(certificate_sha256=b"c" * 32)

        started_s = trio.current_time()
        await lives(owner, 300.0, changes)
        assert [round(at_s - started_s) for at_s, _ in owner.sent] == [0, 200]
        newest = parse_record(owner.sent[-1][1])[0]
        assert (newest.round, newest.certificate_sha256) == (7, b"c" * 32)
        assert newest.lifetime_s >= 3 * gossip.PUBLISH_INTERVAL_EACH_S * 1000

    in_virtual_time(main)
