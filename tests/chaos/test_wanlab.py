"""The wide-area lab itself: what it promises of delay, rate, loss and cuts, and that nothing of it is left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from scripts.wanlab.wan import Host, Wan, WanError, unavailable

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.slow,
    pytest.mark.skipif(unavailable() is not None, reason=unavailable() or "a lab can be made"),
]

WAIT_S = 20.0

ECHO = """
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    s.bind((sys.argv[1], 5000))
    print("listening", flush=True)
    while True:
        data, who = s.recvfrom(2048)
        s.sendto(data, who)
"""
PROBE = """
import socket, sys, time
count, wait_s = int(sys.argv[2]), float(sys.argv[3])
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    s.connect((sys.argv[1], 5000))
    sent = {}
    s.settimeout(wait_s)
    for number in range(count):
        sent[number] = time.monotonic()
        s.send(number.to_bytes(4, "big") + bytes(996))
    answers = []
    try:
        while len(answers) < count:
            number = int.from_bytes(s.recv(2048)[:4], "big")
            answers.append((number, time.monotonic() - sent[number]))
    except TimeoutError:
        pass
for number, seconds in answers:
    print(number, seconds)
"""


@pytest.fixture
def wan() -> Iterator[Wan]:
    """Three hosts; each answers datagrams at port 5000."""
    with Wan(3) as made, contextlib.ExitStack() as children:
        for host in made.hosts:
            child = subprocess.Popen([*host.prefix, sys.executable, "-c", ECHO, host.address], stdout=subprocess.PIPE)
            children.callback(child.communicate, timeout=WAIT_S)
            children.callback(child.kill)
            assert child.stdout is not None
            assert child.stdout.readline() == b"listening\n"
        yield made


def probe(source: Host, target: Host, *, count: int = 1, wait_s: float = 2.0) -> list[tuple[int, float]]:
    """Datagrams of 1,000 bytes, all at once: (number, seconds of the round trip) of those answered, in order."""
    done = subprocess.run(
        [*source.prefix, sys.executable, "-c", PROBE, target.address, str(count), str(wait_s)],
        capture_output=True,
        text=True,
        timeout=WAIT_S + wait_s,
        check=True,
    )
    return [(int(number), float(seconds)) for number, seconds in (line.split() for line in done.stdout.splitlines())]


def test_delay_is_of_one_way_and_jitter_keeps_the_order(wan: Wan) -> None:
    a, b, c = wan.hosts
    wan.link([a], [b], delay_s=0.2)
    assert next(seconds for _, seconds in probe(a, b)) >= 0.4
    assert next(seconds for _, seconds in probe(a, c)) < 0.3, "other pairs are as they were"
    wan.link([a], [b], delay_s=0.2, jitter_s=0.1)
    answers = probe(a, b, count=50)
    assert [number for number, _ in answers] == list(range(50))
    assert min(seconds for _, seconds in answers) >= 0.2


def test_loss_is_of_the_share_that_was_asked_for(wan: Wan) -> None:
    a, b, _ = wan.hosts
    wan.link([a], [b], loss=0.2)
    for _ in range(10):
        probe(a, b, count=60, wait_s=0.3)
    counts = wan.counts([a], [b])
    assert counts.delivered + counts.lost >= 900
    assert 0.1 < counts.loss < 0.3  # 0.2 ± eight standard deviations
    wan.link([a], [b], loss=0.0)
    assert len(probe(a, b, count=60)) == 60


def test_a_rate_delays_and_its_queue_drops(wan: Wan) -> None:
    a, b, _ = wan.hosts
    wan.queue(10.0)
    wan.rate(a, up_bytes_s=50_000)
    answers = probe(a, b, count=20)
    assert len(answers) == 20
    assert answers[-1][1] >= 20 * 1000 / 50_000
    wan.queue(0.1)
    assert len(probe(a, b, count=20, wait_s=0.5)) <= 10
    assert wan.counts([a], [b]).full >= 10


def test_cuts_are_of_the_directions_that_were_named(wan: Wan) -> None:
    a, b, c = wan.hosts
    wan.cut([a], [b], one_way=True)
    assert not probe(a, b, wait_s=0.3)
    assert not probe(b, a, wait_s=0.3), "the answer is lost"
    assert wan.counts([b], [a]).delivered == 1
    assert probe(a, c)
    wan.cut([a])
    assert not probe(a, c, wait_s=0.3)
    assert probe(b, c)
    wan.heal()
    assert probe(a, b)
    assert probe(c, a)


def test_hosts_of_a_site_share_its_line(wan: Wan) -> None:
    a, b, c = wan.hosts
    wan.queue(10.0)
    wan.site(0, [a, b], up_bytes_s=50_000, down_bytes_s=50_000)
    assert probe(a, b, count=20)[-1][1] < 20 * 1000 / 50_000
    assert probe(a, c, count=20)[-1][1] >= 20 * 1000 / 50_000


def test_mistakes_are_sentences(wan: Wan) -> None:
    with pytest.raises(WanError, match="1 to 64"):
        Wan(65)
    with pytest.raises(WanError, match="not understood"):
        wan.link(loss=2.0)
    with pytest.raises(WanError, match="no congestion control 'none-such'"), Wan(1, congestion_control="none-such"):
        pytest.fail("this kernel knows it")


HOLDER = """
import sys, time
from scripts.wanlab.wan import Wan
with Wan(2) as wan:
    print(wan._process.pid, *(host.namespace for host in wan.hosts), flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("victim", ["user", "lab"])
def test_nothing_is_left_when_either_is_killed(victim: str) -> None:
    """Neither the user nor the lab's own process needs to do anything for its namespaces and devices to go."""
    before = set(psutil.net_if_addrs())
    user = subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=os.environ | paths()
    )
    assert user.stdout is not None
    pid, *namespaces = user.stdout.readline().decode().split()
    numbers = {os.stat(one).st_ino for one in namespaces}
    assert len(numbers) == 2
    assert numbers <= namespaces_in_use()
    os.kill(user.pid if victim == "user" else int(pid), signal.SIGKILL)
    try:
        deadline_s = time.monotonic() + WAIT_S
        while numbers & namespaces_in_use():
            assert time.monotonic() < deadline_s, "the namespaces are still there"
            time.sleep(0.1)
        assert set(psutil.net_if_addrs()) == before
    finally:
        user.kill()
        user.communicate(timeout=WAIT_S)


def paths() -> dict[str, str]:
    """So that a child imports what this process does."""
    return {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    }


def namespaces_in_use() -> set[int]:
    """Network namespaces that some process is in or holds open."""
    found = set()
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            for link in (process / "ns/net", *_descriptors(process)):
                try:
                    if os.readlink(link).startswith("net:["):
                        found.add(os.stat(link).st_ino)
                except OSError:
                    continue  # it has ended
    return found


def _descriptors(process: Path) -> list[Path]:
    try:
        return list((process / "fd").iterdir())
    except OSError:
        return []
