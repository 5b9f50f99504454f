"""The DHT of Atoll's nodes: who provides a run, and nothing else; bounded against whoever takes part in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import trio
from libp2p.abc import INetStream
from libp2p.custom_types import TProtocol
from libp2p.kad_dht import common, kad_dht, peer_routing, provider_store, value_store
from libp2p.kad_dht.kad_dht import DHTMode, KadDHT
from libp2p.kad_dht.provider_store import ProviderStore
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from libp2p.records.validator import NamespacedValidator

from node.daemon.addresses import Address, parse_address
from node.daemon.host import HELLO_TIMEOUT_S, HardenedHost
from protocol.names import PeerId

DHT_PROTOCOL = TProtocol("/atoll/kad/1.0.0")
"""Of our own: the library's prefix option does not reach the wire, and /ipfs/kad would join us to everybody's DHT."""
MAX_DHT_MESSAGE_BYTES = 64 * 1024
PROVIDER_LIFETIME_S = 30 * 60
"""Of a provider record; each node renews its own every few minutes. The library keeps dead ones for two days."""
MAX_PROVIDED_KEYS = 500
MAX_PROVIDERS = 40
MAX_DHT_STREAMS = 64
MAX_DHT_STREAMS_PER_PEER = 4
DHT_STREAM_TIMEOUT_S = 30.0
DHT_QUERY_TIMEOUT_S = 30.0
PROVIDER_QUERIES = 8

for _module in (common, kad_dht, peer_routing, provider_store, value_store):
    _module.PROTOCOL_ID = DHT_PROTOCOL
    _module.MAX_DHT_MESSAGE_SIZE = MAX_DHT_MESSAGE_BYTES
provider_store.PROVIDER_RECORD_EXPIRATION_INTERVAL = PROVIDER_LIFETIME_S


class BoundedProviders(ProviderStore):  # type: ignore[misc]
    """Provider records that a stranger cannot pile up, and in which the living displace the dead.

    The library keeps the first 20 of a key for two days and ignores the rest, and any number of keys.
    """

    def add_provider(self, key: bytes, provider: PeerInfo) -> None:
        records = self.providers.get(key)
        if records is None and len(self.providers) >= MAX_PROVIDED_KEYS:
            self.cleanup_expired()
            if len(self.providers) >= MAX_PROVIDED_KEYS:
                return
        name = str(provider.peer_id)
        if records is not None and name not in records and len(records) >= common.BUCKET_SIZE:
            del records[min(records, key=lambda one: records[one].timestamp)]
        super().add_provider(key, PeerInfo(provider.peer_id, list(provider.addrs)[:16]))


class RunDHT(KadDHT):  # type: ignore[misc]
    """The library's Kademlia as a server, for provider records alone, open to peers that introduced themselves."""

    def __init__(self, host: HardenedHost) -> None:
        super().__init__(
            host,
            DHTMode.SERVER,
            # No validator at all: every value is refused. The defaults store 50,000 values of a megabyte from anyone.
            validator=NamespacedValidator({}, strict_validation=True),
            validator_changed=True,
            strict_validation=True,
            max_peers_per_subnet=0,
        )
        self.provider_store = BoundedProviders(host, self.peer_routing)
        self._inbound_limiter = trio.CapacityLimiter(MAX_DHT_STREAMS)
        self._open_streams: Counter[ID] = Counter()

    async def handle_stream(self, stream: INetStream) -> None:
        """The library holds one of twelve slots for as long as a peer likes."""
        muxed = stream.muxed_conn
        with trio.move_on_after(HELLO_TIMEOUT_S):
            await muxed.settled.wait()
        peer = muxed.peer_id
        if not muxed.greeted or self._open_streams[peer] >= MAX_DHT_STREAMS_PER_PEER:
            await stream.reset()
            return
        self._open_streams[peer] += 1
        try:
            with trio.move_on_after(DHT_STREAM_TIMEOUT_S) as deadline:
                await super().handle_stream(stream)
            if deadline.cancelled_caught:
                await stream.reset()
        finally:
            self._open_streams[peer] -= 1
            if not self._open_streams[peer]:
                del self._open_streams[peer]

    async def announce(self, key: bytes) -> None:
        """Become a provider of `key` at the peers closest to it."""
        with trio.move_on_after(DHT_QUERY_TIMEOUT_S):
            await self.provider_store.provide(key)

    async def find(self, key: bytes) -> dict[PeerId, list[Address]]:
        """Providers of `key` but this node. The library's own lookup answers from the local store once that has one."""
        found: dict[PeerId, list[Address]] = {}

        def note(providers: Sequence[PeerInfo]) -> None:
            for provider in providers:
                if provider.peer_id != self.local_peer_id and len(found) < MAX_PROVIDERS:
                    found.setdefault(str(provider.peer_id), []).extend(_parsed(provider))

        async def ask(peer: ID) -> None:
            providers, _ = await self.provider_store._get_providers_from_peer_with_closers(peer, key)
            note(providers)

        note(self.provider_store.get_providers(key))
        with trio.move_on_after(DHT_QUERY_TIMEOUT_S):
            closest = await self.peer_routing.find_closest_peers_network(key)
            async with trio.open_nursery() as nursery:
                for peer in closest[:PROVIDER_QUERIES]:
                    if peer != self.local_peer_id:
                        nursery.start_soon(ask, peer)
        return found


def _parsed(provider: PeerInfo) -> list[Address]:
    addresses = []
    for one in list(provider.addrs)[:16]:
        try:
            address = parse_address(str(one))
        except ValueError:
            continue
        if address.peer_id in (None, str(provider.peer_id)):
            addresses.append(address.of(str(provider.peer_id)))
    return addresses
