"""Who dials whom between real engines, where only one side of a pair can be dialled."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import trio
from blake3 import blake3

from node.engine import api
from node.engine.switchboard import CALL_TIMEOUT_S
from tests.swarm.engine_lab import Lab, LabEngine, flat_round, lab

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


def test_a_peer_has_another_dial_it_only_so_often(tmp_path: Path) -> None:
    """A wish to be dialled names no address, but the record of who wishes does: it is no way to knock at a third one's
    door.
    """

    async def main() -> None:
        with trio.fail_after(60), trap() as victim:
            async with lab(tmp_path, 2) as swarm:
                engine, hostile = swarm.engines
                hostile.seen_port = victim.getsockname()[1]
                await swarm.introduce()
                for _ in range(100):
                    await engine.ask.call(peer_id=hostile.peer_id, token=bytes(32))
                await engine.ask.call(peer_id="12D3KooWNobody", token=bytes(32))
                met = trio.socket.from_stdlib_socket(victim)
                with trio.fail_after(5):
                    caller, _ = await met.accept()
                with caller, pytest.raises(BlockingIOError):
                    victim.accept()

    trio.run(main)
