"""Bounds of a probe: what this node asks for, and what it gives to others, strangers included."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import trio
import trio.testing

from node.daemon import prober
from node.daemon.link_table import LinkTable
from node.engine import api, probing
from node.engine.frames import AskMeta, Subject
from node.engine.probing import MAX_CHUNK_BYTES, PROBE_BYTES, ProbeAllowance, Prober
from node.engine.requests import NotThere


def in_virtual_time(main: Callable[[], Awaitable[None]]) -> None:
    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def given(allowance: ProbeAllowance, peer: str, *, size: int = MAX_CHUNK_BYTES, times: int = 100) -> int:
    return sum(size for _ in range(times) if allowance.grant(peer, size))


def test_a_peer_gets_one_probe_in_a_while_and_all_together_little() -> None:
    async def main() -> None:
        allowance = ProbeAllowance(lambda: False)
        assert given(allowance, "a") == PROBE_BYTES
        await trio.sleep(probing.PEER_INTERVAL_S - 1.0)
        assert given(allowance, "a") == 0
        await trio.sleep(1.0)
        assert given(allowance, "a") == PROBE_BYTES
        given(allowance, "b")
        assert sum(given(allowance, f"sybil {number}") for number in range(500)) == 0
        total = 0
        for second in range(600):
            await trio.sleep(1.0)
            total += given(allowance, f"sybil {second}")
        assert total <= 600 * probing.REFILL_BYTES_S + MAX_CHUNK_BYTES
        assert len(allowance._peers) <= probing.MAX_PEERS

    in_virtual_time(main)


def test_a_peer_that_does_not_stop_is_stopped() -> None:
    async def main() -> None:
        allowance = ProbeAllowance(lambda: False)
        assert allowance.grant("a", 1 << 14)
        await trio.sleep(probing.ANSWERED_S + 0.1)
        assert not allowance.grant("a", 1 << 14)

    in_virtual_time(main)


def test_nothing_is_given_in_an_exchange_nor_for_an_absurd_question() -> None:
    async def main() -> None:
        exchanging = True
        allowance = ProbeAllowance(lambda: exchanging)
        assert given(allowance, "a") == 0
        exchanging = False
        for size in (0, -1, MAX_CHUNK_BYTES + 1, 1 << 62):
            assert not allowance.grant("a", size)
        assert given(allowance, "a") == PROBE_BYTES

    in_virtual_time(main)


class Line:
    """A peer that answers at a rate, over a round trip: in the place of switchboard and requester."""

    def __init__(self, bytes_s: float, round_trip_s: float = 0.02) -> None:
        self.given = 0
        self.refuses = False
        self._bytes_s = bytes_s
        self._round_trip_s = round_trip_s
        self._free_at_s = 0.0

    async def reach(self, peer_id: str, *, within_s: float) -> Any:
        return SimpleNamespace(peer_id=peer_id)

    async def ask(self, link: Any, content: bytes, question: AskMeta, *, largest_bytes: int) -> bytearray:
        assert question.subject == Subject.PROBE
        if self.refuses:
            raise NotThere("it does not have this")
        size = question.chunk
        assert 0 < size <= MAX_CHUNK_BYTES
        assert size <= largest_bytes
        self._free_at_s = max(self._free_at_s, trio.current_time()) + size / self._bytes_s
        await trio.sleep_until(self._free_at_s + self._round_trip_s)
        self.given += size
        return bytearray(size)


async def probe(line: Line, exchanging: Callable[[], bool] = lambda: False) -> tuple[api.Probed, float]:
    started_s = trio.current_time()
    made = Prober(exchanging=exchanging, switchboard=line, requester=line)  # type: ignore[arg-type]
    return await made.run(api.Probe(id=1, peer_id="a")), trio.current_time() - started_s


def test_a_probe_ends_with_its_bytes_on_a_fast_line_and_with_its_time_on_a_slow_one() -> None:
    async def main() -> None:
        probed, seconds = await probe(Line(1e9))
        assert probed.bytes_received <= PROBE_BYTES
        assert probed.bytes_received > PROBE_BYTES // 2
        assert seconds < 1.0
        probed, seconds = await probe(Line(1e6))
        assert 8e5 < probed.bytes_received < 2.1e6
        assert seconds < probing.PROBE_S + 1.1
        probed, seconds = await probe(Line(2e4))
        assert probed.bytes_received <= 6 * probing.FIRST_CHUNK_BYTES, "a slow line is asked for little"
        assert seconds < 6.0
        probed, seconds = await probe(Line(100.0))
        assert (probed.bytes_received, seconds) == (0, probing.PROBE_S + probing.ANSWER_S)

    in_virtual_time(main)


def test_an_exchange_or_a_refusal_ends_a_probe() -> None:
    async def main() -> None:
        line = Line(1e6)
        probed, seconds = await probe(line, lambda: line.given > 100_000)
        assert probed.why == "an exchange began"
        assert probed.bytes_received < 500_000
        assert seconds < 1.0
        line.refuses = True
        probed, _ = await probe(line)
        assert (probed.bytes_received, probed.why) == (0, "it does not have this")

    in_virtual_time(main)


class Engine:
    def __init__(self) -> None:
        self.probed: list[tuple[float, str]] = []

    async def probe(self, *, peer_id: str) -> api.Probed:
        self.probed.append((trio.current_time(), peer_id))
        return api.Probed(id=1, bytes_received=0, why="")


def daemon_prober(peers: int, idle: Callable[[], bool] = lambda: True) -> tuple[prober.Prober, Engine, LinkTable]:
    table, engine = LinkTable("me"), Engine()
    names = [f"peer {number}" for number in range(peers)]
    records = {name: SimpleNamespace(certificate_sha256=b"x" * 32) for name in names}
    network = SimpleNamespace(peers=dict.fromkeys(names), membership=SimpleNamespace(records=records), link_table=table)
    return prober.Prober(network=network, engine=engine, idle=idle), engine, table  # type: ignore[arg-type]


def test_links_are_probed_one_at_a_time_seldom_and_only_where_nothing_is_known() -> None:
    async def main() -> None:
        made, engine, table = daemon_prober(5)
        table.saw_peer("peer 3", api.Rates(received_bytes_s=1e6))
        with trio.move_on_after(540.0):
            await made.run()
        assert sorted(peer for _, peer in engine.probed) == ["peer 0", "peer 1", "peer 2", "peer 4"]
        times = [at_s for at_s, _ in engine.probed]
        gaps = [after - before for before, after in itertools.pairwise(times)]
        assert all(gap >= 0.75 * prober.EVERY_S for gap in gaps)
        with trio.move_on_after(540.0):
            await made.run()
        assert len(engine.probed) <= 8, "who told nothing is asked again after ten minutes"

    in_virtual_time(main)


def test_a_large_swarm_is_not_probed_through() -> None:
    async def main() -> None:
        made, _, table = daemon_prober(100)
        for number in range(prober.KNOWN_ENOUGH):
            assert made.next_peer() is not None
            table.saw_peer(f"peer {number}", api.Rates(received_bytes_s=1e6))
        assert made.next_peer() is None

    in_virtual_time(main)


def test_nobody_is_probed_while_a_round_exchanges() -> None:
    async def main() -> None:
        made, engine, _ = daemon_prober(5, lambda: trio.current_time() > 300.0)
        start_s = trio.current_time()
        with trio.move_on_after(400.0):
            await made.run()
        assert engine.probed
        assert all(at_s > max(300.0, start_s) for at_s, _ in engine.probed)

    in_virtual_time(main)
