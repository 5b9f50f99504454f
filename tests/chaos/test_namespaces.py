"""Nodes on machines of their own, as far as the kernel can tell: in network namespaces, joined by one multiaddr."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.swarm.daemons import ROUND_S, Daemon, assert_agreed, assert_sensible, daemons, wait_all, wait_counted

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.swarm,
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces are made by root only"),
    pytest.mark.skipif(shutil.which("ip") is None, reason="network namespaces need `ip` of iproute2"),
]


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=20, check=False)
    if done.returncode != 0:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


@pytest.fixture
def namespaces() -> Iterator[list[str]]:
    """Three namespaces on one bridge, 10.x.y.1 to 3, which lies in a fourth: nothing is left on this machine's own net.

    No namespace has a route to anywhere else, and each has its loopback.
    """
    tag = secrets.token_hex(3)
    names = [f"atoll-{tag}-{index}" for index in range(4)]
    net = f"10.{secrets.randbelow(200) + 20}.{secrets.randbelow(250)}"
    made: list[str] = []
    try:
        try:
            for name in names:
                ip("netns", "add", name)
                made.append(name)
                ip("-n", name, "link", "set", "lo", "up")
            switch = names[3]
            ip("-n", switch, "link", "add", "bridge", "type", "bridge")
            ip("-n", switch, "link", "set", "bridge", "up")
            for index, name in enumerate(names[:3]):
                port = f"port{index}"
                ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", switch)
                ip("-n", switch, "link", "set", port, "master", "bridge", "up")
                ip("-n", name, "addr", "add", f"{net}.{index + 1}/24", "dev", "eth0")
                ip("-n", name, "link", "set", "eth0", "up")
        except OSError as error:
            pytest.skip(f"this kernel makes no such namespaces: {error}")
        yield names[:3]
    finally:
        for name in made:
            ip("netns", "del", name)


def assert_reachable_from_elsewhere(node: Daemon) -> None:
    assert node.last is not None
    for address in node.last.addresses:
        host = address.split("/")[2]
        assert not host.startswith("127."), f"{node.name} announces {address}"
        assert host not in ("0.0.0.0", "::", "::1"), f"{node.name} announces {address}"


def test_three_machines_joined_by_one_address(namespaces: list[str], tmp_path: Path) -> None:
    """No flag but what a newcomer types: the addresses are found, C is told of A by B."""
    with daemons(tmp_path) as make:
        a, b, c = (make(name, namespace=place) for name, place in zip("abc", namespaces, strict=True))
        a.start("--run", "micro", "--threads", "1").wait_listening()
        assert_reachable_from_elsewhere(a)
        assert a.address.split("/")[2].startswith("10.")
        b.start("--join", a.address, "--threads", "1").wait_listening()
        b.wait(lambda status: status.round >= 1, "B has the state")
        c.start("--join", b.address, "--threads", "1").wait_listening()
        wait_counted([a, b, c], 1, "all three are counted", 2 * ROUND_S)
        for node in (a, b, c):
            assert_reachable_from_elsewhere(node)
            assert_sensible(node.status())
        wait_all([c], lambda: (seen := c.peer(a)) is not None and seen.connected, "C is connected to A itself")
        assert_agreed(a, b, c, at_least=1)

        unplug(namespaces[1])
        a_and_c = [a, c]
        before = max(node.last.round for node in a_and_c if node.last)
        wait_all(
            a_and_c,
            lambda: all(node.last is not None and node.last.round >= before + 2 for node in a_and_c),
            "A and C go on without B, whose cable is out",
            2 * ROUND_S,
        )
        plug(namespaces[1])
        wait_counted([a, b, c], 1, "B is counted again once its cable is in", 3 * ROUND_S)
        for node in (c, b, a):
            code, seconds = node.terminate()
            assert (code, seconds <= 10.0) == (0, True)
            assert not node.survivors()


def unplug(namespace: str) -> None:
    ip("-n", namespace, "link", "set", "eth0", "down")


def plug(namespace: str) -> None:
    ip("-n", namespace, "link", "set", "eth0", "up")
