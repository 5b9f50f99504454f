"""Whether a node that catches up comes nearer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio
import trio.testing

from node.daemon.pace import JUDGED_AFTER_S, WINDOW_S, Pace


def story(tell: Callable[[Pace], Awaitable[None]]) -> None:
    async def main() -> None:
        await tell(Pace())

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_who_comes_nearer_is_not_slow() -> None:
    async def tell(pace: Pace) -> None:
        for step in range(20):
            pace.saw(10 * step, 100 + 5 * step)
            assert pace.too_slow is None
            await trio.sleep(5)

    story(tell)


def test_who_does_not_says_both_paces_and_once_in_the_log() -> None:
    async def tell(pace: Pace) -> None:
        news = []
        for step in range(20):
            pace.saw(step, 100 + 2 * step)
            news.append(pace.news())
            await trio.sleep(6)
        sentence = pace.too_slow
        assert sentence is not None
        assert "replay makes 10.0 rounds/min while the run makes 20.0" in sentence
        assert len([one for one in news if one]) == 1
        assert news[int(JUDGED_AFTER_S // 6)] is None, "not before there is something to judge by"
        for step in range(20, 90):
            pace.saw(10 * step, 10 * step)
            await trio.sleep(6)
        assert pace.too_slow is None
        assert pace.news() is None

    story(tell)


def test_a_node_that_was_frozen_is_not_slow() -> None:
    async def tell(pace: Pace) -> None:
        pace.begin()
        pace.saw(100, 100)
        await trio.sleep(WINDOW_S / 2)  # at the tip; then frozen for three rounds
        pace.begin()
        pace.saw(110, 113)
        assert pace.too_slow is None

    story(tell)


def test_what_a_snapshot_skips_is_no_pace() -> None:
    async def tell(pace: Pace) -> None:
        pace.saw(0, 100)
        await trio.sleep(JUDGED_AFTER_S + 1)
        pace.saw(1, 130)
        assert pace.too_slow is not None
        pace.restart()
        pace.saw(129, 131)
        assert pace.too_slow is None

    story(tell)
