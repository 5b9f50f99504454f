"""How a peer's engine is reached: by dialling it, by asking to be dialled, or through a volunteer (design section 8).

Only one side of a pair needs to be reachable, and the other dials it at once: who can be dialled and cannot dial asks
to be dialled (`CallWanted`), and a pair where neither can has a volunteer join it (`SpliceWanted`). When both can, the
one with the smaller peer id dials; the other does so only after `TAKEOVER_S` without a connection.
"""

from __future__ import annotations

import contextlib
import math
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

import trio

from node.engine.api import Peer, Splice
from node.engine.drops import Drops
from node.engine.handshake import HandshakeFailed, Stream, TokenBook, accept, dial, introduce
from node.engine.link import Link
from node.engine.splice import dial_through
from node.errors import AtollError, StrangerError

LANES = 4
TAKEOVER_S = 1.0
TOKEN_TIMEOUT_S = 10.0
CALL_TIMEOUT_S = 8.0
"""For a peer to be asked to dial, and to have done it: seven round trips of a second."""
CALLED_EVERY_S = 1.0
"""How often a peer may have this node dial it, at most."""
JOIN_TIMEOUT_S = 12.0
"""For the daemon to find a volunteer that joins this node with a peer."""
JOIN_TAKEOVER_S = 3.0
"""As `TAKEOVER_S`, where a volunteer joins the pair: it takes some six round trips."""
MAX_MEETINGS = 64
"""Lanes that peers have a volunteer join with this node, and that are not authenticated yet."""
DIAL_ATTEMPTS = 3
RETRY_DELAY_S = 0.5

AnswerT = TypeVar("AnswerT")


class Unreachable(AtollError):
    """No link to a peer could be made; the message says why."""


@dataclass(slots=True, eq=False)
class Question(Generic[AnswerT]):
    """To the daemon, about one peer; one at a time."""

    asked: bool = False
    _answered: trio.Event = field(default_factory=trio.Event)
    _answer: AnswerT | None = None

    def answer(self, answer: AnswerT | None) -> None:
        """What the daemon says; nothing where nobody waits for it."""
        if self.asked:
            self._answer = answer
            self._answered.set()

    async def ask(self, send: Callable[[], Awaitable[None]], within_s: float) -> AnswerT | None:
        """None: no answer in time, or one that is none."""
        self.asked, self._answered, self._answer = True, trio.Event(), None
        try:
            await send()
            with trio.move_on_after(within_s):
                await self._answered.wait()
        finally:
            self.asked = False
        return self._answer


@dataclass(slots=True, eq=False)
class Contact:
    peer: Peer
    dialling: trio.Lock = field(default_factory=trio.Lock)
    arrived: trio.Event = field(default_factory=trio.Event)
    dialled: bool = False
    """The last link that was made was made from here: perhaps the peer cannot dial us at all."""
    token: Question[bytes] = field(default_factory=Question)
    call: Question[str] = field(default_factory=Question)
    """Why the peer does not dial; empty: it does."""
    splice: Question[Splice | str] = field(default_factory=Question)
    """A splice, or why there is none."""
    waits_for_call: bool = False
    called_at_s: float = -math.inf
    """When it last had this node dial it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wants:
    """What the daemon is asked for, by peer id."""

    token: Callable[[str], Awaitable[None]]
    """Towards the peer's engine."""
    call: Callable[[str], Awaitable[None]]
    """Have the peer dial this node."""
    splice: Callable[[str], Awaitable[None]]
    """Have a volunteer join this node with the peer."""


def at_host(host: str, addresses: Sequence[str]) -> tuple[str, ...]:
    """The ports of `addresses` (`host:port`) at `host` alone, two at most: for what is dialled on a peer's wish."""
    ports = dict.fromkeys(address.rpartition(":")[2] for address in addresses)
    return tuple(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for port in ports)[:2]


class Dialler:
    """The directory of peers, and the ways to them."""

    def __init__(
        self,
        *,
        nursery: trio.Nursery,
        peer_id: str,
        links: Mapping[str, Link],
        add_lane: Callable[[str, bytes, Stream], None],
        tokens: TokenBook,
        wants: Wants,
        dropped: Drops,
    ) -> None:
        """`links`: those that stand. `add_lane`: peer, the token that names the group, an authenticated lane."""
        self.contacts: dict[str, Contact] = {}
        self.context: ssl.SSLContext | None = None
        """Of this engine's certificate; set before anything is asked."""
        self._nursery = nursery
        self._peer_id = peer_id
        self._links = links
        self._add_lane = add_lane
        self._tokens = tokens
        self._wants = wants
        self._dropped = dropped
        self._meetings = 0
        self._news = trio.lowlevel.ParkingLot()
        """Who waits for a peer that is not in the directory yet."""

    def set_peers(self, peers: tuple[Peer, ...]) -> list[str]:
        """Replace the directory; who is no longer in it."""
        listed = {peer.peer_id: peer for peer in peers if peer.peer_id != self._peer_id}
        gone = [peer_id for peer_id in self.contacts if peer_id not in listed]
        for peer_id in gone:
            del self.contacts[peer_id]
        for peer_id, peer in listed.items():
            contact = self.contacts.get(peer_id)
            if contact is None:
                self.contacts[peer_id] = Contact(peer)
                if peer_id in self._links:
                    self.contacts[peer_id].arrived.set()
            else:
                contact.peer = peer
        self._news.unpark_all()
        return gone

    def answer_token(self, peer_id: str, token: bytes | None) -> None:
        if contact := self.contacts.get(peer_id):
            contact.token.answer(token)

    def answer_call(self, peer_id: str, failure: str) -> None:
        """`failure` is empty when the peer dials."""
        if contact := self.contacts.get(peer_id):
            contact.call.answer(failure)

    def answer_splice(self, peer_id: str, splice: Splice | str) -> None:
        """A splice, or why there is none."""
        if contact := self.contacts.get(peer_id):
            contact.splice.answer(splice)

    def link_up(self, peer_id: str) -> None:
        if contact := self.contacts.get(peer_id):
            contact.arrived.set()
        self._news.unpark_all()

    def link_down(self, peer_id: str) -> None:
        if contact := self.contacts.get(peer_id):
            contact.arrived = trio.Event()

    async def reach(self, peer_id: str, *, within_s: float, eager: bool = False, attempts: int = DIAL_ATTEMPTS) -> Link:
        """A link to `peer_id`, made if there is none. `eager` dials at once, whoever's turn it is.

        Raises `Unreachable`.
        """
        if link := self._links.get(peer_id):
            return link
        why = "it is not in the directory of engines"
        with trio.move_on_after(within_s):
            while (contact := self.contacts.get(peer_id)) is None and peer_id not in self._links:
                await self._news.park()
            if contact is None:
                return self._links[peer_id]
            why = "no connection in time"
            async with contact.dialling:
                peer = contact.peer
                dialable = peer.dialable and bool(peer.addresses)
                mine = eager or contact.dialled or (dialable and not peer.dials) or self._peer_id < peer.peer_id
                if not peer.addresses:
                    why = "it has no address that can be dialled, and it did not dial"
                if peer.dials and not dialable:
                    why = await self._be_dialled(contact) or why
                elif not mine:
                    with trio.move_on_after(TAKEOVER_S if dialable else JOIN_TAKEOVER_S):
                        await contact.arrived.wait()
                if peer_id not in self._links and not dialable and not peer.dials:
                    attempts = 1
                    try:
                        await self._be_joined(contact)
                        await contact.arrived.wait()
                    except HandshakeFailed as error:
                        why = str(error)
                if peer_id not in self._links and peer.addresses:
                    try:
                        await self._dial(contact, peer.addresses, attempts)
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

    async def _be_dialled(self, contact: Contact) -> str:
        """Have a peer dial this node, which cannot dial it; why it came to nothing, else empty."""
        contact.waits_for_call = True
        try:
            failure = await contact.call.ask(lambda: self._wants.call(contact.peer.peer_id), CALL_TIMEOUT_S)
            if failure:
                return failure
            with trio.move_on_after(CALL_TIMEOUT_S):
                await contact.arrived.wait()
        finally:
            contact.waits_for_call = False
        if contact.arrived.is_set():
            return ""
        return "it was asked to dial, and did not arrive" if failure is not None else "it was not asked to dial in time"

    def call(self, peer_id: str, token: bytes, host: str) -> None:
        """A peer that cannot dial this node wants to be dialled at `host`, and takes `token`."""
        contact = self.contacts.get(peer_id)
        if contact is None or not contact.peer.addresses or peer_id in self._links:
            return
        both_ask = contact.waits_for_call
        if contact.dialling.locked() and not both_ask:
            return  # it is being dialled
        now_s = trio.current_time()
        if now_s < contact.called_at_s + CALLED_EVERY_S:
            self._dropped.count("a wish to be dialled that came too soon after another", peer_id)
            return
        contact.called_at_s = now_s
        addresses = at_host(host, contact.peer.addresses)
        self._nursery.start_soon(self._follow_call, contact, addresses, token, both_ask)

    async def _follow_call(self, contact: Contact, addresses: Sequence[str], token: bytes, both_ask: bool) -> None:
        """`both_ask`: this node waits to be dialled by that very peer, and holds the lock meanwhile."""
        try:
            if both_ask:
                await self._dial(contact, addresses, 1, token)
                return
            async with contact.dialling:
                if contact.peer.peer_id not in self._links:
                    await self._dial(contact, addresses, 1, token)
        except HandshakeFailed as error:
            self._dropped.count(f"a peer that asked to be dialled cannot be: {error}", contact.peer.peer_id)

    async def _be_joined(self, contact: Contact) -> None:
        """Have a volunteer join this node with a peer; who asks it is the one that authenticates as the dialling side.

        Raises `HandshakeFailed`.
        """
        peer_id = contact.peer.peer_id
        token = await self._token(contact)
        splice = await contact.splice.ask(lambda: self._wants.splice(peer_id), JOIN_TIMEOUT_S)
        if splice is None or isinstance(splice, str):
            raise HandshakeFailed(splice or "its daemon did not say who joins it with this node")
        failures = []
        for address in splice.addresses:
            try:
                stream = await self._join_lane(contact, splice, address, token, 0)
            except HandshakeFailed as error:
                failures.append(str(error))
                continue
            contact.dialled = True
            self._add_lane(peer_id, token, stream)
            for lane in range(1, splice.lanes):
                self._nursery.start_soon(
                    self._more, contact, token, partial(self._join_lane, contact, splice, address, token, lane)
                )
            return
        raise HandshakeFailed("; ".join(dict.fromkeys(failures)))

    async def _join_lane(self, contact: Contact, splice: Splice, address: str, token: bytes, lane: int) -> Stream:
        tcp = await dial_through(address, ticket=splice.ticket, lane=lane, lanes=splice.lanes)
        return await introduce(
            tcp,
            f"what {address} leads to",
            certificate_sha256=contact.peer.certificate_sha256,
            peer_id=self._peer_id,
            token=token,
            lane=lane,
            lanes=splice.lanes,
        )

    def meet(self, peer_id: str, splice: Splice) -> None:
        """A peer that can neither dial this node nor be dialled has a volunteer join them."""
        for lane in range(splice.lanes):
            if self._meetings >= MAX_MEETINGS:
                self._dropped.count("too many meetings at volunteers at once", peer_id)
                return
            self._meetings += 1
            self._nursery.start_soon(self._meet, peer_id, splice, lane)

    async def _meet(self, peer_id: str, splice: Splice, lane: int) -> None:
        """This is the side that is dialled: it shows its certificate, and wants a token."""
        tcp: trio.SocketStream | None = None
        authenticated: tuple[str, bytes, Stream] | None = None
        assert self.context is not None, "the engine listens"
        try:
            for address in splice.addresses:
                with contextlib.suppress(HandshakeFailed):
                    tcp = await dial_through(address, ticket=splice.ticket, lane=lane, lanes=splice.lanes)
                    break
            if tcp is not None:
                authenticated = await accept(tcp, self.context, self._tokens)
        except StrangerError as error:
            self._dropped.count(str(error), peer_id)
        finally:
            self._meetings -= 1
            if authenticated is None and tcp is not None:
                await trio.aclose_forcefully(tcp)
        if authenticated is not None:
            self._add_lane(*authenticated)

    async def _dial(
        self, contact: Contact, addresses: Sequence[str], attempts: int, token: bytes | None = None
    ) -> None:
        """`token`: of a peer that gave one unasked."""
        if token is None:
            token = await self._token(contact)
        failures = []
        for attempt in range(attempts):
            if attempt:
                await trio.sleep(RETRY_DELAY_S * 2**attempt)
            for address in addresses:
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
                    dial_lane = partial(self._dial_lane, contact, address, token, lane)
                    self._nursery.start_soon(self._more, contact, token, dial_lane)
                return
        raise HandshakeFailed("; ".join(dict.fromkeys(failures)))

    async def _more(self, contact: Contact, token: bytes, open_lane: Callable[[], Awaitable[Stream]]) -> None:
        try:
            stream = await open_lane()
        except HandshakeFailed:
            return  # the lanes that stand carry everything
        if contact.peer.peer_id in self._links:
            self._add_lane(contact.peer.peer_id, token, stream)
        else:
            await trio.aclose_forcefully(stream.transport_stream)

    async def _dial_lane(self, contact: Contact, address: str, token: bytes, lane: int) -> Stream:
        return await dial(
            address,
            certificate_sha256=contact.peer.certificate_sha256,
            peer_id=self._peer_id,
            token=token,
            lane=lane,
            lanes=LANES,
        )

    async def _token(self, contact: Contact) -> bytes:
        token = await contact.token.ask(lambda: self._wants.token(contact.peer.peer_id), TOKEN_TIMEOUT_S)
        if token is None:
            raise HandshakeFailed("its daemon gave no token")
        return token
