"""hivemind's libp2p: its daemon `p2pd`, started here with nothing but what an all-reduce needs.

No DHT, no relay, no bootstrap peers: who takes part, and where, comes from the roster. `p2pd` ends by itself when this
process's connection to it ends.
"""

from __future__ import annotations

import asyncio
import os
from importlib.resources import files
from typing import Any

import hivemind.hivemind_cli
from hivemind.p2p import P2P
from hivemind.utils.multiaddr import Multiaddr

START_S = 30.0
IDLE_S = 60
"""`p2pd` waits so long for its first client."""


class TransportFailed(Exception):
    """One sentence."""


async def start(host: str, port: int, directory: str) -> tuple[P2P, asyncio.subprocess.Process]:
    """`directory`: for its sockets. Raises `TransportFailed`."""
    family = "ip6" if ":" in host else "ip4"
    # However long the path is: the kernel takes 107 characters of a socket's.
    place = f"/proc/{os.getpid()}/fd/{os.open(directory, os.O_PATH | os.O_DIRECTORY)}"
    control = f"{place}/p2pd.sock"
    P2P._UNIX_SOCKET_PREFIX = f"/unix{place}/"
    process = await asyncio.create_subprocess_exec(
        str(files(hivemind.hivemind_cli) / "p2pd"),
        f"-listen=/unix{control}",
        f"-hostAddrs=/{family}/{host}/tcp/{port}",
        f"-idleTimeout={IDLE_S}s",
        "-tls=1",
        "-relay=0",
        "-relayService=0",
        "-autonat=0",
        "-connManager=0",
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        await asyncio.wait_for(_until_ready(process), START_S)
        p2p = await asyncio.wait_for(P2P.replicate(Multiaddr(f"/unix{control}")), START_S)
    except TimeoutError:
        raise TransportFailed(f"hivemind's p2pd did not start within {START_S:.0f} s") from None
    return p2p, process


async def _until_ready(process: asyncio.subprocess.Process) -> None:
    assert process.stdout is not None
    last = "it said nothing"
    while line := await process.stdout.readline():
        last = line.decode(errors="replace").strip()
        if last.startswith("Peer ID:"):
            return
    raise TransportFailed(f"hivemind's p2pd cannot start: {last}")


async def drain(process: asyncio.subprocess.Process) -> None:
    """What it says goes nowhere: it is verbose about every stranger."""
    assert process.stdout is not None
    while await process.stdout.read(1 << 16):
        pass


def port_of(p2p: P2P) -> int:
    """Where it listens. Raises `TransportFailed`."""
    addresses: Any = p2p._visible_maddrs
    for address in addresses:
        text = str(address).split("/")
        if "tcp" in text:
            return int(text[text.index("tcp") + 1])
    raise TransportFailed(f"hivemind's p2pd listens nowhere: {[str(address) for address in addresses]}")
