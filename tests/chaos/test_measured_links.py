"""Links of a known delay and rate, measured by real engines and real nodes: what is said of them is what they are.

The lab's figures hold for whole packets, so payload rates are a few percent below them. Tolerances: round trips within
20 % under ± 30 % of jitter; a line that transfers filled within 25 %; what probes and lines that nothing filled say
is a lower bound, at least a third. On a busy machine `ATOLL_TEST_PATIENCE` makes room for round trips that it makes
longer itself.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
import trio

from node.daemon.link_table import Pair
from node.engine import api
from scripts.benchmark.atoll import AtollEngines, Station, opened_atoll
from scripts.benchmark.contestant import ENCODE, EXCHANGE, LOAD, OUTER, Case
from scripts.benchmark.lab import even_lab
from scripts.benchmark.vectors import Inputs
from scripts.wanlab.wan import Wan, unavailable
from tests.chaos.wide_area import wide_area
from tests.swarm.daemons import PATIENCE

pytestmark = [
    pytest.mark.chaos_long,
    pytest.mark.slow,
    pytest.mark.swarm,
    pytest.mark.skipif(unavailable() is not None, reason=unavailable() or "a lab can be made"),
]

HOSTS = 3
ELEMENTS = 4_000_000
LINE_BYTES_S = 2e6
SLOW_BYTES_S = LINE_BYTES_S / 5
QUEUE_S = 0.5
DELAY_S = 0.05
LIMIT_S = 300.0


class Measured:
    """What a daemon would make of one engine's measurements."""

    def __init__(self, station: Station) -> None:
        self.line = Pair()
        self.links: dict[str, Pair] = {}
        self._station = station

    def take(self) -> None:
        for event in self._station.measured:
            if isinstance(event, api.LineMeasured):
                self.line.observe(event.rates)
            else:
                self.links.setdefault(event.peer_id, Pair()).observe(event.rates)
        self._station.measured.clear()


async def play_round(engines: AtollEngines, number: int, measured: Sequence[Measured]) -> float:
    """The exchange's seconds; a stretch of traffic is told of half a second after its end."""
    seconds = 0.0
    for phase in (LOAD, ENCODE, EXCHANGE, OUTER):
        took_s = await engines.perform(phase, number)
        seconds = took_s if phase == EXCHANGE else seconds
    await trio.sleep(2.0)
    for one in measured:
        one.take()
    return seconds


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def within(rate: float | None, line_bytes_s: float, low: float, high: float = 1.25) -> bool:
    return rate is not None and low * line_bytes_s <= rate <= high * line_bytes_s


def test_engines_measure_lines_and_see_one_that_lost_four_fifths(tmp_path: Path) -> None:
    """Slow: six rounds of 6 to 25 s."""
    with Wan(HOSTS, congestion_control="cubic") as wan, closing(Inputs(HOSTS, ELEMENTS)) as inputs:
        wan.queue(QUEUE_S)
        wan.link(delay_s=DELAY_S)
        wan.rate(*wan.hosts, up_bytes_s=LINE_BYTES_S, down_bytes_s=LINE_BYTES_S)
        case = Case(
            engine="atoll",
            codec="int8",
            plan="flat",
            lab=even_lab(HOSTS, LINE_BYTES_S * 8 / 1e6, round_trip_ms=2e3 * DELAY_S),
            hosts=wan.hosts,
            inputs=inputs,
            part_elements=65_536,
            patience_s=LIMIT_S,
            directory=tmp_path,
        )

        async def main() -> None:
            with trio.fail_after(LIMIT_S):
                async with trio.open_nursery() as nursery:
                    async with opened_atoll(case, nursery) as engines:
                        await measure(engines, wan)
                    nursery.cancel_scope.cancel()

        trio.run(main)


async def measure(engines: AtollEngines, wan: Wan) -> None:
    measured = [Measured(station) for station in engines.stations]
    for number in range(2):
        await play_round(engines, number, measured)
    for one in measured:
        say(f"line of 2 MB/s: {one.line.sent_bytes_s or 0:.3g} up, {one.line.received_bytes_s or 0:.3g} down")
        assert within(one.line.sent_bytes_s, LINE_BYTES_S, 0.75), one.line
        assert within(one.line.received_bytes_s, LINE_BYTES_S, 0.75), one.line
        assert len(one.links) == HOSTS - 1
        for pair in one.links.values():
            assert within(pair.sent_bytes_s, LINE_BYTES_S, 0.3), "each of two links has half of the line at least"
    slow = measured[0]
    wan.rate(wan.hosts[0], up_bytes_s=SLOW_BYTES_S, down_bytes_s=LINE_BYTES_S)
    for number in range(2, 5):
        await play_round(engines, number, measured)
        say(f"now 0.4 MB/s up: {slow.line.sent_bytes_s or 0:.3g}, after {number - 1} rounds")
    assert within(slow.line.sent_bytes_s, SLOW_BYTES_S, 0.75, 1.6), slow.line
    for one in measured[1:]:
        assert within(one.line.sent_bytes_s, LINE_BYTES_S, 0.6), "the others' lines are what they were"
    wan.rate(wan.hosts[0], up_bytes_s=LINE_BYTES_S, down_bytes_s=LINE_BYTES_S)
    await play_round(engines, 5, measured)
    assert within(slow.line.sent_bytes_s, LINE_BYTES_S, 0.75), "more is believed at once"
    await probe(engines, measured)


async def probe(engines: AtollEngines, measured: Sequence[Measured]) -> None:
    """With nothing known before, and nothing else on the lines."""
    asker, answerer = engines.stations[:2]
    measured[0].links.clear()
    probed = await asker.client.probe(peer_id=answerer.identity.peer_id)
    assert not probed.why
    assert probed.bytes_received <= 4 << 20
    await trio.sleep(2.0)
    measured[0].take()
    pair = measured[0].links[answerer.identity.peer_id]
    say(f"a probe of a line of 2 MB/s: {pair.received_bytes_s or 0:.3g}")
    assert within(pair.received_bytes_s, LINE_BYTES_S, 1 / 3), pair
    assert pair.sent_bytes_s is None


ROUND_TRIP_S = 0.1
NODE_LINE_BYTES_S = 1e6


def test_nodes_tell_each_other_what_their_links_are(tmp_path: Path) -> None:
    """Slow: two minutes, for a probe a minute from each of three nodes. Vectors of `micro` are too short to tell."""
    with wide_area(tmp_path, 3) as area:
        area.wan.queue(QUEUE_S)
        area.wan.link(delay_s=ROUND_TRIP_S / 2, jitter_s=0.3 * ROUND_TRIP_S / 2)
        area.wan.rate(*area.wan.hosts, up_bytes_s=NODE_LINE_BYTES_S, down_bytes_s=NODE_LINE_BYTES_S)
        area.begin()
        area.settle()

        def known() -> bool:
            return all(
                member.received_bytes_s is not None and member.up_bytes_s is not None
                for node in area.nodes
                for member in node.now.member_list
            )

        area.wait(area.nodes, known, "each node knows each link, and each line", LIMIT_S)
        for node in area.nodes:
            status = node.status()
            assert within(status.up_bytes_s, NODE_LINE_BYTES_S, 1 / 3)
            assert within(status.down_bytes_s, NODE_LINE_BYTES_S, 1 / 3)
            for member in status.member_list:
                assert within(member.up_bytes_s, NODE_LINE_BYTES_S, 0.3), "as its record says"
                assert within(member.received_bytes_s, NODE_LINE_BYTES_S, 1 / 3)
                if member.peer_id != node.peer_id:
                    assert member.round_trip_ms is not None
                    longest_s = 1.2 * ROUND_TRIP_S + (PATIENCE - 1) * 0.02
                    assert 0.8 * ROUND_TRIP_S < member.round_trip_ms / 1e3 < longest_s, member
                    assert member.round_trip_age_s is not None
                    assert member.round_trip_age_s < 30.0
                    assert member.lost_answers == 0.0
        area.expect_agreement(area.nodes, 0)
        area.expect_nothing_left()
