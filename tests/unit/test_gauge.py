"""What a stretch of traffic proves of a link, and what the kernel says of a connection."""

from __future__ import annotations

import contextlib
import socket

import pytest
import trio

from node.engine.gauge import MIN_BURST_BYTES, WINDOW_S, Stretch, _Moved, _tick
from node.engine.tcp_info import tcp_info

TICK_S = 0.05
PACKET_BYTES = 1000


def carry(
    stretch: Stretch,
    seconds: float,
    bytes_s: float,
    *,
    since_s: float = 0.0,
    pressed: bool = True,
    busy_share: float = 1.0,
) -> float:
    """Ticks of a steady flow; when they end."""
    now_s = since_s
    for _ in range(round(seconds / TICK_S)):
        now_s += TICK_S
        packets = round(bytes_s * TICK_S / PACKET_BYTES)
        busy_s = TICK_S * busy_share if bytes_s else 0.0
        stretch.tick(packets, packets * PACKET_BYTES, now_s, busy_s=busy_s, pressed=pressed)
    return now_s


def test_a_steady_flow_is_its_rate() -> None:
    stretch = Stretch(0.0)
    carry(stretch, 3.0, 1e6)
    rate, sure = stretch.best()
    assert rate == pytest.approx(1e6, rel=0.01)
    assert sure


def test_the_best_second_counts_not_the_slow_start_nor_the_wait_for_others() -> None:
    stretch = Stretch(0.0)
    end_s = carry(stretch, 1.0, 1e5)
    end_s = carry(stretch, 1.2, 2e6, since_s=end_s)
    end_s = carry(stretch, 5.0, 0.0, since_s=end_s, pressed=False)
    carry(stretch, 1.0, 3e5, since_s=end_s)
    rate, sure = stretch.best()
    assert rate == pytest.approx(2e6, rel=0.02)
    assert sure


def test_a_loop_that_was_late_makes_nothing_faster() -> None:
    """Bytes of three seconds are seen at one tick: over three seconds."""
    stretch = Stretch(0.0)
    end_s = carry(stretch, 1.0, 1e6)
    stretch.tick(3000, 3_000_000, end_s + 3.0, busy_s=3.0, pressed=True)
    carry(stretch, 1.0, 1e6, since_s=end_s + 3.0)
    rate, _ = stretch.best()
    assert rate == pytest.approx(1e6, rel=0.06)


def test_bytes_behind_a_lost_packet_make_nothing_faster_when_they_are_confirmed_at_once() -> None:
    stretch = Stretch(0.0)
    now_s = 0.0
    for tick in range(60):
        now_s += TICK_S
        stretch.tick(50, 1_000_000 if tick % 20 == 19 else 0, now_s, busy_s=TICK_S, pressed=True)
    rate, _ = stretch.best()
    assert rate == pytest.approx(1e6, rel=0.01)


def test_a_short_burst_proves_its_rate_and_no_more() -> None:
    stretch = Stretch(0.0)
    end_s = carry(stretch, 0.2, 2e7)
    carry(stretch, 0.5, 0.0, since_s=end_s)
    rate, sure = stretch.best()
    assert rate == pytest.approx(2e7, rel=0.01)
    assert not sure


def test_a_slow_line_that_is_asked_for_more_is_known() -> None:
    stretch = Stretch(0.0)
    carry(stretch, 4.0, 2e4)
    assert stretch.best() == (pytest.approx(2e4, rel=0.01), True)


def test_a_few_bytes_and_a_long_trickle_prove_nothing() -> None:
    stretch = Stretch(0.0)
    carry(stretch, 0.5, 1.9 * MIN_BURST_BYTES)
    assert stretch.best() == (None, False)
    stretch = Stretch(0.0)
    carry(stretch, 30.0, 2e5, busy_share=0.1)
    assert stretch.best() == (None, False), "six megabytes, and nothing that the link was asked for and did not give"
    stretch, now_s = Stretch(0.0), 0.0
    for _ in range(20):
        now_s = carry(stretch, TICK_S, 2e6, since_s=now_s)
        now_s = carry(stretch, 9 * TICK_S, 0.0, since_s=now_s)
    assert stretch.best() == (None, False), "short rounds, one after another"


def test_a_flow_that_nothing_pressed_proves_no_limit() -> None:
    stretch = Stretch(0.0)
    carry(stretch, 3 * WINDOW_S, 1e6, pressed=False)
    assert stretch.best() == (pytest.approx(1e6, rel=0.01), False)


def of(*links: tuple[float, bool], seconds: float = 2.0) -> tuple[list[bool], bool]:
    """For links with a rate and whether they were busy: which of them, and whether the line, showed a limit."""
    line = Stretch(0.0)
    stretches = [Stretch(0.0) for _ in links]
    now_s = 0.0
    for _ in range(round(seconds / TICK_S)):
        now_s += TICK_S
        moved = [
            _Moved(stretch, round(rate * TICK_S / PACKET_BYTES), round(rate * TICK_S), TICK_S * busy, busy)
            for stretch, (rate, busy) in zip(stretches, links, strict=True)
        ]
        _tick(line, moved, now_s)
    return [stretch.best()[1] for stretch in stretches], line.best()[1]


def test_links_that_share_the_line_alike_say_something_of_the_line_alone() -> None:
    assert of((1e6, True), (1e6, True), (1e6, True)) == ([False, False, False], True)


def test_a_link_that_gets_less_than_the_others_is_slow_itself() -> None:
    assert of((1e6, True), (1e6, True), (3e5, True)) == ([False, False, True], True)


def test_one_busy_link_among_idle_ones_says_nothing_of_the_line() -> None:
    assert of((1e6, True), (2e5, False)) == ([True, False], False)
    assert of((1e6, True)) == ([True], True), "the only one: nobody can tell them apart"


def test_the_kernel_counts_what_was_confirmed_and_received_not_what_was_written_or_read() -> None:
    async def main() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        with listener, socket.create_connection(listener.getsockname()) as near:
            far, _ = listener.accept()
            with far:
                near.sendall(bytes(100_000))
                with trio.fail_after(10):
                    while (told := tcp_info(near)) is None or told.in_flight:  # noqa: ASYNC110 - the kernel tells nobody
                        await trio.sleep(0.01)
                assert told.acked_bytes in (100_000, 100_001), "the SYN may count"
                heard = tcp_info(far)
                assert heard is not None
                assert heard.received_bytes == 100_000, "though nothing was read"
                assert heard.received_packets >= 1
                assert told.acked_packets >= heard.received_packets
                near.settimeout(0.0)
                written = 0
                with contextlib.suppress(BlockingIOError):
                    while written < 1 << 30:
                        written += near.send(bytes(1 << 16))
                full = tcp_info(near)
                assert full is not None
                assert full.not_sent
                assert full.acked_bytes < 100_000 + written
        assert tcp_info(near) is None

    trio.run(main)


def test_what_is_no_tcp_connection_has_no_account() -> None:
    with socket.socket(socket.AF_UNIX) as other:
        assert tcp_info(other) is None
