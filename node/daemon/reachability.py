"""Whether peers can dial this node, by asking them to try (design section 7); who of a pair can dial whom.

Control and data are judged each for itself: their ports are forwarded, or forgotten, one by one.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from typing import Protocol

import structlog
import trio

from node.daemon import rpc
from node.daemon.addresses import local_networks, parse_address, resolve
from node.daemon.admission import address_block
from node.daemon.dial_back import ANSWER_S, MAX_PORTS, DialBackAnswer, DialBackRequest
from node.daemon.dial_words import AGAIN_S, MAX_VERDICTS, Words, closed_ports
from node.daemon.link import Link
from node.daemon.membership import Membership, MembershipRecord
from node.daemon.own_addresses import OwnAddresses
from node.daemon.splicing import Splicing
from node.daemon.streams import RequestFailed
from node.errors import StrangerError
from node.status import ReachStatus
from protocol.names import PeerId, digest

ASKED = 3
"""Peers whose newest word is wanted."""
SETTLE_S = 1.0
"""After a change, for the rest of it to follow: a node's two ports open one after another."""

_log = structlog.get_logger(__name__)


class ReachabilityOwner(Protocol):
    """What this asks of the network."""

    peer_id: PeerId
    membership: Membership
    splicing: Splicing
    own_addresses: OwnAddresses

    @property
    def peers(self) -> Mapping[PeerId, Link]: ...

    def links_changed(self) -> trio.Event: ...

    @property
    def relay_bytes_s(self) -> float: ...

    def found_address(self, host: str) -> None: ...

    async def request(self, peer: PeerId, method: str, payload: bytes, *, timeout_s: float) -> bytes: ...


class Reachability:
    def __init__(self, owner: ReachabilityOwner) -> None:
        self._owner = owner
        self._control = Words()
        self._data = Words()
        self._networks = local_networks()
        self._asked_for: DialBackRequest | None = None
        self._seen: dict[PeerId, tuple[str, bool]] = {}
        """Peer → where it saw this node come from, and whether it is on one of this node's networks."""
        self._looked_at: dict[str, float] = {}
        """Origin of peers that were asked to dial this node → until when they may."""
        self._elsewhere = ""
        """Where peers see this node come from, if that is none of the addresses that the operator announces."""

    def look_at_networks(self) -> None:
        """A laptop changes networks."""
        self._networks = local_networks()

    def was_seen(self, link: Link, host: str) -> None:
        """A peer said in its hello where this node's connection comes from."""
        if _is_ip(host) and not link.is_spliced:
            self._seen[link.peer_id] = host, self._is_local(link.remote_host)
            while len(self._seen) > MAX_VERDICTS:
                del self._seen[next(iter(self._seen))]

    # ------------------------------------------------------------ asking

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            changed = self._owner.links_changed()
            with trio.move_on_after(AGAIN_S):
                await changed.wait()
                await trio.sleep(SETTLE_S)
            request = self._question()
            if request is None:
                continue
            if request != self._asked_for:  # other ports, or another engine: nothing is known of these
                self._asked_for = request
                self._control, self._data = Words(), Words()
            peers = self._next_peers(trio.current_time())
            async with trio.open_nursery() as nursery:
                for link in peers:
                    nursery.start_soon(self._ask, link, request)
            if peers:
                self._publish()

    def _question(self) -> DialBackRequest | None:
        """None while this node has no run, or no engine."""
        mine = self._owner.membership.mine
        if not mine.run or not mine.certificate_sha256:
            return None
        data_ports = (int(one.rpartition(":")[2]) for one in mine.data_addresses)
        return DialBackRequest(
            control_ports=tuple(dict.fromkeys(one.port for one in self._owner.own_addresses.control))[:MAX_PORTS],
            data_ports=tuple(dict.fromkeys(data_ports))[:MAX_PORTS],
            certificate_sha256=mine.certificate_sha256,
        )

    def _next_peers(self, now_s: float) -> list[Link]:
        """Whose word is wanted now: of different places, those from elsewhere first."""
        told = {peer for peer in self._control.by_peer if not self._due(peer, now_s)}
        hosts = {link.remote_host for peer, link in self._owner.peers.items() if peer in told}
        due = [link for peer, link in self._owner.peers.items() if peer not in told and not link.is_spliced]
        due.sort(
            key=lambda link: (self._is_local(link.remote_host), link.remote_host in hosts, self._lot(link.peer_id))
        )
        chosen: dict[str, Link] = {}
        for link in due:
            chosen.setdefault(link.remote_host, link)
        return list(chosen.values())[: max(0, ASKED - len(told))]

    def _lot(self, peer: PeerId) -> bytes:
        """So that not everybody asks the same few."""
        return digest(b"atoll/dial-back", self._owner.peer_id.encode(), peer.encode())

    def _due(self, peer: PeerId, now_s: float) -> bool:
        return self._control.due(peer, now_s) or self._data.due(peer, now_s)

    async def _ask(self, link: Link, request: DialBackRequest) -> None:
        peer, local = link.peer_id, self._is_local(link.remote_host)
        control: str | None = None
        data: str | None = None
        host = ""
        self._looked_at[address_block(link.remote_host)] = trio.current_time() + 2 * ANSWER_S
        try:
            payload = await self._owner.request(peer, rpc.DIAL_BACK, rpc.encode(request), timeout_s=ANSWER_S)
            answer = rpc.decode(payload, DialBackAnswer)
            if not _is_ip(answer.host):
                raise StrangerError(f"a dial-back to {answer.host[:60]!r}, which is no IP address")
            if await self._speaks_of_me(answer.host):
                host = answer.host
                control, data = _why_not(answer.control.values()), _why_not(answer.data.values())
        except (RequestFailed, StrangerError) as error:
            _log.debug("a peer did not try to dial this node", peer=peer, why=str(error))
        now_s = trio.current_time()
        self._control.say(peer, now_s, local=local, host=host, why=control)
        self._data.say(peer, now_s, local=local, host=host, why=data)
        if control == "" and not local and self._is_told_by_enough(host):
            self._owner.found_address(host)

    def _is_told_by_enough(self, host: str) -> bool:
        """Whether two peers dialled this node at `host`, or the only one there is: a single one of many could have it
        send the others to somebody else's door.
        """
        told = sum(word.host == host and word.yes is True for word in self._control.by_peer.values())
        direct = sum(not link.is_spliced for link in self._owner.peers.values())
        return self.seen_at == host and told >= min(2, direct)

    async def _speaks_of_me(self, host: str) -> bool:
        """Whether the address that a peer dialled is one that this node tells others, if its operator chose them."""
        own = self._owner.own_addresses.operators
        if not own:
            return True
        for address in own:
            try:
                if any(one.host == host for one in await resolve(address)):
                    self._elsewhere = ""
                    return True
            except (OSError, trio.TooSlowError):
                continue
        self._elsewhere = host
        return False

    def _publish(self) -> None:
        control, data = self._control.verdict, self._data.verdict
        mine = self._owner.membership.mine
        if (mine.reachable, mine.data_reachable) != (control, data):
            _log.info("reachability", control=control, data=data, seen_at=self.seen_at, advice=self.advice())
        self._owner.membership.publish(
            reachable=control,
            data_reachable=data,
            relays=data is True and self._owner.relay_bytes_s > 0,
            seen_at=self.seen_at,
        )

    def is_looked_at_from(self, origin: str) -> bool:
        """Whether a connection from there that ends in its handshake is a dial-back that was asked for, most likely."""
        now_s = trio.current_time()
        self._looked_at = {one: until_s for one, until_s in self._looked_at.items() if until_s > now_s}
        return origin in self._looked_at

    # ------------------------------------------------------------ what is known

    @property
    def seen_at(self) -> str:
        """Where most peers, of those from elsewhere if there are any, see this node; empty: nobody has said."""
        words = [(word.host, word.local) for word in self._control.by_peer.values() if word.host]
        words = words or list(self._seen.values())
        hosts = [host for host, local in words if not local] or [host for host, _ in words]
        return max(sorted(set(hosts)), key=hosts.count, default="")

    def status(self) -> ReachStatus:
        mine, splicing, peers = self._owner.membership.mine, self._owner.splicing, self._owner.peers
        spliced = {peer for peer, link in peers.items() if link.is_spliced}
        return ReachStatus(
            control=mine.reachable,
            data=mine.data_reachable,
            seen_at=mine.seen_at or None,
            advice=self.advice(),
            through={peer: volunteer for peer, volunteer in splicing.through.items() if peer in spliced},
            not_joined={
                peer: why
                for peer, why in splicing.failures.items()
                if peer not in peers and peer in self._owner.membership.records
            },
        )

    def advice(self) -> str:
        """What an operator can do so that peers can dial this node, in one sentence; empty: nothing need be done."""
        request = self._asked_for
        if request is None:
            return ""
        if self._elsewhere:
            announced = ", ".join(str(one) for one in self._owner.own_addresses.operators)
            return (
                f"peers see this node come from {self._elsewhere}, not from what it announces ({announced}): "
                "whether they can dial it there is not known"
            )
        closed = []
        if self._control.verdict is False:
            closed += list(request.control_ports)
        if self._data.verdict is False:
            closed += list(request.data_ports)
        if not closed:
            return ""
        return closed_ports(
            seen_at=self.seen_at,
            own={str(one.ip) for one in self._networks},
            listening=next(iter(self._owner.own_addresses.listening)),
            control_port=request.control_ports[0],
            data_port=request.data_ports[0],
            closed=closed,
            announced=bool(self._owner.own_addresses.operators),
        )

    # ------------------------------------------------------------ pairs

    def is_out_of_reach(self, record: MembershipRecord) -> bool:
        """Whether this node is known not to be able to dial that one's control port."""
        return record.reachable is False and not self._same_site(record)

    def leaves_dialling_to(self, record: MembershipRecord) -> bool:
        """Whether that one is out of reach for this node, and reaches this node: it will connect."""
        return self.is_out_of_reach(record) and self._owner.membership.mine.reachable is True

    def needs_volunteer(self, record: MembershipRecord) -> bool:
        """Whether neither is known to be able to dial the other's control port."""
        return self.is_out_of_reach(record) and self._owner.membership.mine.reachable is False

    def may_need_volunteer(self, record: MembershipRecord) -> bool:
        """The same of what is not known yet, after a dial that failed."""
        return self._owner.membership.mine.reachable is not True and record.reachable is not True

    def data_dialable(self, record: MembershipRecord) -> bool:
        """Whether this node's engine can dial that one's, as far as is known."""
        if record.data_reachable is not None:
            return record.data_reachable or self._same_site(record)
        link = self._owner.peers.get(record.peer_id)
        if link is not None and link.dialled and not link.is_spliced:
            return True  # the same machine, at another port
        return self._may_lead(one.rpartition(":")[0] for one in record.data_addresses)

    def data_dials(self, record: MembershipRecord) -> bool:
        """Whether that one's engine can dial this node's, likewise."""
        mine = self._owner.membership.mine
        if mine.data_reachable is not None:
            return mine.data_reachable or self._same_site(record)
        link = self._owner.peers.get(record.peer_id)
        if link is None or (not link.is_spliced and (not link.dialled or self._is_local(link.remote_host))):
            return True
        hosts = (one.rpartition(":")[0].strip("[]") for one in mine.data_addresses)
        return any(not _is_ip(host) or ipaddress.ip_address(host).is_global for host in hosts)

    def _may_lead(self, hosts: Iterable[str]) -> bool:
        """Whether one of them is not somebody else's private address."""
        return any(
            not _is_ip(host) or ipaddress.ip_address(host).is_global or self._is_local(host)
            for host in (one.strip("[]") for one in hosts)
        )

    def _same_site(self, record: MembershipRecord) -> bool:
        """Behind one router, and on one network there: every home has a 192.168.1.0/24, and no home's leads to
        another's.
        """
        seen_at = self._owner.membership.mine.seen_at
        if not seen_at or record.seen_at != seen_at:
            return False
        return any(self._is_local(parse_address(text).host) for text in record.addresses)

    def _is_local(self, host: str) -> bool:
        if not _is_ip(host):
            return False
        ip = ipaddress.ip_address(host)
        return any(ip.version == one.version and ip in one.network for one in self._networks)


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _why_not(failures: Iterable[str]) -> str | None:
    """Of several ports one is enough; None: none was tried."""
    told = sorted(failures)
    return told[0] if told else None
