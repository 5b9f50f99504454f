"""Every token is accounted for in a real swarm whose processes are killed at drawn moments."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import time
from pathlib import Path

import psutil
import pytest
from daemons import ROUND_S, Daemon, assert_agreed, daemons, wait_all, wait_counted

from node.cli import runs
from node.daemon.contribution import WorkLedger
from node.daemon.identity import hold_identity
from node.daemon.store import Store
from node.daemon.work_book import enter, read_chain
from node.daemon.work_file import WorkFile
from node.manifest import rules_of

pytestmark = [pytest.mark.swarm, pytest.mark.slow]

ROLES = ("trainer", "engine", "daemon", "supervisor")
LONGEST_PAUSE_S = 3.0


def loopback() -> tuple[str, ...]:
    """A port that stays the node's over its lives: the others look for it there."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return "--listen", f"/ip4/127.0.0.1/tcp/{probe.getsockname()[1]}", "--threads", "1"


def kill(node: Daemon, role: str) -> None:
    """SIGKILL, wherever it is in its life; nothing when it is between two of them."""
    if role == "supervisor":
        node.kill()
        return
    with contextlib.suppress(psutil.Error, ProcessLookupError):
        process = node.whole_node().get(role)
        if process is not None:
            os.kill(process.pid, signal.SIGKILL)


def accounts(node: Daemon) -> tuple[WorkLedger, dict[str, int]]:
    """A stopped node's account, brought up to its chain; and what that chain counts of each of its peers."""
    run = runs.current(node.home)
    assert run is not None
    rules = rules_of(run.manifest)
    with hold_identity(node.home) as identity:
        store = Store(node.home.run_directory(run.run_id), rules, identity)
        store.open()
        try:
            work = WorkFile(node.home.run_directory(run.run_id) / "work").load(rules.part_count)
            ledger = WorkLedger(work, token_cap=3 * rules.lease_cap_units * rules.unit_tokens)
            enter(ledger, read_chain(store, identity.peer_id, work.through))
            peers = {
                ready.sender
                for one in range(store.state.base.round)
                for ready in store.commit_at(one).roster.message.readys
            }
            return ledger, {peer: read_chain(store, peer, None).total for peer in peers}
        finally:
            store.close()


def test_nobody_knows_the_moment_and_all_work_is_accounted_for(tmp_path: Path) -> None:
    drawn = random.Random(20)
    with daemons(tmp_path) as make:
        nodes = [make(name) for name in "abc"]
        a, b, c = nodes
        ports = {node.name: loopback() for node in nodes}
        a.start("--run", "micro", *ports["a"]).wait_listening()
        addresses = {"a": a.address}
        for node in (b, c):
            node.start("--join", a.address, *ports[node.name]).wait_listening()
            addresses[node.name] = node.address
        wait_counted(nodes, 1, "all three are counted", 2 * ROUND_S)
        events = [(node, role) for node in nodes for role in ROLES]
        drawn.shuffle(events)
        for node, role in events:
            time.sleep(drawn.uniform(0, LONGEST_PAUSE_S))
            kill(node, role)
            if role == "supervisor":
                others = [f"--join={address}" for name, address in addresses.items() if name != node.name]
                node.start(*others, *ports[node.name])
            for one in nodes:
                status = one.glance()
                assert status is None or status.work.exact.missing == 0, (one.name, status.work)
        wait_all(nodes, lambda: all(one.last is not None for one in nodes), "all are back", 3 * ROUND_S)
        wait_counted(nodes, 2, "all three are counted again", 4 * ROUND_S)
        assert_agreed(*nodes, at_least=1)
        for node in nodes:
            code, seconds = node.terminate()
            assert (code, seconds <= 10.0) == (0, True), node.output
        seen = {node.peer_id: accounts(node) for node in nodes}
        longest = max((chain for _, chain in seen.values()), key=lambda chain: sum(chain.values()))
        for peer, (ledger, chain) in seen.items():
            exact = ledger.status().exact
            assert exact.missing == 0, exact
            assert min(exact.produced, exact.counted, exact.carried, *exact.discarded.values()) >= 0
            assert exact.counted == chain[peer], "what is counted is what the chain says"
            # It may have left before the others' last rounds, in which it had no part.
            assert exact.counted == longest[peer]
        assert sum(sum(ledger.account.discarded.values()) for ledger, _ in seen.values()) > 0
