"""Hellos: who is let in, who is refused with which sentence, and which of two connections of a pair is kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import structlog
import trio
from libp2p.abc import INetConn, INetStream, INetwork, INotifee
from multiaddr import Multiaddr

from node.daemon import rpc
from node.daemon.addresses import Address, parse_strangers_addresses
from node.daemon.hardening import HardenedYamux
from node.daemon.host import HELLO_TIMEOUT_S, DialError, HardenedHost, UpgradeFailed, close_quietly
from node.daemon.link import Link, LinkOwner
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
from protocol.names import Digest, PeerId

PROBE_S = 3.0
"""For the link of an earlier life to answer, before it counts as dead."""

WARNING_S = 10.0
"""For a node to take in that another machine has its key."""

SIMULTANEOUS_S = 5.0
"""Two connections of one pair made within this time were dialled by both at once."""

RETIRED_S = 3.0
"""For what is on its way over a connection that another replaced."""

FRESH_S = 90.0
"""How long a refusal or an alarm stands in `reason`."""

NOT_INTRODUCED = "it answers, but did not introduce itself as a node of Atoll"

_ONE_KEY_ONE_NODE = "stop one of the two, or give one another --home, since a copied key is not a second node."

RULE_BROKEN = 4.0
"""Points of blame for a broken frame; ten shut a peer out."""

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


class IntroductionOwner(LinkOwner, Protocol):
    """What the introductions ask of the network."""

    peer_id: PeerId
    run_id: Digest | None
    counts: Counter[str]
    links: dict[PeerId, Link]

    @property
    def announced(self) -> Sequence[Address]: ...

    def tell(self, event: NetworkEvent) -> None: ...

    async def live(self, link: Link, hello: Hello, addresses: Sequence[Address]) -> None: ...


class Introductions:
    """The one way in: every connection, whoever dialled it, passes here or ends."""

    def __init__(self, *, owner: IntroductionOwner, version: str, incarnation: bytes) -> None:
        self.reputation = Reputation()
        self._last_refusal: PeerRefused | None = None
        self._last_refusal_at_s = 0.0
        self._duplicate = ""
        self._duplicate_at_s = 0.0
        self._owner = owner
        self._version = version
        self._incarnation = incarnation

    def start(self, host: HardenedHost, nursery: trio.Nursery) -> None:
        self._host = host
        self._nursery = nursery
        host.swarm.may_dial = self.reputation.why_not_dial
        host.swarm.register_notifee(_OnDialled(self))
        host.set_stream_handler(CONTROL_PROTOCOL, self._serve_control_stream)

    async def connect(self, peer_id: PeerId, addresses: Sequence[Address]) -> Link:
        """The link to a peer, dialled and introduced if there is none. Raises `DialError` or `Refused`."""
        if (link := self._owner.links.get(peer_id)) and not link.is_spliced:
            return link
        if why := self.reputation.why_not_dial(peer_id):
            raise Refused("paused", why)
        connection = await self._host.swarm.dial(peer_id, addresses)
        link = await self._introduced(peer_id, connection)
        if link is not None:
            return link
        where = addresses[0] if addresses else Address("ip4", "0.0.0.0", 0, peer_id)
        raise DialError({where: NOT_INTRODUCED})

    async def connect_over(self, peer_id: PeerId, tcp: trio.SocketStream) -> Link:
        """The same over a connection that a volunteer has joined. Raises `UpgradeFailed` or `Refused`."""
        link = await self._introduced(peer_id, await self._host.swarm.dial_over(peer_id, tcp))
        if link is None:
            raise UpgradeFailed(NOT_INTRODUCED)
        return link

    async def _introduced(self, peer_id: PeerId, connection: INetConn) -> Link | None:
        """The link that comes of a connection which this node made, if one does. Raises `Refused`."""
        muxed: HardenedYamux = connection.muxed_conn
        with trio.move_on_after(HELLO_TIMEOUT_S):
            await muxed.settled.wait()
        if link := self._owner.links.get(peer_id):
            return link
        if isinstance(muxed.refusal, Refused):
            raise muxed.refusal
        return None

    # ------------------------------------------------------------ hellos

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
        try:
            remote_host = str((muxed.get_remote_address() or ("", 0))[0])
            with trio.fail_after(HELLO_TIMEOUT_S):
                if dialled:
                    await stream.send(encode_frame(self._hello(remote_host)))
                hello = await stream.receive_hello()
                addresses = parse_strangers_addresses(hello.addresses, peer_id)
                if refusal := await self._judge(peer_id, hello, dialled, spliced=not remote_host):
                    muxed.refusal = refusal
                    self._note_refusal(peer_id, refusal, by_this_node=True)
                    await stream.send(encode_frame(Refusal(refusal.code, refusal.reason)))
                    with trio.move_on_after(2.0):
                        await muxed.event_closed.wait()  # the peer reads the sentence, then closes
                    return
                if not dialled:
                    await stream.send(encode_frame(self._hello(remote_host)))
            link = Link(
                owner=self._owner,
                peer_id=peer_id,
                stream=stream,
                hello=hello,
                dialled=dialled,
                remote_host=remote_host,
            )
            if self._install(link, muxed):
                await self._owner.live(link, hello, addresses)
        except Refused as refusal:
            muxed.refusal = refusal
            self._note_refusal(peer_id, refusal, by_this_node=False)
        except StrangerError as error:
            self._owner.counts["control streams that broke a rule"] += 1
            self.reputation.blame(peer_id, RULE_BROKEN, str(error))
        except (LinkClosed, trio.TooSlowError, OSError):
            self._owner.counts["introductions that were not finished"] += 1
        finally:
            with trio.CancelScope(shield=True), trio.move_on_after(3.0):
                await muxed.close()

    def _hello(self, remote_host: str) -> Hello:
        return Hello(
            protocol=PROTOCOL_VERSION,
            version=self._version,
            run=self._owner.run_id or b"",
            incarnation=self._incarnation,
            addresses=tuple(one.endpoint for one in self._owner.announced),
            observed_host=remote_host,
        )

    def _install(self, link: Link, muxed: HardenedYamux) -> bool:
        """Put a link in its place, unless a better one of the same peer came in the meantime."""
        old = self._owner.links.get(link.peer_id)
        if old is not None and not self._is_better(link.dialled, link.incarnation, old, spliced=link.is_spliced):
            return False
        self._owner.links[link.peer_id] = link
        muxed.greet()
        if old is not None:
            self._nursery.start_soon(_retire, old)
        return True

    # ------------------------------------------------------------ judgement

    async def _judge(self, peer_id: PeerId, hello: Hello, dialled: bool, *, spliced: bool) -> Refused | None:
        """Why this node does not want the peer; None: it does."""
        mine = self._owner.peer_id
        if peer_id == mine:
            if hello.incarnation == self._incarnation:
                return Refused("self", f"{peer_id} is this node itself")
            self.alarm_duplicate("it connected to this node")
            return Refused("identity", f"Another machine uses the identity {peer_id}: {_ONE_KEY_ONE_NODE}")
        if self.reputation.is_banned(peer_id):
            return Refused("banned", f"{mine} shut {peer_id} out for a while, because it broke rules")
        if hello.protocol != PROTOCOL_VERSION or _minor(hello.version) != _minor(self._version):
            return Refused(
                "version",
                f"{mine} runs Atoll {self._version} and {peer_id} runs {hello.version[:40]}: "
                f"install the same version on both.",
            )
        if self._owner.run_id is not None and hello.run not in (b"", self._owner.run_id):
            return self.other_run(peer_id, hello.run)
        old = self._owner.links.get(peer_id)
        if old is None or old.closed.is_set():
            return None
        if old.incarnation != hello.incarnation:
            if await old.answers_within(PROBE_S):
                self._nursery.start_soon(_warn, old)
                return Refused(
                    "identity",
                    f"Another machine, at {old.remote_host or 'a volunteer'}, already takes part as {peer_id}: "
                    f"{_ONE_KEY_ONE_NODE}",
                )
            old.close("it was restarted")
            return None
        if not self._is_better(dialled, hello.incarnation, old, spliced=spliced):
            return Refused("duplicate", "another connection of this pair is kept")
        return None

    def _is_better(self, dialled: bool, incarnation: bytes, old: Link, *, spliced: bool) -> bool:
        """Of two connections of one pair: the direct one; else the newer; of two made at the same time, the one that
        the smaller id dialled.

        Both sides come to the same answer without asking.
        """
        if old.closed.is_set() or old.incarnation != incarnation:
            return True
        if spliced != old.is_spliced:
            return old.is_spliced
        if old.dialled == dialled:
            return True
        if trio.current_time() - old.connected_at_s > SIMULTANEOUS_S:
            return True
        return dialled == (self._owner.peer_id < old.peer_id)

    def other_run(self, peer_id: PeerId, run: bytes) -> Refused:
        mine = self._owner.run_id.hex()[:16] if self._owner.run_id else "none"
        return Refused(
            "run",
            f"{self._owner.peer_id} takes part in run {mine} and {peer_id} in run {run.hex()[:16] or 'none'}: "
            "join with the address of a peer of your own run.",
        )

    async def refuse(self, link: Link, refusal: Refused) -> None:
        """End an introduced link with a sentence that both sides show."""
        self._note_refusal(link.peer_id, refusal, by_this_node=True)
        await link.refuse(refusal)

    def _note_refusal(self, peer_id: PeerId, refusal: Refused, *, by_this_node: bool) -> None:
        if refusal.code == "duplicate":
            return
        self.reputation.refused(peer_id, refusal.reason)
        if refusal.code == "self":
            return
        if refusal.code == "identity" and not by_this_node:
            self.alarm_duplicate(refusal.reason)
        event = PeerRefused(peer=peer_id, code=refusal.code, reason=refusal.reason, by_this_node=by_this_node)
        self._last_refusal = event
        self._last_refusal_at_s = trio.current_time()
        self._owner.tell(event)

    def alarm_duplicate(self, detail: str) -> None:
        """Somebody else has this node's key."""
        self._duplicate = reason = (
            f"Another machine uses this node's identity {self._owner.peer_id} ({detail}): {_ONE_KEY_ONE_NODE}"
        )
        self._duplicate_at_s = trio.current_time()
        _log.error("duplicate identity", reason=reason)
        self._owner.tell(DuplicateIdentity(reason=reason))

    async def warned(self, peer: PeerId, payload: bytes) -> bytes:
        """A peer refused another machine that has this node's key: said once in a while, since it is but a claim."""
        if not self.fresh_alarm():
            self.alarm_duplicate(f"{peer} was shown it by another, and refused that one")
        return b""

    def fresh_alarm(self) -> str:
        """The sentence of a duplicate identity, for a while after it was last seen; else empty."""
        return self._duplicate if trio.current_time() - self._duplicate_at_s < FRESH_S else ""

    def fresh_refusal(self) -> str:
        """The sentence of the last refusal, for a while; else empty."""
        if self._last_refusal is None or trio.current_time() - self._last_refusal_at_s > FRESH_S:
            return ""
        return self._last_refusal.reason


async def _warn(twin: Link) -> None:
    """Whoever copied a key looks at either of the two machines: both say it."""
    try:
        await twin.request(rpc.IDENTITY_USED_TWICE, b"", WARNING_S)
    except RequestFailed as failure:
        _log.debug("a node was not told that its identity is used twice", peer=twin.peer_id, why=str(failure))


async def _retire(old: Link) -> None:
    """Let what is on its way arrive."""
    with trio.move_on_after(RETIRED_S):
        await old.closed.wait()
    old.close("another connection replaced it")


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


class _OnDialled(INotifee):  # type: ignore[misc]
    """Every connection that this node dials, also those of the DHT, is introduced."""

    def __init__(self, introductions: Introductions) -> None:
        self._introductions = introductions

    async def connected(self, network: INetwork, conn: INetConn) -> None:
        muxed: HardenedYamux = conn.muxed_conn
        if muxed.is_initiator and not muxed.introducing:
            muxed.introducing = True
            introductions = self._introductions
            introductions._nursery.start_soon(introductions._open_control_stream, conn)

    async def disconnected(self, network: INetwork, conn: INetConn) -> None: ...

    async def opened_stream(self, network: INetwork, stream: INetStream) -> None: ...

    async def closed_stream(self, network: INetwork, stream: INetStream) -> None: ...

    async def listen(self, network: INetwork, multiaddr: Multiaddr) -> None: ...

    async def listen_close(self, network: INetwork, multiaddr: Multiaddr) -> None: ...
