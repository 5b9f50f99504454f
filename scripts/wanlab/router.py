"""A home behind a router on a lab's host: what is behind it dials out under the router's address, and nobody dials in.

with Wan(3) as wan, behind_router(wan.hosts[2]) as home:
    subprocess.Popen([*home.prefix, "atoll", "daemon", ...])

The router is the host's own network namespace, whose kernel masquerades as any home router's does. The rules are given
to nf_tables directly, so that neither `nft` nor `iptables` is needed. What nobody behind it asked for is dropped
without a word. The home ends with the block, its rules with the lab.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from scripts.wanlab.wan import Host, WanError

HOME_NETWORK = "192.168.77"
"""Of every home: two of them have the same addresses, as homes do."""
TOOL_S = 20.0

_NLM_F_REQUEST, _NLM_F_ACK, _NLM_F_CREATE, _NLM_F_APPEND = 0x1, 0x4, 0x400, 0x800
_NLA_F_NESTED = 0x8000
_NETLINK_NETFILTER = 12
_NFPROTO_IPV4 = 2
_SUBSYSTEM = 10
_BATCH_BEGIN, _BATCH_END = 0x10, 0x11
_NEW_TABLE, _NEW_CHAIN, _NEW_RULE = 0, 3, 6
_PREROUTING, _INPUT, _POSTROUTING = 0, 1, 4
_DNAT_PRIORITY, _FILTER_PRIORITY, _SNAT_PRIORITY = -100, 0, 100
_DROP, _ACCEPT = 0, 1
_REGISTER = 1
_META_IIFNAME = 6
_TABLE = "home"


class RouterError(WanError):
    """This kernel makes no routers: one sentence."""


@contextlib.contextmanager
def behind_router(host: Host, *, forwards: bool = False) -> Iterator[Host]:
    """One machine behind `host`, which becomes a router. `forwards`: all that dials the router is led to the machine.

    Raises `RouterError`.
    """
    inside = subprocess.Popen(
        [
            *host.prefix,
            "unshare",
            "--net",
            "--",
            sys.executable,
            "-c",
            "import sys; print(flush=True); sys.stdin.read()",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert inside.stdout is not None
        inside.stdout.readline()
        namespace = f"/proc/{inside.pid}/ns/net"
        home = Host(index=host.index, address=f"{HOME_NETWORK}.2", namespace=namespace)
        _run(
            *host.prefix, "ip", "link", "add", "home0", "type", "veth", "peer", "name", "eth0", "netns", str(inside.pid)
        )
        _run(*host.prefix, "ip", "addr", "add", f"{HOME_NETWORK}.1/24", "dev", "home0")
        _run(*host.prefix, "ip", "link", "set", "home0", "up")
        _run(*home.prefix, "ip", "link", "set", "lo", "up")
        _run(*home.prefix, "ip", "addr", "add", f"{home.address}/24", "dev", "eth0")
        _run(*home.prefix, "ip", "link", "set", "eth0", "up")
        _run(*home.prefix, "ip", "route", "add", "default", "via", f"{HOME_NETWORK}.1")
        words = ["forward"] if forwards else []
        paths = {"PYTHONPATH": str(Path(__file__).parents[2])}
        _run(*host.prefix, sys.executable, "-m", "scripts.wanlab.router", *words, environment=os.environ | paths)
        yield home
    finally:
        inside.communicate(timeout=TOOL_S)  # it ends with its input


def _run(*command: str, environment: dict[str, str] | None = None) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_S, env=environment, check=False)
    if done.returncode != 0:
        raise RouterError(f"{' '.join(command)}: {done.stderr.strip()[-500:]}")


# ---------------------------------------------------------------- nf_tables (linux/netfilter/nf_tables.h)


def masquerade(*, forwards: bool) -> None:
    """Make the network namespace of this process a router's. Raises `OSError`."""
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    messages = [
        (_NEW_TABLE, _text(1, _TABLE)),
        _chain("out", "nat", _POSTROUTING, _SNAT_PRIORITY, _ACCEPT),
        _rule("out", _expression("masq", b"")),
        # What is meant for the router itself, since nobody inside asked for it.
        _chain("door", "filter", _INPUT, _FILTER_PRIORITY, _DROP),
    ]
    if forwards:
        messages += [
            _chain("in", "nat", _PREROUTING, _DNAT_PRIORITY, _ACCEPT),
            _rule("in", *_arrived_by("wan0"), *_led_to(f"{HOME_NETWORK}.2")),
        ]
    _send(messages)


def _send(messages: list[tuple[int, bytes]]) -> None:
    """As one batch: all of it, or nothing."""
    batch = [_message(_BATCH_BEGIN, _NLM_F_REQUEST, 0, 0, _SUBSYSTEM)]
    for number, (kind, body) in enumerate(messages, 1):
        flags = _NLM_F_REQUEST | _NLM_F_ACK | _NLM_F_CREATE | _NLM_F_APPEND
        batch.append(_message(_SUBSYSTEM << 8 | kind, flags, number, _NFPROTO_IPV4, 0, body))
    batch.append(_message(_BATCH_END, _NLM_F_REQUEST, len(messages) + 1, 0, _SUBSYSTEM))
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_NETFILTER) as sock:
        sock.settimeout(TOOL_S)
        sock.bind((0, 0))
        sock.send(b"".join(batch))
        acknowledged = 0
        while acknowledged < len(messages):
            data = sock.recv(65_536)
            while data:
                (length,) = struct.unpack_from("=I", data)
                (error,) = struct.unpack_from("=i", data, 16)
                if error:
                    raise OSError(-error, f"nf_tables: {os.strerror(-error)}")
                acknowledged += 1
                data = data[(length + 3) & ~3 :]


def _message(kind: int, flags: int, number: int, family: int, resource: int, body: bytes = b"") -> bytes:
    payload = struct.pack("=BB", family, 0) + struct.pack(">H", resource) + body
    return struct.pack("=IHHII", 16 + len(payload), kind, flags, number, 0) + payload


def _attribute(kind: int, body: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(body), kind) + body + bytes(-len(body) % 4)


def _nested(kind: int, *attributes: bytes) -> bytes:
    return _attribute(kind | _NLA_F_NESTED, b"".join(attributes))


def _text(kind: int, text: str) -> bytes:
    return _attribute(kind, text.encode() + b"\0")


def _number(kind: int, value: int) -> bytes:
    return _attribute(kind, struct.pack(">i", value))


def _chain(name: str, kind: str, hook: int, priority: int, policy: int) -> tuple[int, bytes]:
    where = _nested(4, _number(1, hook), _number(2, priority))
    return _NEW_CHAIN, _text(1, _TABLE) + _text(3, name) + where + _number(5, policy) + _text(7, kind)


def _rule(chain: str, *expressions: bytes) -> tuple[int, bytes]:
    return _NEW_RULE, _text(1, _TABLE) + _text(2, chain) + _nested(4, *expressions)


def _expression(name: str, body: bytes) -> bytes:
    return _nested(1, _text(1, name), _nested(2, body))


def _arrived_by(interface: str) -> tuple[bytes, bytes]:
    name = interface.encode().ljust(16, b"\0")
    return (
        _expression("meta", _number(1, _REGISTER) + _number(2, _META_IIFNAME)),
        _expression("cmp", _number(1, _REGISTER) + _number(2, 0) + _nested(3, _attribute(1, name))),
    )


def _led_to(address: str) -> tuple[bytes, bytes]:
    value = _nested(2, _attribute(1, socket.inet_aton(address)))
    return (
        _expression("immediate", _number(1, _REGISTER) + value),
        _expression("nat", _number(1, 1) + _number(2, _NFPROTO_IPV4) + _number(3, _REGISTER)),
    )


if __name__ == "__main__":
    masquerade(forwards="forward" in sys.argv[1:])
