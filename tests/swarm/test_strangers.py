"""Whatever strangers send to any port of a node: it trains on, its memory stays flat, and real peers can still join."""

from __future__ import annotations

import http.client
import sys
import time
from pathlib import Path

import pytest

from tests.swarm.daemons import PATIENCE, ROUND_S, Daemon, assert_agreed, assert_sensible, daemons, wait_counted
from tests.swarm.strangers import ANY, FLOOD_S, GROWTH_BYTES, flood, free_port, half_open, resident_and_descriptors

pytestmark = [pytest.mark.swarm, pytest.mark.slow]


def test_strangers_at_every_port(tmp_path: Path) -> None:
    with daemons(tmp_path) as make:
        ports = {"data": free_port(), "http": free_port()}
        node = make("node").start(
            "--run", "micro", "--listen", ANY, "--threads", "1",
            "--data-port", str(ports["data"]), "--http", f"127.0.0.1:{ports['http']}",
        )  # fmt: skip
        node.wait_listening()
        ports["control"] = int(node.address.split("/")[4])
        node.wait(lambda status: status.round >= 1, "the first round")

        for kind, port in ports.items():
            flood(port, kind)
        before = resident_and_descriptors(node)
        began = node.status()

        with half_open(ports):
            for kind, port in ports.items():
                flood(port, kind)
            reached = node.wait(lambda status: status.round >= began.round + 2, "rounds go on under the flood")
            assert_sensible(reached)
            http_is_for_reading_only(node, ports["http"])
        assert reached.problems, "what was dropped is counted"

        node.wait(lambda status: status.round >= reached.round + 1, "rounds go on after it")
        after = resident_and_descriptors(node)
        sys.stdout.write(
            f"\n(resident bytes, descriptors) before {before}, after {after}; dropped: {reached.problems}\n"
        )
        for role, (resident, descriptors) in after.items():
            assert resident - before[role][0] < GROWTH_BYTES, (role, before, after)
            assert descriptors - before[role][1] < 20, (role, before, after)

        peer = make("peer").start("--join", node.address, "--listen", ANY, "--threads", "1")
        peer.wait_listening()
        wait_counted([node, peer], 1, "a real peer joins and is counted", 2 * ROUND_S)
        assert_agreed(node, peer, at_least=1)


def http_is_for_reading_only(node: Daemon, port: int) -> None:
    """The half-open ones above hold all places for a while, not for ever. Nothing there stops or changes the node."""
    deadline_s = time.monotonic() + FLOOD_S
    while True:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5.0 * PATIENCE)
            connection.request("POST", "/stop")
            answer = connection.getresponse().status
            break
        except (OSError, http.client.HTTPException):
            assert time.monotonic() < deadline_s, "the status server answers nobody any more"
            time.sleep(0.5)
        finally:
            connection.close()
    assert answer in (404, 405)
    assert node.running
