"""Who this engine is connected to: listener, lanes, and the links that they make (design section 8).

Two groups of lanes of one peer that meet join into one link. Who dials whom, `node.engine.dialling` says.
"""

from __future__ import annotations

import ssl
from typing import Protocol

import trio

from node.engine.api import Peer
from node.engine.dialling import DIAL_ATTEMPTS, LANES, Dialler, Wants
from node.engine.drops import Drops
from node.engine.handshake import OnlyProbed, Stream, TokenBook, accept, first_byte
from node.engine.link import Link, Receiver
from node.engine.splice import FIRST_BYTE, Seat, Splicer
from node.engine.strangers import Stranger, Strangers
from node.errors import StrangerError

REPLACED_AFTER_S = 5.0
"""New lanes of a peer whose link is older than this mean that it has lost that link: it is replaced, not joined."""
MAX_LANES_PER_LINK = 4 * LANES
"""Two groups may meet; more is nobody's honest need."""
BACKLOG = 512


class LinkWatcher(Receiver, Protocol):
    def link_up(self, link: Link) -> None: ...

    def link_down(self, link: Link) -> None: ...


class Switchboard:
    def __init__(
        self,
        *,
        nursery: trio.Nursery,
        peer_id: str,
        watcher: LinkWatcher,
        wants: Wants,
        splicer: Splicer,
        dropped: Drops,
    ) -> None:
        """`dropped` counts rejected input by reason."""
        self.tokens = TokenBook()
        self._nursery = nursery
        self._peer_id = peer_id
        self._watcher = watcher
        self._splicer = splicer
        self._dropped = dropped
        self._links: dict[str, Link] = {}
        self._strangers = Strangers()
        self.dialler = Dialler(
            nursery=nursery,
            peer_id=peer_id,
            links=self._links,
            add_lane=self._add_lane,
            tokens=self.tokens,
            wants=wants,
            dropped=dropped,
        )
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
        contact = self.dialler.contacts.get(peer_id)
        return contact.peer.addresses if contact is not None else ()

    def set_peers(self, peers: tuple[Peer, ...]) -> None:
        """Replace the directory; links to peers that are no longer in it are closed."""
        for peer_id in self.dialler.set_peers(peers):
            if link := self._links.get(peer_id):
                link.close()

    @property
    def peer_id(self) -> str:
        """Of this node."""
        return self._peer_id

    async def reach(self, peer_id: str, *, within_s: float, eager: bool = False, attempts: int = DIAL_ATTEMPTS) -> Link:
        """A link to `peer_id`, made if there is none. `eager` dials at once, whoever's turn it is.

        Raises `Unreachable`.
        """
        return await self.dialler.reach(peer_id, within_s=within_s, eager=eager, attempts=attempts)

    # ---------------------------------------------------------------- listening

    async def listen(self, host: str, port: int, context: ssl.SSLContext) -> int:
        """Accept connections; returns the port. Raises `OSError` when it cannot be bound."""
        self.dialler.context = context
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
        seat: Seat | None = None
        try:
            with stranger.scope:
                if await first_byte(tcp) == FIRST_BYTE:
                    seat = await self._splicer.welcome(tcp)
                else:
                    authenticated = await accept(tcp, context, self.tokens)
        except OnlyProbed:
            pass  # a peer's dial-back, most likely
        except StrangerError as error:
            self._dropped.count(str(error), stranger.host)
        finally:
            self._strangers.leave(stranger)
            if authenticated is None and seat is None:
                await trio.aclose_forcefully(tcp)
        if seat is not None:
            await self._splicer.carry(seat)
        elif authenticated is not None:
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
            self.dialler.link_up(peer_id)
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
            self.dialler.link_down(link.peer_id)
            self.closed_sent_bytes += link.sending.bytes
            self.closed_received_bytes += link.receiving.bytes
            self._watcher.link_down(link)


def _host_of(tcp: trio.SocketStream) -> str:
    try:
        return str(tcp.socket.getpeername()[0])
    except OSError:
        return "gone"
