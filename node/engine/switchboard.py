"""Who this engine is connected to: listener, dialling, tokens, and the directory of peers (design section 8).

Only one side of a pair needs to be reachable, and the other dials it at once: who can be dialled and cannot dial asks
to be dialled (`CallWanted`). When both are, the one with the smaller peer id dials; the other does so only after
`TAKEOVER_S` without a connection. Two groups of lanes that meet join into one link.
"""

from __future__ import annotations

import math
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

import trio

from node.engine.api import Peer
from node.engine.drops import Drops
from node.engine.handshake import HandshakeFailed, OnlyProbed, Stream, TokenBook, accept, dial
from node.engine.link import Link, Receiver
from node.engine.strangers import Stranger, Strangers
from node.errors import AtollError, StrangerError

LANES = 4
TAKEOVER_S = 1.0
TOKEN_TIMEOUT_S = 10.0
CALL_TIMEOUT_S = 8.0
"""For a peer to be asked to dial, and to have done it: seven round trips of a second."""
CALLED_EVERY_S = 1.0
"""How often a peer may have this node dial it, at most."""
DIAL_ATTEMPTS = 3
RETRY_DELAY_S = 0.5
REPLACED_AFTER_S = 5.0
"""New lanes of a peer whose link is older than this mean that it has lost that link: it is replaced, not joined."""
MAX_LANES_PER_LINK = 4 * LANES
"""Two groups may meet; more is nobody's honest need."""
BACKLOG = 512


class Unreachable(AtollError):
    """No link to a peer could be made; the message says why."""


class LinkWatcher(Receiver, Protocol):
    def link_up(self, link: Link) -> None: ...

    def link_down(self, link: Link) -> None: ...


@dataclass(slots=True, eq=False)
class _Contact:
    peer: Peer
    dialling: trio.Lock = field(default_factory=trio.Lock)
    arrived: trio.Event = field(default_factory=trio.Event)
    dialled: bool = False
    """The last link that was made was dialled by us: perhaps the peer cannot dial us at all."""
    token_event: trio.Event | None = None
    token: bytes | None = None
    call_event: trio.Event | None = None
    call_failure: str = ""
    called_at_s: float = -math.inf
    """When it last had this node dial it."""


class Switchboard:
    def __init__(
        self,
        *,
        nursery: trio.Nursery,
        peer_id: str,
        watcher: LinkWatcher,
        want_token: Callable[[str], Awaitable[None]],
        want_call: Callable[[str], Awaitable[None]],
        dropped: Drops,
    ) -> None:
        """`want_token` asks the daemon for a token towards a peer, `want_call` to have a peer dial this node; `dropped`
        counts rejected input by reason.
        """
        self.tokens = TokenBook()
        self._nursery = nursery
        self._peer_id = peer_id
        self._watcher = watcher
        self._want_token = want_token
        self._want_call = want_call
        self._dropped = dropped
        self._contacts: dict[str, _Contact] = {}
        self._links: dict[str, Link] = {}
        self._strangers = Strangers()
        self._news = trio.lowlevel.ParkingLot()
        """Who waits for a peer that is not in the directory yet."""
        self.closed_sent_bytes = 0
        """Over links that are closed."""
        self.closed_received_bytes = 0

    # ---------------------------------------------------------------- directory

    @property
    def connections(self) -> int:
        return sum(link.lanes for link in self._links.values()) + len(self._strangers)

    def links(self) -> list[Link]:
        return list(self._links.values())

    def link(self, peer_id: str) -> Link | None:
        return self._links.get(peer_id)

    def addresses(self, peer_id: str) -> tuple[str, ...]:
        """Where a peer's engine listens; none of a peer that is not in the directory, or cannot be dialled."""
        contact = self._contacts.get(peer_id)
        return contact.peer.addresses if contact is not None else ()

    def set_peers(self, peers: tuple[Peer, ...]) -> None:
        """Replace the directory; links to peers that are no longer in it are closed."""
        listed = {peer.peer_id: peer for peer in peers if peer.peer_id != self._peer_id}
        for peer_id in [peer_id for peer_id in self._contacts if peer_id not in listed]:
            del self._contacts[peer_id]
            if link := self._links.get(peer_id):
                link.close()
        for peer_id, peer in listed.items():
            contact = self._contacts.get(peer_id)
            if contact is None:
                self._contacts[peer_id] = _Contact(peer)
                if peer_id in self._links:
                    self._contacts[peer_id].arrived.set()
            else:
                contact.peer = peer
        self._news.unpark_all()

    def dial_token(self, peer_id: str, token: bytes | None) -> None:
        """The daemon's answer to `want_token`."""
        contact = self._contacts.get(peer_id)
        if contact is not None and contact.token_event is not None:
            contact.token = token
            contact.token_event.set()

    def call_answered(self, peer_id: str, failure: str) -> None:
        """The daemon's answer to `want_call`; `failure` is empty when the peer dials."""
        contact = self._contacts.get(peer_id)
        if contact is not None and contact.call_event is not None:
            contact.call_failure = failure
            contact.call_event.set()

    # ---------------------------------------------------------------- dialling

    @property
    def peer_id(self) -> str:
        """Of this node."""
        return self._peer_id

    async def reach(self, peer_id: str, *, within_s: float, eager: bool = False, attempts: int = DIAL_ATTEMPTS) -> Link:
        """A link to `peer_id`, made if there is none. `eager` dials at once, whoever's turn it is.

        Raises `Unreachable`.
        """
        if link := self._links.get(peer_id):
            return link
        why = "it is not in the directory of engines"
        with trio.move_on_after(within_s):
            while (contact := self._contacts.get(peer_id)) is None and peer_id not in self._links:
                await self._news.park()
            if contact is None:
                return self._links[peer_id]
            why = "no connection in time"
            async with contact.dialling:
                peer = contact.peer
                mine = eager or contact.dialled or not peer.dials or self._peer_id < peer.peer_id
                if not peer.addresses:
                    why = "it has no address that can be dialled, and it did not dial"
                if peer.dials and not (peer.dialable and peer.addresses):
                    why = await self._be_dialled(contact) or why
                elif not mine:
                    with trio.move_on_after(TAKEOVER_S):
                        await contact.arrived.wait()
                if peer_id not in self._links and peer.addresses:
                    try:
                        await self._dial(contact, attempts)
                    except HandshakeFailed as error:
                        why = str(error)
                        # It may be dialling us at this moment.
                        with trio.move_on_after(TAKEOVER_S):
                            await contact.arrived.wait()
                    else:
                        await contact.arrived.wait()
                else:
                    await contact.arrived.wait()
        if link := self._links.get(peer_id):
            return link
        raise Unreachable(f"{peer_id} cannot be reached: {why}")

    async def _be_dialled(self, contact: _Contact) -> str:
        """Have a peer dial this node, which cannot dial it; why it came to nothing, else empty."""
        contact.call_event, contact.call_failure = trio.Event(), "its daemon did not say whether it dials"
        try:
            with trio.move_on_after(CALL_TIMEOUT_S):
                await self._want_call(contact.peer.peer_id)
                await contact.call_event.wait()
                if not contact.call_failure:
                    contact.call_failure = "it was asked to dial, and did not arrive"
                    await contact.arrived.wait()
                    return ""
        finally:
            contact.call_event = None
        return contact.call_failure

    def call(self, peer_id: str, token: bytes) -> None:
        """A peer that cannot dial this node wants to be dialled, and takes `token`."""
        contact = self._contacts.get(peer_id)
        if contact is None or not contact.peer.addresses or peer_id in self._links:
            return
        both_ask = contact.call_event is not None
        if contact.dialling.locked() and not both_ask:
            return  # it is being dialled
        now_s = trio.current_time()
        if now_s < contact.called_at_s + CALLED_EVERY_S:
            self._dropped.count("a wish to be dialled that came too soon after another", peer_id)
            return
        contact.called_at_s = now_s
        self._nursery.start_soon(self._follow_call, contact, token, both_ask)

    async def _follow_call(self, contact: _Contact, token: bytes, both_ask: bool) -> None:
        """`both_ask`: this node waits to be dialled by that very peer, and holds the lock meanwhile."""
        try:
            if both_ask:
                await self._dial(contact, 1, token)
                return
            async with contact.dialling:
                if contact.peer.peer_id not in self._links:
                    await self._dial(contact, 1, token)
        except HandshakeFailed as error:
            self._dropped.count(f"a peer that asked to be dialled cannot be: {error}", contact.peer.peer_id)

    async def _dial(self, contact: _Contact, attempts: int, token: bytes | None = None) -> None:
        """`token`: of a peer that gave one unasked."""
        if token is None:
            token = await self._token(contact)
        failures = []
        for attempt in range(attempts):
            if attempt:
                await trio.sleep(RETRY_DELAY_S * 2**attempt)
            for address in contact.peer.addresses:
                if contact.arrived.is_set():
                    return
                try:
                    stream = await self._dial_lane(contact, address, token, 0)
                except HandshakeFailed as error:
                    failures.append(str(error))
                    continue
                contact.dialled = True
                self._add_lane(contact.peer.peer_id, token, stream)
                for lane in range(1, LANES):
                    self._nursery.start_soon(self._dial_more, contact, address, token, lane)
                return
        raise HandshakeFailed("; ".join(dict.fromkeys(failures)))

    async def _dial_more(self, contact: _Contact, address: str, token: bytes, lane: int) -> None:
        try:
            stream = await self._dial_lane(contact, address, token, lane)
        except HandshakeFailed:
            return  # the lanes that stand carry everything
        if contact.peer.peer_id in self._links:
            self._add_lane(contact.peer.peer_id, token, stream)
        else:
            await trio.aclose_forcefully(stream.transport_stream)

    async def _dial_lane(self, contact: _Contact, address: str, token: bytes, lane: int) -> Stream:
        return await dial(
            address,
            certificate_sha256=contact.peer.certificate_sha256,
            peer_id=self._peer_id,
            token=token,
            lane=lane,
            lanes=LANES,
        )

    async def _token(self, contact: _Contact) -> bytes:
        contact.token_event, contact.token = trio.Event(), None
        try:
            await self._want_token(contact.peer.peer_id)
            with trio.move_on_after(TOKEN_TIMEOUT_S):
                await contact.token_event.wait()
        finally:
            contact.token_event = None
        token: bytes | None = contact.token
        if token is None:
            raise HandshakeFailed("its daemon gave no token")
        return token

    # ---------------------------------------------------------------- listening

    async def listen(self, host: str, port: int, context: ssl.SSLContext) -> int:
        """Accept connections; returns the port. Raises `OSError` when it cannot be bound."""
        listeners = await trio.open_tcp_listeners(port, host=host or None, backlog=BACKLOG)
        bound = int(listeners[0].socket.getsockname()[1])
        for listener in listeners:
            self._nursery.start_soon(self._accept_all, listener, context)
        return bound

    async def _accept_all(self, listener: trio.SocketListener, context: ssl.SSLContext) -> None:
        async with listener:
            while True:
                try:
                    tcp = await listener.accept()
                except OSError as error:
                    # Out of descriptors or the like: others will be freed; accepting again at once would only spin.
                    self._dropped.count(f"a connection that could not be accepted: {error.strerror}")
                    await trio.sleep(0.1)
                    continue
                stranger = self._strangers.admit(_host_of(tcp))
                if stranger is None:
                    self._dropped.count("too many unauthenticated connections")
                    await trio.aclose_forcefully(tcp)
                else:
                    self._nursery.start_soon(self._welcome, tcp, stranger, context)

    async def _welcome(self, tcp: trio.SocketStream, stranger: Stranger, context: ssl.SSLContext) -> None:
        authenticated: tuple[str, bytes, Stream] | None = None
        try:
            with stranger.scope:
                authenticated = await accept(tcp, context, self.tokens)
        except OnlyProbed:
            pass  # a peer's dial-back, most likely
        except StrangerError as error:
            self._dropped.count(str(error), stranger.host)
        finally:
            self._strangers.leave(stranger)
            if authenticated is None:
                await trio.aclose_forcefully(tcp)
        if authenticated is not None:
            self._add_lane(*authenticated)

    def _add_lane(self, peer_id: str, group: bytes, stream: Stream) -> None:
        """`group` is the token under which the lane was opened."""
        link = self._links.get(peer_id)
        if link is not None and (
            link.closed or (group not in link.groups and trio.current_time() - link.since > REPLACED_AFTER_S)
        ):
            link.close()
            self._forget(link)
            link = None
        if link is not None and link.lanes >= MAX_LANES_PER_LINK:
            self._dropped.count("too many lanes of one link", peer_id)
            self._nursery.start_soon(trio.aclose_forcefully, stream.transport_stream)
            return
        if link is None:
            link = self._links[peer_id] = Link(peer_id, self._watcher)
            if contact := self._contacts.get(peer_id):
                contact.arrived.set()
            self._news.unpark_all()
            self._watcher.link_up(link)
        link.groups.add(group)
        self._nursery.start_soon(self._carry, link, stream)

    async def _carry(self, link: Link, stream: Stream) -> None:
        try:
            await link.run_lane(stream)
        finally:
            self._forget(link)

    def _forget(self, link: Link) -> None:
        if self._links.get(link.peer_id) is link:
            del self._links[link.peer_id]
            if contact := self._contacts.get(link.peer_id):
                contact.arrived = trio.Event()
            self.closed_sent_bytes += link.sending.bytes
            self.closed_received_bytes += link.receiving.bytes
            self._watcher.link_down(link)


def _host_of(tcp: trio.SocketStream) -> str:
    try:
        return str(tcp.socket.getpeername()[0])
    except OSError:
        return "gone"
