"""Every token is accounted for in a real swarm whose processes are killed at drawn moments."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path

import psutil
import pytest
from daemons import ROUND_S, Daemon, assert_agreed, daemons, trio_of, wait_all, wait_counted

from scripts.soaking.accounts import read_account

pytestmark = [pytest.mark.chaos_long, pytest.mark.swarm, pytest.mark.slow]

ROLES = ("trainer", "engine", "daemon", "supervisor")
LONGEST_PAUSE_S = 3.0


def kill(node: Daemon, role: str) -> None:
    """SIGKILL, wherever it is in its life; nothing when it is between two of them."""
    if role == "supervisor":
        node.kill()
        return
    with contextlib.suppress(psutil.Error, ProcessLookupError):
        process = node.whole_node().get(role)
        if process is not None:
            os.kill(process.pid, signal.SIGKILL)


def test_nobody_knows_the_moment_and_all_work_is_accounted_for(tmp_path: Path) -> None:
    drawn = random.Random(20)
    with daemons(tmp_path) as make:
        trio = trio_of(make, counted=1)
        nodes = trio.nodes
        events = [(node, role) for node in nodes for role in ROLES]
        drawn.shuffle(events)
        for node, role in events:
            time.sleep(drawn.uniform(0, LONGEST_PAUSE_S))
            kill(node, role)
            if role == "supervisor":
                trio.start_again(node, *(one for one in nodes if one is not node))
            for one in nodes:
                status = one.glance()
                assert status is None or status.work.exact.missing == 0, (one.name, status.work)
        wait_all(nodes, lambda: all(one.last is not None for one in nodes), "all are back", 3 * ROUND_S)
        wait_counted(nodes, 2, "all three are counted again", 4 * ROUND_S)
        assert_agreed(*nodes, at_least=1)
        for node in nodes:
            code, seconds = node.terminate()
            assert (code, seconds <= 10.0) == (0, True), node.output
        accounts = [account for node in nodes if (account := read_account(node.home)) is not None]
        longest = max(accounts, key=lambda account: account.tip[1])
        for account in accounts:
            exact = account.work
            assert exact.missing == 0, exact
            assert min(exact.produced, exact.counted, exact.carried, *exact.discarded.values()) >= 0
            assert exact.counted == account.chain[account.peer], "what is counted is what the chain says"
            # It may have left before the others' last rounds, in which it had no part.
            assert exact.counted == longest.chain[account.peer]
