"""A volunteer's bounds: how many connections it joins, of whom, by which ticket, and for how long it waits."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import trio
import trio.testing

from node.engine.splice import (
    MAX_LANES_PER_PEER,
    MAX_SPLICED_LANES,
    MEETING_S,
    HandshakeFailed,
    Splicer,
    SpliceRefused,
    dial_through,
)
from node.errors import StrangerError

PEERS = [f"peer {number}" for number in range(200)]


def in_virtual_time(main: Callable[[], Awaitable[None]]) -> None:
    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_volunteer_joins_so_many_and_no_more() -> None:
    async def main() -> None:
        splicer = Splicer(1e6)
        for number in range(MAX_SPLICED_LANES // 2):
            splicer.open(PEERS[2 * number], PEERS[2 * number + 1], 2)
        with pytest.raises(SpliceRefused, match=f"passes on {MAX_SPLICED_LANES} connections for others already"):
            splicer.open("a", "b", 2)
        await trio.sleep(MEETING_S + 1)
        splicer.open("a", "b", 2)  # those of the others were never used

    in_virtual_time(main)


def test_one_peer_cannot_have_it_all() -> None:
    async def main() -> None:
        splicer = Splicer(1e6)
        for number in range(MAX_LANES_PER_PEER // 2):
            splicer.open("greedy", PEERS[number], 2)
        with pytest.raises(SpliceRefused, match=f"{MAX_LANES_PER_PEER} connections of greedy"):
            splicer.open("modest", "greedy", 2)
        splicer.open("modest", "other", 2)

    in_virtual_time(main)


@pytest.mark.parametrize(("first", "second", "lanes"), [("a", "a", 1), ("a", "b", 0), ("a", "b", 9)])
def test_what_is_no_splice(first: str, second: str, lanes: int) -> None:
    async def main() -> None:
        with pytest.raises(SpliceRefused, match="makes no sense"):
            Splicer(1e6).open(first, second, lanes)

    in_virtual_time(main)


def test_who_volunteers_for_nothing_says_so() -> None:
    async def main() -> None:
        with pytest.raises(SpliceRefused, match="--max-relay 0"):
            Splicer(0).open("a", "b", 1)

    in_virtual_time(main)


class Volunteer:
    """On loopback, with what it refused."""

    def __init__(self, splicer: Splicer) -> None:
        self.splicer = splicer
        self.refused: list[str] = []
        self.address = ""

    async def run(self, task_status: trio.TaskStatus[None]) -> None:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        self.address = f"127.0.0.1:{listeners[0].socket.getsockname()[1]}"
        await trio.serve_listeners(self._welcome, listeners, task_status=task_status)  # type: ignore[arg-type]

    async def _welcome(self, tcp: trio.SocketStream) -> None:
        try:
            seat = await self.splicer.welcome(tcp)
        except StrangerError as error:
            self.refused.append(str(error))
            await trio.aclose_forcefully(tcp)
            return
        await self.splicer.carry(seat)

    async def dial(self, ticket: bytes, lane: int = 0, lanes: int = 1) -> trio.SocketStream:
        return await dial_through(self.address, ticket=ticket, lane=lane, lanes=lanes)


def with_volunteer(main: Callable[[Volunteer, trio.Nursery], Awaitable[None]]) -> None:
    async def run() -> None:
        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                volunteer = Volunteer(Splicer(1e9))
                await nursery.start(volunteer.run)
                await main(volunteer, nursery)
                nursery.cancel_scope.cancel()

    trio.run(run)


def test_two_sides_meet_and_what_they_say_passes_until_one_hangs_up() -> None:
    async def main(volunteer: Volunteer, nursery: trio.Nursery) -> None:
        tickets = volunteer.splicer.open("a", "b", 1)
        ends: dict[int, trio.SocketStream] = {}

        async def come(side: int) -> None:
            ends[side] = await volunteer.dial(tickets[side])

        async with trio.open_nursery() as both:
            both.start_soon(come, 0)
            both.start_soon(come, 1)
        assert (volunteer.splicer.lanes, volunteer.splicer.pairs) == (1, 1)
        for near, far in ((0, 1), (1, 0)):
            text = bytes([near]) * 300_000
            nursery.start_soon(ends[near].send_all, text)
            received = bytearray()
            while len(received) < len(text):
                received += await ends[far].receive_some()
            assert received == text
        await ends[0].aclose()
        assert await ends[1].receive_some() == b""
        assert volunteer.splicer.relayed_bytes == 600_000
        await ends[1].aclose()

    with_volunteer(main)


def test_a_ticket_opens_its_lanes_once_and_no_others() -> None:
    async def main(volunteer: Volunteer, nursery: trio.Nursery) -> None:
        ticket, _ = volunteer.splicer.open("a", "b", 2)
        nursery.start_soon(volunteer.dial, ticket, 0, 2)
        with trio.fail_after(5):
            while not volunteer.splicer._tickets[ticket][2]:  # noqa: ASYNC110 - nothing is said before the other came
                await trio.sleep(0.01)
        for bad in ((ticket, 0, 2), (ticket, 2, 2), (ticket, 1, 4), (bytes(32), 0, 1)):
            with pytest.raises(HandshakeFailed):
                await volunteer.dial(*bad)
        assert len(volunteer.refused) == 4
        assert "does not open" in volunteer.refused[0]
        assert "unknown, used or expired ticket" in volunteer.refused[3]

    with_volunteer(main)
