"""What real engines say of their links after a transfer, and what a probe may do.

Between them is a forwarder of a known rate. What is measured may be less, on a busy machine, and hardly more;
`tests/chaos/test_measured_links.py` has tolerances.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import trio

from node.engine import api
from node.engine.switchboard import LANES
from tests.swarm.daemons import PATIENCE
from tests.swarm.engine_lab import Lab, LabEngine, Proxy, Sizes, flat_round, lab

pytestmark = [pytest.mark.slow, pytest.mark.swarm]

SIZES = Sizes(elements=3 << 19, buffer_elements=0, part_elements=1 << 18)
"""Frames of a quarter of a megabyte: always under way, also for an engine that a busy machine seldom wakes."""
LINE_BYTES_S = 1e6
SLOWEST_BYTES_S, FASTEST_BYTES_S = 1e4, 3 * LINE_BYTES_S
"""What the forwarder's sockets hold comes on top of what it forwards in a second."""


ENOUGH_BYTES = 1 << 19
"""Half of what the forwarder lets through in a probe's time. With less, a busy machine proves nothing."""


def test_a_transfer_tells_of_links_and_line_and_a_probe_where_there_was_none(tmp_path: Path) -> None:
    async def main() -> None:
        with trio.fail_after(60 * PATIENCE):
            async with lab(tmp_path, 2, SIZES) as swarm:
                a, b = swarm.engines
                for engine in (a, b):
                    proxy = Proxy(LINE_BYTES_S / LANES)
                    proxy.target_port = engine.port
                    await swarm.nursery.start(proxy.run)
                    engine.seen_port = proxy.port
                await swarm.introduce()
                await probe_tells(a, b)
                await exchange_tells(swarm, a, b)
                await probe_gives_way(swarm, a, b)

    trio.run(main)


def plausible(bytes_s: float | None) -> bool:
    return bytes_s is not None and SLOWEST_BYTES_S < bytes_s < FASTEST_BYTES_S


def any_tells(events: Sequence[api.LinkMeasured | api.LineMeasured], direction: str) -> bool:
    return any(getattr(one.rates, direction) is not None for one in events)


async def expect_measured(engine: LabEngine, other: LabEngine, *directions: str) -> None:
    """In these directions and no others; of the only link, and of the line. Forgets it then.

    A pause of a busy machine makes two stretches of traffic of one.
    """
    for direction in directions:
        for events in (engine.links, engine.lines):
            await engine.until(direction, partial(any_tells, events, direction))
    assert {one.peer_id for one in engine.links} == {other.peer_id}
    for measured in (*engine.links, *engine.lines):
        for direction in ("sent_bytes_s", "received_bytes_s"):
            rate = getattr(measured.rates, direction)
            assert rate is None or (direction in directions and plausible(rate)), measured
    engine.links.clear()
    engine.lines.clear()


async def probe_tells(a: LabEngine, b: LabEngine) -> None:
    """Only of the way to who asked, at both ends; and soon after it nobody gets another."""
    probed = await a.ask.probe(peer_id=b.peer_id)
    assert probed.why == ""
    assert 1 << 16 <= probed.bytes_received <= 4 << 20
    if probed.bytes_received >= ENOUGH_BYTES:
        await expect_measured(a, b, "received_bytes_s")
        await expect_measured(b, a, "sent_bytes_s")
    await trio.sleep(3.0)  # what a peer is answered ends by the clock
    again = await a.ask.probe(peer_id=b.peer_id)
    assert (again.bytes_received, again.why) == (0, "it does not have this")


async def exchange_tells(swarm: Lab, a: LabEngine, b: LabEngine) -> None:
    await swarm.load_initial(np.zeros(SIZES.elements, np.float32))
    turn = flat_round(swarm, 0)
    await turn.start()
    await turn.finish()
    await expect_measured(a, b, "sent_bytes_s", "received_bytes_s")
    await expect_measured(b, a, "sent_bytes_s", "received_bytes_s")
    for engine in (a, b):
        await engine.ask.stop_exchange(roster_id=turn.roster_id)


async def probe_gives_way(swarm: Lab, a: LabEngine, b: LabEngine) -> None:
    """To an exchange that waits for somebody who is not there."""
    turn = flat_round(swarm, 1)
    requests: dict[str, api.Exchange] = dict(
        zip([one.peer_id for one in turn.engines], turn.requests(await turn.encode()), strict=True)
    )
    await a.ask.exchange(requests[a.peer_id])
    probed = await a.ask.probe(peer_id=b.peer_id)
    assert (probed.bytes_received, probed.why) == (0, "an exchange began")
    probed = await b.ask.probe(peer_id=a.peer_id)
    assert (probed.bytes_received, probed.why) == (0, "it does not have this")
    await a.ask.stop_exchange(roster_id=turn.roster_id)
