"""Strangers on the data port: the exchange goes on, memory stays flat, and a real peer still gets in."""

from __future__ import annotations

import os
import random
import ssl
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
import pytest
import trio

from node.engine import handshake, tls
from node.engine.frames import AskMeta, DownMeta, Header, Kind, UpMeta
from node.engine.switchboard import MAX_LANES_PER_LINK
from tests.swarm.engine_lab import LabEngine, Sizes, flat_round, lab
from tests.swarm.test_engine_downloads import put_artifact
from tests.swarm.test_engine_faults import Liar

pytestmark = [pytest.mark.slow, pytest.mark.swarm]

CONNECTIONS = 300
GROWTH_LIMIT_BYTES = 40 << 20


async def throw_garbage(port: int) -> None:
    """Random bytes, at once and slowly; a lone TLS hello; nothing at all; a TLS session with a false hello."""
    streams = []
    for number in range(CONNECTIONS):
        try:
            stream = await trio.open_tcp_stream("127.0.0.1", port)
        except OSError:
            continue
        streams.append(stream)
        try:
            match number % 4:
                case 0:
                    await stream.send_all(os.urandom(4096))
                case 1:
                    await stream.send_all(b"\x16\x03\x01\xff\xff" + os.urandom(64))
                case 2:
                    pass
                case 3:
                    await false_hello(stream)
        except (trio.BrokenResourceError, ssl.SSLError, OSError):
            continue
    for stream in streams:
        await trio.aclose_forcefully(stream)


async def false_hello(tcp: trio.SocketStream) -> None:
    with trio.move_on_after(0.5):
        stream = trio.SSLStream(tcp, tls.client_context(), https_compatible=True)
        await stream.send_all(b"ATL1\x00\xff\xff\xff" + os.urandom(96))
        await stream.receive_some(1)


def own_memory(engine: LabEngine) -> int:
    return engine.resident()[0]


def test_floods_on_every_data_port(tmp_path: Path) -> None:
    async def main() -> None:
        sizes = Sizes(elements=1_000_000, buffer_elements=0, part_elements=8192)
        rng = np.random.default_rng(0)
        with trio.fail_after(120):
            async with lab(tmp_path, 3, sizes) as swarm:
                await swarm.load_initial(rng.standard_normal(sizes.elements).astype(np.float32))

                async def turn(number: int) -> None:
                    one = flat_round(swarm, number, duration_s=40.0)
                    for engine in one.engines:
                        engine.delta[:] = rng.standard_normal(sizes.elements).astype(np.float32)
                    await one.start()
                    refs = await one.finish()
                    assert all(ref is not None and ref.bitmap == (1 << len(one.engines)) - 1 for ref in refs)
                    assert len({answer.state_hash for answer in await one.apply(refs)}) == 1

                await turn(0)
                await turn(1)
                before = [own_memory(engine) for engine in swarm.engines]
                async with trio.open_nursery() as nursery:
                    for engine in swarm.engines:
                        nursery.start_soon(throw_garbage, engine.port)
                    await turn(2)
                await turn(3)
                for engine, bytes_before in zip(swarm.engines, before, strict=True):
                    assert own_memory(engine) - bytes_before < GROWTH_LIMIT_BYTES
                    dropped = (await engine.ask.inventory()).dropped
                    assert any("does not begin with TLS" in reason for reason in dropped)
                    assert any("token" in reason or "not ours" in reason for reason in dropped)
                # Someone new can come while half-open connections stand.
                hanging = [await trio.open_tcp_stream("127.0.0.1", swarm.engines[0].port) for _ in range(100)]
                joiner = await swarm.add()
                data = b"artifact" * 1000
                artifact = put_artifact(swarm.engines[0], data)
                await joiner.ask.fetch_artifact(
                    hash=artifact, length=len(data), sources=(swarm.engines[0].peer_id,), timeout_s=20
                )
                for stream in hanging:
                    await trio.aclose_forcefully(stream)

    trio.run(main)


def test_a_member_with_absurd_lengths_loses_its_connection_only(tmp_path: Path) -> None:
    async def main() -> None:
        with trio.fail_after(60):
            async with lab(tmp_path, 2) as swarm:
                target, liar = swarm.engines
                before = own_memory(target)
                for number in range(20):
                    stream = await Liar(swarm, liar).dial(target, token=bytes([number] * 32))
                    header = bytearray(Header(kind=Kind.UP, id=bytes(32)).pack())
                    header[8:12] = (0xFFFFFFF0).to_bytes(4, "little")
                    # The end of the stream, or a reset: the engine hung up.
                    with suppress(trio.BrokenResourceError):
                        await stream.send_all(bytes(header) + bytes(100_000))
                        while await stream.receive_some(4096):
                            pass
                    await trio.aclose_forcefully(stream.transport_stream)
                dropped = (await target.ask.inventory()).dropped
                assert sum(count for reason, count in dropped.items() if "over the limit" in reason) == 20
                # Well within the frame limit, but for a roster that nobody knows: read past, never buffered.
                stream = await Liar(swarm, liar).dial(target, token=bytes([99] * 32))
                header = bytearray(Header(kind=Kind.UP, id=bytes(32), payload_bytes=1 << 27).pack())
                await stream.send_all(bytes(header))
                for _ in range(128):
                    await stream.send_all(bytes(1 << 20))
                assert own_memory(target) - before < GROWTH_LIMIT_BYTES
                await trio.aclose_forcefully(stream.transport_stream)

    trio.run(main)


def test_a_token_is_good_once_and_a_certificate_must_be_the_named_one(tmp_path: Path) -> None:
    async def main() -> None:
        with trio.fail_after(60):
            async with lab(tmp_path, 2) as swarm:
                target, liar = swarm.engines
                first = await Liar(swarm, liar).dial(target, token=bytes(32))
                again = {
                    "peer_id": liar.peer_id,
                    "certificate_sha256": target.certificate[2],
                    "token": bytes(32),
                    "lane": 0,
                    "lanes": 1,
                }
                address = f"127.0.0.1:{target.port}"
                with pytest.raises(handshake.HandshakeFailed, match="refused our token"):
                    await handshake.dial(address, **again)  # type: ignore[arg-type]
                with pytest.raises(handshake.HandshakeFailed, match="another certificate"):
                    await handshake.dial(address, **(again | {"certificate_sha256": bytes(32)}))  # type: ignore[arg-type]
                await target.ask.accept_token(peer_id=target.peer_id, token=bytes([1] * 32), expires_s=5)
                with pytest.raises(handshake.HandshakeFailed, match="refused our token"):
                    await handshake.dial(address, **(again | {"token": bytes([1] * 32)}))  # type: ignore[arg-type]
                await trio.aclose_forcefully(first.transport_stream)

    trio.run(main)


def test_a_link_has_so_many_lanes_and_no_more(tmp_path: Path) -> None:
    async def main() -> None:
        with trio.fail_after(60):
            async with lab(tmp_path, 2) as swarm:
                target, liar = swarm.engines
                streams = []
                for number in range(3 * MAX_LANES_PER_LINK // 2):
                    streams.append(await Liar(swarm, liar).dial(target, token=bytes([number]) * 32))
                assert (await target.ask.inventory()).connections <= MAX_LANES_PER_LINK
                for stream in streams:
                    await trio.aclose_forcefully(stream.transport_stream)

    trio.run(main)


def test_a_member_that_sends_nonsense_in_well_formed_frames_stops_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        rng = random.Random(3)
        sizes = Sizes(elements=16 * 1024, buffer_elements=0, part_elements=1024)
        with trio.fail_after(90):
            async with lab(tmp_path, 3, sizes) as swarm:
                await swarm.load_initial(np.zeros(sizes.elements, np.float32))
                turn = flat_round(swarm, 0, progress_s=4.0)
                target, other, liar = turn.engines
                for engine in turn.engines:
                    engine.delta[:] = np.float32(0.5)
                requests = turn.requests(await turn.encode())
                liar.kill()
                for engine, request in zip((target, other), requests, strict=False):
                    await engine.ask.exchange(request)
                for number in range(150):
                    stream = await Liar(swarm, liar).dial(target, token=number.to_bytes(32, "big"))
                    with suppress(trio.BrokenResourceError):
                        for _ in range(8):
                            await stream.send_all(nonsense(rng, turn.roster_id, sizes.part_count))
                    await trio.aclose_forcefully(stream.transport_stream)
                refs = await turn.finish((target, other))
                assert {ref.bitmap for ref in refs if ref is not None} == {0b011}
                assert target.process is not None
                assert target.process.poll() is None
                assert sum((await target.ask.inventory()).dropped.values()) > 100

    trio.run(main)


def nonsense(rng: random.Random, roster_id: bytes, part_count: int) -> bytes:
    kind = rng.choice(list(Kind))
    metas = (
        UpMeta(rng.randbytes(rng.choice((0, 1, 40))), rng.randbytes(rng.choice((0, 64)))),
        DownMeta("12D3KooW" + "x" * rng.randrange(60), rng.randbytes(rng.randrange(100)), rng.randbytes(64)),
        AskMeta(rng.randrange(7), rng.choice((0, -1, 2**40, 2**62)), rng.choice((0, -5, 2**63 - 1))),
    )
    meta = rng.choice((*map(msgspec.msgpack.encode, metas), b"", rng.randbytes(30)))
    payload = rng.randbytes(rng.choice((0, 1, 4, 1040, 5000)))
    header = Header(
        kind=kind,
        id=rng.choice((roster_id, rng.randbytes(32))),
        part=rng.choice((0, 3, part_count, 2**32 - 1)),
        slot=rng.choice((0, 2, 65_535)),
        meta_bytes=len(meta),
        payload_bytes=len(payload),
    )
    return header.pack() + meta + payload
