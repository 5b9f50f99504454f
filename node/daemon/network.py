"""The network as the daemon sees it: the peers of its run, messages to and from them, and why there are none.

async with open_network(...) as network:
    network.serve("tip", answer_tip)
    await network.set_run(run_id)
    network.send(None, message)
    async for peer, data in network.inbox: ...
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

import msgspec
import structlog
import trio
from libp2p.abc import INetConn, INetStream, INetwork, INotifee
from libp2p.tools.anyio_service import background_trio_service
from multiaddr import Multiaddr

from node.daemon.addresses import (
    Address,
    announced,
    parse_own_address,
    parse_peer_address,
    parse_strangers_addresses,
)
from node.daemon.discovery import Discovery, describe_errors
from node.daemon.hardening import HardenedYamux
from node.daemon.host import (
    HELLO_TIMEOUT_S,
    DialError,
    HardenedHost,
    close_quietly,
    open_host,
    unwrapped,
)
from node.daemon.identity import Identity
from node.daemon.inbox import Inbox
from node.daemon.link import Link
from node.daemon.membership import MAX_LINKS, LinkSummary, Membership, Verdict, link_key
from node.daemon.remembered import RememberedPeers
from node.daemon.reputation import Reputation
from node.daemon.streams import (
    CONTROL_PROTOCOL,
    PROTOCOL_VERSION,
    FramedStream,
    Hello,
    LinkClosed,
    Refusal,
    Refused,
    RequestFailed,
    encode_frame,
)
from node.errors import StrangerError
from node.home import Home
from protocol.names import Digest, PeerId

DEFAULT_LISTEN = "/ip4/0.0.0.0/tcp/0"
PUBLISH_INTERVAL_S = 10.0
MIN_PUBLISH_INTERVAL_S = 1.0
FORWARDED_TO = 4
"""Of the connected peers, chosen at random, those that get another's news from here."""

PROBE_S = 3.0
"""For the link of an earlier life to answer, before it counts as dead."""

SIMULTANEOUS_S = 5.0
RETIRED_S = 3.0
MAX_EVENTS = 256
MAX_TABLE_BYTES = 3 * 1024 * 1024
TABLE_METHOD = "membership"
TABLE_TIMEOUT_S = 20.0
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerConnected:
    peer: PeerId


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerDisconnected:
    peer: PeerId
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRefused:
    """One side does not want the other: another version, another run, shut out."""

    peer: PeerId
    code: str
    reason: str
    by_this_node: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DuplicateIdentity:
    """Another machine uses this node's key."""

    reason: str


NetworkEvent: TypeAlias = PeerConnected | PeerDisconnected | PeerRefused | DuplicateIdentity
Handler: TypeAlias = Callable[[PeerId, bytes], Awaitable[bytes]]


@asynccontextmanager
async def open_network(
    *,
    identity: Identity,
    home: Home,
    listen: Sequence[str] = (DEFAULT_LISTEN,),
    announce: Sequence[str] = (),
    bootstrap: Sequence[str] = (),
    run_id: bytes | None = None,
    version: str,
    incarnation: bytes,
) -> AsyncIterator[Network]:
    """A node on the network, until the context ends.

    `listen`, `announce`, `bootstrap`: multiaddrs; those of peers end in `/p2p/PEER_ID`. `run_id` None: this node has
    only an address, and learns the run from whom it meets. Raises `OperatorError` for a bad address or a busy port.
    """
    own = [parse_own_address(text, "--listen") for text in listen or (DEFAULT_LISTEN,)]
    told = [parse_own_address(text, "--announce") for text in announce]
    known = [parse_peer_address(text) for text in bootstrap]
    remembered = RememberedPeers(home.peers_file)
    network = Network(identity=identity, version=version, incarnation=incarnation, announce=told)
    with unwrapped():
        async with open_host(identity, own, lambda: network.announced) as host, trio.open_nursery() as nursery:
            network._start(host, nursery, known, remembered)
            async with background_trio_service(network.discovery.dht):
                nursery.start_soon(network.discovery.run)
                nursery.start_soon(network._publish)
                nursery.start_soon(network._expire)
                if run_id is not None:
                    await network.set_run(run_id)
                try:
                    yield network
                finally:
                    network.inbox.close()
                    with trio.CancelScope(shield=True), trio.move_on_after(2.0):
                        await network._leave()
                    nursery.cancel_scope.cancel()


class Network:
    """Made by `open_network`."""

    def __init__(self, *, identity: Identity, version: str, incarnation: bytes, announce: Sequence[Address]) -> None:
        self.peer_id: PeerId = identity.peer_id
        self.run_id: Digest | None = None
        self.counts: Counter[str] = Counter()
        self.inbox = Inbox(self.counts)
        self.membership = Membership(
            peer_id=identity.peer_id,
            keyring=identity,
            version=version,
            incarnation=incarnation,
            on_duplicate=self._on_duplicate,
        )
        self._version = version
        self._incarnation = incarnation
        self._announce = tuple(announce)
        self._listening: list[Address] = []
        self._observed: dict[str, set[PeerId]] = {}
        self._announced: list[Address] = list(announce)
        self._links: dict[PeerId, Link] = {}
        self._links_changed = trio.Event()
        self._handlers: dict[str, Handler] = {TABLE_METHOD: self._answer_table}
        self._reputation = Reputation()
        self._last_refusal: PeerRefused | None = None
        self._duplicate: str | None = None
        self._rates: dict[PeerId, tuple[float | None, float | None]] = {}
        self._events: deque[NetworkEvent] = deque(maxlen=MAX_EVENTS)
        self._events_send, self.changes = trio.open_memory_channel[NetworkEvent](MAX_EVENTS)

    def _start(
        self, host: HardenedHost, nursery: trio.Nursery, bootstrap: Sequence[Address], remembered: RememberedPeers
    ) -> None:
        self._host = host
        self._nursery = nursery
        self._listening = host.listening()
        self._refresh_announced()
        host.swarm.may_dial = self.must_not_dial
        host.swarm.register_notifee(_OnDialled(self))
        host.set_stream_handler(CONTROL_PROTOCOL, self._serve_control_stream)
        self.discovery = Discovery(owner=self, host=host, bootstrap=bootstrap, remembered=remembered)

    # ------------------------------------------------------------ who is there

    @property
    def links(self) -> Mapping[PeerId, Link]:
        """Everyone connected, also those that have no run yet."""
        return MappingProxyType(self._links)

    @property
    def peers(self) -> Mapping[PeerId, Link]:
        """The connected peers of the run; while this node has none, everyone connected."""
        if self.run_id is None:
            return self.links
        return {peer: link for peer, link in self._links.items() if link.run == self.run_id}

    @property
    def announced(self) -> list[Address]:
        return self._announced

    @property
    def addresses(self) -> list[str]:
        """Full multiaddrs of this node, to give to others."""
        return [str(address.of(self.peer_id)) for address in self._announced]

    @property
    def data_host(self) -> str:
        """Where the engine's data listener shall listen."""
        return self._listening[0].host

    def data_addresses(self, port: int) -> tuple[str, ...]:
        """`host:port` of the engine's data listener, for the membership record."""
        found = (Address(one.kind, one.host, port).host_port for one in self._announced)
        return tuple(dict.fromkeys(found))[:16]

    def offered_run(self) -> Digest | None:
        """The run of whoever is connected: what a node with only an address joins."""
        return next((link.run for link in self._links.values() if link.run), None)

    async def set_run(self, run_id: Digest) -> None:
        """The run of this node, once. Peers of other runs are refused from now on."""
        if self.run_id is not None:
            raise ValueError(f"this node is already in run {self.run_id.hex()}")
        self.run_id = run_id
        self.membership.publish(run=run_id, addresses=tuple(one.endpoint for one in self._announced))
        for link in list(self._links.values()):
            if link.run in (b"", run_id):
                link.send_run(run_id)
                if link.run == run_id:
                    self._welcome(link)
            else:
                await self._refuse(link, self._other_run(link.run))
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

    # ------------------------------------------------------------ messages and requests

    def send(self, peer: PeerId | None, data: bytes, *, replaces: str | None = None) -> None:
        """A datagram to one peer, or to every connected peer of the run. Never blocks; loss is allowed.

        A datagram still queued under the same `replaces` key gives way to this one (heartbeats).
        """
        if peer is not None:
            link = self._links.get(peer)
            links = [link] if link is not None and self.is_member(link) else []
        else:
            links = [link for link in self._links.values() if self.is_member(link)]
        for link in links:
            link.send(data, replaces)

    async def request(self, peer: PeerId, method: str, payload: bytes, *, timeout_s: float) -> bytes:
        """The answer of a connected peer. Raises `RequestFailed` with a sentence."""
        link = self._links.get(peer)
        if link is None:
            raise RequestFailed(f"{peer} is not connected")
        return await link.request(method, payload, timeout_s)

    def serve(self, method: str, handler: Handler) -> None:
        """Answer requests; `AtollError` of the handler travels as a sentence. Replaces an earlier handler."""
        self._handlers[method] = handler

    def record_rate(
        self, peer: PeerId, *, sent_bytes_s: float | None = None, received_bytes_s: float | None = None
    ) -> None:
        """A transfer's measured rate, for this node's link summary."""
        sent, received = self._rates.get(peer, (None, None))
        self._rates[peer] = (sent_bytes_s or sent, received_bytes_s or received)
        while len(self._rates) > 1000:
            del self._rates[next(iter(self._rates))]

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
        if not self.is_member(link):
            self.counts["membership records from outside the run"] += len(records)
            return
        news = []
        for data in records[:1000]:
            try:
                verdict = self.membership.accept(data)
            except StrangerError as error:
                self.counts["bad membership records"] += 1
                self._reputation.blame(link.peer_id, 2, str(error))
                continue
            if verdict is Verdict.NEWS:
                news.append(data)
            elif verdict is Verdict.OUTDATED and (newer := self.membership.data_of(link.peer_id)):
                link.send_gossip((newer,))
        if news:
            self._forward(tuple(news), link.peer_id)
        if self._reputation.is_banned(link.peer_id):
            link.close("it is shut out for breaking rules")

    def on_run_chosen(self, link: Link, run: bytes) -> None:
        if link.run and run != link.run:
            raise StrangerError("it changed its run")
        link.run = run
        if self.run_id is not None and run != self.run_id:
            self._nursery.start_soon(self._refuse, link, self._other_run(run))
        elif self.is_member(link):
            self._welcome(link)
        self._change_links()

    def _forward(self, records: tuple[bytes, ...], source: PeerId) -> None:
        others = [link for link in self.peers.values() if link.peer_id != source]
        for link in random.sample(others, min(FORWARDED_TO, len(others))):
            link.send_gossip(records)

    # ------------------------------------------------------------ introductions

    def must_not_dial(self, peer_id: PeerId) -> str | None:
        return self._reputation.why_not_dial(peer_id)

    async def connect(self, peer_id: PeerId, addresses: Sequence[Address]) -> Link:
        """The link to a peer, dialled and introduced if there is none. Raises `DialError` or `Refused`."""
        if link := self._links.get(peer_id):
            return link
        if why := self.must_not_dial(peer_id):
            raise Refused("paused", why)
        connection = await self._host.swarm.dial(peer_id, addresses)
        muxed: HardenedYamux = connection.muxed_conn
        with trio.move_on_after(HELLO_TIMEOUT_S):
            await muxed.settled.wait()
        if link := self._links.get(peer_id):
            return link
        if isinstance(muxed.refusal, Refused):
            raise muxed.refusal
        where = addresses[0] if addresses else Address("ip4", "0.0.0.0", 0, peer_id)
        raise DialError({where: "it answers, but did not introduce itself as a node of Atoll"})

    def _hello(self, remote_host: str) -> Hello:
        return Hello(
            protocol=PROTOCOL_VERSION,
            version=self._version,
            run=self.run_id or b"",
            incarnation=self._incarnation,
            addresses=tuple(one.endpoint for one in self._announced),
            observed_host=remote_host,
        )

    async def _serve_control_stream(self, stream: INetStream) -> None:
        """A peer that dialled this node opened its control stream."""
        muxed: HardenedYamux = stream.muxed_conn
        if muxed.is_initiator or muxed.introducing:
            await stream.reset()  # only who dialled opens it, and once
            return
        muxed.introducing = True
        await self._introduce(muxed, FramedStream(stream), dialled=False)

    async def _open_control_stream(self, connection: INetConn) -> None:
        """This node dialled: it opens the control stream."""
        muxed: HardenedYamux = connection.muxed_conn
        try:
            with trio.fail_after(HELLO_TIMEOUT_S):
                stream = await self._host.open_on(connection, CONTROL_PROTOCOL)
        except Exception as error:  # noqa: BLE001 - the library raises whatever the peer provoked
            _log.debug("no control stream", peer=str(muxed.peer_id), why=repr(error))
            await close_quietly(connection)
            return
        await self._introduce(muxed, FramedStream(stream), dialled=True)

    async def _introduce(self, muxed: HardenedYamux, stream: FramedStream, *, dialled: bool) -> None:
        """Hellos both ways, then the link's whole life; the connection ends with it."""
        peer_id = str(muxed.peer_id)
        remote_host = str((muxed.get_remote_address() or ("", 0))[0])
        try:
            with trio.fail_after(HELLO_TIMEOUT_S):
                if dialled:
                    await stream.send(encode_frame(self._hello(remote_host)))
                hello = await stream.receive_hello()
                addresses = parse_strangers_addresses(hello.addresses, peer_id)
                if refusal := await self._judge(peer_id, hello, dialled):
                    await stream.send(encode_frame(Refusal(code=refusal.code, reason=refusal.reason)))
                    self._note_refusal(peer_id, refusal, by_this_node=True)
                    muxed.refusal = refusal
                    await muxed.event_closed.wait()  # the peer reads the sentence, then closes
                    return
                if not dialled:
                    await stream.send(encode_frame(self._hello(remote_host)))
            link = Link(
                owner=self,
                peer_id=peer_id,
                stream=stream,
                hello=hello,
                dialled=dialled,
                remote_host=remote_host,
            )
            await self._live(link, muxed, hello, addresses)
        except Refused as refusal:
            muxed.refusal = refusal
            self._note_refusal(peer_id, refusal, by_this_node=False)
        except StrangerError as error:
            self.counts["control streams that broke a rule"] += 1
            self._reputation.blame(peer_id, 4, str(error))
        except (LinkClosed, trio.TooSlowError):
            self.counts["introductions that were not finished"] += 1
        finally:
            with trio.CancelScope(shield=True), trio.move_on_after(3.0):
                await muxed.close()

    async def _live(self, link: Link, muxed: HardenedYamux, hello: Hello, addresses: Sequence[Address]) -> None:
        old = self._links.get(link.peer_id)
        if old is not None and not self._is_better(link.dialled, hello.incarnation, old):
            raise Refused("duplicate", "another connection of this pair is kept")
        self._links[link.peer_id] = link
        muxed.greet()
        if old is not None:
            self._nursery.start_soon(self._retire, old)
        else:
            self._tell(PeerConnected(peer=link.peer_id))
        self._observe(hello.observed_host, link.peer_id)
        if not link.dialled:
            self.membership.publish(reachable=True)
        self._change_links()
        try:
            await self.discovery.on_link(link, addresses)
            if self.is_member(link):
                self._welcome(link)
            await link.run_until_closed()
        finally:
            if self._links.get(link.peer_id) is link:
                del self._links[link.peer_id]
                self._tell(PeerDisconnected(peer=link.peer_id, why=link.why_closed))
                if link.why_closed.startswith("it left"):
                    self.membership.forget(link.peer_id)
                self._change_links()

    async def _judge(self, peer_id: PeerId, hello: Hello, dialled: bool) -> Refused | None:
        """Whether this node wants the peer; why not."""
        if peer_id == self.peer_id:
            if hello.incarnation != self._incarnation:
                self._on_duplicate("it connected to this node")
            return Refused("self", f"{peer_id} is this node itself")
        if self._reputation.is_banned(peer_id):
            return Refused("banned", f"{self.peer_id} shut {peer_id} out for a while, because it broke rules")
        if hello.protocol != PROTOCOL_VERSION or _minor(hello.version) != _minor(self._version):
            return Refused(
                "version",
                f"{self.peer_id} runs Atoll {self._version} and {peer_id} runs {hello.version[:40]}: "
                f"both need the same version ({_minor(self._version)}).",
            )
        if self.run_id is not None and hello.run and hello.run != self.run_id:
            return self._other_run(hello.run)
        old = self._links.get(peer_id)
        if old is None or old.closed.is_set():
            return None
        if old.incarnation != hello.incarnation:
            if await old.answers_within(PROBE_S):
                return Refused(
                    "identity",
                    f"Another machine, at {old.remote_host}, already takes part as {peer_id}: "
                    "stop one of the two, or give one another home (a copied key is not a second node).",
                )
            old.close("it was restarted")
            return None
        if not self._is_better(dialled, hello.incarnation, old):
            return Refused("duplicate", "another connection of this pair is kept")
        return None

    def _is_better(self, dialled: bool, incarnation: bytes, old: Link) -> bool:
        """Of two connections of one pair: the newer; of two made at the same time, the one that the smaller id dialled.

        Both sides come to the same answer without asking.
        """
        if old.closed.is_set() or old.incarnation != incarnation or old.dialled == dialled:
            return True
        if trio.current_time() - old.connected_at_s > SIMULTANEOUS_S:
            return True
        return dialled == (self.peer_id < old.peer_id)

    async def _retire(self, old: Link) -> None:
        """Let what is on its way arrive."""
        with trio.move_on_after(RETIRED_S):
            await old.closed.wait()
        old.close("another connection replaced it")

    def _other_run(self, run: bytes) -> Refused:
        mine = self.run_id.hex()[:16] if self.run_id else "none"
        return Refused(
            "run",
            f"{self.peer_id} takes part in run {mine}, not in {run.hex()[:16] or 'none'}: "
            "join with the address of a peer of your own run.",
        )

    async def _refuse(self, link: Link, refusal: Refused) -> None:
        self._note_refusal(link.peer_id, refusal, by_this_node=True)
        await link.refuse(refusal)

    def _note_refusal(self, peer_id: PeerId, refusal: Refused, *, by_this_node: bool) -> None:
        if refusal.code == "duplicate":
            return
        self._reputation.refused(peer_id, refusal.reason)
        if refusal.code == "self":
            return
        if refusal.code == "identity" and not by_this_node:
            self._on_duplicate(refusal.reason)
        event = PeerRefused(peer=peer_id, code=refusal.code, reason=refusal.reason, by_this_node=by_this_node)
        self._last_refusal = event
        self._tell(event)

    def _on_duplicate(self, detail: str) -> None:
        self._duplicate = (
            f"Another machine uses this node's identity {self.peer_id} ({detail}): "
            "stop one of the two, or give one another home."
        )
        _log.error("duplicate identity", reason=self._duplicate)
        self._tell(DuplicateIdentity(reason=self._duplicate))

    # ------------------------------------------------------------ membership

    def _welcome(self, link: Link) -> None:
        """A peer of the run: it gets this node's record, and if it is new here, it is asked for the whole table."""
        link.send_gossip((self.membership.renew(),))
        if link.peer_id not in self.membership.records:
            self._nursery.start_soon(self._pull_table, link)

    async def _pull_table(self, link: Link) -> None:
        try:
            answer = await link.request(TABLE_METHOD, b"", TABLE_TIMEOUT_S)
            records = msgspec.msgpack.decode(answer, type=tuple[bytes, ...])
        except (RequestFailed, msgspec.DecodeError) as error:
            _log.debug("no membership table", peer=link.peer_id, why=str(error))
            return
        self.on_gossip(link, records)

    async def _answer_table(self, peer: PeerId, payload: bytes) -> bytes:
        link = self._links.get(peer)
        if link is None or not self.is_member(link):
            raise RequestFailed("the membership table is for peers of the run")
        table: list[bytes] = []
        size = 0
        for data in self.membership.table():
            size += len(data)
            if size > MAX_TABLE_BYTES:
                break
            table.append(data)
        return msgspec.msgpack.encode(table)

    async def _publish(self) -> None:
        """This node's record to everyone connected, regularly and soon after a change."""
        while True:
            with trio.move_on_after(PUBLISH_INTERVAL_S * random.uniform(0.8, 1.2)):
                await self.membership.unpublished.wait()
            if self.run_id is not None:
                self.membership.publish(links=self._link_summaries())
                record = self.membership.renew()
                for link in self.peers.values():
                    link.send_gossip((record,))
            else:
                self.membership.unpublished = trio.Event()
            await trio.sleep(MIN_PUBLISH_INTERVAL_S)

    async def _expire(self) -> None:
        while True:
            await trio.sleep(1.0)
            self.membership.expire()

    def _link_summaries(self) -> dict[str, LinkSummary]:
        summaries: dict[str, LinkSummary] = {}
        for peer, link in self.peers.items():
            if link.round_trip_s is not None and len(summaries) < MAX_LINKS:
                summaries[link_key(peer)] = LinkSummary(
                    round(link.round_trip_s, 5), *self._rates.get(peer, (None, None))
                )
        return summaries

    # ------------------------------------------------------------ addresses

    def _observe(self, host: str, by: PeerId) -> None:
        """Two peers that see this node come from the same public address: probably it is reached there, too."""
        if self._announce or len(self._observed) >= 64:
            return
        self._observed.setdefault(host, set()).add(by)
        self._refresh_announced()

    def _refresh_announced(self) -> None:
        found = announced(self._listening, self._announce)
        everywhere = [one for one in self._listening if one.ip is not None and one.ip.is_unspecified]
        for host, reporters in self._observed.items():
            for one in everywhere:
                guess = Address("ip6" if ":" in host else "ip4", host, one.port)
                if len(reporters) >= 2 and guess.kind == one.kind and guess.is_public and guess not in found:
                    found.append(guess)
        if found != self._announced:
            self._announced = found[:16]
            self.membership.publish(addresses=tuple(one.endpoint for one in self._announced))

    # ------------------------------------------------------------ answers for people

    def reason(self) -> str:
        """Why there are no peers, in one sentence; empty when there are."""
        if self._duplicate:
            return self._duplicate
        if self.peers:
            return ""
        if self._last_refusal is not None:
            return self._last_refusal.reason
        if errors := self.discovery.bootstrap_errors:
            return f"No peer answers ({describe_errors(errors)}); dialling them again until one does."
        where = self.addresses[0] if self.addresses else "this node's address"
        return f"No other peer yet; others join with `atoll join {where}`."

    def problems(self) -> dict[str, int]:
        """Input that was dropped, by reason, since the start."""
        return dict(self.counts + self._host.swarm.admission.counts)

    def _tell(self, event: NetworkEvent) -> None:
        try:
            self._events_send.send_nowait(event)
        except trio.WouldBlock:
            self.changes.receive_nowait()  # nobody listens: the newest events matter
            self._events_send.send_nowait(event)

    async def _leave(self) -> None:
        """Say goodbye to everyone and write the known peers down."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.discovery.save)
            for link in self._links.values():
                nursery.start_soon(link.say_goodbye, "it was stopped")


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


class _OnDialled(INotifee):  # type: ignore[misc]
    """Every connection that this node dials, also those of the DHT, is introduced."""

    def __init__(self, network: Network) -> None:
        self._network = network

    async def connected(self, network: INetwork, conn: INetConn) -> None:
        muxed: HardenedYamux = conn.muxed_conn
        if muxed.is_initiator and not muxed.introducing:
            muxed.introducing = True
            self._network._nursery.start_soon(self._network._open_control_stream, conn)

    async def disconnected(self, network: INetwork, conn: INetConn) -> None: ...

    async def opened_stream(self, network: INetwork, stream: INetStream) -> None: ...

    async def closed_stream(self, network: INetwork, stream: INetStream) -> None: ...

    async def listen(self, network: INetwork, multiaddr: Multiaddr) -> None: ...

    async def listen_close(self, network: INetwork, multiaddr: Multiaddr) -> None: ...
