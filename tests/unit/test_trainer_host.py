"""The daemon's side of the attach socket, with raw clients: bad frames, second trainers, and whose the vectors are."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio
import trio.testing

import node
from node.daemon.trainer_host import Attached, Detached, TrainerHost
from node.errors import OperatorError
from node.home import Home
from node.ipc import FrameStream
from node.trainer import wire

Client = FrameStream[wire.ToTrainer, wire.FromTrainer]
START = wire.RoundStart(
    round=4,
    state_hash=bytes(32),
    lease=(),
    budget_steps=5,
    schedule_step=20,
    tokens_total=0,
    validate=False,
    last=False,
)
WELCOME = wire.Welcome(
    run_id="00",
    peer_id="peer",
    manifest=b"{}",
    artifacts_directory="/a",
    trainer_directory="/t",
    device="cpu",
    threads=0,
    allow_functions=(),
    start=START,
)
CONTRIBUTION = wire.Contribution(round=4, steps=5, tokens=10, loss=1.0, ranges_done=(), units_wanted=1, made=10)
COMMITTED = wire.Committed(
    counted=(True,),
    part_elements=256,
    hard_reset=False,
    start=wire.RoundStart(
        round=5,
        state_hash=bytes(32),
        lease=(),
        budget_steps=5,
        schedule_step=25,
        tokens_total=0,
        validate=False,
        last=False,
    ),
)


class Served:
    """A host that is serving; `answer` is what its driver says to a new trainer."""

    def __init__(self, home: Home, host: TrainerHost) -> None:
        self.home = home
        self.host = host
        self.answer: wire.Welcome | wire.Waiting = WELCOME
        self.fds = os.memfd_create("theta"), os.memfd_create("delta")
        self.clients: list[Client] = []

    async def connect(self) -> Client:
        sock = trio.socket.socket(trio.socket.AF_UNIX)
        await sock.connect(str(self.home.attach_socket))
        self.clients.append(FrameStream(socket.socket(fileno=sock.detach()), wire.ToTrainer))
        return self.clients[-1]

    async def attach(self, *, name: str = "test", version: str = node.__version__) -> Client:
        client = await self.connect()
        await client.send(wire.Attach(version=version, pid=os.getpid(), layout_digest=None, name=name))
        return client

    async def welcomed(self) -> Client:
        client = await self.attach()
        assert await client.receive() == WELCOME
        assert isinstance(await self.host.events.receive(), Attached)
        return client

    async def loaded(self) -> Client:
        """Its model is built and holds θ."""
        client = await self.welcomed()
        assert not self.host.loaded
        await client.send(wire.Loaded(round=4, made=0, fresh=True, cause="start"))
        assert isinstance(await self.host.events.receive(), wire.Loaded)
        assert self.host.loaded
        return client


@contextlib.asynccontextmanager
async def serving(tmp_path: Path, **options: float) -> AsyncIterator[Served]:
    home = Home(tmp_path)
    served = Served(home, TrainerHost(home, **options))
    served.host.provide(lambda: served.answer, lambda: served.fds)
    try:
        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                await nursery.start(lambda task_status: served.host.run(task_status=task_status))
                yield served
                nursery.cancel_scope.cancel()
    finally:
        for client in served.clients:
            client.close()
        for fd in served.fds:
            os.close(fd)


def test_the_socket_is_private_and_goes_away_with_the_host(tmp_path: Path) -> None:
    async def main() -> None:
        path = Home(tmp_path).attach_socket
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("a dead daemon's")
        async with serving(tmp_path):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert not path.exists()

    trio.run(main)


def test_a_folder_that_is_not_ours_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "atoll").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(OperatorError, match="set XDG_RUNTIME_DIR"):
            await TrainerHost(Home(tmp_path)).run()
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / ("long" * 30)))
        with pytest.raises(OperatorError, match="longer than 107 bytes"):
            await TrainerHost(Home(tmp_path)).run()

    trio.run(main)


def test_a_trainer_is_welcomed_with_theta_and_delta(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
            client = await served.attach(name="mine")
            assert await client.receive() == WELCOME
            fds = client.take_fds()
            assert [os.fstat(fd).st_ino for fd in fds] == [os.fstat(fd).st_ino for fd in served.fds]
            for fd in fds:
                os.close(fd)
            event = await served.host.events.receive()
            assert event == Attached(name="mine", pid=os.getpid(), layout_digest=None, round=4)
            assert (served.host.attached, served.host.name, served.host.pid) == (True, "mine", os.getpid())
            client.close()
            event = await served.host.events.receive()
            assert isinstance(event, Detached)
            assert not event.failed
            assert (served.host.attached, served.host.name) == (False, None)

    trio.run(main)


def test_a_waiting_trainer_is_told_why_and_welcomed_when_the_state_is_there(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, keepalive_s=0.05) as served:
            served.answer = wire.Waiting(reason="downloading 3 of 9 chunks")
            client = await served.attach()
            assert await client.receive() == served.answer
            assert await client.receive() == served.answer, "repeated, so that it knows us alive"
            served.answer = wire.Waiting(reason="downloading 8 of 9 chunks")
            served.host.poke()
            while await client.receive() != served.answer:
                pass
            assert not served.host.attached
            served.answer = WELCOME
            served.host.poke()
            while await client.receive() != WELCOME:
                pass
            served.host.explain("waiting for 2 more peers")
            while await client.receive() != wire.Waiting(reason="waiting for 2 more peers"):
                pass

    trio.run(main)


@pytest.mark.parametrize("welcomed", [True, False])
def test_a_second_trainer_is_refused_and_the_first_stays(tmp_path: Path, welcomed: bool) -> None:
    async def main() -> None:
        async with serving(tmp_path, succession_s=0.05) as served:
            if not welcomed:
                served.answer = wire.Waiting(reason="not yet")
            first = await served.attach(name="first")
            await first.receive()
            second = await served.attach(name="second")
            refusal = await second.receive()
            assert isinstance(refusal, wire.Refused)
            assert f"'first', process {os.getpid()}" in refusal.reason
            with pytest.raises(trio.EndOfChannel):
                await second.receive()
            assert served.host.name == "first"

    trio.run(main)


def test_a_successor_waits_for_the_end_of_the_first(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, succession_s=10.0) as served:
            first = await served.welcomed()
            second = await served.attach(name="second")
            await trio.testing.wait_all_tasks_blocked(0.01)
            await first.send(wire.Goodbye(reason="it has finished"))
            assert await second.receive() == WELCOME
            assert served.host.name == "second"

    trio.run(main)


def test_another_version_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
            refusal = await (await served.attach(version="9.1.0")).receive()
            assert isinstance(refusal, wire.Refused)
            assert f"has version 9.1.0, this daemon {node.__version__}" in refusal.reason

    trio.run(main)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\xff\xff\xff\xff", "over the limit"),
        (b"\x03\x00\x00\x00abc", "does not decode"),
        (b"\x01\x00\x00\x00\xc1", "does not decode"),
    ],
)
def test_a_stranger_to_the_protocol_is_refused(tmp_path: Path, data: bytes, said: str) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
            client = await served.connect()
            await client._socket.send(data)
            refusal = await client.receive()
            assert isinstance(refusal, wire.Refused)
            assert said in refusal.reason
            await served.welcomed()

    trio.run(main)


def test_who_says_nothing_is_cut_off_and_connections_are_bounded(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, attach_timeout_s=0.1) as served:
            silent = [await served.connect() for _ in range(40)]
            refused = 0
            for client in silent:
                try:
                    refused += isinstance(await client.receive(), wire.Refused)
                except trio.EndOfChannel:
                    continue
            assert 1 <= refused < 40
            await served.welcomed()

    trio.run(main)


@pytest.mark.parametrize(
    ("frame", "said"),
    [
        (b"\x03\x00\x00\x00abc", "malformed frame"),
        (wire.Attach(version="0", pid=1, layout_digest=None, name=""), "attached twice"),
        (wire.Contribution(round=-1, steps=0, tokens=0, loss=None, ranges_done=(), units_wanted=0, made=0), "round -1"),
        (
            wire.Contribution(
                round=4,
                steps=0,
                tokens=0,
                loss=None,
                ranges_done=(wire.Lease(epoch=0, start=9, stop=2),),
                units_wanted=0,
                made=0,
            ),
            "range",
        ),
        (wire.TrainerFailed(reason="out of memory: buy some"), "out of memory: buy some"),
    ],
)
def test_a_trainer_that_breaks_the_protocol_is_detached_with_a_reason(
    tmp_path: Path, frame: bytes | wire.FromTrainer, said: str
) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
            client = await served.welcomed()
            if isinstance(frame, bytes):
                await client._socket.send(frame)
            else:
                await client.send(frame)
            goodbye = await client.receive()
            assert isinstance(goodbye, wire.Goodbye)
            event = await served.host.events.receive()
            assert isinstance(event, Detached)
            assert event.failed
            assert said in event.reason
            await served.welcomed()

    trio.run(main)


def test_work_before_the_welcome_is_a_fault(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
            served.answer = wire.Waiting(reason="not yet")
            client = await served.attach()
            await client.receive()
            await client.send(CONTRIBUTION)
            event = await served.host.events.receive()
            assert isinstance(event, Detached)
            assert "before it was welcomed" in event.reason

    trio.run(main)


def test_the_vectors_change_hands_with_contribution_and_committed(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
            host = served.host
            assert host.vectors_free
            client = await served.welcomed()
            assert not host.vectors_free
            await host.freeze(4, 3.0)
            assert await client.receive() == wire.Freeze(round=4, within_s=3.0)
            await client.send(CONTRIBUTION)
            assert await host.events.receive() == CONTRIBUTION
            assert host.vectors_free
            await host.freeze(4, 3.0)  # it is handed over already: nothing to ask for
            await host.committed(COMMITTED)
            assert await client.receive() == COMMITTED
            assert not host.vectors_free
            # One of a round that is over says nothing about the vectors.
            await client.send(CONTRIBUTION)
            await client.send(wire.Loaded(round=5, made=10))
            assert await host.events.receive() == wire.Loaded(round=5, made=10)
            assert not host.vectors_free

    trio.run(main)


def test_hold_waits_for_the_contribution(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
            assert not await served.host.hold(4, 1.0), "nobody is attached"
            client = await served.loaded()

            async def contribute() -> None:
                assert isinstance(await client.receive(), wire.Freeze)
                await client.send(CONTRIBUTION)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(contribute)
                assert await served.host.hold(4, 10.0)
            assert served.host.attached

    trio.run(main)


def test_hold_cuts_off_who_does_not_hand_over(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
            client = await served.loaded()
            assert not await served.host.hold(4, 0.05)
            assert not served.host.attached
            assert isinstance(await client.receive(), wire.Freeze)
            goodbye = await client.receive()
            assert isinstance(goodbye, wire.Goodbye)
            assert "did not hand over its work of round 4" in goodbye.reason
            await served.host.committed(COMMITTED)  # reaches nobody, which is fine

    trio.run(main)


def test_a_commit_does_not_wait_for_a_trainer_that_builds_its_model(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
            client = await served.welcomed()
            with trio.fail_after(2.0):
                assert not await served.host.hold(4, 3600.0)
            assert isinstance(await client.receive(), wire.Freeze)
            goodbye = await client.receive()
            assert goodbye == wire.Goodbye(reason="round 4 was committed while it built its model")

    trio.run(main)


def test_a_chatty_trainer_never_blocks_on_a_driver_that_does_not_listen(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
            client = await served.welcomed()
            for steps in range(1000):
                await client.send(
                    wire.Progress(
                        round=4, steps=steps, tokens=steps, loss=None, tokens_per_s=1.0, step_s=1.0, made=steps
                    )
                )
            await client.send(CONTRIBUTION)
            assert await served.host.hold(4, 10.0)
            assert served.host.progress is not None
            assert served.host.progress.steps == 999

    trio.run(main)


def test_a_trainer_that_does_not_read_is_cut_off(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, send_timeout_s=0.1) as served:
            client = await served.welcomed()
            while served.host.attached:
                await served.host.committed(COMMITTED)
            event = await served.host.events.receive()
            assert isinstance(event, Detached)
            assert "did not read" in event.reason
            client.close()

    trio.run(main)


def test_the_daemon_does_not_pay_for_pytorch() -> None:
    program = "import sys, node.daemon.trainer_host; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=30, check=False).returncode == 0
