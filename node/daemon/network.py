"""The network as the daemon sees it: the peers of its run, messages to and from them, and why there are none.

async with open_network(...) as network:
    network.serve("tip", answer_tip)
    await network.set_run(run_id)
    network.send(None, message)
    async for peer, data in network.inbox: ...
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import TypeAlias

import trio
from libp2p.tools.anyio_service import background_trio_service

from node.daemon import rpc
from node.daemon.addresses import Address, parse_host_port, parse_own_address, parse_peer_address
from node.daemon.dial_back import DialBacks
from node.daemon.discovery import Discovery, describe_errors
from node.daemon.gossip import TABLE_METHOD, Gossip
from node.daemon.host import HardenedHost, open_host, unwrapped
from node.daemon.identity import Identity
from node.daemon.inbox import Inbox
from node.daemon.introductions import (
    DuplicateIdentity,
    Introductions,
    NetworkEvent,
    PeerConnected,
    PeerDisconnected,
    PeerRefused,
)
from node.daemon.link import Link
from node.daemon.link_table import LinkTable
from node.daemon.membership import Membership
from node.daemon.own_addresses import OwnAddresses
from node.daemon.reachability import Reachability
from node.daemon.remembered import RememberedPeers
from node.daemon.splicing import Splicing
from node.daemon.streams import Hello, Refused, RequestFailed
from node.errors import StrangerError
from node.home import Home
from protocol.names import Digest, PeerId

__all__ = [
    "DuplicateIdentity",
    "Network",
    "NetworkEvent",
    "PeerConnected",
    "PeerDisconnected",
    "PeerRefused",
    "Refused",
    "RequestFailed",
    "open_network",
]

DEFAULT_LISTEN = "/ip4/0.0.0.0/tcp/0"
ADDRESS_INTERVAL_S = 30.0
MAX_EVENTS = 256
GOODBYE_S = 2.0
STOPPED = "it was stopped"

Handler: TypeAlias = Callable[[PeerId, bytes], Awaitable[bytes]]


@asynccontextmanager
async def open_network(
    *,
    identity: Identity,
    home: Home,
    listen: Sequence[str] = (DEFAULT_LISTEN,),
    announce: Sequence[str] = (),
    announce_data: Sequence[str] = (),
    bootstrap: Sequence[str] = (),
    run_id: bytes | None = None,
    version: str,
    incarnation: bytes,
    name: str = "",
    relay_bytes_s: float = 0.0,
) -> AsyncIterator[Network]:
    """A node on the network, until the context ends.

    `listen`, `announce`, `bootstrap`: multiaddrs; those of peers end in `/p2p/PEER_ID`. `announce_data`: `HOST:PORT` of
    the engine, if it is not the announced hosts with the engine's own port. `run_id` None: this node has only an
    address, and learns the run from whom it meets. `incarnation`: random bytes of this process start. `name`: for
    people. `relay_bytes_s`: passed on for pairs that cannot dial each other, at most. Raises `OperatorError` for a bad
    address or a busy port.
    """
    own = [parse_own_address(text, "--listen") for text in listen or (DEFAULT_LISTEN,)]
    told = [parse_own_address(text, "--announce") for text in announce]
    known = [parse_peer_address(text) for text in bootstrap]
    remembered = RememberedPeers(home.peers_file)
    failure: Exception | None = None
    network = Network(
        identity=identity,
        version=version,
        incarnation=incarnation,
        name=name,
        announce=told,
        announce_data=[parse_host_port(text, "--announce-data") for text in announce_data],
        relay_bytes_s=relay_bytes_s,
    )
    with unwrapped():
        async with open_host(identity, own, lambda: network.announced) as host, trio.open_nursery() as nursery:
            network._start(host, nursery, known, remembered)
            async with background_trio_service(network.discovery.dht):
                nursery.start_soon(network._discover)
                nursery.start_soon(network.gossip.run)
                nursery.start_soon(network._watch_addresses)
                nursery.start_soon(network.reachability.run)
                if run_id is not None:
                    await network.set_run(run_id)
                try:
                    yield network
                except Exception as error:
                    failure = error
                    raise
                finally:
                    network.inbox.close()
                    with trio.CancelScope(shield=True), trio.move_on_after(GOODBYE_S):
                        await network._leave()
                    nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure  # the library's own contexts, ending while cancelled, lose what went through them


class Network:
    """Made by `open_network`."""

    def __init__(
        self,
        *,
        identity: Identity,
        version: str,
        incarnation: bytes,
        name: str,
        announce: Sequence[Address],
        announce_data: Sequence[str],
        relay_bytes_s: float,
    ) -> None:
        self.peer_id: PeerId = identity.peer_id
        self.run_id: Digest | None = None
        self.links: dict[PeerId, Link] = {}
        """Everyone connected, also those that have no run yet. Only the network changes it."""
        self._discovering = trio.CancelScope()
        self._leaving = False
        self.counts: Counter[str] = Counter()
        self.inbox = Inbox(self.counts)
        self.introductions = Introductions(owner=self, version=version, incarnation=incarnation)
        self.membership = Membership(
            peer_id=identity.peer_id,
            keyring=identity,
            version=version,
            incarnation=incarnation,
            name=name,
            on_duplicate=self.introductions.alarm_duplicate,
        )
        self.link_table = LinkTable(identity.peer_id)
        self.gossip = Gossip(self, self.introductions.reputation)
        self.own_addresses = OwnAddresses(announce=announce, announce_data=announce_data)
        self.relay_bytes_s = relay_bytes_s
        """What this node passes on for pairs that cannot dial each other."""
        self.reachability = Reachability(self)
        self.splicing = Splicing(self)
        self._links_changed = trio.Event()
        self._handlers: dict[str, Handler] = {
            TABLE_METHOD: self.gossip.answer_table,
            rpc.SPLICE: self.splicing.asked,
            rpc.SPLICE_OFFER: self.splicing.offered,
            rpc.DIAL_BACK: DialBacks(peers=lambda: self.peers, dial_control=self._dial_back).answer,
            rpc.IDENTITY_USED_TWICE: self.introductions.warned,
        }
        self._events_send, self.changes = trio.open_memory_channel[NetworkEvent](MAX_EVENTS)

    def _start(
        self, host: HardenedHost, nursery: trio.Nursery, bootstrap: Sequence[Address], remembered: RememberedPeers
    ) -> None:
        self._host = host
        self._nursery = nursery
        self.own_addresses.listening = host.listening()
        host.swarm.admission.may_look = self.reachability.is_looked_at_from
        self._refresh_announced()
        self.discovery = Discovery(owner=self, host=host, bootstrap=bootstrap, remembered=remembered)
        self.introductions.start(host, nursery)
        host.swarm.may_dial = self._why_not_dial_for_the_dht
        self.splicing.start(nursery)

    # ------------------------------------------------------------ who is there

    @property
    def peers(self) -> Mapping[PeerId, Link]:
        """The connected peers of the run; while this node has none, everyone connected."""
        if self.run_id is None:
            return MappingProxyType(self.links)
        return {peer: link for peer, link in self.links.items() if link.run == self.run_id}

    @property
    def announced(self) -> Sequence[Address]:
        """Where this node tells peers to dial it."""
        return self.own_addresses.control

    @property
    def addresses(self) -> list[str]:
        """Full multiaddrs of this node, to give to others."""
        return [str(address.of(self.peer_id)) for address in self.announced]

    @property
    def data_host(self) -> str:
        """Where the engine's data listener shall listen."""
        return self.own_addresses.listening[0].host

    def publish_engine(self, port: int, certificate_sha256: bytes) -> None:
        """An engine listens on `port`: peers are told where, now and whenever the addresses change."""
        self.own_addresses.engine_listens(port)
        self.membership.publish(data_addresses=self.own_addresses.data, certificate_sha256=certificate_sha256)

    def offered_run(self) -> Digest | None:
        """The run of whoever is connected: what a node with only an address joins."""
        return next((link.run for link in self.links.values() if link.run), None)

    async def set_run(self, run_id: Digest) -> None:
        """The run of this node, once and for all. Peers of other runs are refused from now on."""
        if self.run_id == run_id:
            return
        if self.run_id is not None:
            raise ValueError(f"this node is already in run {self.run_id.hex()}")
        self.run_id = run_id
        self.membership.publish(run=run_id, addresses=tuple(one.endpoint for one in self.announced))
        for link in list(self.links.values()):
            if link.run in (b"", run_id):
                link.send_run(run_id)
                if link.run == run_id:
                    self._nursery.start_soon(self.gossip.welcome, link)
            else:
                refusal = self.introductions.other_run(link.peer_id, link.run)
                await self.introductions.refuse(link, refusal)
        self._change_links()

    def links_changed(self) -> trio.Event:
        """Set at the next change of `links` or of the run of one."""
        return self._links_changed

    def _change_links(self) -> None:
        self._links_changed.set()
        self._links_changed = trio.Event()

    async def wait_for_peer(self, timeout_s: float) -> bool:
        """Whether there is a peer (of the run, if this node has one) within that time."""
        with trio.move_on_after(timeout_s):
            while not self.peers:
                await self._links_changed.wait()
        return bool(self.peers)

    async def wait_for_link(self, peer: PeerId, timeout_s: float) -> bool:
        """Whether a peer that only a volunteer joins with this node is connected within that time; others are not
        waited for.
        """
        record = self.membership.records.get(peer)
        if record is not None and self.reachability.needs_volunteer(record):
            with trio.move_on_after(timeout_s):
                while peer not in self.links:
                    await self._links_changed.wait()
        return peer in self.links

    async def changed(self, *, within_s: float) -> bool:
        """Waits for a change of the links, or of the run of one; whether there was any in that time."""
        with trio.move_on_after(within_s) as waiting:
            await self._links_changed.wait()
        return not waiting.cancelled_caught

    # ------------------------------------------------------------ messages and requests

    def send(self, peer: PeerId | None, data: bytes, *, replaces: str | None = None) -> None:
        """A datagram to one peer, or to every connected peer of the run. Never blocks; loss is allowed.

        A datagram still queued under the same `replaces` key gives way to this one (heartbeats).
        """
        if peer is not None:
            link = self.links.get(peer)
            links = [link] if link is not None and self.is_member(link) else []
        else:
            links = [link for link in self.links.values() if self.is_member(link)]
        for link in links:
            link.send(data, replaces)

    async def drain(self, within_s: float) -> list[PeerId]:
        """Until what was sent is written to every connection; the peers for which that took longer than `within_s`."""
        slow = set(self.links)

        async def drain(link: Link) -> None:
            await link.drain()
            slow.discard(link.peer_id)

        with trio.move_on_after(within_s):
            async with trio.open_nursery() as nursery:
                for link in self.links.values():
                    nursery.start_soon(drain, link)
        return sorted(slow)

    async def request(self, peer: PeerId, method: str, payload: bytes, *, timeout_s: float) -> bytes:
        """The answer of a connected peer. Raises `RequestFailed` with a sentence."""
        link = self.links.get(peer)
        if link is None:
            raise RequestFailed(f"{peer} is not connected")
        return await link.request(method, payload, timeout_s)

    def serve(self, method: str, handler: Handler) -> None:
        """Answer requests; `AtollError` of the handler travels as a sentence. Replaces an earlier handler."""
        self._handlers[method] = handler

    # ------------------------------------------------------------ what a link asks

    def is_member(self, link: Link) -> bool:
        return self.run_id is not None and link.run == self.run_id

    def handler_of(self, method: str) -> Handler | None:
        return self._handlers.get(method)

    def on_datagram(self, link: Link, data: bytes) -> None:
        if self.is_member(link):
            self.inbox.put(link.peer_id, data)
        else:
            self.counts["datagrams from outside the run"] += 1

    def on_gossip(self, link: Link, records: tuple[bytes, ...]) -> None:
        self.gossip.receive(link, records)

    def on_run_chosen(self, link: Link, run: bytes) -> None:
        if link.run and run != link.run:
            raise StrangerError("it changed its run")
        link.run = run
        if self.run_id is not None and run != self.run_id:
            refusal = self.introductions.other_run(link.peer_id, run)
            self._nursery.start_soon(self.introductions.refuse, link, refusal)
        elif self.is_member(link):
            self._nursery.start_soon(self.gossip.welcome, link)
        self._change_links()

    # ------------------------------------------------------------ what the introductions ask

    async def live(self, link: Link, hello: Hello, addresses: Sequence[Address]) -> None:
        """The whole life of a link that was just put among `links`."""
        self.tell(PeerConnected(peer=link.peer_id))
        self.reachability.was_seen(link, hello.observed_host)
        self._change_links()
        try:
            if self._leaving:
                # Dialled in the moment between the goodbye and the end of the host: its record would outlive it.
                self._nursery.start_soon(link.say_goodbye, STOPPED)
            else:
                self._nursery.start_soon(self.discovery.on_link, link, addresses)
                if self.is_member(link):
                    self._nursery.start_soon(self.gossip.welcome, link)
            await link.run_until_closed()
        finally:
            if self.links.get(link.peer_id) is link:
                del self.links[link.peer_id]
                self.tell(PeerDisconnected(peer=link.peer_id, why=link.why_closed))
                if link.left:
                    self.membership.forget(link.peer_id)
                    self.discovery.on_goodbye(link.peer_id)
                self._change_links()

    async def connect(self, peer_id: PeerId, addresses: Sequence[Address]) -> Link:
        """The link to a peer, dialled if there is none. Raises `DialError` or `Refused`."""
        return await self.introductions.connect(peer_id, addresses)

    async def connect_over(self, peer: PeerId, tcp: trio.SocketStream) -> Link:
        """The same over a connection that a volunteer has joined. Raises `UpgradeFailed` or `Refused`."""
        return await self.introductions.connect_over(peer, tcp)

    async def welcome_over(self, tcp: trio.SocketStream) -> None:
        """Serve a connection that a peer made through a volunteer, to its end."""
        await self._host.swarm.welcome_over(tcp)

    def _why_not_dial_for_the_dht(self, peer: PeerId) -> str | None:
        """The DHT also names those whom nobody can dial: each would cost it a whole timeout."""
        record = self.membership.records.get(peer)
        if record is not None and self.reachability.is_out_of_reach(record):
            return f"{peer} cannot be dialled, as it says itself"
        return self.must_not_dial(peer)

    def must_not_dial(self, peer_id: PeerId) -> str | None:
        return self.introductions.reputation.why_not_dial(peer_id)

    def tell(self, event: NetworkEvent) -> None:
        try:
            self._events_send.send_nowait(event)
        except trio.WouldBlock:
            self.changes.receive_nowait()  # nobody listens: the newest events matter
            self._events_send.send_nowait(event)

    # ------------------------------------------------------------ addresses

    def found_address(self, host: str) -> None:
        """Peers dialled this node at `host`, from which they see it come."""
        self.own_addresses.found(host)
        self._refresh_announced()

    async def _dial_back(self, address: Address) -> None:
        await self._host.swarm.probe(address)

    async def _watch_addresses(self) -> None:
        """A laptop changes networks, a lease ends: the record follows."""
        while True:
            await trio.sleep(ADDRESS_INTERVAL_S)
            self.reachability.look_at_networks()
            self._refresh_announced()

    def _refresh_announced(self) -> None:
        own = self.own_addresses
        if own.look():
            self.membership.publish(addresses=tuple(one.endpoint for one in own.control), data_addresses=own.data)

    # ------------------------------------------------------------ answers for people

    def reason(self) -> str:
        """Why there are no peers, or who else has this node's key, in one sentence; empty when all is well."""
        if alarm := self.introductions.fresh_alarm():
            return alarm
        if self.peers:
            return ""
        if refusal := self.introductions.fresh_refusal():
            return refusal
        if errors := self.discovery.bootstrap_errors:
            return f"No peer answers ({describe_errors(errors)}); dialling them again until one does."
        where = self.addresses[0] if self.addresses else "this node's address"
        return f"No other peer yet; others join with `atoll join {where}`."

    def problems(self) -> dict[str, int]:
        """Input that was dropped, by reason, since the start."""
        return dict(self.counts + self._host.swarm.admission.counts)

    async def _discover(self) -> None:
        with self._discovering:
            await self.discovery.run()

    async def _leave(self) -> None:
        """Say goodbye to everyone and write the known peers down."""
        # Else a bootstrap address is dialled again as soon as its goodbye has ended the link, and who was told that
        # this node left sees it come back and die.
        self._discovering.cancel()
        self._leaving = True
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.discovery.save)
            for link in self.links.values():
                nursery.start_soon(link.say_goodbye, STOPPED)
