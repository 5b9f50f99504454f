"""Finding the peers of a run: the DHT, bootstrap addresses, remembered peers, and everyone's membership records.

Nodes may start in any order and nothing is tried only once: a bootstrap address is dialled for as long as the node
lives, and everyone known is dialled until connected, so islands merge and a dead bootstrap node stops nobody.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Protocol

import structlog
import trio
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from node.daemon.addresses import Address, parse_address
from node.daemon.host import DialError, HardenedHost
from node.daemon.link import Link
from node.daemon.membership import Membership
from node.daemon.reachability import Reachability
from node.daemon.remembered import RememberedPeers
from node.daemon.run_dht import DHT_QUERY_TIMEOUT_S, RunDHT
from node.daemon.splicing import SpliceFailed, Splicing
from node.daemon.streams import Refused
from node.errors import StrangerError
from protocol.names import Digest, PeerId, digest

FIRST_LOOKUP_S = 0.5
MAX_LOOKUP_INTERVAL_S = 60.0
FIRST_RETRY_S = 0.5
MAX_BOOTSTRAP_RETRY_S = 15.0
MAX_JOINING_RETRY_S = 3.0
"""While this node has no run yet: it waits for one for half a minute only."""
MAX_RETRY_ALONE_S = 15.0
MAX_RETRY_S = 60.0
RETRY_EACH_S = 1.0
"""Of many who cannot be reached, one is dialled about so often; few are dialled as often as by a node alone, since half
of a run that was cut in two has company, and is to find the other half soon."""
AFTER_GOODBYE_S = 5.0
"""More than a node listens after its goodbye (`network.GOODBYE_S`, and the host's own end)."""
POLITE_DELAY_S = 2.0
"""Of a pair that learn of each other, the one with the greater id dials so much later: one connection, not two."""

FAILURES_BEFORE_VOLUNTEER = 2
"""Dials of a peer that failed, where it is not known that neither can dial the other."""

MAX_LINKS = 128
MAX_DIALS_AT_ONCE = 8
MAX_CANDIDATES = 1000
SAVE_INTERVAL_S = 1.0
"""Between two writes of the known peers at the soonest."""
_log = structlog.get_logger(__name__)


class DiscoveryOwner(Protocol):
    """What discovery asks of the network."""

    peer_id: PeerId
    run_id: Digest | None
    membership: Membership
    reachability: Reachability
    splicing: Splicing

    @property
    def links(self) -> Mapping[PeerId, Link]: ...

    def links_changed(self) -> trio.Event: ...

    def must_not_dial(self, peer_id: PeerId) -> str | None: ...

    async def connect(self, peer_id: PeerId, addresses: Sequence[Address]) -> Link: ...


class _Candidate:
    """Somebody to connect to, and when next."""

    def __init__(self, addresses: Sequence[Address], due_s: float) -> None:
        self.addresses = tuple(dict.fromkeys(addresses))[:16]
        self.due_s = due_s
        self.failures = 0
        self.dialling = False
        self.left_to_it = False
        """It was not dialled when it was due, since it can dial this node and not the other way round."""


class Discovery:
    """The loops that keep a node connected to its run."""

    def __init__(
        self,
        *,
        owner: DiscoveryOwner,
        host: HardenedHost,
        bootstrap: Sequence[Address],
        remembered: RememberedPeers,
    ) -> None:
        self._owner = owner
        self._host = host
        self.dht = RunDHT(host)
        self._bootstrap = [one for one in bootstrap if one.peer_id != owner.peer_id]
        self._remembered = remembered
        self._candidates: dict[PeerId, _Candidate] = {}
        self._goodbye_until_s: dict[PeerId, float] = {}
        """Bootstrap peers that said goodbye: not dialled before."""
        self._news = trio.Event()
        self._met = trio.Event()
        """Somebody may be new in the file of known peers."""
        self.bootstrap_errors: dict[Address, str] = {}
        """Of the addresses that do not answer now."""

    async def run(self) -> None:
        """Until cancelled. The DHT itself is run by the caller, as the library's service."""
        async with trio.open_nursery() as nursery:
            for address in self._bootstrap:
                nursery.start_soon(self._keep_bootstrap, address)
            nursery.start_soon(self._gather_records)
            nursery.start_soon(self._dial_candidates)
            nursery.start_soon(self._look_up)
            nursery.start_soon(self._save)

    # ------------------------------------------------------------ what the network reports

    async def on_link(self, link: Link, addresses: Sequence[Address]) -> None:
        """A peer introduced itself; it may enter the routing table, and the file of known peers."""
        peer = ID.from_string(link.peer_id)
        if addresses:
            self._host.get_peerstore().add_addrs(peer, [Multiaddr(one.endpoint) for one in addresses], 3600)
            await self.dht.add_peer(peer)
        if link.run:
            self._remembered.remember(link.peer_id, link.run, tuple(addresses))
            self._met.set()

    def suggest(self, peer_id: PeerId, addresses: Sequence[Address]) -> None:
        """Somebody who may be of the run."""
        if peer_id == self._owner.peer_id or not addresses:
            return
        candidate = self._candidates.get(peer_id)
        if candidate is not None:
            # New addresses first, but what was known stays: an announced address may be worse than the one that worked.
            candidate.addresses = tuple(dict.fromkeys((*addresses, *candidate.addresses)))[:16]
        elif len(self._candidates) < MAX_CANDIDATES:
            polite_s = POLITE_DELAY_S if self._owner.peer_id > peer_id else 0.0
            self._candidates[peer_id] = _Candidate(addresses, trio.current_time() + polite_s)
            self._news.set()

    def on_goodbye(self, peer_id: PeerId) -> None:
        """It said that it leaves: it still listens for a moment, and is not to be called back in it."""
        due_s = trio.current_time() + AFTER_GOODBYE_S
        if any(address.peer_id == peer_id for address in self._bootstrap):
            self._goodbye_until_s[peer_id] = due_s
        if candidate := self._candidates.get(peer_id):
            candidate.due_s = max(candidate.due_s, due_s)
        elif len(self._candidates) < MAX_CANDIDATES:
            self._candidates[peer_id] = _Candidate((), due_s)  # its addresses are among the remembered

    # ------------------------------------------------------------ loops

    async def _keep_bootstrap(self, address: Address) -> None:
        assert address.peer_id is not None, "a bootstrap address names its peer"
        delay_s = FIRST_RETRY_S
        while True:
            changed = self._owner.links_changed()
            if address.peer_id in self._owner.links:
                self.bootstrap_errors.pop(address, None)
                delay_s = FIRST_RETRY_S
                await changed.wait()
                continue
            if (until_s := self._goodbye_until_s.pop(address.peer_id, 0.0)) > trio.current_time():
                self.bootstrap_errors[address] = "it has just left"
                with trio.move_on_at(until_s):
                    while address.peer_id not in self._owner.links:
                        await self._owner.links_changed().wait()
                continue
            try:
                await self._owner.connect(address.peer_id, [address])
                continue
            except (DialError, Refused) as error:
                self.bootstrap_errors[address] = (
                    error.errors.get(address) or str(error) if isinstance(error, DialError) else error.reason
                )
            await trio.sleep(delay_s * random.uniform(0.8, 1.2))
            longest_s = MAX_BOOTSTRAP_RETRY_S if self._owner.run_id is not None else MAX_JOINING_RETRY_S
            delay_s = min(delay_s * 1.7, longest_s)

    async def _gather_records(self) -> None:
        async for _ in self._owner.membership.changes():
            self._met.set()
            for record in list(self._owner.membership.records.values()):
                if record.peer_id not in self._owner.links:
                    self.suggest(record.peer_id, [parse_address(one).of(record.peer_id) for one in record.addresses])

    async def _dial_candidates(self) -> None:
        limiter = trio.CapacityLimiter(MAX_DIALS_AT_ONCE)
        async with trio.open_nursery() as nursery:
            while True:
                if self._owner.run_id is not None:
                    for peer in self._remembered.of_run(self._owner.run_id):
                        self.suggest(peer.peer_id, peer.addresses)
                now = trio.current_time()
                for peer_id, candidate in list(self._candidates.items()):
                    if peer_id in self._owner.links and not self._may_be_direct(peer_id):
                        candidate.failures = 0
                        candidate.due_s = now + FIRST_RETRY_S * random.uniform(0.5, 1.5)
                    elif (
                        candidate.addresses
                        and candidate.due_s <= now
                        and not candidate.dialling
                        and len(self._owner.links) < MAX_LINKS
                        and self._owner.must_not_dial(peer_id) is None
                    ):
                        record = self._owner.membership.records.get(peer_id)
                        if record is not None and not candidate.left_to_it:
                            candidate.left_to_it = self._owner.reachability.leaves_dialling_to(record)
                            if candidate.left_to_it:  # this once: what is known may be wrong by now
                                candidate.due_s = now + MAX_RETRY_S * random.uniform(0.5, 1.0)
                                continue
                        candidate.left_to_it = False
                        candidate.dialling = True
                        nursery.start_soon(self._dial, limiter, peer_id, candidate)
                self._news = trio.Event()
                with trio.move_on_after(1.0):
                    await self._news.wait()

    def _may_be_direct(self, peer_id: PeerId) -> bool:
        """Whether a volunteer joins this node with a peer that it may dial itself by now."""
        record = self._owner.membership.records.get(peer_id)
        return (
            record is not None
            and self._owner.links[peer_id].is_spliced
            and not self._owner.reachability.is_out_of_reach(record)
        )

    async def _dial(self, limiter: trio.CapacityLimiter, peer_id: PeerId, candidate: _Candidate) -> None:
        try:
            async with limiter:
                if peer_id not in self._owner.links or self._may_be_direct(peer_id):
                    await self._connect(peer_id, candidate)
        except (DialError, Refused, SpliceFailed) as error:
            candidate.failures += 1
            missing = sum(1 for peer in self._candidates if peer not in self._owner.links)
            crowd_s = min(MAX_RETRY_S, max(MAX_RETRY_ALONE_S, RETRY_EACH_S * missing))
            longest_s = crowd_s if self._owner.links else MAX_RETRY_ALONE_S
            wait_s = min(FIRST_RETRY_S * 2 ** min(candidate.failures, 10), longest_s)
            candidate.due_s = trio.current_time() + wait_s * random.uniform(0.7, 1.3)
            _log.debug("a peer cannot be reached", peer=peer_id, why=str(error), retry_in_s=round(wait_s, 1))
            if candidate.failures > 20 and peer_id not in self._owner.membership.records:
                self._candidates.pop(peer_id, None)
        finally:
            candidate.dialling = False

    async def _connect(self, peer_id: PeerId, candidate: _Candidate) -> None:
        """By dialling it, or through a volunteer. Raises `DialError`, `Refused`, `SpliceFailed`."""
        reachability, splicing = self._owner.reachability, self._owner.splicing
        record = self._owner.membership.records.get(peer_id)
        if record is not None and reachability.needs_volunteer(record):
            await splicing.connect(peer_id)
            return
        try:
            await self._owner.connect(peer_id, candidate.addresses)
        except DialError as error:
            known = record is not None and reachability.may_need_volunteer(record)
            if not known or candidate.failures < FAILURES_BEFORE_VOLUNTEER or peer_id in self._owner.links:
                raise
            _log.debug("a peer is not where it says", peer=peer_id, why=str(error))
            await splicing.connect(peer_id)

    async def _look_up(self) -> None:
        interval_s = FIRST_LOOKUP_S
        rounds = 0
        while True:
            changed = self._owner.links_changed()
            run = self._owner.run_id
            if run is None or not self._owner.links:
                interval_s, rounds = FIRST_LOOKUP_S, 0
                with trio.move_on_after(1.0):
                    await changed.wait()
                continue
            key = digest(b"atoll/dht/run", run)
            if rounds < 3:
                with trio.move_on_after(DHT_QUERY_TIMEOUT_S):
                    await self.dht.refresh_routing_table()
            if rounds < 4 or rounds % 5 == 0:
                await self.dht.announce(key)
            for peer_id, addresses in (await self.dht.find(key)).items():
                self.suggest(peer_id, addresses)
            rounds += 1
            await trio.sleep(interval_s * random.uniform(0.8, 1.2))
            interval_s = min(interval_s * 1.7, MAX_LOOKUP_INTERVAL_S)

    async def _save(self) -> None:
        """Whoever is met is written down at once: a node killed seconds later must find its run again."""
        while True:
            await self._met.wait()
            self._met = trio.Event()
            await self.save()
            await trio.sleep(SAVE_INTERVAL_S)

    async def save(self) -> None:
        """Write the known peers of the run down."""
        for record in list(self._owner.membership.records.values()):
            if record.peer_id in self._owner.links:
                try:
                    addresses = tuple(parse_address(one).of(record.peer_id) for one in record.addresses)
                except (ValueError, StrangerError):
                    continue
                self._remembered.remember(record.peer_id, record.run, addresses)
        await trio.to_thread.run_sync(self._remembered.save)


def describe_errors(errors: Mapping[Address, str]) -> str:
    """For one sentence: each address with why it does not answer."""
    return "; ".join(f"{address}: {why}" for address, why in errors.items())
