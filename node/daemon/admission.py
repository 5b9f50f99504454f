"""Who may connect: bounded per IP and in all, newcomers before those that linger without introducing themselves."""

from __future__ import annotations

import ipaddress
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import trio

MAX_PENDING_PER_IP = 32
MAX_PENDING = 256
MAX_SETTLED_PER_IP = 128
MAX_CONNECTIONS = 600

LINGERED = "connections that did not introduce themselves in time"


class Admission:
    """The inbound connections of one host, and the counts of those that were turned away."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.may_look: Callable[[str], bool] = lambda _: False
        """Whether who connects from an address and hangs up in the handshake is no trouble worth telling."""
        self._pending: dict[str, deque[trio.CancelScope]] = {}
        self._settled: Counter[str] = Counter()

    @property
    def pending(self) -> int:
        return sum(len(scopes) for scopes in self._pending.values())

    @property
    def settled(self) -> int:
        return self._settled.total()

    @contextmanager
    def pend(self, ip: str) -> Iterator[trio.CancelScope]:
        """While a connection is not yet introduced. Its scope is cancelled when newer ones need the room."""
        scopes = self._pending.setdefault(ip, deque())
        if len(scopes) >= MAX_PENDING_PER_IP:
            self._evict(ip)
        elif self.pending >= MAX_PENDING:
            self._evict(max(self._pending, key=lambda one: len(self._pending[one])))
        with trio.CancelScope() as scope:
            scopes.append(scope)
            try:
                yield scope
            finally:
                self._forget(ip, scope)

    def _evict(self, ip: str) -> None:
        scope = self._pending[ip].popleft()
        self.counts[LINGERED] += 1
        scope.cancel()

    def _forget(self, ip: str, scope: trio.CancelScope) -> None:
        scopes = self._pending.get(ip)
        if scopes is None:
            return
        if scope in scopes:
            scopes.remove(scope)
        if not scopes:
            del self._pending[ip]

    @contextmanager
    def settle(self, ip: str) -> Iterator[bool]:
        """While an introduced connection lives; False: there are too many of this IP."""
        if self._settled[ip] >= MAX_SETTLED_PER_IP or self.settled >= MAX_CONNECTIONS:
            self.counts["connections beyond the limit of one address"] += 1
            yield False
            return
        self._settled[ip] += 1
        try:
            yield True
        finally:
            self._settled[ip] -= 1
            if not self._settled[ip]:
                del self._settled[ip]


def address_block(host: str) -> str:
    """What counts as one origin: an IPv4 address, or the /64 that an IPv6 machine owns."""
    ip = ipaddress.ip_address(host.partition("%")[0])
    if ip.version == 6 and ip.ipv4_mapped is None:
        return str(ipaddress.ip_network((ip, 64), strict=False))
    return str(ip)
