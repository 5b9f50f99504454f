"""The engine's side of hivemind's averager, with a program in its place that says and ends as it is told to."""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio

from node.engine.geometry import Geometry
from node.engine.hivemind.process import AveragerGone, AveragerProcess, AveragerSettings
from node.engine.hivemind.words import Begin, Delivered, Exclude
from protocol.codecs import codec

pytestmark = pytest.mark.slow

STAND_IN = """#!{python}
import json, os, socket, sys
told = json.loads(sys.argv[-1])
sock = socket.socket(fileno=told["socket_fd"])
def say(event, **fields):
    sock.sendall(json.dumps({{"event": event}} | fields).encode() + b"\\n")
{first}
for line in sock.makefile():
    said = json.loads(line)
    if said["op"] == "begin":
        say("begun", roster=said["roster"])
        say("delivered", roster=said["roster"], sender=0, part=3)
    elif said["op"] == "stop":
        say("ended", roster=said["roster"], why="it was stopped", bytes_sent=1, bytes_received=2)
    elif said["op"] == "exclude":
        os._exit(7)
"""
LISTENING = 'say("listening", peer="id%d" % os.getpid(), port=4003)'


def averager(folder: Path, first: str = LISTENING) -> AveragerProcess:
    program = folder / "stand-in"
    program.write_text(STAND_IN.format(python=sys.executable, first=first))
    program.chmod(0o755)
    geometry = Geometry(
        elements=1024,
        buffer_elements=0,
        part_elements=256,
        codec=codec("fp16"),
        sum_codec=codec("sum16"),
        momentum=0.9,
    )
    settings = AveragerSettings(python=str(program), host="127.0.0.1", port=0, directory=folder / "sockets")
    return AveragerProcess(settings, geometry)


def with_one(folder: Path, work: Callable[[AveragerProcess], Awaitable[None]], first: str = LISTENING) -> None:
    async def main() -> None:
        one = averager(folder, first)
        with trio.fail_after(60):
            one.start()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(one.run)
                await work(one)
                nursery.cancel_scope.cancel()
        one.close()
        assert one.pid is None
        assert one.contact is None

    trio.run(main)
    assert not (folder / "sockets").exists()


def begin(roster: str) -> Begin:
    return Begin(
        roster=roster, names=("a",), me=0, owners=(0,) * 4, weights=(), largest=(1.0,), sender_timeout_s=1, deadline_s=1
    )


def test_one_roster_after_another(tmp_path: Path) -> None:
    async def work(one: AveragerProcess) -> None:
        await one.ready()
        assert one.contact is not None
        assert one.contact.port == 4003
        for roster in ("ab", "cd"):
            async with one.turn(roster, within_s=5) as turn:
                await one.begin(turn, begin(roster))
                assert isinstance(await turn.events.receive(), Delivered)
            assert turn.is_over

    with_one(tmp_path, work)


def test_the_next_roster_takes_the_turn_away(tmp_path: Path) -> None:
    async def work(one: AveragerProcess) -> None:
        await one.ready()
        begun, ended = trio.Event(), trio.Event()

        async def first() -> None:
            async with one.turn("ab", within_s=5) as turn:
                await one.begin(turn, begin("ab"))
                begun.set()
                await trio.sleep_forever()
            ended.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(first)
            await begun.wait()
            async with one.turn("cd", within_s=5) as turn:
                assert ended.is_set()
                await one.begin(turn, begin("cd"))

    with_one(tmp_path, work)


def test_one_that_dies_ends_its_roster_and_is_started_again(tmp_path: Path) -> None:
    async def work(one: AveragerProcess) -> None:
        await one.ready()
        before = one.contact
        async with one.turn("ab", within_s=5) as turn:
            await one.begin(turn, begin("ab"))
            await turn.tell(Exclude(roster="ab", sender=0))  # this stand-in dies of it
            async for event in turn.events:
                assert isinstance(event, Delivered)
        async with one.turn("cd", within_s=30) as turn:
            await one.begin(turn, begin("cd"))
            assert one.contact != before

    with_one(tmp_path, work)


def test_one_that_cannot_start_is_told_with_its_own_words(tmp_path: Path) -> None:
    async def work(one: AveragerProcess) -> None:
        with pytest.raises(AveragerGone, match="does not start: hivemind's p2pd cannot start: no port"):
            await one.ready()

    with_one(tmp_path, work, 'say("failed", why="hivemind\'s p2pd cannot start: no port"); sys.exit(0)')


def test_hivemind_has_no_codec_like_int4(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="hivemind has no codec like 'int4'"):
        AveragerProcess(
            AveragerSettings(python="", host="", port=0, directory=tmp_path),
            Geometry(
                elements=256,
                buffer_elements=0,
                part_elements=256,
                codec=codec("int4"),
                sum_codec=codec("sum16"),
                momentum=0.9,
            ),
        )
    assert os.listdir(tmp_path) == []
