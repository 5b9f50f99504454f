"""Strangers on the node's port: whatever they send, the node goes on, its memory stays, and real peers can join."""

from __future__ import annotations

import os
import random
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import trio
from libp2p.host.exceptions import StreamFailure
from libp2p.protocol_muxer.exceptions import MultiselectClientError
from network_nodes import RUN, Node, meshed, nodes, run, until

from node.daemon.addresses import Address, parse_peer_address
from node.daemon.hardening import HardenedYamux
from node.daemon.host import HardenedHost, open_host
from node.daemon.identity import Identity
from node.daemon.membership import MembershipRecord, sign_record
from node.daemon.streams import (
    CONTROL_PROTOCOL,
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    Answer,
    Datagram,
    FramedStream,
    Gossip,
    Hello,
    LinkClosed,
    Pong,
    Refusal,
    Refused,
    Request,
    encode_frame,
)

pytestmark = [pytest.mark.slow, pytest.mark.swarm]


class Stranger:
    """Speaks libp2p and frames, but keeps no rule."""

    def __init__(self, identity: Identity, host: HardenedHost) -> None:
        self.identity = identity
        self.host = host

    async def stream(self, node: Node, protocol: str = CONTROL_PROTOCOL) -> Any:
        connection = await self.host.swarm.dial(node.network.peer_id, [parse_peer_address(node.address)])
        return await self.host.open_on(connection, protocol)

    async def introduced(self, node: Node) -> FramedStream:
        framed = FramedStream(await self.stream(node))
        await framed.send(encode_frame(hello()))
        await framed.receive_hello()
        framed.max_frame_bytes = MAX_FRAME_BYTES
        return framed


@asynccontextmanager
async def stranger() -> AsyncIterator[Stranger]:
    identity = Identity.generate()
    async with open_host(identity, [Address("ip4", "127.0.0.1", 0)], list) as host:
        yield Stranger(identity, host)


def hello(**fields: Any) -> Hello:
    filled: dict[str, Any] = {
        "protocol": PROTOCOL_VERSION,
        "version": "0.1.0",
        "run": RUN,
        "incarnation": b"i" * 16,
        "addresses": (),
        "observed_host": "127.0.0.1",
        **fields,
    }
    return Hello(**filled)


async def can_still_join(some: Any, node: Node) -> None:
    before = [one for one in some.all if not one.stopping.is_set()]
    joiner = await some.start(node.address)
    await until(lambda: meshed([*before, joiner]))


async def port_of(node: Node) -> int:
    return parse_peer_address(node.address).port


GARBAGE = [
    b"",
    b"\x00" * 100,
    b"GET / HTTP/1.1\r\n\r\n",
    b"\x13/multistream/1.0.0\n",
    b"\x13/multistream/1.0.0\n\x04\xff\xfe\xfd\n",
    b"\x13/multistream/1.0.0\n\x07/noise\n" + b"\xff\xff" + b"\x00" * 500,
    b"\x13/multistream/1.0.0\n\x07/noise\n" + b"\x00\x00" * 20,
    b"\x13/multistream/1.0.0\n" + b"\xff\xff\xff\xff\x7f" + b"x" * 10_000,
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    random.Random(7).randbytes(100_000),
]


def test_garbage_on_the_port(tmp_path: Path) -> None:
    async def main() -> None:
        async with nodes(tmp_path) as some:
            node = await some.start()
            for garbage in GARBAGE:
                with suppress(trio.BrokenResourceError):
                    stream = await trio.open_tcp_stream("127.0.0.1", await port_of(node))
                    async with stream:
                        await stream.send_all(garbage)
                        with trio.move_on_after(0.05):
                            await stream.receive_some()
            await can_still_join(some, node)

    run(main)


def test_three_hundred_connections_held_open_and_three_hundred_in_a_row(tmp_path: Path) -> None:
    async def main() -> None:
        async with nodes(tmp_path) as some, trio.open_nursery() as nursery:
            node = await some.start()
            peer = await some.start(node.address)
            await until(lambda: meshed([node, peer]))
            port = await port_of(node)
            for warm in (True, False):
                for _ in range(300):
                    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
                        await stream.send_all(b"\x13/multistream/1.0.0\n")
                if warm:
                    await trio.sleep(0.5)
                    before = resident_mb()
            held = [await trio.open_tcp_stream("127.0.0.1", port) for _ in range(300)]
            await can_still_join(some, node)
            assert resident_mb() - before < 25, "memory stays"
            assert peer.network.peers
            for stream in held:
                nursery.start_soon(stream.aclose)

    run(main, within_s=60.0)


def resident_mb() -> float:
    return float(psutil.Process().memory_info().rss) / 1e6


def test_introduced_strangers_in_a_row_leave_no_memory_behind(tmp_path: Path) -> None:
    """Whole handshakes under new identities, introduced and gone."""

    async def visit(node: Node, times: int) -> None:
        for _ in range(times):
            async with stranger() as other:
                await other.introduced(node)

    async def main() -> None:
        async with nodes(tmp_path) as some:
            node = await some.start()
            await visit(node, 10)
            before = resident_mb()
            await visit(node, 40)
            await until(lambda: not node.network.links)
            assert not node.network._host.swarm.get_connections()
            assert resident_mb() - before < 15
            await can_still_join(some, node)

    run(main, within_s=60.0)


def test_connections_that_never_introduce_themselves_are_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.daemon.host.HELLO_TIMEOUT_S", 0.5)

    async def main() -> None:
        async with nodes(tmp_path) as some, stranger() as other:
            node = await some.start()
            connection = await other.host.swarm.dial(node.network.peer_id, [parse_peer_address(node.address)])
            muxed: HardenedYamux = connection.muxed_conn
            with trio.fail_after(3.0):
                await muxed.event_closed.wait()
            counts = node.network.problems()
            assert counts["connections that did not introduce themselves in time"] == 1

    run(main)


@pytest.mark.parametrize(
    "bytes_sent",
    [
        struct.pack(">I", 2**32 - 1) + b"x" * 100,
        struct.pack(">I", 17_000) + b"x" * 17_000,
        struct.pack(">I", 5) + b"\xff" * 5,
        struct.pack(">I", 0),
        encode_frame(Datagram(b"before the hello")),
        encode_frame(hello(addresses=("nonsense",))),
        encode_frame(hello(addresses=(f"/ip4/203.0.113.5/tcp/1/p2p/{Identity.generate().peer_id}",))),
        struct.pack(">I", 4) + msgspec.msgpack.encode([0, 1]) + b"\x00",
        b"\x91" * 5000,
    ],
)
def test_a_broken_hello(tmp_path: Path, bytes_sent: bytes) -> None:
    async def main() -> None:
        async with nodes(tmp_path) as some, stranger() as other:
            node = await some.start()
            stream = await other.stream(node)
            await stream.write(bytes_sent)
            with suppress(Exception):
                while await stream.read(1024):
                    pass
            await until(lambda: node.network.problems() == {"control streams that broke a rule": 1})
            assert not node.network.links
            await can_still_join(some, node)

    run(main)


@pytest.mark.parametrize(
    "bytes_sent",
    [
        struct.pack(">I", MAX_FRAME_BYTES + 1) + b"x" * 100,
        struct.pack(">I", 10) + os.urandom(10),
        encode_frame(hello()),
        encode_frame(Answer(1, True, b"")) * 100 + encode_frame(hello()),
    ],
)
def test_a_broken_frame_ends_the_link_and_nothing_else(tmp_path: Path, bytes_sent: bytes) -> None:
    async def main() -> None:
        async with nodes(tmp_path) as some, stranger() as other:
            node = await some.start()
            framed = await other.introduced(node)
            assert other.identity.peer_id in node.network.links
            await framed.send(bytes_sent)
            await until(lambda: other.identity.peer_id not in node.network.links)
            assert node.network.problems() == {"control streams that broke a rule": 1}
            await can_still_join(some, node)

    run(main)


def test_a_second_control_stream_is_not_served(tmp_path: Path) -> None:
    async def main() -> None:
        async with nodes(tmp_path) as some, stranger() as other:
            node = await some.start()
            await other.introduced(node)
            [connection] = other.host.swarm.get_connections()
            with suppress(StreamFailure, MultiselectClientError, LinkClosed):
                second = FramedStream(await other.host.open_on(connection, CONTROL_PROTOCOL))
                await second.send(encode_frame(hello()))
                await second.receive_hello()
                pytest.fail("a second control stream was answered")
            assert other.identity.peer_id in node.network.links

    run(main)


def test_whoever_breaks_rules_again_and_again_is_shut_out(tmp_path: Path) -> None:
    async def main() -> None:
        async with nodes(tmp_path) as some, stranger() as other:
            node = await some.start()
            for _ in range(3):
                framed = await other.introduced(node)
                await framed.send(struct.pack(">I", MAX_FRAME_BYTES + 1))
                await until(lambda: not node.network.links)
            with pytest.raises(Refused, match=r"shut .* out for a while"):
                await other.introduced(node)
            await can_still_join(some, node)

    run(main)


def test_forged_records_are_dropped_and_their_bringer_is_shut_out(tmp_path: Path) -> None:
    async def main() -> None:
        async with nodes(tmp_path) as some, stranger() as other:
            node = await some.start()
            peer = await some.start(node.address)
            await until(lambda: meshed(some.all))
            framed = await other.introduced(node)
            victim = peer.network.membership.mine
            forged = [
                sign_record(
                    msgspec.structs.replace(victim, sequence=victim.sequence + 100 + n, round=99), other.identity
                )
                for n in range(6)
            ]
            await framed.send(encode_frame(Gossip(tuple(forged))))
            await until(lambda: other.identity.peer_id not in node.network.links)
            assert node.network.membership.records[victim.peer_id].round == 0
            assert node.network.problems()["bad membership records"] == len(forged)

    run(main)


def test_a_stranger_that_floods_and_never_reads_is_dropped(tmp_path: Path) -> None:
    async def main() -> None:
        async with nodes(tmp_path) as some, stranger() as other:
            node = await some.start()

            async def answer(who: str, payload: bytes) -> bytes:
                return bytes(3_000_000)

            node.network.serve("big", answer)
            framed = await other.introduced(node)
            before = resident_mb()
            link = node.network.links[other.identity.peer_id]
            with suppress(Exception), trio.move_on_after(5.0):
                number = 0
                while not link.closed.is_set():
                    number += 1
                    await framed.send(encode_frame(Request(number, "big", b"")))
                    await framed.send(*[encode_frame(Pong(n)) for n in range(50)])
            assert resident_mb() - before < 80
            await can_still_join_beside(some, node)

    run(main, within_s=60.0)


async def can_still_join_beside(some: Any, node: Node) -> None:
    joiner = await some.start(node.address)
    await until(lambda: node.network.peer_id in joiner.network.peers)


def test_a_record_of_a_peer_that_nobody_reaches_disturbs_nobody(tmp_path: Path) -> None:
    async def main() -> None:
        async with nodes(tmp_path) as some, stranger() as other:
            node = await some.start()
            framed = await other.introduced(node)
            ghosts = [Identity.generate() for _ in range(30)]
            records = tuple(
                sign_record(
                    MembershipRecord(
                        peer_id=ghost.peer_id,
                        run=RUN,
                        sequence=1,
                        incarnation=b"i",
                        version="0.1.0",
                        addresses=("/ip4/127.0.0.1/tcp/1", "/ip4/203.0.113.1/tcp/1"),
                    ),
                    ghost,
                )
                for ghost in ghosts
            )
            await framed.send(encode_frame(Gossip(records)))
            await until(lambda: len(node.network.membership.records) == 31)
            await can_still_join_beside(some, node)

    run(main)


def test_a_refusal_on_a_link_is_shown(tmp_path: Path) -> None:
    async def main() -> None:
        async with nodes(tmp_path) as some, stranger() as other:
            node = await some.start()
            framed = await other.introduced(node)
            await framed.send(encode_frame(Refusal("run", "you are not wanted here")))
            await until(lambda: node.network.reason() == "you are not wanted here")

    run(main)
