"""TLS over real TCP on loopback: what is sent arrives, in whatever pieces the network delivers it."""

from __future__ import annotations

import random
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import trio

from node.daemon.identity import Identity, create_data_certificate
from node.engine import tls
from node.engine.tls_stream import LEAST_BATCH_BYTES, READ_BYTES, Batch, TlsStream

DEADLINE_S = 20.0
CERTIFICATE = create_data_certificate(Identity.generate().peer_id)


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        with trio.fail_after(DEADLINE_S):
            await main()

    trio.run(bounded)


@asynccontextmanager
async def tcp_pair() -> AsyncIterator[tuple[trio.SocketStream, trio.SocketStream]]:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener:
        one = await trio.open_tcp_stream("127.0.0.1", listener.socket.getsockname()[1])
        other = await listener.accept()
        try:
            yield one, other
        finally:
            await trio.aclose_forcefully(one)
            await trio.aclose_forcefully(other)


@asynccontextmanager
async def tls_over(
    client_tcp: trio.SocketStream, server_tcp: trio.SocketStream
) -> AsyncIterator[tuple[TlsStream, TlsStream]]:
    client = TlsStream(client_tcp, tls.client_context())
    server = TlsStream(
        server_tcp, tls.server_context(CERTIFICATE.certificate_pem, CERTIFICATE.key_pem), server_side=True
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.do_handshake)
        nursery.start_soon(server.do_handshake)
    yield client, server


@asynccontextmanager
async def tls_pair() -> AsyncIterator[tuple[TlsStream, TlsStream]]:
    async with tcp_pair() as pair, tls_over(*pair) as streams:
        yield streams


def test_both_prove_what_they_speak() -> None:
    async def main() -> None:
        async with tls_pair() as (client, server):
            assert client.protocol == server.protocol == tls.ALPN
            assert client.peer_certificate() is not None
            assert server.peer_certificate() is None

    run(main)


def test_bulk_in_both_directions_at_once() -> None:
    async def main() -> None:
        draw = random.Random(7)
        there, back = ([draw.randbytes(draw.randrange(1, 900_000)) for _ in range(12)] for _ in range(2))

        async def send(stream: TlsStream, frames: list[bytes]) -> None:
            for frame in frames:
                await stream.send_all(frame[:48], frame[48:])

        async def receive(stream: TlsStream, frames: list[bytes]) -> None:
            for frame in frames:
                assert await stream.receive_exactly(len(frame)) == frame

        async with tls_pair() as (client, server), trio.open_nursery() as nursery:
            nursery.start_soon(send, client, there)
            nursery.start_soon(send, server, back)
            nursery.start_soon(receive, server, there)
            nursery.start_soon(receive, client, back)

    run(main)


@pytest.mark.parametrize("piece_bytes", [7, 100, 1460, 9000])
def test_nothing_waits_for_bytes_that_will_not_come(piece_bytes: int) -> None:
    """A frame ends in the middle of records and packets; what OpenSSL has taken already comes from nowhere again."""

    async def main() -> None:
        async with tcp_pair() as (near, far), tcp_pair() as (near_2, far_2):
            size = 70_000 if piece_bytes > 7 else 18_000

            async def trickle(source: trio.SocketStream, sink: trio.SocketStream) -> None:
                async for data in source:
                    for start in range(0, len(data), piece_bytes):
                        await sink.send_all(data[start : start + piece_bytes])
                        await trio.lowlevel.checkpoint()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(trickle, far, near_2)
                nursery.start_soon(trickle, near_2, far)
                async with tls_over(near, far_2) as (client, server):
                    for number in range(3):
                        frame = bytes([number]) * (size + number)
                        nursery.start_soon(client.send_all, frame)
                        # The next frame is sent only when this one has arrived.
                        assert await server.receive_exactly(len(frame)) == frame
                nursery.cancel_scope.cancel()

    run(main)


def test_the_end_is_told_and_what_came_before_it_is_not_lost() -> None:
    async def main() -> None:
        async with tls_pair() as (client, server):
            await client.send_all(b"last words")
            await trio.aclose_forcefully(client.transport_stream)
            assert await server.receive_exactly(10) == b"last words"
            assert await server.receive_some(1) == b""
            with pytest.raises(trio.EndOfChannel):
                await server.receive_exactly(1)

    run(main)


def test_a_changed_byte_is_noticed() -> None:
    async def main() -> None:
        async with tcp_pair() as (near, far), tcp_pair() as (near_2, far_2):

            async def pass_on(source: trio.SocketStream, sink: trio.SocketStream) -> None:
                async for data in source:
                    await sink.send_all(data if not spoil else data[:-1] + bytes([data[-1] ^ 1]))

            spoil = False
            async with trio.open_nursery() as nursery:
                nursery.start_soon(pass_on, far, near_2)
                nursery.start_soon(pass_on, near_2, far)
                async with tls_over(near, far_2) as (client, server):
                    spoil = True
                    await client.send_all(b"a part")
                    with pytest.raises(ssl.SSLError):
                        await server.receive_exactly(6)
                nursery.cancel_scope.cancel()

    run(main)


def test_a_reader_waits_for_more_on_a_fast_line_and_for_little_on_a_slow_one() -> None:
    async def main() -> None:
        async with tcp_pair() as (sender, receiver):
            batch = Batch(receiver.socket)
            buffer = memoryview(bytearray(READ_BYTES))

            def told() -> int:
                return receiver.socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(sender.send_all, bytes(8 << 20))
                left = 8 << 20
                highest = 0
                while left:
                    left -= await batch.receive(buffer, left)
                    highest = max(highest, told())
                assert highest > 8 * LEAST_BATCH_BYTES

            async def slowly() -> None:
                while True:
                    await sender.send_all(bytes(1000))
                    await trio.sleep(0.01)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(slowly)
                while told() > 8 * LEAST_BATCH_BYTES:
                    await batch.receive(buffer, 1 << 20)
                nursery.cancel_scope.cancel()

    run(main)
