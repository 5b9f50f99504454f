"""Every file of a home, damaged while its node is down: the node says so, makes do, and contributes again.

The files are those of a real home. One that no pattern here names fails the test: whoever adds a file says what is to
become of it when a disk spoils it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from daemons import ROUND_S, Daemon, assert_agreed, daemons, wait_all, wait_counted

pytestmark = [pytest.mark.swarm, pytest.mark.slow]

LOOPBACK = ("--listen", "/ip4/127.0.0.1/tcp/0", "--threads", "1")

RUN = r"runs/[0-9a-f]{64}"
DAMAGED = {
    "run id": r"run",
    "known peers": r"peers\.json",
    "listen port": r"listen_port",
    "last status": r"last_status\.json",
    "daemon file": r"daemon\.json",
    "log": r"daemon\.log(\.1)?",
    "manifest": rf"{RUN}/manifest\.msgpack",
    "chain log": rf"{RUN}/chain\.log",
    "chain checkpoint": rf"{RUN}/chain\.checkpoint",
    "vote journal": rf"{RUN}/journal",
    "apply journal": rf"{RUN}/engine/apply\.journal",
    "artifact": rf"{RUN}/engine/artifacts/[0-9a-f]{{64}}",
    "part payloads": rf"{RUN}/engine/parts/[0-9a-f]{{64}}\.data",
    "part index": rf"{RUN}/engine/parts/[0-9a-f]{{64}}\.index",
    "part rounds": rf"{RUN}/engine/parts/rounds",
    "snapshot": rf"{RUN}/engine/snapshots/[0-9]+-[0-9a-f]{{64}}/data",
    "snapshot chunks": rf"{RUN}/engine/snapshots/[0-9]+-[0-9a-f]{{64}}/chunks",
    "contribution": rf"{RUN}/engine/outbox/[0-9a-f]{{64}}\.data",
    "contribution index": rf"{RUN}/engine/outbox/[0-9a-f]{{64}}\.meta",
    "trainer index": rf"{RUN}/trainer/checkpoint\.json",
    "work account": rf"{RUN}/work",
    "trainer account": rf"{RUN}/trainer/made\.tokens",
    "trainer state": rf"{RUN}/trainer/state-[0-9a-f]+\.safetensors",
}
UNTOUCHED = {
    "identity": r"identity\.key",  # who this node is; nobody else can give it back
    "locks": r"(identity|supervisor)\.lock",  # empty, or a number that is written anew
    "operator's": r"config\.toml",
    "interrupted": rf"{RUN}/engine/(artifacts|snapshots)/.*\.partial(/(data|chunks))?",  # verified by chunk
    "drafts": r".*\.(new|writing)",
    "left behind": r".*(\.damaged|\.unusable|/corrupt/.*|chain\.log\.(torn|left)-[0-9]+)",
    "chaos": r"(bends|armed|struck).*",
}


def files_by_kind(home: Path) -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for path in sorted(home.rglob("*")):
        name = str(path.relative_to(home))
        if not path.is_file() or any(re.fullmatch(pattern, name) for pattern in UNTOUCHED.values()):
            continue
        kinds = [kind for kind, pattern in DAMAGED.items() if re.fullmatch(pattern, name)]
        assert len(kinds) == 1, f"{name}: say in this test what becomes of it when it is damaged"
        found.setdefault(kinds[0], []).append(path)
    return found


def flip(path: Path) -> None:
    """One bit in the middle."""
    data = bytearray(path.read_bytes())
    if data:
        data[len(data) // 2] ^= 0x04
        path.write_bytes(data)


def cut(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def three(make: object) -> tuple[Daemon, Daemon, Daemon]:
    assert callable(make)
    a, b, c = make("a"), make("b"), make("c")
    a.start("--run", "micro", *LOOPBACK).wait_listening()
    for joiner in (b, c):
        joiner.start("--join", a.address, "--threads", "1")
    nodes = [a, b, c]
    wait_all(nodes, lambda: all(node.last is not None and node.last.members == 3 for node in nodes), "all have met")
    wait_counted(nodes, 3, "all three are counted")
    return a, b, c


def back_again(a: Daemon, b: Daemon, c: Daemon, what: str) -> None:
    c.start("--threads", "1")
    wait_counted([a, b, c], 1, f"C contributes again after {what}", 3 * ROUND_S)
    newest = max(a.rounds.keys() & c.rounds.keys())
    assert a.rounds[newest].state_hash == c.rounds[newest].state_hash, what


@pytest.mark.chaos_long
@pytest.mark.parametrize("damage", [flip, cut])
def test_everything_at_once(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    """But for the manifest, the known peers and the run id, of which one finds the peers that send the others."""
    with daemons(tmp_path) as make:
        a, b, c = three(make)
        c.kill()
        for kind, paths in files_by_kind(c.home.path).items():
            if kind not in {"known peers", "manifest"}:
                for path in paths:
                    damage(path)
        back_again(a, b, c, f"{damage.__name__} of everything")
        assert_agreed(a, b, at_least=3)


@pytest.mark.chaos_long
@pytest.mark.parametrize("damage", [flip, cut])
def test_one_kind_after_another(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    with daemons(tmp_path) as make:
        a, b, c = three(make)
        done: set[str] = set()
        while True:
            c.kill()
            kinds = files_by_kind(c.home.path)
            left = [kind for kind in kinds if kind not in done]
            if not left:
                break
            for path in kinds[left[0]]:
                damage(path)
            said = len(c.output)
            back_again(a, b, c, f"{damage.__name__} of the {left[0]}")
            done.add(left[0])
            lines = [line for line in c.output[said:].splitlines() if "[warning]" in line or "[error]" in line]
            sys.stdout.write(f"{left[0]}: {' | '.join(line[:160] for line in lines[:3]) or 'nothing said'}\n")
        assert done >= {"manifest", "chain log", "vote journal", "snapshot", "artifact", "part payloads"}
        assert_agreed(a, b, at_least=3)
