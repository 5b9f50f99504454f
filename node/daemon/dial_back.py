"""Dial-back: a peer tries whether the node that asks it can be dialled, and says so (design section 7).

Who asks names ports, never a host: what is dialled is the address from which its own connection comes. Only peers of
the run may ask, a few times a minute for each address, and few dials go on at once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

import msgspec
import trio

from node.daemon import rpc
from node.daemon.addresses import Address
from node.daemon.admission import address_block
from node.daemon.allowance import Allowances
from node.daemon.host import DIAL_TIMEOUT_S, DialError
from node.daemon.link import Link
from node.engine.handshake import HandshakeFailed, probe
from node.errors import AtollError
from protocol.names import PeerId

MAX_PORTS = 2
"""Of each kind in one request: one for IPv4 and one for IPv6, should they differ."""
MAX_AT_ONCE = 8
ALLOWED_AT_ONCE = 12.0
"""Dial-backs of one address without a wait: a rack behind one router starts together."""
ALLOWED_PER_S = 1 / 5
DIAL_S = DIAL_TIMEOUT_S
"""For one port. Where nobody answers at all, `CONNECT_TIMEOUT_S` tells sooner."""
ANSWER_S = DIAL_S + 4.0


class DialBackRequest(msgspec.Struct, frozen=True, kw_only=True):
    control_ports: tuple[int, ...]
    data_ports: tuple[int, ...]
    certificate_sha256: bytes
    """Of the asker's engine."""


class DialBackAnswer(msgspec.Struct, frozen=True, kw_only=True):
    host: str
    """The IP address that the asker's connection comes from, and that was dialled."""
    control: dict[int, str]
    """Port → why it could not be dialled; empty: it was."""
    data: dict[int, str]


class DialBacks:
    """The answering side."""

    def __init__(
        self, *, peers: Callable[[], Mapping[PeerId, Link]], dial_control: Callable[[Address], Awaitable[None]]
    ) -> None:
        """`peers`: the connected peers of the run. `dial_control` raises `DialError`."""
        self._peers = peers
        self._dial_control = dial_control
        self._running = 0
        self._allowances = Allowances(at_once=ALLOWED_AT_ONCE, per_s=ALLOWED_PER_S)
        """By origin."""

    async def answer(self, peer: PeerId, payload: bytes) -> bytes:
        """The request `rpc.DIAL_BACK`. Raises `AtollError` with a sentence for the asker."""
        request = rpc.decode(payload, DialBackRequest)
        link = self._peers().get(peer)
        if link is None or link.is_spliced:
            raise AtollError("dial-backs are for peers of the run that are connected directly")
        ports = (*request.control_ports, *request.data_ports)
        if max(len(request.control_ports), len(request.data_ports)) > MAX_PORTS:
            raise AtollError(f"a dial-back tries at most {MAX_PORTS} ports of each kind")
        if not all(0 < port < 65_536 for port in ports):
            raise AtollError("a dial-back to a port that is none")
        if self._running >= MAX_AT_ONCE:
            raise AtollError(f"{MAX_AT_ONCE} dial-backs are under way here; ask again later")
        if not self._allowances.take(address_block(link.remote_host)):
            raise AtollError(f"too many dial-backs to {link.remote_host}; ask again later")
        self._running += 1
        try:
            return rpc.encode(await self._dialled(peer, link.remote_host, request))
        finally:
            self._running -= 1

    async def _dialled(self, peer: PeerId, host: str, request: DialBackRequest) -> DialBackAnswer:
        answer = DialBackAnswer(host=host, control={}, data={})
        kind = "ip6" if ":" in host else "ip4"

        async def control(port: int) -> None:
            try:
                with trio.fail_after(DIAL_S):
                    await self._dial_control(Address(kind, host, port, peer))
                answer.control[port] = ""
            except (DialError, trio.TooSlowError) as error:
                answer.control[port] = str(error) or f"no answer within {DIAL_S:g} s"

        async def data(port: int) -> None:
            try:
                with trio.fail_after(DIAL_S):
                    await probe(Address(kind, host, port).host_port, certificate_sha256=request.certificate_sha256)
                answer.data[port] = ""
            except (HandshakeFailed, trio.TooSlowError) as error:
                answer.data[port] = str(error) or f"no answer within {DIAL_S:g} s"

        async with trio.open_nursery() as nursery:
            for port in dict.fromkeys(request.control_ports):
                nursery.start_soon(control, port)
            for port in dict.fromkeys(request.data_ports):
                nursery.start_soon(data, port)
        return answer
