"""Large answers to joiners: by turns, a few at a time, one while an exchange goes on, none for who does not read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import cast

import pytest
import trio
import trio.testing

from node.engine.drops import Drops
from node.engine.frames import Kind
from node.engine.link import Buffer, Link, Outgoing
from node.engine.serving import (
    LOOK_AGAIN_S,
    SERVED_AT_ONCE,
    SERVED_AT_ONCE_IN_EXCHANGE,
    SERVED_PER_LINK,
    TURN_S,
    Serving,
)
from protocol.names import ZERO_DIGEST


class Reader:
    """A link whose peer takes what it is sent when the test says so."""

    def __init__(self, peer_id: str) -> None:
        self.peer_id = peer_id
        self.closed = False
        self.given: list[Outgoing] = []

    def send(self, frame: Outgoing, *, later: bool = False) -> None:
        assert later, "answers give way to rounds"
        self.given.append(frame)

    def take(self) -> None:
        sent = self.given.pop(0).sent
        assert sent is not None
        sent()


async def _nothing() -> tuple[bytes, Buffer] | None:
    return None


class Bench:
    def __init__(self) -> None:
        self.exchanging = False
        self.dropped = Drops()
        self.serving = Serving(exchanging=lambda: self.exchanging, dropped=self.dropped)

    def ask(self, reader: Reader, count: int) -> None:
        for number in range(count):
            answer = Outgoing(kind=Kind.ANSWER, id=ZERO_DIGEST, part=number, load=_nothing)
            self.serving.put(cast(Link, reader), answer)


def run(story: Callable[[Bench], object]) -> None:
    async def main() -> None:
        bench = Bench()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(bench.serving.run)
            await story(bench)  # type: ignore[misc]
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


async def moved() -> None:
    await trio.sleep(2 * LOOK_AGAIN_S)


def test_everybody_gets_a_turn() -> None:
    async def story(bench: Bench) -> None:
        readers = [Reader(f"r{number}") for number in range(3)]
        for reader in readers:
            bench.ask(reader, 10)
        await moved()
        assert [len(reader.given) for reader in readers] == [SERVED_PER_LINK] * 3
        for _ in range(10):
            for reader in readers:
                reader.take()
            await moved()
        assert bench.serving.waiting == 0
        assert all(not reader.given for reader in readers)

    run(story)


def test_no_more_than_a_few_are_under_way_and_one_in_an_exchange() -> None:
    async def story(bench: Bench) -> None:
        bench.exchanging = True
        readers = [Reader(f"r{number}") for number in range(3 * SERVED_AT_ONCE)]
        for reader in readers:
            bench.ask(reader, 2)
        await moved()
        assert sum(len(reader.given) for reader in readers) == SERVED_AT_ONCE_IN_EXCHANGE
        next(reader for reader in readers if reader.given).take()
        await moved()
        assert sum(len(reader.given) for reader in readers) == SERVED_AT_ONCE_IN_EXCHANGE
        bench.exchanging = False
        await moved()
        assert sum(len(reader.given) for reader in readers) == SERVED_AT_ONCE

    run(story)


def test_who_does_not_read_holds_up_nobody() -> None:
    async def story(bench: Bench) -> None:
        stuck = [Reader(f"stuck{number}") for number in range(SERVED_AT_ONCE // SERVED_PER_LINK)]
        for reader in stuck:
            bench.ask(reader, 10)
        await moved()
        honest = Reader("honest")
        bench.ask(honest, 3)
        await moved()
        assert not honest.given, "all places are taken"
        await trio.sleep(TURN_S)
        assert len(honest.given) == SERVED_PER_LINK
        honest.take()
        await moved()
        assert all(len(reader.given) == SERVED_PER_LINK for reader in stuck), "they get no more before they have read"
        stuck[0].take()
        assert bench.dropped + Counter() == {"a download that was read too slowly to wait for": 1}

    run(story)


def test_what_a_peer_that_is_gone_was_owed_is_forgotten() -> None:
    async def story(bench: Bench) -> None:
        gone, stays = Reader("gone"), Reader("stays")
        bench.ask(gone, 30)
        await moved()
        gone.closed = True
        bench.serving.link_down(cast(Link, gone))
        assert bench.serving.waiting == 0
        bench.ask(stays, 1)
        await moved()
        assert len(stays.given) == 1

    run(story)


@pytest.mark.parametrize("late", [True, False])
def test_a_link_that_closes_meanwhile_is_passed_over(late: bool) -> None:
    async def story(bench: Bench) -> None:
        closed, other = Reader("closed"), Reader("other")
        closed.closed = True
        for reader in (closed, other) if late else (other, closed):
            bench.ask(reader, 2)
        await moved()
        assert not closed.given
        assert len(other.given) == 2
        assert bench.serving.waiting == 0

    run(story)
