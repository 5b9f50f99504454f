"""Who dials whom between real engines, where only one side of a pair can be dialled."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import trio
from blake3 import blake3

from node.daemon.engine_client import EngineFailed
from node.engine import api
from node.engine.dialling import CALL_TIMEOUT_S
from tests.swarm.engine_lab import Lab, LabEngine, Proxy, flat_round, lab

pytestmark = [pytest.mark.slow, pytest.mark.swarm]


@contextlib.contextmanager
def trap() -> Iterator[socket.socket]:
    """Where a router swallows what is dialled: connections are taken by the kernel, and nobody answers."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        sock.setblocking(False)
        yield sock


def assert_nobody_came(sock: socket.socket) -> None:
    with pytest.raises(BlockingIOError):
        sock.accept()


async def hide(swarm: Lab, engine: LabEngine, behind: socket.socket) -> None:
    """It says an address at which nobody reaches it."""
    engine.dialable, engine.seen_port = False, behind.getsockname()[1]
    await swarm.introduce()


@pytest.mark.parametrize("hidden_number", [0, 1, 2])
def test_in_a_round_only_who_can_be_dialled_is_dialled(tmp_path: Path, hidden_number: int) -> None:
    """Whatever the order of the peer ids, which decides between two that can both be dialled."""

    async def main() -> None:
        with trio.fail_after(60), trap() as router:
            async with lab(tmp_path, 3) as swarm:
                hidden = sorted(swarm.engines, key=lambda engine: engine.peer_id)[hidden_number]
                await hide(swarm, hidden, router)
                await swarm.load_initial(np.zeros(swarm.sizes.elements, np.float32))
                turn = flat_round(swarm, 0)
                await turn.start()
                refs = await turn.finish()
                assert {ref.bitmap for ref in refs if ref is not None} == {0b111}
                assert all(refs)
                assert not any(engine.ended[turn.roster_id].failed_edges for engine in swarm.engines)
                assert_nobody_came(router)

    trio.run(main)


def test_who_wants_something_of_one_that_cannot_be_dialled_asks_to_be_dialled(tmp_path: Path) -> None:
    async def main() -> None:
        data = np.random.default_rng(1).bytes(3_000_000)
        with trio.fail_after(60), trap() as router:
            async with lab(tmp_path, 2) as swarm:
                reachable, hidden = swarm.engines
                await hide(swarm, hidden, router)
                artifact = blake3(data).digest()
                (hidden.directory / "artifacts" / artifact.hex()).write_bytes(data)
                await reachable.ask.fetch_artifact(
                    hash=artifact, length=len(data), sources=(hidden.peer_id,), timeout_s=20
                )
                assert swarm.calls == [(reachable.peer_id, hidden.peer_id)]
                assert_nobody_came(router)

    trio.run(main)


def test_two_that_each_leave_the_dialling_to_the_other_meet(tmp_path: Path) -> None:
    """What they know of each other is a guess at first."""

    async def main() -> None:
        with trio.fail_after(60):
            async with lab(tmp_path, 2) as swarm:
                for engine, other in (swarm.engines, reversed(swarm.engines)):
                    peer = api.Peer(
                        peer_id=other.peer_id,
                        addresses=(f"127.0.0.1:{other.port}",),
                        certificate_sha256=other.certificate[2],
                        dialable=False,
                    )
                    await engine.ask.set_peers((peer,))
                await swarm.load_initial(np.zeros(swarm.sizes.elements, np.float32))
                turn = flat_round(swarm, 0, duration_s=CALL_TIMEOUT_S / 2)
                await turn.start()
                refs = await turn.finish()
                assert {ref.bitmap for ref in refs if ref is not None} == {0b11}
                assert all(refs)

    trio.run(main)


async def fetch(engine: LabEngine, source: LabEngine, data: bytes, *, timeout_s: float = 30.0) -> None:
    artifact = blake3(data).digest()
    (source.directory / "artifacts" / artifact.hex()).write_bytes(data)
    await engine.ask.fetch_artifact(hash=artifact, length=len(data), sources=(source.peer_id,), timeout_s=timeout_s)
    assert (engine.directory / "artifacts" / artifact.hex()).read_bytes() == data


def test_two_that_nobody_can_dial_are_joined_by_a_volunteer(tmp_path: Path) -> None:
    """In a round, and for a download. All that the volunteer sees is ciphertext."""

    class Wire(Proxy):
        seen = bytearray()

        def saw(self, data: bytes) -> None:
            self.seen += data

    async def main() -> None:
        with trio.fail_after(60), trap() as router:
            async with lab(tmp_path, 3, relay_bytes_s=50_000_000) as swarm, trio.open_nursery() as nursery:
                volunteer, left, right = swarm.engines
                wire = Wire()
                await nursery.start(wire.run)
                wire.target_port, volunteer.seen_port = volunteer.port, wire.port
                swarm.volunteers = [volunteer]
                await hide(swarm, left, router)
                await hide(swarm, right, router)
                await swarm.load_initial(np.zeros(swarm.sizes.elements, np.float32))
                turn = flat_round(swarm, 0)
                await turn.start()
                refs = await turn.finish()
                assert {ref.bitmap for ref in refs if ref is not None} == {0b111}
                assert all(refs)
                assert_nobody_came(router)
                before = (await volunteer.ask.inventory()).relayed_bytes
                assert before > 0
                text = b"what the volunteer must not read" * 50_000
                await fetch(left, right, text)
                inventory = await volunteer.ask.inventory()
                assert inventory.relayed_bytes - before > len(text)
                assert inventory.relayed_pairs == 1
                assert len(wire.seen) > inventory.relayed_bytes, "it saw all of it, on its way in and out"
                assert text[:32] not in wire.seen
                nursery.cancel_scope.cancel()

    trio.run(main)


def test_when_a_volunteer_dies_another_one_is_taken(tmp_path: Path) -> None:
    async def main() -> None:
        data = np.random.default_rng(1).bytes(8_000_000)
        with trio.fail_after(90), trap() as router:
            async with lab(tmp_path, 4, relay_bytes_s=2_000_000) as swarm:
                first, second, left, right = swarm.engines
                swarm.volunteers = [first, second]
                await hide(swarm, left, router)
                await hide(swarm, right, router)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(partial(fetch, left, right, data, timeout_s=60))
                    while (await first.ask.inventory()).relayed_bytes < 1_000_000:  # noqa: ASYNC110 - it tells nobody
                        await trio.sleep(0.05)
                    first.kill()
                assert (await second.ask.inventory()).relayed_bytes > 1_000_000
                assert_nobody_came(router)

    trio.run(main)


def test_a_volunteer_keeps_to_its_rate(tmp_path: Path) -> None:
    async def main() -> None:
        rate_bytes_s, size = 2_000_000, 4_000_000
        with trio.fail_after(60), trap() as router:
            async with lab(tmp_path, 3, relay_bytes_s=rate_bytes_s) as swarm:
                volunteer, left, right = swarm.engines
                swarm.volunteers = [volunteer]
                await hide(swarm, left, router)
                await hide(swarm, right, router)
                started_s = trio.current_time()
                await fetch(left, right, np.random.default_rng(1).bytes(size))
                assert trio.current_time() - started_s > 0.9 * size / rate_bytes_s

    trio.run(main)


def test_a_pair_without_a_volunteer_is_told_why(tmp_path: Path) -> None:
    async def main() -> None:
        with trio.fail_after(60), trap() as router:
            async with lab(tmp_path, 3) as swarm:  # nobody passes anything on
                volunteer, left, right = swarm.engines
                swarm.volunteers = [volunteer]
                await hide(swarm, left, router)
                await hide(swarm, right, router)
                with pytest.raises(EngineFailed, match="cannot be reached"):
                    await fetch(left, right, b"in vain", timeout_s=15)
                with pytest.raises(EngineFailed, match="passes nothing on for others"):
                    await volunteer.ask.open_splice(first=left.peer_id, second=right.peer_id, lanes=2)

    trio.run(main)


def test_a_peer_has_another_dial_it_only_so_often(tmp_path: Path) -> None:
    """What is dialled is the host that its control connection leads to, at a port of its record."""

    async def main() -> None:
        with trio.fail_after(60), trap() as victim:
            async with lab(tmp_path, 2) as swarm:
                engine, hostile = swarm.engines
                hostile.seen_port = victim.getsockname()[1]
                await swarm.introduce()
                await engine.ask.call(peer_id="12D3KooWNobody", token=bytes(32), host="127.0.0.1")
                for _ in range(100):
                    await engine.ask.call(peer_id=hostile.peer_id, token=bytes(32), host="127.0.0.1")
                met = trio.socket.from_stdlib_socket(victim)
                with trio.fail_after(5):
                    caller, _ = await met.accept()
                with caller, pytest.raises(BlockingIOError):
                    victim.accept()

    trio.run(main)
