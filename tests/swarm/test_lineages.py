"""Two lineages of one run, made and healed with real processes: the loser follows, and says what it lost.

No network has to be cut for it. One of three goes on alone while the others are down, and dies; the others, a quorum of
the electors, come back and go on where all three were. Then the first one comes back to them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from daemons import ROUND_S, Daemon, assert_agreed, daemons, trio_of, wait_all, wait_counted

from node.daemon.contribution import LINEAGE_LOST

pytestmark = [pytest.mark.chaos_long, pytest.mark.swarm, pytest.mark.slow]


def reached(node: Daemon, round_: int) -> bool:
    return node.last is not None and node.last.round >= round_


def test_the_loser_of_two_lineages_follows_the_electors_and_reports_what_it_lost(tmp_path: Path) -> None:
    with daemons(tmp_path) as make:
        trio = trio_of(make, counted=2)
        a, b, c = nodes = trio.nodes
        first = a.status().lineage
        b.kill()
        c.kill()
        own = a.wait(lambda status: status.lineage not in (None, first), "a new lineage of one", 3 * ROUND_S)
        assert own.lineage is not None
        ahead = own.round + 3
        a.wait(lambda status: status.round >= ahead, "it goes on alone", 2 * ROUND_S)
        alone = a.status()
        a.kill()

        for node, other in ((b, c), (c, b)):
            trio.start_again(node, other)
        others = [b, c]
        wait_all(
            others, lambda: all(node.last is not None and node.last.round >= 2 for node in others), "both are back"
        )
        goal = max(node.last.round for node in others if node.last is not None) + 2
        wait_all(others, lambda: all(reached(node, goal) for node in others), "the two go on", 3 * ROUND_S)
        assert {node.status().lineage for node in others} == {first}

        trio.start_again(a, b, c)
        seen: set[str] = set()

        def followed() -> bool:
            if a.last is not None:
                seen.add(a.last.reason)
            assert all(node.last is None or node.last.lineage == first for node in others), "the winner goes on"
            return a.last is not None and bool(a.last.lost_lineages)

        wait_all(nodes, followed, "the loser is taken in", 4 * ROUND_S)
        # Whether one or both of the others have been heard by then is a matter of moments.
        assert any("live elector" in reason and "following it in" in reason for reason in seen), seen
        status = a.status()
        assert status.lineage == first
        assert status.left_lineage is None
        (lost,) = status.lost_lineages
        assert (lost.lineage, lost.followed) == (own.lineage, first)
        assert lost.rounds >= 3
        assert lost.own_tokens > 0
        assert status.work.discarded[LINEAGE_LOST] > 0
        assert status.problems["lineage lost"] == 1
        wait_counted(nodes, 1, "all three are counted again", 3 * ROUND_S)
        status = a.status()
        assert status.work.exact.missing == 0, status.work
        assert status.work.counted_tokens < alone.work.counted_tokens + alone.work.carried_tokens + lost.own_tokens
        a.rounds = {one.round: one for one in status.history if one.round >= goal}
        assert_agreed(*nodes, at_least=1)
        assert "this node's own lineage is given up" in a.output
        for node in nodes:
            code, seconds = node.terminate()
            assert (code, seconds <= 10.0) == (0, True), node.output
