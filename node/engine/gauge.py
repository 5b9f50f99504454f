"""How fast links and the line were while there was traffic, by the kernel's own counters (design section 7).

Not bytes over a round's time: that tells of waits for sums and votes, and of how much there was to send. Nor bytes over
the time in which a lane was busy: the kernel takes megabytes at once that a slow line carries away over minutes, and a
loop that was late reads at memory's speed what came meanwhile. What the other end's kernel has confirmed, and what ours
has received, over a second of unbroken traffic, is what was carried; the fastest such second of a stretch of traffic
is the most that it can prove. It is a lower bound: `node.daemon.rates` says what is made of several.

Packets are counted, since what follows a lost one is acknowledged in bytes only when that one has come again, and then
all at once: with bytes a line of 2 MB/s showed 2.4. Bytes per packet are those of the whole stretch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import trio

from node.engine import api
from node.engine.link import Link
from node.engine.tcp_info import tcp_info

WINDOW_S = 1.0
"""Several round trips, and more than any queue on the way holds."""
FIRST_TICK_S = 0.01
"""While a stretch is younger than a window: what is short is measured to that."""
TICK_S = 0.05
TICK_EACH_LANE_S = 0.0005
"""So that reading many connections takes some percent of a core at most."""
QUIET_S = 0.5
"""Without traffic: the stretch is over."""
LONGEST_S = 30.0
"""Then a stretch is told of, and the next one begins."""
MIN_WINDOW_BYTES = 1 << 14
"""A few packets, even of the slowest line."""
MIN_BURST_BYTES = 1 << 18
"""Of what is over before a window is: less says more of latency than of a rate."""
SURE_S = 1.0
"""Seconds in which a direction was pressed for all that it gives."""
BUSY_SHARE = 0.5
"""Of a window there was something to carry, or it proves nothing."""
BURST_BUSY_SHARE = 0.2
"""Likewise of a run that ticks measure too coarsely."""
PRESSED_SHARE = 0.8
HELD_SHARE = 0.2
"""Of its time a sender may be held by the receiver's window, and still have been as fast as the link."""
UNFAIR_SHARE = 0.5
"""A link that gets less than this of what the others get at the same time is slower than the line that they share."""


class Stretch:
    """One direction of a link, or of all of them, in one stretch of traffic.

    A trickle proves nothing, however long it lasts: only time counts in which there was something to carry.
    """

    def __init__(self, now_s: float) -> None:
        self._bytes = 0
        self._packets = 0
        self._busy_s = 0.0
        self._pressed_s = 0.0
        self._looked_at_s = now_s
        self._run: deque[_Mark] = deque()
        """Since there was always something to carry, over the last window; empty: there is nothing."""
        self._run_began = _Mark(now_s, 0, 0.0)
        self._run_moved = self._run_began
        """When packets were last carried in it."""
        self._best_packets_s = 0.0
        """Of whole windows."""
        self._best_burst_packets_s = 0.0
        """Of runs that were shorter than a window."""

    def tick(self, packets: int, size: int, now_s: float, *, busy_s: float, pressed: bool) -> None:
        """`packets` and bytes since the last tick, and how long of it there was something to carry.

        `pressed`: the whole time, and nobody else is the reason that it was not faster.
        """
        if not self._run and (packets or busy_s):
            self._run_began = self._run_moved = _Mark(self._looked_at_s, self._packets, self._busy_s)
            self._run.append(self._run_began)
        self._packets += packets
        self._bytes += size
        self._busy_s += min(busy_s, now_s - self._looked_at_s)
        if pressed:
            self._pressed_s += now_s - self._looked_at_s
        self._looked_at_s = now_s
        if not self._run:
            return
        mark = _Mark(now_s, self._packets, self._busy_s)
        self._run.append(mark)
        while len(self._run) > 2 and now_s - self._run[1].at_s >= WINDOW_S:
            self._run.popleft()
        if now_s - self._run[0].at_s >= WINDOW_S:
            self._best_packets_s = max(self._best_packets_s, self._run[0].rate_to(mark, BUSY_SHARE))
        if packets:
            self._run_moved = mark
        elif not busy_s:
            self._end_run()

    def best(self) -> tuple[float | None, bool]:
        """Bytes per second, None if nothing can be said; and whether the link gave no more although it was pressed."""
        self._end_run()
        packet_bytes = self._bytes / max(1, self._packets)
        whole, burst = self._best_packets_s * packet_bytes, self._best_burst_packets_s * packet_bytes
        if whole * WINDOW_S >= MIN_WINDOW_BYTES and whole >= burst:
            return whole, self._pressed_s >= SURE_S
        return burst or None, False

    def _end_run(self) -> None:
        began, moved = self._run_began, self._run_moved
        carried_bytes = (moved.packets - began.packets) * self._bytes / max(1, self._packets)
        if self._run and carried_bytes >= MIN_BURST_BYTES and moved.at_s - began.at_s < WINDOW_S:
            self._best_burst_packets_s = max(self._best_burst_packets_s, began.rate_to(moved, BURST_BUSY_SHARE))
        self._run.clear()


@dataclass(frozen=True, slots=True)
class _Mark:
    at_s: float
    packets: int
    busy_s: float

    def rate_to(self, later: _Mark, busy_share: float) -> float:
        """Packets per second between two marks; 0 if there was not enough to carry to say so."""
        seconds = later.at_s - self.at_s
        if seconds <= 0.0 or later.busy_s - self.busy_s < busy_share * seconds:
            return 0.0
        return (later.packets - self.packets) / seconds


@dataclass(slots=True)
class _Counters:
    """Of all lanes of a link, at one moment."""

    acked_bytes: int = 0
    received_bytes: int = 0
    acked_packets: int = 0
    received_packets: int = 0
    waiting: bool = False
    """Something is not sent yet: it is more than the link takes."""
    in_flight: bool = False
    held_s: float = 0.0
    sending_busy_s: float = 0.0
    receiving_busy_s: float = 0.0


@dataclass(slots=True)
class _Moved:
    """By one link in one direction, between two looks."""

    stretch: Stretch
    packets: int
    size: int
    busy_s: float
    busy: bool
    """All the time."""


class _Watched:
    """A link in this stretch of traffic."""

    def __init__(self, counters: _Counters, now_s: float) -> None:
        self.sent = Stretch(now_s)
        self.received = Stretch(now_s)
        self._before = counters
        self._looked_at_s = now_s

    def look(self, now: _Counters, now_s: float) -> tuple[_Moved, _Moved]:
        """Sent and received since the last look."""
        before, seconds = self._before, now_s - self._looked_at_s
        self._before, self._looked_at_s = now, now_s
        waits = before.waiting and now.waiting
        sending_s = seconds if waits else now.sending_busy_s - before.sending_busy_s
        receiving_s = now.receiving_busy_s - before.receiving_busy_s
        held = now.held_s - before.held_s > HELD_SHARE * seconds
        # Less than before: a lane has gone.
        return (
            _Moved(
                self.sent,
                max(0, now.acked_packets - before.acked_packets),
                max(0, now.acked_bytes - before.acked_bytes),
                sending_s,
                sending_s >= PRESSED_SHARE * seconds and not held,
            ),
            _Moved(
                self.received,
                max(0, now.received_packets - before.received_packets),
                max(0, now.received_bytes - before.received_bytes),
                receiving_s,
                receiving_s >= PRESSED_SHARE * seconds,
            ),
        )


class Gauge:
    """Tells of each stretch of traffic when it is over: `LinkMeasured` for each link, `LineMeasured` for all."""

    def __init__(self, links: Callable[[], Sequence[Link]], emit: Callable[[api.Event], Awaitable[None]]) -> None:
        self._links = links
        self._emit = emit
        self._stirred = trio.Event()

    def watch(self, link: Link) -> None:
        """A new link: its traffic wakes the gauge."""
        link.sending.began = link.receiving.began = self._stir

    def _stir(self) -> None:
        self._stirred.set()

    async def run(self) -> None:
        while True:
            await self._stirred.wait()
            await self._watch_stretch()

    async def _watch_stretch(self) -> None:
        began_s = moved_at_s = now_s = trio.current_time()
        watched: dict[Link, _Watched] = {}
        line_sent, line_received = Stretch(now_s), Stretch(now_s)
        while now_s - moved_at_s < QUIET_S and now_s - began_s < LONGEST_S:
            self._stirred = trio.Event()
            links = self._links()
            ups: list[_Moved] = []
            downs: list[_Moved] = []
            for link in links:
                counters = _read(link)
                if counters is None:
                    continue
                if counters.in_flight or link.sending.active or link.receiving.active:
                    moved_at_s = now_s
                if link not in watched:
                    watched[link] = _Watched(counters, now_s)
                    continue
                up, down = watched[link].look(counters, now_s)
                ups.append(up)
                downs.append(down)
            _tick(line_sent, ups, now_s)
            _tick(line_received, downs, now_s)
            lanes = sum(link.lanes for link in links)
            tick_s = FIRST_TICK_S if now_s - began_s < WINDOW_S else TICK_S
            await trio.sleep(max(tick_s, lanes * TICK_EACH_LANE_S))
            now_s = trio.current_time()
        if now_s - moved_at_s < QUIET_S:
            self._stirred.set()  # it goes on: the next stretch begins at once
        for link, one in watched.items():
            if (rates := _rates(one.sent, one.received)) is not None:
                await self._emit(api.LinkMeasured(peer_id=link.peer_id, rates=rates))
        if (rates := _rates(line_sent, line_received)) is not None:
            await self._emit(api.LineMeasured(rates=rates))


def _tick(line: Stretch, links: Sequence[_Moved], now_s: float) -> None:
    """One direction of all links that are looked at.

    A single busy link may wait for the line at its other end: this node's own is pressed when two are busy, or when
    there is no other. A link among several busy ones is pressed when it gets far less than they do: else it is the
    line that they share.
    """
    busy = [moved for moved in links if moved.busy]
    mean = sum(moved.packets for moved in busy) / max(1, len(busy))
    for moved in links:
        slowest = len(busy) == 1 or moved.packets <= UNFAIR_SHARE * mean
        pressed = moved.busy and slowest
        moved.stretch.tick(moved.packets, moved.size, now_s, busy_s=moved.busy_s, pressed=pressed)
    line.tick(
        sum(moved.packets for moved in links),
        sum(moved.size for moved in links),
        now_s,
        busy_s=max((moved.busy_s for moved in links), default=0.0),
        pressed=len(busy) >= max(1, min(2, len(links))),
    )


def _read(link: Link) -> _Counters | None:
    """None: the kernel does not tell, or no lane stands."""
    total = _Counters(sending_busy_s=link.sending.busy_s, receiving_busy_s=link.receiving.busy_s)
    sockets = link.sockets
    for one in sockets:
        info = tcp_info(one)
        if info is None:
            return None
        total.acked_bytes += info.acked_bytes
        total.received_bytes += info.received_bytes
        total.acked_packets += info.acked_packets
        total.received_packets += info.received_packets
        total.waiting = total.waiting or info.not_sent
        total.in_flight = total.in_flight or info.in_flight or info.not_sent
        total.held_s += info.held_s / len(sockets)
    return total if sockets else None


def _rates(sent: Stretch, received: Stretch) -> api.Rates | None:
    """None: there was too little of both."""
    sent_bytes_s, sent_is_sure = sent.best()
    received_bytes_s, received_is_sure = received.best()
    if sent_bytes_s is None and received_bytes_s is None:
        return None
    return api.Rates(
        sent_bytes_s=sent_bytes_s,
        sent_is_sure=sent_is_sure,
        received_bytes_s=received_bytes_s,
        received_is_sure=received_is_sure,
    )
