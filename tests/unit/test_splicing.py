"""Which volunteer joins a pair, and whom a volunteer joins."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from node.daemon import rpc
from node.daemon.engine_client import EngineFailed
from node.daemon.membership import LinkSummary, link_key
from node.daemon.splicing import (
    CONTROL,
    DATA,
    DATA_LANES,
    SET_ASIDE_S,
    SpliceFailed,
    SpliceOffer,
    SpliceRequest,
    Splicing,
)
from node.daemon.streams import RequestFailed
from node.engine import api
from node.errors import AtollError, StrangerError

ME, OTHER = "12D3KooWme------", "12D3KooWother---"


def in_virtual_time(main: Callable[[], Awaitable[None]]) -> None:
    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


class Network:
    """Peers with records, and what is asked of them."""

    def __init__(self, me: str = ME) -> None:
        self.peer_id = me
        self.peers: dict[str, Any] = {}
        self.membership: Any = SimpleNamespace(records={})
        self.asked: list[tuple[str, str]] = []
        self.answers: dict[str, str] = {}
        """Peer → why it refuses."""

    def add(self, name: str, *, near_s: float = 0.1, far_s: float | None = 0.1, **record: Any) -> str:
        peer = f"12D3KooW{name:-<8}"
        links = {} if far_s is None else {link_key(OTHER): LinkSummary(far_s)}
        values = {"relays": True, "data_addresses": ("203.0.113.5:1",), "links": links} | record
        self.membership.records[peer] = SimpleNamespace(**values)
        self.peers[peer] = SimpleNamespace(is_spliced=False, round_trip_s=near_s, remote_host="198.51.100.7")
        return peer

    async def request(self, peer: str, method: str, payload: bytes, *, timeout_s: float) -> bytes:
        self.asked.append((peer, method))
        await trio.lowlevel.checkpoint()
        if why := self.answers.get(peer):
            raise RequestFailed(why)
        return b"ticket"

    async def connect_over(self, peer: str, tcp: trio.SocketStream) -> Any:
        raise NotImplementedError

    async def welcome_over(self, tcp: trio.SocketStream) -> None:
        raise NotImplementedError


def test_the_nearest_way_is_taken_first_then_the_next() -> None:
    async def main() -> None:
        network = Network()
        far = network.add("far", near_s=0.01, far_s=0.5)
        near = network.add("near", near_s=0.1, far_s=0.1)
        unknown = network.add("unknown", near_s=0.01, far_s=None)
        network.add("unwilling", relays=False)
        network.add("hidden", data_addresses=())
        spliced = network.add("spliced", near_s=0.0, far_s=0.0)
        network.peers[spliced].is_spliced = True
        network.answers = {
            near: "it passes on 96 connections already",
            far: "it is not connected with that peer itself",
        }
        splice = await Splicing(network).data_splice(OTHER)
        assert [peer for peer, _ in network.asked] == [near, far, unknown]
        assert (splice.ticket, splice.lanes, splice.addresses) == (b"ticket", DATA_LANES, ("198.51.100.7:1",))

    in_virtual_time(main)


def test_pairs_spread_over_equally_near_volunteers_and_both_sides_agree() -> None:
    async def main() -> None:
        chosen = set()
        for number in range(40):
            peers = [f"12D3KooWa{number}", f"12D3KooWb{number}"]
            firsts = []
            for me, other in (peers, reversed(peers)):
                network = Network(me)
                for name in ("x", "y", "z"):
                    network.add(name, links={link_key(other): LinkSummary(0.1)})
                await Splicing(network).data_splice(other)
                firsts.append(network.asked[0][0])
            assert firsts[0] == firsts[1]
            chosen.add(firsts[0])
        assert len(chosen) == 3

    in_virtual_time(main)


def test_who_failed_is_not_asked_at_once_again_and_the_reason_is_told() -> None:
    async def main() -> None:
        network = Network()
        full = network.add("full")
        network.answers = {full: "this node passes on 96 connections for others already; ask another"}
        splicing = Splicing(network)
        for _ in range(3):
            with pytest.raises(SpliceFailed, match="no volunteer joins this node"):
                await splicing.data_splice(OTHER)
        assert len(network.asked) == 1
        await trio.sleep(SET_ASIDE_S + 1)
        with pytest.raises(SpliceFailed, match="96 connections for others already"):
            await splicing.data_splice(OTHER)
        assert "96 connections" in splicing.failures[OTHER]

    in_virtual_time(main)


class Engine:
    def __init__(self, refuses: str = "") -> None:
        self.refuses = refuses
        self.met: list[str] = []

    async def open_splice(self, *, first: str, second: str, lanes: int) -> api.SpliceOpened:
        await trio.lowlevel.checkpoint()
        if self.refuses:
            raise EngineFailed(self.refuses)
        return api.SpliceOpened(id=0, tickets=(b"mine", b"theirs"))

    async def accept_splice(self, *, peer_id: str, splice: api.Splice) -> api.Done:
        await trio.lowlevel.checkpoint()
        self.met.append(peer_id)
        return api.Done(id=0)


def wish(peer: str, kind: str = DATA, lanes: int = DATA_LANES) -> bytes:
    return rpc.encode(SpliceRequest(peer=peer, kind=kind, lanes=lanes))


def test_a_volunteer_offers_the_other_side_its_ticket_and_answers_with_the_askers() -> None:
    async def main() -> None:
        network = Network()
        asker, other = network.add("asker"), network.add("other")
        splicing = Splicing(network)
        splicing.engine = Engine()  # type: ignore[assignment]
        assert await splicing.asked(asker, wish(other)) == b"mine"
        assert network.asked == [(other, rpc.SPLICE_OFFER)]
        network.answers = {other: "it does not know the asker"}
        with pytest.raises(AtollError, match="the other side does not come: it does not know"):
            await splicing.asked(asker, wish(other))

    in_virtual_time(main)


def test_whom_a_volunteer_does_not_join() -> None:
    async def main() -> None:
        network = Network()
        asker, other, spliced = network.add("asker"), network.add("other"), network.add("spliced")
        network.peers[spliced].is_spliced = True
        splicing = Splicing(network)
        with pytest.raises(AtollError, match="the engine of this node is not running"):
            await splicing.asked(asker, wish(other))
        splicing.engine = Engine(refuses="this node passes on 96 connections")  # type: ignore[assignment]
        for peer, payload, says in [
            ("12D3KooWstranger", wish(other), "connected here directly"),
            (spliced, wish(other), "connected here directly"),
            (asker, wish(spliced), "not connected with that peer itself"),
            (asker, wish("12D3KooWnobody"), "not connected with that peer itself"),
            (asker, wish(asker), "not connected with that peer itself"),
            (asker, wish(other), "passes on 96 connections"),
        ]:
            with pytest.raises(AtollError, match=says):
                await splicing.asked(peer, payload)
        for kind, lanes in ((DATA, 100), (CONTROL, 2), ("other", 1)):
            with pytest.raises(StrangerError, match="is none"):
                await splicing.asked(asker, wish(other, kind, lanes))

    in_virtual_time(main)


def test_a_peer_cannot_wear_a_volunteer_out() -> None:
    async def main() -> None:
        network = Network()
        asker, other, modest = network.add("asker"), network.add("other"), network.add("modest")
        splicing = Splicing(network)
        splicing.engine = Engine()  # type: ignore[assignment]

        async def on_and_on() -> None:
            for _ in range(100):
                await splicing.asked(asker, wish(other))

        with pytest.raises(AtollError, match="too many splices"):
            await on_and_on()
        await splicing.asked(modest, wish(other))

    in_virtual_time(main)


def test_whom_this_node_meets_at_a_volunteer() -> None:
    async def main() -> None:
        network = Network()
        volunteer, other = network.add("volunteer"), network.add("other")
        splicing = Splicing(network)
        engine = Engine()
        splicing.engine = engine  # type: ignore[assignment]

        def offer(peer: str, kind: str = DATA) -> bytes:
            lanes = DATA_LANES if kind == DATA else 1
            return rpc.encode(SpliceOffer(peer=peer, kind=kind, lanes=lanes, ticket=bytes(32)))

        await splicing.offered(volunteer, offer(other))
        assert engine.met == [other]
        for peer, payload, says in [
            ("12D3KooWstranger", offer(other), "only a peer of the run"),
            (volunteer, offer("12D3KooWnobody"), "no other peer that this node knows"),
            (volunteer, offer(ME), "no other peer that this node knows"),
            (volunteer, offer(other, CONTROL), "it is connected with that peer"),
        ]:
            with pytest.raises(AtollError, match=says):
                await splicing.offered(peer, payload)
        assert engine.met == [other]

    in_virtual_time(main)
