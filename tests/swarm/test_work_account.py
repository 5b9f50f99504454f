"""Every token is accounted for in a real swarm whose processes are killed: at drawn moments, and at chosen places."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import time
from pathlib import Path

import psutil
import pytest
from daemons import ROUND_S, Daemon, assert_agreed, daemons, trio_of, wait_all, wait_counted

from node.trainer.made import TokenCounter
from scripts.soaking.accounts import read_account
from tests.chaos.lab import Lab, Node

pytestmark = [pytest.mark.swarm, pytest.mark.slow]

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


@pytest.mark.chaos_long
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


PLACES = {
    "exchange": "before it has sent anything: all of it goes on with the next round",
    "reduced": "in the middle: some parts are counted, and the rest is lost if this round's commit is missed",
    "vote-1": "when all of it is on its way into a commit that the node misses",
}


def thrown_away(node: Node) -> int:
    """Tokens that its trainer took out of its model uncounted, by the trainer's own word."""
    lines = node.log_lines("tokens of uncounted work are discarded")
    return sum(int(match[1]) for line in lines if (match := re.search(r"(\d+) tokens of uncounted work", line)))


def test_what_a_killed_engine_had_is_counted_or_carried_or_lost_but_nothing_twice(tmp_path: Path) -> None:
    """Its trainer lives. The account is held against what it does not write itself: the trainer's word for what left
    the model uncounted, the trainer's counter, and the chain.
    """
    with Lab(tmp_path, say=print) as lab:
        nodes = lab.swarm(3, rounds=2)
        victim, *others = nodes
        for place, what in PLACES.items():
            before, thrown = victim.status().work, thrown_away(victim)
            _, struck = lab.strike(nodes, lambda _: victim, place, target="engine")
            lab.wait_counted_again(victim, others, struck.at_s, lab.reached(nodes) + 1)
            work = victim.status().work
            assert work.exact.missing == 0, (what, work)
            lost, thrown = work.discarded_tokens - before.discarded_tokens, thrown_away(victim) - thrown
            assert lost <= thrown <= lab.round_tokens(), f"{what}: {lost} are reported lost, {thrown} left the model"
        assert_agreed(*nodes, at_least=1)
        for node in nodes:
            code, seconds = node.terminate()
            assert (code, seconds <= 10.0) == (0, True), node.output
        assert lab.run is not None
        for node in nodes:
            account = read_account(node.home)
            assert account is not None
            exact = account.work
            assert exact.missing == 0, exact
            assert exact.counted == account.chain[account.peer], "what is counted is what the chain says"
            made = TokenCounter(node.home.trainer_directory(lab.run.run_id)).tokens
            assert exact.produced <= made * exact.parts, "no token is in two places"
            assert made * exact.parts - exact.produced <= lab.round_tokens() * exact.parts
