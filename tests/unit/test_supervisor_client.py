"""The daemon's end of the link to its supervisor, over a real socket pair."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import trio

from node.daemon.supervisor_client import SupervisorClient, SupervisorGone


@pytest.fixture
def link() -> Iterator[tuple[SupervisorClient, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield SupervisorClient(ours), theirs


def asked(theirs: socket.socket) -> bool:
    return bool(theirs.recv(1 << 16))


def test_a_request_under_way_when_the_daemon_ends_is_no_failure(link: tuple[SupervisorClient, socket.socket]) -> None:
    """`status` asks for the processes at any time, also while the node leaves."""
    client, theirs = link

    async def main() -> None:
        with trio.fail_after(10):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(client.run)
                nursery.start_soon(client.processes)
                assert await trio.to_thread.run_sync(asked, theirs)
                nursery.cancel_scope.cancel()

    trio.run(main)


def test_the_end_of_the_supervisor_ends_the_daemon(link: tuple[SupervisorClient, socket.socket]) -> None:
    client, theirs = link

    async def main() -> None:
        with trio.fail_after(10):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(client.run)
                nursery.start_soon(client.processes)
                assert await trio.to_thread.run_sync(asked, theirs)
                theirs.close()

    with pytest.raises(BaseExceptionGroup) as ended:
        trio.run(main)
    assert ended.group_contains(SupervisorGone, match="has ended")
