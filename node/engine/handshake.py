"""How two engines prove their peer ids to each other without libp2p (design section 8).

The dialled side shows a certificate whose SHA-256 stands in its signed membership record. The dialling side shows a
one-time token that it got from the other's daemon over the authenticated control stream:

    hello   "ATL1", lane, lanes, length of peer id, peer id (64 bytes, padded), token (32 bytes)
    answer  one byte, 1; anything else, or the end of the stream, is a refusal
"""

from __future__ import annotations

import hashlib
import ssl
import struct
from dataclasses import dataclass, field

import trio

from node.engine import tls
from node.engine.tls_stream import TlsStream
from node.errors import StrangerError
from node.peer_id import MAX_PEER_ID_CHARACTERS, public_key_of
from node.sockets import keep_trying

MAX_LANES = 8
TOKEN_BYTES = 32
HANDSHAKE_TIMEOUT_S = 10.0
"""For TLS and hello together: six round trips of 1.6 s."""
CONNECT_TIMEOUT_S = 5.0
MAX_TOKENS = 4096
MAX_TOKENS_PER_PEER = 8
"""Unused ones: a peer needs one at a time. Whoever asks for more displaces only its own."""
MAX_HOST_CHARACTERS = 253

_MAGIC = b"ATL1"
_HELLO = struct.Struct("<4sBBH64s32s")
_ACCEPTED = b"\x01"

Stream = TlsStream
_BROKEN = (OSError, ssl.SSLError, trio.BrokenResourceError, trio.ClosedResourceError, trio.EndOfChannel)


class OnlyProbed(StrangerError):
    """The other end only looked whether this engine can be dialled."""


class HandshakeFailed(Exception):
    """The other end is not reachable or not who it should be; the message says which."""


@dataclass(slots=True)
class _Token:
    peer_id: str
    expires_at: float
    lanes_used: set[int] = field(default_factory=set)
    lanes: int | None = None


class TokenBook:
    """Tokens given out for connections towards us: valid once (each lane of one group once) until they expire."""

    def __init__(self) -> None:
        self._tokens: dict[bytes, _Token] = {}

    def add(self, peer_id: str, token: bytes, expires_s: float) -> None:
        now = trio.current_time()
        for old in [key for key, entry in self._tokens.items() if entry.expires_at < now]:
            del self._tokens[old]
        own = [key for key, entry in self._tokens.items() if entry.peer_id == peer_id]
        for old in own[: max(0, len(own) + 1 - MAX_TOKENS_PER_PEER)]:
            del self._tokens[old]
        while len(self._tokens) >= MAX_TOKENS:
            del self._tokens[next(iter(self._tokens))]
        self._tokens[token] = _Token(peer_id, now + expires_s)

    def redeem(self, peer_id: str, token: bytes, lane: int, lanes: int) -> bool:
        entry = self._tokens.get(token)
        if entry is None or entry.peer_id != peer_id or entry.expires_at < trio.current_time():
            return False
        if not 0 <= lane < lanes <= MAX_LANES or lane in entry.lanes_used or entry.lanes not in (None, lanes):
            return False
        entry.lanes = lanes
        entry.lanes_used.add(lane)
        if len(entry.lanes_used) == lanes:
            del self._tokens[token]
        return True


async def connect(address: str) -> trio.SocketStream:
    """A TCP connection to `address` (`host:port`). Raises `HandshakeFailed`."""
    try:
        host, port = split_address(address)
        with trio.fail_after(CONNECT_TIMEOUT_S):
            tcp = await trio.open_tcp_stream(host, port)
    except (OSError, ValueError, trio.TooSlowError) as error:
        raise HandshakeFailed(f"{address}: {describe(error)}") from error
    keep_trying(tcp.socket)
    return tcp


async def probe(address: str, *, certificate_sha256: bytes) -> None:
    """Whether the engine with that certificate can be dialled at `address`: nothing is asked of it.

    Raises `HandshakeFailed`.
    """
    tcp = await connect(address)
    try:
        with trio.fail_after(HANDSHAKE_TIMEOUT_S):
            await _open_tls(tcp, address, certificate_sha256, tls.PROBE_ALPN)
    except (*_BROKEN, trio.TooSlowError) as error:
        raise HandshakeFailed(f"{address}: {describe(error)}") from error
    finally:
        await trio.aclose_forcefully(tcp)


async def _open_tls(tcp: trio.SocketStream, address: str, certificate_sha256: bytes, protocol: str) -> Stream:
    """Raises `HandshakeFailed` for another certificate or protocol, and what a broken connection raises."""
    stream = TlsStream(tcp, tls.client_context(protocol))
    await stream.do_handshake()
    certificate = stream.peer_certificate()
    if certificate is None or hashlib.sha256(certificate).digest() != certificate_sha256:
        raise HandshakeFailed(f"{address} shows another certificate than its membership record names")
    if stream.protocol != protocol:
        raise HandshakeFailed(f"{address} does not speak {protocol}")
    return stream


async def dial(address: str, *, certificate_sha256: bytes, peer_id: str, token: bytes, lane: int, lanes: int) -> Stream:
    """An authenticated lane to the engine at `address` (`host:port`). `peer_id` is ours. Raises `HandshakeFailed`."""
    tcp = await connect(address)
    return await introduce(
        tcp, address, certificate_sha256=certificate_sha256, peer_id=peer_id, token=token, lane=lane, lanes=lanes
    )


async def introduce(
    tcp: trio.SocketStream,
    address: str,
    *,
    certificate_sha256: bytes,
    peer_id: str,
    token: bytes,
    lane: int,
    lanes: int,
) -> Stream:
    """The same over a connection that stands. It is closed when this raises `HandshakeFailed`."""
    try:
        with trio.fail_after(HANDSHAKE_TIMEOUT_S):
            stream = await _open_tls(tcp, address, certificate_sha256, tls.ALPN)
            name = peer_id.encode()
            await stream.send_all(_HELLO.pack(_MAGIC, lane, lanes, len(name), name, token))
            if await stream.receive_some(1) != _ACCEPTED:
                raise HandshakeFailed(f"{address} refused our token")
    except HandshakeFailed:
        await trio.aclose_forcefully(tcp)
        raise
    except (*_BROKEN, trio.TooSlowError) as error:
        await trio.aclose_forcefully(tcp)
        raise HandshakeFailed(f"{address}: {describe(error)}") from error
    except BaseException:
        await trio.aclose_forcefully(tcp)
        raise
    return stream


async def accept(tcp: trio.SocketStream, context: ssl.SSLContext, tokens: TokenBook) -> tuple[str, bytes, Stream]:
    """The peer id behind an incoming connection, the token that names its group, and the lane.

    Raises `StrangerError`; the caller closes `tcp`.
    """
    keep_trying(tcp.socket)
    try:
        with trio.fail_after(HANDSHAKE_TIMEOUT_S):
            await _expect_tls_record(tcp)
            stream = TlsStream(tcp, context, server_side=True)
            await stream.do_handshake()
            if stream.protocol == tls.PROBE_ALPN:
                raise OnlyProbed("it only looked whether this engine can be dialled")
            if stream.protocol != tls.ALPN:
                raise StrangerError(f"a connection without ALPN {tls.ALPN}")
            hello = await stream.receive_exactly(_HELLO.size)
            magic, lane, lanes, name_length, name, token = _HELLO.unpack(hello)
            if magic != _MAGIC or name_length > MAX_PEER_ID_CHARACTERS:
                raise StrangerError("a hello that is not ours")
            try:
                peer_id = name[:name_length].decode("ascii")
            except UnicodeDecodeError:
                raise StrangerError("a hello whose peer id is not text") from None
            _require_peer_id(peer_id)
            if not tokens.redeem(peer_id, token, lane, lanes):
                raise StrangerError("a hello with an unknown, used or expired token")
            await stream.send_all(_ACCEPTED)
    except _BROKEN as error:
        raise StrangerError(f"a broken handshake: {describe(error)}") from error
    except trio.TooSlowError:
        raise StrangerError(f"a handshake of more than {HANDSHAKE_TIMEOUT_S:g} s") from None
    return peer_id, token, stream


async def first_byte(tcp: trio.SocketStream) -> bytes:
    """Of a connection, without taking it; empty at its end. Raises `StrangerError` when none comes."""
    try:
        with trio.fail_after(HANDSHAKE_TIMEOUT_S):
            return bytes(await tcp.socket.recv(1, trio.socket.MSG_PEEK))
    except OSError as error:
        raise StrangerError(f"a broken handshake: {describe(error)}") from error
    except trio.TooSlowError:
        raise StrangerError(f"a handshake of more than {HANDSHAKE_TIMEOUT_S:g} s") from None


async def _expect_tls_record(tcp: trio.SocketStream) -> None:
    """Random bytes are turned away before any cryptography is spent on them."""
    first = await tcp.socket.recv(1, trio.socket.MSG_PEEK)
    if first != b"\x16":
        raise StrangerError("a connection that does not begin with TLS")


def _require_peer_id(peer_id: str) -> None:
    try:
        public_key_of(peer_id)
    except StrangerError as error:
        raise StrangerError(f"a hello with a malformed peer id: {error}") from error


def split_address(address: str) -> tuple[str, int]:
    """`host:port` or `[v6]:port`. Raises `ValueError`."""
    host, separator, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not separator or not host or "\0" in host or len(host) > MAX_HOST_CHARACTERS:
        raise ValueError(f"{address[:80]!r} is not host:port")
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65_536):
        raise ValueError(f"{address[:80]!r} has no port between 1 and 65535")
    return host, int(port)


def describe(error: BaseException) -> str:
    """For a person."""
    if isinstance(error, trio.TooSlowError):
        return "no answer in time"
    return str(error) or type(error).__name__
