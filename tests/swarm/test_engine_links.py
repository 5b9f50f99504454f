"""What real engines say of their links after a transfer, and what a probe may do; loopback, so figures are plausible
rather than known (`tests/chaos/test_measured_links.py` has lines of a known rate)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import trio

from node.engine import api
from tests.swarm.engine_lab import Lab, LabEngine, Sizes, flat_round, lab

pytestmark = [pytest.mark.slow, pytest.mark.swarm]

SIZES = Sizes(elements=1 << 21, buffer_elements=0, part_elements=1 << 16)
SLOWEST_BYTES_S, FASTEST_BYTES_S = 1e4, 2e10
"""Of a loopback: whatever lies outside is a mistake in a unit."""


def test_a_transfer_tells_of_links_and_line_and_a_probe_where_there_was_none(tmp_path: Path) -> None:
    async def main() -> None:
        with trio.fail_after(60):
            async with lab(tmp_path, 2, SIZES) as swarm:
                a, b = swarm.engines
                await probe_tells(a, b)
                await exchange_tells(swarm, a, b)
                await probe_gives_way(swarm, a)

    trio.run(main)


async def told(engine: LabEngine) -> tuple[dict[str, api.Rates], api.Rates]:
    """Of the newest stretch of traffic, link by link, and of the line."""
    await engine.until("a stretch of traffic is over", lambda: engine.lines)
    links, line = {one.peer_id: one.rates for one in engine.links}, engine.lines[-1].rates
    engine.links.clear()
    engine.lines.clear()
    return links, line


def plausible(bytes_s: float | None) -> bool:
    return bytes_s is not None and SLOWEST_BYTES_S < bytes_s < FASTEST_BYTES_S


async def probe_tells(a: LabEngine, b: LabEngine) -> None:
    """Only of the way to who asked, at both ends; and soon after it nobody gets another."""
    probed = await a.ask.probe(peer_id=b.peer_id)
    assert probed.why == ""
    assert 1 << 20 < probed.bytes_received <= 4 << 20
    links, line = await told(a)
    assert set(links) == {b.peer_id}
    for rates in (links[b.peer_id], line):
        assert plausible(rates.received_bytes_s)
        assert rates.sent_bytes_s is None
    links, line = await told(b)
    for rates in (links[a.peer_id], line):
        assert plausible(rates.sent_bytes_s)
        assert rates.received_bytes_s is None
    again = await a.ask.probe(peer_id=b.peer_id)
    assert again.bytes_received < 1 << 20
    assert again.why == "it does not have this"


async def exchange_tells(swarm: Lab, a: LabEngine, b: LabEngine) -> None:
    await swarm.load_initial(np.zeros(SIZES.elements, np.float32))
    turn = flat_round(swarm, 0)
    await turn.start()
    await turn.finish()
    for engine, other in ((a, b), (b, a)):
        # On a busy machine an exchange may be several stretches of traffic.
        for direction in ("sent_bytes_s", "received_bytes_s"):
            for events in (engine.links, engine.lines):
                await engine.until(direction, lambda d=direction, e=events: any(getattr(one.rates, d) for one in e))
        assert {one.peer_id for one in engine.links} == {other.peer_id}
        for measured in (*engine.links, *engine.lines):
            known = [measured.rates.sent_bytes_s, measured.rates.received_bytes_s]
            assert all(plausible(rate) for rate in known if rate is not None)
        await engine.ask.stop_exchange(roster_id=turn.roster_id)


async def probe_gives_way(swarm: Lab, a: LabEngine) -> None:
    """To an exchange that waits for somebody who is not there."""
    b = swarm.engines[1]
    turn = flat_round(swarm, 1)
    requests = dict(zip([one.peer_id for one in turn.engines], turn.requests(await turn.encode()), strict=True))
    await a.ask.exchange(requests[a.peer_id])
    probed = await a.ask.probe(peer_id=b.peer_id)
    assert (probed.bytes_received, probed.why) == (0, "an exchange began")
    probed = await b.ask.probe(peer_id=a.peer_id)
    assert (probed.bytes_received, probed.why) == (0, "it does not have this")
    await a.ask.stop_exchange(roster_id=turn.roster_id)
