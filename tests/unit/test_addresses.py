"""Addresses: one sentence for each mistake, and no loopback told to the world."""

from __future__ import annotations

import ipaddress
import socket

import pytest
import trio

from node.daemon import addresses
from node.daemon.addresses import (
    Address,
    announced,
    check_can_listen,
    parse_own_address,
    parse_peer_address,
    parse_strangers_addresses,
    ranked,
    resolve,
)
from node.errors import OperatorError, StrangerError

PEER = "12D3KooWEwNAtmxkK3ucW3CDFjRUDQXVpNbwJDDYsARG2uY4kpHe"
OTHER = "12D3KooWGTYfjzxtiGaGuzLLDJphWFPhqEvvJzYEGzFVVsrp8bUs"


@pytest.mark.parametrize(
    "text",
    [
        f"/ip4/203.0.113.5/tcp/4001/p2p/{PEER}",
        f"/ip6/2001:db8::1/tcp/4001/p2p/{PEER}",
        f"/dns4/node.example.org/tcp/4001/p2p/{PEER}",
        f"/dns/localhost/tcp/1/p2p/{PEER}",
    ],
)
def test_good_addresses_survive_a_round_trip_and_libp2p_reads_them(text: str) -> None:
    from multiaddr import Multiaddr

    address = parse_peer_address(text)
    assert str(address) == text
    assert address.peer_id == PEER
    assert str(Multiaddr(text)) == text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "must look like"),
        ("203.0.113.5:4001", "must look like"),
        ("/ip4/203.0.113.5/udp/4001/quic-v1", "must look like"),
        (f"/ip4/203.0.113.256/tcp/4001/p2p/{PEER}", "'203.0.113.256' is not an ip4 address"),
        (f"/ip4/203.0.113.5/tcp/70000/p2p/{PEER}", "'70000' is not a TCP port"),
        (f"/ip4/203.0.113.5/tcp/0/p2p/{PEER}", "port 0"),
        (f"/ip9/203.0.113.5/tcp/1/p2p/{PEER}", "'ip9' is not one of"),
        (f"/dns4/bad host/tcp/1/p2p/{PEER}", "'bad host' is not a host name"),
        ("/ip4/203.0.113.5/tcp/4001", "atoll id"),
        (f"/ip4/203.0.113.5/tcp/4001/ws/p2p/{PEER}", "after the port"),
        ("/ip4/203.0.113.5/tcp/4001/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N", "not the peer id"),
        ("/" * 10_000, "more than 400 characters"),
    ],
)
def test_bad_addresses_are_explained_in_one_sentence(text: str, says: str) -> None:
    with pytest.raises(OperatorError) as refusal:
        parse_peer_address(text)
    assert says in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_own_addresses() -> None:
    assert parse_own_address("/ip4/0.0.0.0/tcp/0", "--listen") == Address("ip4", "0.0.0.0", 0)
    assert parse_own_address(f"/dns4/a.example/tcp/9/p2p/{PEER}", "--announce") == Address("dns4", "a.example", 9)
    with pytest.raises(OperatorError, match="needs an ip4 or ip6"):
        parse_own_address("/dns4/a.example/tcp/9", "--listen")
    with pytest.raises(OperatorError, match="name the port"):
        parse_own_address("/ip4/203.0.113.5/tcp/0", "--announce")


def test_strangers_addresses_are_bounded_and_their_own() -> None:
    assert parse_strangers_addresses(["/ip4/203.0.113.5/tcp/1"], PEER) == [Address("ip4", "203.0.113.5", 1, PEER)]
    with pytest.raises(StrangerError, match="in the name of"):
        parse_strangers_addresses([f"/ip4/203.0.113.5/tcp/1/p2p/{OTHER}"], PEER)
    with pytest.raises(StrangerError, match="more than 16"):
        parse_strangers_addresses([f"/ip4/203.0.113.5/tcp/{port}" for port in range(1, 18)], PEER)
    with pytest.raises(StrangerError, match="malformed"):
        parse_strangers_addresses(["nonsense"], PEER)


def machine(monkeypatch: pytest.MonkeyPatch, *interfaces: str, primary: str = "") -> None:
    monkeypatch.setattr(addresses, "primary_hosts", lambda: {primary})
    monkeypatch.setattr(addresses, "local_networks", lambda: [ipaddress.ip_interface(one) for one in interfaces])


def test_loopback_is_announced_only_when_there_is_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, "127.0.0.1/8", "192.168.1.7/24", "169.254.1.1/16", "2001:db8::7/64")
    everywhere = Address("ip4", "0.0.0.0", 4001)
    assert announced([everywhere], []) == [Address("ip4", "192.168.1.7", 4001)]
    assert announced([Address("ip4", "127.0.0.1", 4001)], []) == [Address("ip4", "127.0.0.1", 4001)]
    both = [Address("ip4", "127.0.0.1", 4001), Address("ip4", "192.168.1.7", 4001)]
    assert announced(both, []) == [Address("ip4", "192.168.1.7", 4001)]
    told = [Address("ip4", "203.0.113.5", 9)]
    assert announced([everywhere], told) == told
    machine(monkeypatch, "127.0.0.1/8")
    assert announced([everywhere], []) == [Address("ip4", "127.0.0.1", 4001)]


def test_the_address_of_the_default_route_is_announced_first(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, "172.17.0.1/16", "8.8.4.4/24", "192.168.1.7/24", primary="192.168.1.7")
    order = [one.host for one in announced([Address("ip4", "0.0.0.0", 4001)], [])]
    assert order == ["192.168.1.7", "8.8.4.4", "172.17.0.1"]


def test_primary_hosts_are_this_machines() -> None:
    mine = {str(one.ip) for one in addresses.local_networks()}
    assert addresses.primary_hosts() <= mine


def test_what_is_likely_to_answer_is_dialled_first(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, "127.0.0.1/8", "192.168.1.7/24")
    foreign = Address("ip4", "10.0.0.9", 1)
    loopback = Address("ip4", "127.0.0.1", 1)
    name = Address("dns4", "a.example", 1)
    public = Address("ip4", "8.8.4.4", 1)
    near = Address("ip4", "192.168.1.9", 1)
    public_ip6 = Address("ip6", "2600::1", 1)
    order = ranked([public_ip6, foreign, loopback, name, public, near, near])
    assert order == [near, public, name, loopback, foreign, public_ip6]


def test_names_are_resolved_by_the_system() -> None:
    async def main() -> None:
        found = await resolve(Address("dns4", "localhost", 4001, PEER))
        assert found == [Address("ip4", "127.0.0.1", 4001, PEER)]
        numeric = Address("ip4", "203.0.113.5", 4001)
        assert await resolve(numeric) == [numeric]

    trio.run(main)


def test_a_busy_port_is_named_even_when_its_owner_would_share_it() -> None:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OperatorError, match=rf"127\.0\.0\.1:{port}.*stop what uses TCP port {port}.*--listen"):
            check_can_listen(Address("ip4", "127.0.0.1", port))
    check_can_listen(Address("ip4", "127.0.0.1", port))


def test_an_address_of_another_machine_cannot_be_listened_on() -> None:
    with pytest.raises(OperatorError, match=r"203\.0\.113\.5:4001.*an address of this machine"):
        check_can_listen(Address("ip4", "203.0.113.5", 4001))
