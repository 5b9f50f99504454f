"""A real node whose root fabricates means is found out by an audit and left out by all (protocol section 7)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.lab import OUTAGE_ROUND_S, Lab
from tests.swarm.daemons import PATIENCE, assert_agreed, wait_all

pytestmark = [pytest.mark.slow, pytest.mark.chaos_long, pytest.mark.swarm]

CAUGHT_S = 90.0 * PATIENCE
"""For an audit to draw one of its parts, the others to recompute it, and a ROSTER to carry the evidence."""
ROUNDS = 2


def test_a_root_that_fabricates_means_is_left_out_by_all(tmp_path: Path) -> None:
    with Lab(tmp_path, say=print) as lab:
        nodes = lab.swarm(4)
        *others, liar = nodes
        before = [node.status() for node in others]
        assert not any(status.caught for status in before)
        assert sum(status.audits.right for status in before) > 0, "nobody has audited anything yet"
        assert not any(status.audits.wrong for status in before)
        began = lab.reached(nodes)
        liar.bend("means-fabricated")
        wait_all(
            others,
            lambda: (
                all(node.last is not None and liar.peer_id not in node.last.group for node in others)
                and all(node.last is not None and liar.peer_id in node.last.caught for node in others)
            ),
            "everyone leaves the liar out",
            CAUGHT_S,
        )
        out = max(node.last.round for node in others if node.last is not None)
        lab.say(f"left out {out - began} rounds after the first lie could be told")
        lab.wait_round(others, out + ROUNDS, "the others go on", ROUNDS * OUTAGE_ROUND_S)
        statuses = [node.status() for node in others]
        for node, status in zip(others, statuses, strict=True):
            assert set(status.caught) == {liar.peer_id}, f"{node.name} convicts somebody honest: {status.caught}"
            assert "mean" in status.caught[liar.peer_id]
            assert liar.peer_id not in status.group
            assert node.log_lines("a peer is caught", liar.peer_id)
            for number in range(out + 1, out + ROUNDS):
                assert liar.peer_id not in node.rounds[number].contributors
        assert sum(status.audits.wrong for status in statuses) >= 1
        assert_agreed(*others, at_least=ROUNDS)
        liar.wait(lambda status: "evidence against this node's key" in status.reason, "the liar says so", CAUGHT_S)
        for node, status in zip(others, statuses, strict=True):
            audits, number = status.audits, max(1, status.round)
            lab.say(
                f"{node.name}: {audits.right} right, {audits.wrong} wrong, skipped {audits.skipped}; a round costs "
                f"{audits.seconds / number:.3f} s and {audits.bytes_received / number:.0f} bytes"
            )
