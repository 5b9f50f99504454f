"""A network of the soak's own: a namespace for each node, joined by a bridge that lies in another; nothing else.

All names begin with one tag, and the sweeper (`scripts.soaking.sweeper`) removes them when the soak is gone.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess

COMMAND_S = 20.0


class NoNamespaces(Exception):
    """One sentence: why this machine gives none."""


def ip(*arguments: str) -> None:
    """Raises `NoNamespaces`."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=COMMAND_S, check=False)
    if done.returncode != 0:
        raise NoNamespaces(f"`ip {' '.join(arguments)}` says: {done.stderr.strip()}")


class Bridge:
    """Places 0 … count-1, each with an address of its own."""

    def __init__(self, count: int) -> None:
        """Makes all of it. Raises `NoNamespaces`, and then nothing is left."""
        if os.geteuid() != 0:
            raise NoNamespaces("network namespaces are made by root only")
        if shutil.which("ip") is None:
            raise NoNamespaces("there is no `ip` (package iproute2)")
        self._tag = f"soak-{secrets.token_hex(3)}"
        self._net = f"10.{20 + secrets.randbelow(200)}.{secrets.randbelow(250)}"
        self._switch = f"{self._tag}-switch"
        self.namespaces = tuple(f"{self._tag}-{place}" for place in range(count))
        try:
            for name in self.all_namespaces:
                ip("netns", "add", name)
                ip("-n", name, "link", "set", "lo", "up")
            ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
            ip("-n", self._switch, "link", "set", "bridge", "up")
            for place, name in enumerate(self.namespaces):
                port = f"port{place}"
                ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", self._switch)
                ip("-n", self._switch, "link", "set", port, "master", "bridge", "up")
                ip("-n", name, "addr", "add", f"{self.host(place)}/24", "dev", "eth0")
                ip("-n", name, "link", "set", "eth0", "up")
        except (NoNamespaces, subprocess.TimeoutExpired) as error:
            self.remove()
            raise NoNamespaces(str(error)) from error

    @property
    def all_namespaces(self) -> tuple[str, ...]:
        return (self._switch, *self.namespaces)

    def host(self, place: int) -> str:
        return f"{self._net}.{place + 1}"

    def unplug(self, place: int) -> None:
        """At the bridge: the node itself sees its cable go, as it would on a desk."""
        ip("-n", self._switch, "link", "set", f"port{place}", "down")

    def plug(self, place: int) -> None:
        ip("-n", self._switch, "link", "set", f"port{place}", "up")

    def remove(self) -> None:
        for name in reversed(self.all_namespaces):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=COMMAND_S, check=False)
