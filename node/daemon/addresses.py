"""Where peers are reached: what operators write, what this node announces, and in which order a peer is dialled.

An address is a multiaddr of TCP over IPv4, IPv6 or a DNS name, with the peer id at its end:
`/ip4/203.0.113.5/tcp/4001/p2p/12D3KooW...`. The peer id is not optional for a peer: it is what the handshake checks.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import psutil  # type: ignore[import-untyped]
import trio

from node.daemon.identity import is_peer_id
from node.engine.handshake import split_address
from node.errors import OperatorError, StrangerError
from protocol.names import PeerId

MAX_ADDRESS_CHARACTERS = 400
MAX_ADDRESSES_PER_PEER = 16
RESOLVE_TIMEOUT_S = 5.0

_IP_KINDS = {"ip4": ipaddress.IPv4Address, "ip6": ipaddress.IPv6Address}
_DNS_KINDS = ("dns", "dns4", "dns6")
_EXAMPLE = "/ip4/203.0.113.5/tcp/4001"


@dataclass(frozen=True, slots=True)
class Address:
    """One TCP endpoint, and the peer expected there (None: a listening address, or one still without its peer)."""

    kind: str
    """`ip4`, `ip6`, `dns`, `dns4` or `dns6`."""
    host: str
    port: int
    peer_id: PeerId | None = None

    def __str__(self) -> str:
        tail = f"/p2p/{self.peer_id}" if self.peer_id else ""
        return f"{self.endpoint}{tail}"

    @property
    def endpoint(self) -> str:
        """The multiaddr without the peer id."""
        return f"/{self.kind}/{self.host}/tcp/{self.port}"

    @property
    def host_port(self) -> str:
        return f"[{self.host}]:{self.port}" if self.kind == "ip6" else f"{self.host}:{self.port}"

    @property
    def ip(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
        return ipaddress.ip_address(self.host) if self.kind in _IP_KINDS else None

    @property
    def is_public(self) -> bool:
        """A numeric address that the whole internet routes."""
        return self.ip is not None and self.ip.is_global

    def of(self, peer_id: PeerId | None) -> Address:
        return Address(self.kind, self.host, self.port, peer_id)


def parse_address(text: str) -> Address:
    """Raises `ValueError` with what is wrong, as the end of a sentence."""
    if len(text) > MAX_ADDRESS_CHARACTERS:
        raise ValueError(f"it has more than {MAX_ADDRESS_CHARACTERS} characters")
    fields = text.strip().split("/")
    if fields[0] or len(fields) < 5 or fields[3] != "tcp":
        raise ValueError(f"it must look like {_EXAMPLE}/p2p/PEER_ID")
    _, kind, host, _, port_text, *rest = fields
    if kind in _IP_KINDS:
        try:
            host = str(_IP_KINDS[kind](host))
        except ipaddress.AddressValueError:
            raise ValueError(f"{host!r} is not an {kind} address") from None
    elif kind not in _DNS_KINDS:
        raise ValueError(f"{kind!r} is not one of ip4, ip6, dns, dns4, dns6")
    elif not host or len(host) > 253 or not all(c.isalnum() or c in "-._" for c in host) or not host.isascii():
        raise ValueError(f"{host!r} is not a host name")
    if not (port_text.isascii() and port_text.isdigit() and int(port_text) < 65536):
        raise ValueError(f"{port_text!r} is not a TCP port")
    if not rest:
        return Address(kind, host, int(port_text))
    if len(rest) != 2 or rest[0] != "p2p":
        raise ValueError(f"{'/' + '/'.join(rest)!r} after the port is not /p2p/PEER_ID")
    if not is_peer_id(rest[1]):
        raise ValueError(f"{rest[1]!r} is not the peer id of an ed25519 key (they start with 12D3KooW)")
    return Address(kind, host, int(port_text), rest[1])


def parse_peer_address(text: str) -> Address:
    """An operator's address of a peer to join. Raises `OperatorError`, one sentence that names the fix."""
    try:
        address = parse_address(text)
    except ValueError as error:
        raise OperatorError(f"The address {text!r} cannot be used: {error}.") from None
    if address.peer_id is None:
        raise OperatorError(
            f"The address {text!r} names no peer: append /p2p/PEER_ID (`atoll id` on that machine prints it)."
        )
    if address.port == 0:
        raise OperatorError(f"The address {text!r} has port 0: use the port that the peer listens on.")
    return address


def parse_own_address(text: str, flag: str) -> Address:
    """An operator's `--listen` or `--announce`. Raises `OperatorError`."""
    try:
        address = parse_address(text)
    except ValueError as error:
        raise OperatorError(f"{flag} {text!r} cannot be used: {error}.") from None
    if flag == "--listen" and address.kind not in _IP_KINDS:
        raise OperatorError(f"{flag} {text!r} cannot be used: listening needs an ip4 or ip6 address of this machine.")
    if flag == "--announce" and address.port == 0:
        raise OperatorError(f"{flag} {text!r} cannot be used: name the port that peers shall dial.")
    return address.of(None)


def parse_host_port(text: str, flag: str) -> str:
    """An operator's `HOST:PORT`. Raises `OperatorError`."""
    try:
        host, port = split_address(text)
    except ValueError as error:
        raise OperatorError(f"{flag} {text!r} cannot be used: {error}.") from None
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_strangers_addresses(texts: Iterable[str], peer_id: PeerId) -> list[Address]:
    """What a peer says of itself: at most 16, well-formed, of that peer. Raises `StrangerError`."""
    addresses = []
    for count, text in enumerate(texts):
        if count >= MAX_ADDRESSES_PER_PEER:
            raise StrangerError(f"more than {MAX_ADDRESSES_PER_PEER} addresses for one peer")
        try:
            address = parse_address(text)
        except ValueError as error:
            raise StrangerError(f"a malformed address: {error}") from None
        if address.peer_id not in (None, peer_id):
            raise StrangerError(f"an address of {address.peer_id} in the name of {peer_id}")
        addresses.append(address.of(peer_id))
    return addresses


def local_networks() -> list[ipaddress.IPv4Interface | ipaddress.IPv6Interface]:
    """The addresses of this machine's interfaces that are up, with their networks."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    found: list[ipaddress.IPv4Interface | ipaddress.IPv6Interface] = []
    for name, entries in psutil.net_if_addrs().items():
        if name not in up:
            continue
        for entry in entries:
            if entry.family in (socket.AF_INET, socket.AF_INET6) and "%" not in entry.address:
                mask = entry.netmask or ("32" if entry.family == socket.AF_INET else "128")
                if entry.family == socket.AF_INET6 and ":" in mask:
                    mask = str(int(ipaddress.IPv6Address(mask)).bit_count())
                found.append(ipaddress.ip_interface(f"{entry.address}/{mask}"))
    return found


def announced(listening: Sequence[Address], announce: Sequence[Address]) -> list[Address]:
    """The addresses to tell peers: the operator's if there are any, else those of this machine that it listens on.

    A loopback address goes out only when nothing else is listened on: to any other machine it would be itself.
    """
    if announce:
        return list(dict.fromkeys(announce))
    found: dict[Address, None] = {}
    for address in listening:
        ip = address.ip
        assert ip is not None, "listening addresses are numeric"
        if ip.is_unspecified:
            for interface in local_networks():
                if interface.version == ip.version and not interface.ip.is_link_local:
                    found[Address(address.kind, str(interface.ip), address.port)] = None
        else:
            found[address] = None
    outside = [address for address in found if not _is_loopback(address)]
    primary = primary_hosts()
    return sorted(outside, key=lambda one: (one.host not in primary, not one.is_public)) or list(found)


def primary_hosts() -> set[str]:
    """The addresses from which this machine reaches the rest of the world: not those of its bridges and tunnels."""
    found: set[str] = set()
    for family, elsewhere in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((elsewhere, 9))  # chooses a route; nothing is sent
                found.add(str(probe.getsockname()[0]))
        except OSError:
            continue  # no route there
    return found


def _is_loopback(address: Address) -> bool:
    return address.ip is not None and address.ip.is_loopback


def ranked(addresses: Iterable[Address]) -> list[Address]:
    """Best first: on one of my networks, then public, then names, then loopback, then others' private networks.

    A private address of somebody else's network usually swallows packets, so it costs a whole timeout: last.
    """
    networks = local_networks()
    has_public_ip6 = any(one.version == 6 and one.ip.is_global for one in networks)

    def rank(address: Address) -> int:
        ip = address.ip
        if ip is None:
            return 2
        if ip.is_loopback:
            return 3
        if any(one.version == ip.version and ip in one.network for one in networks):
            return 0
        if ip.is_global:
            return 1 if ip.version == 4 or has_public_ip6 else 5
        return 4

    return sorted(dict.fromkeys(addresses), key=rank)


async def resolve(address: Address) -> list[Address]:
    """Numeric addresses behind a DNS name, by the system's resolver. Raises `OSError` or `trio.TooSlowError`."""
    if address.kind in _IP_KINDS:
        return [address]
    family = {"dns4": socket.AF_INET, "dns6": socket.AF_INET6}.get(address.kind, socket.AF_UNSPEC)
    with trio.fail_after(RESOLVE_TIMEOUT_S):
        entries = await trio.socket.getaddrinfo(address.host, address.port, family=family, type=socket.SOCK_STREAM)
    kinds = {socket.AF_INET: "ip4", socket.AF_INET6: "ip6"}
    return list(
        dict.fromkeys(
            Address(kinds[family], str(name[0]), address.port, address.peer_id)
            for family, _, _, _, name in entries
            if family in kinds
        )
    )


def check_can_listen(address: Address) -> None:
    """Raises `OperatorError` when something else listens there, or the address is not this machine's.

    libp2p listens with SO_REUSEPORT: two daemons would share a port, each getting half of the connections.
    """
    family = socket.AF_INET if address.kind == "ip4" else socket.AF_INET6
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            probe.bind((address.host, address.port))
        except OSError as error:
            fix = {
                errno.EADDRINUSE: f"stop what uses TCP port {address.port}, or choose another",
                errno.EADDRNOTAVAIL: "choose an address of this machine",
                errno.EACCES: "choose a port above 1023",
            }.get(error.errno or 0, "choose another address")
            raise OperatorError(
                f"Cannot listen on {address.host_port} ({error.strerror}): {fix} "
                f"with --listen /{address.kind}/HOST/tcp/PORT (port 0: any free one)."
            ) from error
