"""py-libp2p 0.8.1: each fault in the bare library, and its absence through our host.

When an upgrade of libp2p makes a `bare` half fail, the fault is mended there, and ours may go.
"""

from __future__ import annotations

import contextlib
import gc
import socket
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing
import varint
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.io.exceptions import IncompleteReadError
from libp2p.io.utils import read_exactly
from libp2p.kad_dht.kad_dht import DHTMode, KadDHT
from libp2p.kad_dht.pb.kademlia_pb2 import Message
from libp2p.kad_dht.provider_store import ProviderStore
from libp2p.network.config import ConnectionConfig
from libp2p.network.exceptions import SwarmException
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from libp2p.peer.peerstore import PeerStore, PeerStoreError, create_signed_peer_record
from libp2p.stream_muxer.exceptions import MuxedStreamError
from libp2p.stream_muxer.yamux import yamux
from libp2p.stream_muxer.yamux.yamux import Yamux
from libp2p.tools.anyio_service import background_trio_service
from multiaddr import Multiaddr

from node.daemon import admission, hardening
from node.daemon.addresses import Address
from node.daemon.hardening import CHUNK_BYTES, HardenedPeerStore, HardenedYamux, PatientStream
from node.daemon.host import HardenedHost, open_host
from node.daemon.identity import Identity
from node.daemon.run_dht import DHT_PROTOCOL, MAX_PROVIDED_KEYS, BoundedProviders, RunDHT
from node.errors import OperatorError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.swarm,
    # The bare library leaves sockets and coroutines behind where it breaks; ours are checked by what they do.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

LOOPBACK = Address("ip4", "127.0.0.1", 0)
ECHO = "/test/echo/1"
DEADLINE_S = 9.0


@pytest.fixture(autouse=True)
def _swept() -> Iterator[None]:
    """What the bare library dropped is collected while its warnings are still ignored."""
    yield
    gc.collect()


def run(main: Callable[[], Awaitable[None]], clock: trio.abc.Clock | None = None) -> None:
    async def bounded() -> None:
        with trio.fail_after(DEADLINE_S if clock is None else 3600):
            await main()

    trio.run(bounded, clock=clock)


@asynccontextmanager
async def bare_host(**options: Any) -> AsyncIterator[Any]:
    made = new_host(key_pair=create_new_key_pair(), **options)
    async with made.run(listen_addrs=[Multiaddr("/ip4/127.0.0.1/tcp/0")]):
        yield made
        with trio.move_on_after(1.0):
            await made.close()


@asynccontextmanager
async def our_host() -> AsyncIterator[HardenedHost]:
    """A host that greets whoever opens an echo stream, as the control stream does."""
    announced: list[Address] = []
    async with open_host(Identity.generate(), [LOOPBACK], lambda: announced) as made:
        announced += made.listening()
        made.set_stream_handler(ECHO, greet_and_echo)
        yield made


async def greet_and_echo(stream: Any) -> None:
    stream.muxed_conn.greet()
    while data := await stream.read(65536):
        await stream.write(data)


async def echo(stream: Any) -> None:
    with contextlib.suppress(Exception):
        while data := await stream.read(65536):
            await stream.write(data)


def address_of(made: Any) -> Address:
    port = int(made.get_transport_addrs()[0].value_for_protocol("tcp"))
    return Address("ip4", "127.0.0.1", port, str(made.get_id()))


async def connect(client: Any, server: Any) -> Any:
    """A connection of `client` to `server`, ours or bare."""
    where = address_of(server)
    if isinstance(client, HardenedHost):
        return await client.swarm.dial(str(server.get_id()), [where])
    return await client.get_network().dial_addr(Multiaddr(where.endpoint), server.get_id())


async def until(condition: Callable[[], bool]) -> None:
    """What another node does cannot be awaited; it is looked at until it is so."""
    with trio.fail_after(5.0):
        while not condition():  # noqa: ASYNC110 - the library has no event for it
            await trio.sleep(0.01)


async def says_hello(client: Any, server: Any) -> bool:
    """Whether an echo comes back over a new stream."""
    with trio.move_on_after(3.0):
        stream = await client.new_stream(server.get_id(), [ECHO])
        await stream.write(b"hello")
        return await stream.read(5) == b"hello"
    return False


# ---------------------------------------------------------------- one peer's mistake ends the node


async def send_malformed_token(client: Any, connection: Any) -> None:
    stream = await connection.new_stream()
    with contextlib.suppress(Exception):
        await stream.write(b"\x04\xff\xfe\xfd\n")
        with trio.move_on_after(0.5):
            while await stream.read(1024):
                pass


def test_a_malformed_protocol_token_ends_the_bare_node_and_not_ours() -> None:
    async def bare() -> None:
        async with bare_host() as client, bare_host() as server:
            await send_malformed_token(client, await connect(client, server))
            await trio.sleep(1.0)

    with pytest.raises(BaseExceptionGroup) as ended:
        run(bare)
    assert ended.group_contains(UnicodeDecodeError)

    async def ours() -> None:
        async with our_host() as client, our_host() as server:
            await send_malformed_token(client, await connect(client, server))
            assert await says_hello(client, server)
            assert server.swarm.admission.counts["streams that failed"] == 1

    run(ours)


def test_an_error_in_a_stream_handler_ends_the_bare_node_and_not_ours() -> None:
    async def broken(stream: Any) -> None:
        raise ZeroDivisionError

    async def bare() -> None:
        async with bare_host() as client, bare_host() as server:
            server.set_stream_handler("/broken", broken)
            await connect(client, server)
            with contextlib.suppress(Exception):
                await client.new_stream(server.get_id(), ["/broken"])
            await trio.sleep(1.0)

    with pytest.raises(BaseExceptionGroup) as ended:
        run(bare)
    assert ended.group_contains(ZeroDivisionError)

    async def ours() -> None:
        async with our_host() as client, our_host() as server:
            server.set_stream_handler("/broken", broken)
            await connect(client, server)
            with contextlib.suppress(Exception):
                await client.new_stream(server.get_id(), ["/broken"])
            assert await says_hello(client, server)

    run(ours)


# ---------------------------------------------------------------- limits


def test_the_bare_inbound_limit_counts_connections_that_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def bare() -> None:
        config = ConnectionConfig(min_connections=0, low_watermark=0, high_watermark=3, max_connections=3)
        async with bare_host(connection_config=config) as server, bare_host() as client:
            server.set_stream_handler(ECHO, echo)
            for _ in range(3):
                connection = await connect(client, server)
                assert await says_hello(client, server)
                await connection.close()
            with pytest.raises(SwarmException), trio.fail_after(4.0):
                await connect(client, server)

    run(bare)
    monkeypatch.setattr(admission, "MAX_SETTLED_PER_IP", 3)

    async def ours() -> None:
        async with our_host() as server, our_host() as client:
            for _ in range(8):
                connection = await connect(client, server)
                assert await says_hello(client, server)
                await connection.close()
            await until(lambda: not (server.swarm.admission.settled or server.swarm.admission.pending))

    run(ours)


def test_connections_that_say_nothing_do_not_keep_others_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_PENDING_PER_IP", 8)

    async def main() -> None:
        async with our_host() as server, our_host() as client, trio.open_nursery() as nursery:
            silent = [await trio.open_tcp_stream("127.0.0.1", address_of(server).port) for _ in range(50)]
            counts = server.swarm.admission.counts
            await until(lambda: counts["connections that did not introduce themselves in time"] == 42)
            assert server.swarm.admission.pending == 8
            await connect(client, server)
            assert await says_hello(client, server)
            for stream in silent:
                nursery.start_soon(stream.aclose)

    run(main)


def test_introduced_connections_in_a_row_leave_nothing_behind() -> None:
    async def main() -> None:
        async with our_host() as server, our_host() as client:
            for _ in range(60):
                connection = await connect(client, server)
                assert await says_hello(client, server)
                with trio.move_on_after(0.01):
                    await connection.close()
            await until(lambda: not (server.swarm.get_connections() or server.swarm.admission.settled))

    run(main)


def test_the_bare_node_accepts_plaintext_and_ours_only_noise() -> None:
    async def offers(made: Any, protocol: bytes) -> bool:
        async with await trio.open_tcp_stream("127.0.0.1", address_of(made).port) as stream:
            hello = b"/multistream/1.0.0\n"
            await stream.send_all(bytes([len(hello)]) + hello + bytes([len(protocol) + 1]) + protocol + b"\n")
            answer = b""
            with trio.move_on_after(2.0):
                while answer.count(b"\n") < 2 and (more := await stream.receive_some()):
                    answer += more
            return answer.endswith(protocol + b"\n")

    async def main() -> None:
        async with bare_host() as bare:
            assert await offers(bare, b"/plaintext/2.0.0")
        async with our_host() as ours:
            assert not await offers(ours, b"/plaintext/2.0.0")
            assert not await offers(ours, b"/secio/1.0.0")
            assert await offers(ours, b"/noise")

    run(main)


def test_two_bare_nodes_share_a_port_and_ours_refuses() -> None:
    async def main() -> None:
        async with bare_host() as first:
            port = address_of(first).port
            second = new_host(key_pair=create_new_key_pair())
            async with second.run(listen_addrs=[Multiaddr(f"/ip4/127.0.0.1/tcp/{port}")]):
                assert second.get_transport_addrs()
                await second.close()
            with pytest.raises(OperatorError, match=f"port {port}"):
                async with open_host(Identity.generate(), [Address("ip4", "127.0.0.1", port)], list):
                    pass

    run(main)


# ---------------------------------------------------------------- dialling


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_bare_dialling_gives_up_on_a_good_address_and_then_on_the_peer() -> None:
    dead = [Address("ip4", "127.0.0.1", free_port()) for _ in range(2)]

    async def bare() -> None:
        async with bare_host() as client, bare_host() as server:
            good = Multiaddr(address_of(server).endpoint)
            info = PeerInfo(server.get_id(), [Multiaddr(one.endpoint) for one in dead] + [good])
            with pytest.raises(Exception, match=r".*"):
                await client.connect(info)
            client.get_peerstore().clear_addrs(server.get_id())
            with pytest.raises(Exception, match="negative cache"):
                await client.get_network().dial_peer(server.get_id())

    run(bare)

    async def ours() -> None:
        async with our_host() as client, our_host() as server:
            connection = await client.swarm.dial(str(server.get_id()), [*dead, address_of(server)])
            assert await says_hello(client, server)
            await connection.close()
            await client.swarm.dial(str(server.get_id()), [*dead, address_of(server)])
            assert await says_hello(client, server)

    run(ours)


# ---------------------------------------------------------------- Yamux


class RawPipe:
    """A `ISecureConn` without the security, over a real socket with small buffers."""

    is_initiator = True

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        self.stream = trio.SocketStream(trio.socket.from_stdlib_socket(sock))

    async def read(self, size: int | None = None) -> bytes:
        return await self.stream.receive_some(size)

    async def write(self, data: bytes) -> None:
        await self.stream.send_all(data)

    async def close(self) -> None:
        await self.stream.aclose()


def frame(kind: int, flags: int, stream: int, length: int, body: bytes = b"") -> bytes:
    return struct.pack(yamux.YAMUX_HEADER_FORMAT, 0, kind, flags, stream, length) + body


@asynccontextmanager
async def muxed_pair(kind: type[Yamux]) -> AsyncIterator[tuple[Yamux, trio.SocketStream]]:
    """A muxer on one end; the test speaks Yamux by hand on the other."""
    one, other = socket.socketpair()
    connection = kind(RawPipe(one), ID(b"peer"), is_initiator=True)
    by_hand = RawPipe(other).stream
    async with trio.open_nursery() as nursery:
        nursery.start_soon(connection.start)
        await connection.event_started.wait()
        yield connection, by_hand
        nursery.cancel_scope.cancel()
    await by_hand.aclose()


@pytest.mark.parametrize("kind", [Yamux, HardenedYamux])
def test_a_ping_stops_the_bare_read_loop_while_a_writer_waits(kind: type[Yamux]) -> None:
    async def main() -> None:
        async with muxed_pair(kind) as (connection, peer), trio.open_nursery() as nursery:
            stream = await connection.open_stream()
            nursery.start_soon(stream.write, bytes(200_000))  # the peer reads nothing: the writer holds the lock
            await trio.sleep(0.1)
            arrived: list[bytes] = []

            async def read() -> None:
                while len(b"".join(arrived)) < 5:
                    arrived.append(await stream.read(5))

            nursery.start_soon(read)
            await peer.send_all(frame(yamux.TYPE_PING, yamux.FLAG_SYN, 0, 7))
            await peer.send_all(frame(yamux.TYPE_DATA, 0, stream.stream_id, 5, b"hello"))
            await trio.sleep(0.5)
            assert bool(arrived) is (kind is HardenedYamux)
            nursery.cancel_scope.cancel()

    run(main)


def test_both_sides_may_send_bulk_beside_requests() -> None:
    async def main() -> None:
        async with our_host() as one, our_host() as other:
            await connect(one, other)
            done = 0

            async def bulk() -> None:
                nonlocal done
                stream = await one.new_stream(other.get_id(), [ECHO])
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(stream.write, bytes(3_000_000))
                    left = 3_000_000
                    while left:
                        left -= len(await stream.read(65536))
                done += 1

            async with trio.open_nursery() as nursery:
                for _ in range(2):
                    nursery.start_soon(bulk)
                for _ in range(5):
                    assert await says_hello(one, other)
            assert done == 2

    run(main)


@pytest.mark.parametrize("open_one", [bare_host, our_host])
def test_a_writer_that_gives_up_ends_only_the_bare_connection(open_one: Callable[[], Any]) -> None:
    """A deadline of one request must not cost a peer, and all that others have under way with it."""

    async def main() -> None:
        async with open_one() as one, open_one() as other:
            if open_one is bare_host:
                other.set_stream_handler(ECHO, echo)
            await connect(one, other)
            streams = [await one.new_stream(other.get_id(), [ECHO]) for _ in range(2)]

            async def write() -> None:
                with contextlib.suppress(Exception):
                    await streams[0].write(b"perhaps")

            for turns in range(40):  # one of them is between the encryption and the sending
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(write)
                    for _ in range(turns):
                        await trio.lowlevel.checkpoint()
                    nursery.cancel_scope.cancel()
            heard = b""
            with trio.move_on_after(3.0), contextlib.suppress(Exception):
                await streams[1].write(b"hello")
                heard = await streams[1].read(5)
            assert (heard == b"hello") is (open_one is our_host)

    run(main)


@pytest.mark.parametrize("kind", [Yamux, HardenedYamux])
def test_a_reader_that_pauses_for_seven_seconds_breaks_only_the_bare_stream(kind: type[Yamux]) -> None:
    async def main() -> None:
        async with muxed_pair(kind) as (connection, peer), trio.open_nursery() as nursery:
            received = bytearray()

            async def drain() -> None:
                while data := await peer.receive_some(65536):
                    received.extend(data)

            nursery.start_soon(drain)
            stream = await connection.open_stream()
            failures: list[MuxedStreamError] = []

            async def write() -> None:
                try:
                    await stream.write(bytes(yamux.DEFAULT_WINDOW_SIZE + 10))
                except MuxedStreamError as error:
                    failures.append(error)

            nursery.start_soon(write)
            await trio.sleep(7.0)
            assert bool(failures) is (kind is Yamux)
            if kind is HardenedYamux:
                await peer.send_all(frame(yamux.TYPE_WINDOW_UPDATE, 0, stream.stream_id, 1000))
                await until(lambda: len(received) > yamux.DEFAULT_WINDOW_SIZE + 10)
            nursery.cancel_scope.cancel()

    run(main, trio.testing.MockClock(autojump_threshold=0.005))


def test_our_patience_has_an_end() -> None:
    async def main() -> None:
        async with muxed_pair(HardenedYamux) as (connection, peer), trio.open_nursery() as nursery:

            async def drain() -> None:
                while await peer.receive_some(65536):
                    pass

            nursery.start_soon(drain)
            stream = await connection.open_stream()
            with pytest.raises(Exception, match="read nothing for 30 s"):
                await stream.write(bytes(yamux.DEFAULT_WINDOW_SIZE + 10))
            nursery.cancel_scope.cancel()

    run(main, trio.testing.MockClock(autojump_threshold=0.005))


@pytest.mark.parametrize("kind", [Yamux, HardenedYamux])
def test_a_peer_that_ignores_its_window_fills_only_the_bare_memory(kind: type[Yamux]) -> None:
    async def main() -> None:
        async with muxed_pair(kind) as (connection, peer):
            await peer.send_all(frame(yamux.TYPE_WINDOW_UPDATE, yamux.FLAG_SYN, 2, 0))
            flood = frame(yamux.TYPE_DATA, 0, 2, 60_000, bytes(60_000))
            most = 0
            with contextlib.suppress(trio.BrokenResourceError):
                for _ in range(80):
                    await peer.send_all(flood)
                    most = max(most, sum(len(one) for one in connection.stream_buffers.values()))
            if kind is Yamux:
                assert most > 4_000_000
            else:
                assert most <= hardening.STRANGER_BUFFER_BYTES
                await connection.event_closed.wait()

    run(main)


@pytest.mark.parametrize("kind", [Yamux, HardenedYamux])
def test_streams_beyond_the_limit_are_reset_by_ours(kind: type[Yamux]) -> None:
    async def main() -> None:
        async with muxed_pair(kind) as (connection, peer), trio.open_nursery() as nursery:

            async def drain() -> None:
                while await peer.receive_some(65536):
                    pass

            async def accept() -> None:
                while True:
                    await connection.accept_stream()

            nursery.start_soon(drain)
            nursery.start_soon(accept)
            for number in range(2, 2 * 300, 2):
                await peer.send_all(frame(yamux.TYPE_WINDOW_UPDATE, yamux.FLAG_SYN, number, 0))
            await trio.sleep(0.3)
            assert (len(connection.streams) > hardening.MAX_STREAMS) is (kind is Yamux)
            nursery.cancel_scope.cancel()

    run(main)


@pytest.mark.parametrize("kind", [Yamux, HardenedYamux])
def test_a_connection_to_a_stuck_peer_can_be_closed_only_by_ours(kind: type[Yamux]) -> None:
    async def main() -> None:
        async with muxed_pair(kind) as (connection, _), trio.open_nursery() as nursery:
            stream = await connection.open_stream()

            async def write() -> None:
                with contextlib.suppress(Exception):
                    await stream.write(bytes(200_000))

            nursery.start_soon(write)
            await trio.sleep(0.1)
            with trio.move_on_after(2.0) as closing:
                await connection.close()
            assert closing.cancelled_caught is (kind is Yamux)
            nursery.cancel_scope.cancel()

    run(main)


def test_messages_in_small_segments_are_lost_only_at_the_bare_size() -> None:
    class Trickle:
        """Delivers at most one segment of 536 bytes a read, as TCP may with the smallest legal MTU."""

        async def read(self, size: int) -> bytes:
            await trio.lowlevel.checkpoint()
            return bytes(min(size, 536))

    async def main() -> None:
        with pytest.raises(IncompleteReadError):
            await read_exactly(Trickle(), yamux.MAX_MESSAGE_SIZE)
        assert len(await read_exactly(Trickle(), CHUNK_BYTES + 64)) == CHUNK_BYTES + 64

    run(main)


def test_our_streams_write_in_small_frames() -> None:
    async def main() -> None:
        async with muxed_pair(HardenedYamux) as (connection, peer), trio.open_nursery() as nursery:
            stream = await connection.open_stream()
            assert isinstance(stream, PatientStream)
            nursery.start_soon(stream.write, bytes(100_000))
            received = bytearray()
            while len(received) < 100_000:
                received += await peer.receive_some(65536)
            sizes = []
            while len(received) >= yamux.HEADER_SIZE:
                _, kind, _, _, length = struct.unpack_from(yamux.YAMUX_HEADER_FORMAT, received)
                body = length if kind == yamux.TYPE_DATA else 0
                sizes.append(body)
                del received[: yamux.HEADER_SIZE + body]
            assert max(sizes) == CHUNK_BYTES

    run(main)


# ---------------------------------------------------------------- peer store


def peer(number: int) -> ID:
    return ID(b"\x00\x24\x08\x01\x12\x20" + number.to_bytes(32, "big"))


@pytest.mark.parametrize("kind", [PeerStore, HardenedPeerStore])
def test_a_thousand_strangers_make_only_the_bare_store_forget_this_nodes_key(kind: type[PeerStore]) -> None:
    pair = create_new_key_pair()
    mine = ID.from_pubkey(pair.public_key)
    store = kind() if kind is PeerStore else kind(mine)
    store.add_key_pair(mine, pair)
    for number in range(1100):
        store.add_addrs(peer(number), [Multiaddr(f"/ip4/203.0.113.1/tcp/{number + 1}")], 3600)
    assert len(store.peer_data_map) <= 1001
    if kind is PeerStore:
        with pytest.raises(PeerStoreError):
            store.privkey(mine)
    else:
        assert store.privkey(mine) is not None


@pytest.mark.parametrize("kind", [PeerStore, HardenedPeerStore])
def test_a_peer_whose_clock_was_set_back_is_cut_off_only_by_the_bare_store(kind: type[PeerStore]) -> None:
    pair = create_new_key_pair()
    theirs = ID.from_pubkey(pair.public_key)
    store = kind() if kind is PeerStore else kind(peer(1))
    older = create_signed_peer_record(theirs, [Multiaddr("/ip4/203.0.113.1/tcp/1")], pair.private_key)
    time.sleep(0.002)
    newer = create_signed_peer_record(theirs, [Multiaddr("/ip4/203.0.113.1/tcp/2")], pair.private_key)
    assert store.consume_peer_record(newer, 3600)
    assert store.consume_peer_record(older, 3600) is (kind is HardenedPeerStore)
    assert [str(one) for one in store.addrs(theirs)] == ["/ip4/203.0.113.1/tcp/2"]


def test_one_peer_cannot_store_any_number_of_addresses() -> None:
    store = HardenedPeerStore(peer(1))
    store.add_addrs(peer(2), [Multiaddr(f"/ip4/203.0.113.1/tcp/{port}") for port in range(1, 500)], 3600)
    assert len(store.addrs(peer(2))) == hardening.MAX_ADDRESSES_STORED


# ---------------------------------------------------------------- DHT


@asynccontextmanager
async def our_dht() -> AsyncIterator[tuple[HardenedHost, RunDHT]]:
    async with our_host() as made:
        dht = RunDHT(made)
        async with background_trio_service(dht):
            yield made, dht


async def ask(client: Any, server: Any, message: Message) -> bytes:
    """One DHT message to `server`; what comes back within a second, nothing when the stream is refused."""
    data = message.SerializeToString()
    with trio.move_on_after(1.0), contextlib.suppress(Exception):
        stream = await client.new_stream(server.get_id(), [DHT_PROTOCOL])
        await stream.write(varint.encode(len(data)) + data)
        return bytes(await stream.read(65536))
    return b""


@pytest.mark.parametrize("ours", [False, True])
def test_strangers_values_are_stored_only_by_the_bare_dht(ours: bool) -> None:
    put = Message(type=Message.MessageType.PUT_VALUE, key=b"anything")
    put.record.key = b"anything"
    put.record.value = bytes(1000)

    async def main() -> None:
        if ours:
            async with our_dht() as (server, dht), our_host() as client:
                await connect(client, server)
                assert await says_hello(client, server)
                assert await ask(client, server, put) == b""
                assert dht.value_store.size() == 0
        else:
            async with bare_host() as server, bare_host() as client:
                dht = KadDHT(server, DHTMode.SERVER)
                async with background_trio_service(dht):
                    await connect(client, server)
                    await ask(client, server, put)
                    assert dht.value_store.size() == 1

    run(main)


@pytest.mark.parametrize("ours", [False, True])
def test_idle_streams_use_up_only_the_bare_dht(ours: bool) -> None:
    query = Message(type=Message.MessageType.GET_PROVIDERS, key=b"key")

    async def hold(client: Any, server: Any, count: int) -> None:
        for _ in range(count):
            with contextlib.suppress(Exception):  # refused: that many are held already
                stream = await client.new_stream(server.get_id(), [DHT_PROTOCOL])
                await stream.write(b"\x7f")  # the first byte of a message that never comes
        await trio.sleep(0.2)

    async def main() -> None:
        if ours:
            async with our_dht() as (server, _), our_host() as client, our_host() as other:
                await connect(client, server)
                await connect(other, server)
                assert await says_hello(client, server)
                assert await says_hello(other, server)
                await hold(other, server, 15)
                assert await ask(client, server, query) != b""
        else:
            async with (
                bare_host() as server,
                bare_host() as client,
                bare_host() as other,
                background_trio_service(KadDHT(server, DHTMode.SERVER)),
            ):
                await connect(client, server)
                await connect(other, server)
                assert await ask(client, server, query) != b""
                await hold(other, server, 15)
                assert await ask(client, server, query) == b""

    run(main)


def test_our_dht_answers_only_peers_that_introduced_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.daemon.run_dht.HELLO_TIMEOUT_S", 0.3)
    query = Message(type=Message.MessageType.GET_PROVIDERS, key=b"key")

    async def main() -> None:
        async with our_dht() as (server, _), our_host() as client:
            await connect(client, server)
            assert await ask(client, server, query) == b""
            assert await says_hello(client, server)
            assert await ask(client, server, query) != b""

    run(main)


def test_our_dht_is_not_everybodys() -> None:
    async def main() -> None:
        async with our_dht() as (server, _):
            protocols = [str(one) for one in server.get_mux().get_protocols()]
            assert "/ipfs/kad/1.0.0" not in protocols
            assert "/ipfs/id/1.0.0" not in protocols
            assert DHT_PROTOCOL in protocols

    run(main)


@pytest.mark.parametrize("kind", [ProviderStore, BoundedProviders])
def test_dead_providers_keep_the_living_out_only_of_the_bare_store(kind: type[ProviderStore]) -> None:
    class NoHost:
        def get_id(self) -> ID:
            return peer(0)

    store = kind(NoHost())
    where = [Multiaddr("/ip4/203.0.113.1/tcp/1")]
    for number in range(1, 31):
        store.add_provider(b"run", PeerInfo(peer(number), where))
    newcomer_is_in = peer(30) in [one.peer_id for one in store.get_providers(b"run")]
    assert newcomer_is_in is (kind is BoundedProviders)
    for number in range(MAX_PROVIDED_KEYS + 100):
        store.add_provider(number.to_bytes(4, "big"), PeerInfo(peer(1), where))
    assert (len(store.providers) > MAX_PROVIDED_KEYS) is (kind is ProviderStore)


def test_the_bare_lookup_stops_at_ones_own_record_and_ours_asks_the_others() -> None:
    async def main() -> None:
        async with our_dht() as (one_host, one), our_dht() as (other_host, other):
            await connect(one_host, other_host)
            assert await says_hello(one_host, other_host)
            for connection in one_host.swarm.get_connections():
                connection.muxed_conn.greet()
            where = [Multiaddr(address_of(other_host).endpoint)]
            one_host.get_peerstore().add_addrs(other_host.get_id(), where, 3600)
            await one.add_peer(other_host.get_id())
            other.provider_store.add_provider(b"run", PeerInfo(other_host.get_id(), where))
            await one.announce(b"run")
            bare = await one.provider_store.find_providers(b"run")
            assert [str(found.peer_id) for found in bare] == [str(one_host.get_id())]
            assert set(await one.find(b"run")) == {str(other_host.get_id())}

    run(main)
