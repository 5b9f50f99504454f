"""The hardened libp2p host: one identity, listening sockets, our own dialling, strangers kept within bounds."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import structlog
import trio
from libp2p.abc import INetConn, INetStream
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_new_x25519_key_pair
from libp2p.custom_types import TProtocol
from libp2p.host.basic_host import BasicHost, _IdentifyNotifee
from libp2p.host.ping import ID as PING_ID
from libp2p.host.ping import PingService
from libp2p.io.trio import TrioTCPStream
from libp2p.network.auto_connector import AutoConnector
from libp2p.network.config import ConnectionConfig, RetryConfig
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.network.exceptions import SwarmException
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStoreError
from libp2p.protocol_muxer.multiselect import Multiselect
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE_ID
from libp2p.security.noise.transport import Transport as NoiseTransport
from libp2p.transport.upgrader import TransportUpgrader
from multiaddr import Multiaddr

from node.daemon.addresses import Address, check_can_listen, parse_address, ranked, resolve
from node.daemon.admission import LINGERED, MAX_CONNECTIONS, Admission, address_block
from node.daemon.hardening import (
    CONNECT_TIMEOUT_S,
    HardenedMuxers,
    HardenedPeerStore,
    HardenedTCP,
    HardenedYamux,
    note_connection,
    quieten_libp2p,
)
from node.daemon.identity import Identity
from node.errors import AtollError, OperatorError
from protocol.names import PeerId

DIAL_TIMEOUT_S = 20.0
"""For one address: TCP, security and multiplexer take about six round trips, and a round trip may take 2.5 s."""

HELLO_TIMEOUT_S = 20.0
"""For an accepted connection to introduce itself."""

MAX_DIALLED_ADDRESSES = 8

_NEGOTIATE_TIMEOUT_S = 15
_log = structlog.get_logger(__name__)


SPLICED = "spliced"
"""In the place of an origin, for connections that a volunteer joins."""


class UpgradeFailed(AtollError):
    """What a volunteer joined this node with is not the peer that it should be; the message says why."""


class DialError(AtollError):
    """No address of a peer led to it; `errors` says why for each."""

    def __init__(self, errors: dict[Address, str]) -> None:
        self.errors = errors
        tried = "; ".join(f"{address.host_port}: {why}" for address, why in errors.items())
        super().__init__(tried or "no address is known")


class _GuardedManager:
    """The service manager, with every task that the swarm starts guarded: an escaped error would end the whole host."""

    def __init__(self, manager: Any, counts: Counter[str]) -> None:
        self._manager = manager
        self._counts = counts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    def run_task(self, function: Callable[..., Awaitable[Any]], *args: Any, **options: Any) -> None:
        async def guarded() -> None:
            try:
                await function(*args)
            except Exception as error:  # noqa: BLE001 - any error of one connection must stay within it
                self._counts["connections that failed"] += 1
                _log.debug("a connection's task failed", error=repr(error))

        self._manager.run_task(guarded, **options)


class _NoAutoConnector(AutoConnector):  # type: ignore[misc]
    """The library's dials whatever stands in the peer store until there are hundreds of connections; zeros in its
    configuration do not switch it off."""

    async def run_background_task(self, nursery: trio.Nursery) -> None:
        await trio.lowlevel.checkpoint()

    async def maybe_connect(self) -> None:
        await trio.lowlevel.checkpoint()

    def record_disconnect(self, peer_id: ID) -> None:
        """The library remembers every peer there ever was."""


class HardenedSwarm(Swarm):  # type: ignore[misc]
    """The library's swarm with our admission, our dialling, and no task whose error ends the host."""

    def __init__(self, peer_id: ID, upgrader: TransportUpgrader) -> None:
        config = ConnectionConfig(
            min_connections=0,
            low_watermark=0,
            high_watermark=MAX_CONNECTIONS,
            max_connections=MAX_CONNECTIONS,
            inbound_upgrade_timeout=HELLO_TIMEOUT_S,
            outbound_upgrade_timeout=DIAL_TIMEOUT_S,
            inbound_stream_protocol_negotiation_timeout=_NEGOTIATE_TIMEOUT_S,
            outbound_stream_protocol_negotiation_timeout=_NEGOTIATE_TIMEOUT_S,
        )
        self.admission = Admission()
        self.may_dial: Callable[[PeerId], str | None] = lambda _: None
        """Why a peer must not be dialled now; None: it may."""
        self._dials: dict[ID, trio.Event] = {}
        super().__init__(
            peer_id,
            HardenedPeerStore(peer_id),
            upgrader,
            transports=[HardenedTCP()],
            retry_config=RetryConfig(max_retries=0),
            connection_config=config,
        )
        self.auto_connector = _NoAutoConnector(swarm=self)

    @property
    def manager(self) -> Any:
        return _GuardedManager(self._manager, self.admission.counts)

    async def _handle_inbound_connection(self, read_write_closer: Any, maddr: Multiaddr) -> None:
        await self._serve_inbound(
            read_write_closer, maddr, lambda: address_block(note_connection(read_write_closer)[0])
        )

    async def welcome_over(self, tcp: trio.SocketStream) -> None:
        """A connection that a peer has made through a volunteer, to its end; this is the side that is dialled."""
        await self._serve_inbound(_unaddressed(tcp), Multiaddr("/ip4/0.0.0.0/tcp/0"), lambda: SPLICED)

    async def _serve_inbound(self, read_write_closer: Any, maddr: Multiaddr, origin: Callable[[], str]) -> None:
        """From accept to end. The library holds its token until the swarm stops; ours ends with the connection."""
        block = "unknown"
        muxed: HardenedYamux | None = None
        try:
            block = origin()
            with self.admission.pend(block):
                muxed = await self.upgrade_inbound_raw_conn(RawConnection(read_write_closer, False), maddr)
                with trio.move_on_after(HELLO_TIMEOUT_S) as waiting:
                    await muxed.settled.wait()
                if waiting.cancelled_caught:
                    self.admission.counts[LINGERED] += 1
            if muxed is not None and muxed.greeted:
                with self.admission.settle(block) as admitted:
                    if admitted:
                        await muxed.event_closed.wait()
        except Exception as error:  # noqa: BLE001 - a stranger's handshake fails in any way it likes
            if not self.admission.may_look(block):
                self.admission.counts["handshakes that failed"] += 1
            _log.debug("a handshake failed", address=block, error=repr(error))
        finally:
            with trio.CancelScope(shield=True), trio.move_on_after(2.0):
                await (muxed or read_write_closer).close()

    async def dial_peer(self, peer_id: ID) -> list[INetConn]:
        """For the DHT: the connections to a peer, dialled by the addresses in the peer store if there is none."""
        if alive := [one for one in self.get_connections(peer_id) if not one.is_closed]:
            return alive
        if why := self.may_dial(str(peer_id)):
            raise SwarmException(why)
        try:
            known = self.peerstore.addrs(peer_id)
        except PeerStoreError as error:
            raise SwarmException(f"no address of {peer_id} is known") from error
        addresses = []
        for one in known:
            try:
                addresses.append(parse_address(str(one)).of(str(peer_id)))
            except ValueError:
                continue
        try:
            return [await self.dial(str(peer_id), addresses)]
        except DialError as error:
            raise SwarmException(str(error)) from error

    async def dial(self, peer_id: PeerId, addresses: Sequence[Address]) -> INetConn:
        """A new connection, by the best address that answers; dials of the same peer wait for one another.

        The library tries at most two addresses, then refuses the peer for 60 s. Raises `DialError`.
        """
        target = ID.from_string(peer_id)
        while (other := self._dials.get(target)) is not None:
            await other.wait()
            if alive := [one for one in self.get_connections(target) if not one.is_closed]:
                return alive[0]
        self._dials[target] = finished = trio.Event()
        try:
            return await self._dial_in_turn(target, addresses)
        finally:
            del self._dials[target]
            finished.set()

    async def dial_over(self, peer_id: PeerId, tcp: trio.SocketStream) -> INetConn:
        """A new connection over one that a volunteer has joined. Raises `UpgradeFailed`; it is closed then."""
        try:
            with trio.fail_after(DIAL_TIMEOUT_S):
                raw = RawConnection(_unaddressed(tcp), True)
                return await self.upgrade_outbound_raw_conn(raw, ID.from_string(peer_id))
        except trio.TooSlowError:
            raise UpgradeFailed(f"no handshake within {DIAL_TIMEOUT_S:.0f} s") from None
        except Exception as error:
            raise UpgradeFailed(_why(error)) from error

    async def probe(self, address: Address) -> None:
        """Whether the peer that `address` names can be dialled there: nothing is asked of it. Raises `DialError`."""
        assert address.peer_id is not None, "a peer's address"
        target = ID.from_string(address.peer_id)
        try:
            with trio.fail_after(DIAL_TIMEOUT_S):
                raw = await HardenedTCP().dial(Multiaddr(address.endpoint))
                try:
                    await self.upgrader.upgrade_security(raw, True, target)
                finally:
                    with trio.CancelScope(shield=True), trio.move_on_after(2.0):
                        await raw.close()
        except trio.TooSlowError:
            raise DialError({address: f"no answer within {DIAL_TIMEOUT_S:.0f} s"}) from None
        except Exception as error:
            raise DialError({address: _why(error)}) from error

    async def _dial_in_turn(self, target: ID, addresses: Sequence[Address]) -> INetConn:
        errors: dict[Address, str] = {}
        numeric: dict[Address, None] = {}
        for address in ranked(addresses):
            try:
                numeric.update(dict.fromkeys(await resolve(address)))
            except trio.TooSlowError:
                errors[address] = "its name was not resolved in time"
            except OSError as error:
                errors[address] = f"its name is not known ({error.strerror})"
        for address in list(numeric)[:MAX_DIALLED_ADDRESSES]:
            try:
                with trio.fail_after(DIAL_TIMEOUT_S):
                    return await self.dial_addr(Multiaddr(address.endpoint), target)
            except trio.TooSlowError:
                errors[address] = f"no answer within {DIAL_TIMEOUT_S:.0f} s"
            except Exception as error:  # noqa: BLE001 - the library raises whatever the peer provoked
                errors[address] = _why(error)
            finally:
                self.unblock_peer(target)
        raise DialError(errors)


def _unaddressed(tcp: trio.SocketStream) -> TrioTCPStream:
    """At its other end is a volunteer's address, which says nothing of the peer."""
    stream = TrioTCPStream(tcp)
    stream._cached_remote_address = ("", 0)
    return stream


def _why(error: BaseException | None) -> str:
    """The innermost cause of a failed dial, for a person."""
    chain: list[BaseException] = []
    while error is not None and len(chain) < 20:
        chain.append(error)
        error = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error.__cause__ or error.__context__
    for one in chain:
        if "Peer ID mismatch" in str(one) or type(one).__name__ == "PeerIDMismatchesPubkey":
            return "another peer answers there; its address or peer id has changed"
    for one in reversed(chain):
        if isinstance(one, trio.TooSlowError):
            return f"no answer within {CONNECT_TIMEOUT_S:.0f} s"
        if isinstance(one, OSError) and one.strerror:
            return os.strerror(one.errno) if one.errno else one.strerror
    return "what answers there does not speak libp2p with Noise"


class HardenedHost(BasicHost):  # type: ignore[misc]
    """The library's host without identify, and with a guard around every stream handler."""

    def __init__(self, swarm: HardenedSwarm, announced: Callable[[], Sequence[Address]]) -> None:
        super().__init__(
            network=swarm,
            negotiate_timeout=_NEGOTIATE_TIMEOUT_S,
            disable_identify_address_discovery=True,
            addrs_factory=lambda _: [Multiaddr(address.endpoint) for address in announced()],
        )
        self.swarm = swarm
        swarm.notifees[:] = [one for one in swarm.notifees if not isinstance(one, _IdentifyNotifee)]
        self.multiselect = Multiselect({PING_ID: PingService(self).handle_ping})

    def _schedule_identify(self, peer_id: ID, *, reason: str) -> None:
        """Our hello says all that identify would, signed and bounded."""

    async def _swarm_stream_handler(self, net_stream: INetStream) -> None:
        """One malformed token, or one error in a handler, would end the node: the library lets both escape."""
        try:
            await super()._swarm_stream_handler(net_stream)
        except Exception as error:  # noqa: BLE001 - see above
            self.swarm.admission.counts["streams that failed"] += 1
            _log.debug("a stream failed", peer=str(net_stream.muxed_conn.peer_id), error=repr(error))
            with trio.CancelScope(shield=True), trio.move_on_after(2.0):
                await net_stream.reset()

    async def open_on(self, connection: INetConn, protocol: TProtocol) -> INetStream:
        """A stream on this very connection; the library would choose one of the peer's."""
        stream = await connection.new_stream()
        try:
            chosen = await self.multiselect_client.select_one_of(
                [protocol], MultiselectCommunicator(stream), _NEGOTIATE_TIMEOUT_S
            )
        except BaseException:
            with trio.CancelScope(shield=True), trio.move_on_after(2.0):
                await stream.reset()
            raise
        stream.set_protocol(chosen)
        return stream

    def listening(self) -> list[Address]:
        """Where the host listens, with the ports that the system chose; IPv4 first."""
        found = [parse_address(str(one)) for one in self.get_transport_addrs()]
        return sorted(found, key=lambda address: address.kind)


@contextmanager
def unwrapped() -> Iterator[None]:
    """One error that left nested nurseries comes out as itself, not as groups of one."""
    try:
        yield
    except BaseExceptionGroup as group:
        leaves = list(_leaves(group))
        if len(leaves) == 1:
            raise leaves[0] from None
        raise


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for one in error.exceptions:
            yield from _leaves(one)
    elif not isinstance(error, trio.Cancelled):
        yield error


@asynccontextmanager
async def open_host(
    identity: Identity, listen: Sequence[Address], announced: Callable[[], Sequence[Address]]
) -> AsyncIterator[HardenedHost]:
    """A running host that listens on `listen`. Raises `OperatorError` when one of them cannot be listened on."""
    quieten_libp2p()
    for address in listen:
        check_can_listen(address)
    key_pair = create_new_key_pair(identity.seed)
    peer_id = ID.from_pubkey(key_pair.public_key)
    noise = NoiseTransport(key_pair, noise_privkey=create_new_x25519_key_pair().private_key)
    upgrader = TransportUpgrader({TProtocol(NOISE_ID): noise}, {})
    upgrader.muxer_multistream = HardenedMuxers(_NEGOTIATE_TIMEOUT_S)
    swarm = HardenedSwarm(peer_id, upgrader)
    swarm.peerstore.add_key_pair(peer_id, key_pair)
    host = HardenedHost(swarm, announced)
    with unwrapped():
        async with host.run(listen_addrs=[Multiaddr(address.endpoint) for address in listen]):
            for address in listen:
                if address.endpoint not in swarm.listeners:
                    raise OperatorError(
                        f"Cannot listen on {address.host_port}: choose another with "
                        f"--listen /{address.kind}/{address.host}/tcp/PORT (0: any free port)."
                    )
            try:
                yield host
            finally:
                with trio.CancelScope(shield=True), trio.move_on_after(4.0):
                    # Together, not one by one: each takes 0.2 s of the library's own sleeping.
                    async with trio.open_nursery() as nursery:
                        for connection in swarm.get_connections():
                            nursery.start_soon(close_quietly, connection)
                    await host.close()


async def close_quietly(connection: INetConn) -> None:
    """Close a connection whose state is not known any more."""
    with trio.move_on_after(3.0):
        try:
            await connection.close()
        except Exception as error:  # noqa: BLE001 - it is gone either way
            _log.debug("closing a connection failed", error=repr(error))
