"""The control stream: one long-lived, framed stream per connected pair of nodes (design section 3).

A frame is a 4-byte big-endian length, then msgpack of one of the structs below. Lengths are checked before a byte of
the body is buffered. The first frame of each side is a `Hello`; Noise has proved the peer ids before it.
`node.daemon.link` says what the others are for.
"""

from __future__ import annotations

import struct
from typing import Any, TypeAlias

import msgspec
import trio
from libp2p.custom_types import TProtocol

from node.errors import AtollError, StrangerError

CONTROL_PROTOCOL = TProtocol("/atoll/control/1")
PROTOCOL_VERSION = 2

MAX_FRAME_BYTES = 8 * 1024 * 1024
"""The commit of the largest model, by the largest roster (`protocol.ready_limits`)."""
MAX_HELLO_BYTES = 16 * 1024

WRITE_TIMEOUT_S = 45.0
_READ_BYTES = 64 * 1024
_LENGTH = struct.Struct(">I")


class Hello(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=0):
    protocol: int
    version: str
    run: bytes
    """The run id; empty: the sender has only an address and asks for the run."""
    incarnation: bytes
    """Random bytes of this process start: tells a restart from a second host with the same key."""
    addresses: tuple[str, ...]
    observed_host: str
    """The IP address from which the receiver's connection came."""


class Refusal(msgspec.Struct, frozen=True, array_like=True, tag=1):
    code: str
    reason: str


class Ping(msgspec.Struct, frozen=True, array_like=True, tag=2):
    nonce: int


class Pong(msgspec.Struct, frozen=True, array_like=True, tag=3):
    nonce: int


class Datagram(msgspec.Struct, frozen=True, array_like=True, tag=4):
    data: bytes


class Request(msgspec.Struct, frozen=True, array_like=True, tag=5):
    id: int
    method: str
    payload: bytes


class Answer(msgspec.Struct, frozen=True, array_like=True, tag=6):
    id: int
    more: bool
    fragment: bytes


class Failure(msgspec.Struct, frozen=True, array_like=True, tag=7):
    id: int
    reason: str


class Gossip(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """Signed membership records, each as its owner signed it."""

    records: tuple[bytes, ...]


class RunChosen(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """The sender had only an address; now it is in this run."""

    run: bytes


class Goodbye(msgspec.Struct, frozen=True, array_like=True, tag=10):
    reason: str


Frame: TypeAlias = Hello | Refusal | Ping | Pong | Datagram | Request | Answer | Failure | Gossip | RunChosen | Goodbye
_decoder = msgspec.msgpack.Decoder(Frame)
_encoder = msgspec.msgpack.Encoder()


class Refused(AtollError):
    """One side does not want the other; `reason` is one sentence that both show."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


class RequestFailed(AtollError):
    """No answer to a request; the message is a sentence, the peer's own where it gave one."""


class LinkClosed(AtollError):
    """The stream ended; the message says how."""


def encode_frame(frame: Frame) -> bytes:
    body = _encoder.encode(frame)
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {len(body)} bytes is over the limit of {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


class FramedStream:
    """Frames over a libp2p stream."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._buffer = bytearray()
        self._send_lock = trio.Lock()
        self.max_frame_bytes = MAX_HELLO_BYTES
        """Raised once the peer has introduced itself."""
        self.bytes_received = 0
        self.bytes_sent = 0

    async def receive(self) -> Frame:
        """Raises `LinkClosed` at the end, `StrangerError` for anything that is not a frame."""
        await self._fill(_LENGTH.size)
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > self.max_frame_bytes:
            raise StrangerError(f"a control frame of {length} bytes is over the limit of {self.max_frame_bytes}")
        await self._fill(_LENGTH.size + length)
        body = bytes(memoryview(self._buffer)[_LENGTH.size : _LENGTH.size + length])
        del self._buffer[: _LENGTH.size + length]
        try:
            return _decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise StrangerError(f"a control frame does not decode: {error}") from None

    async def _fill(self, size: int) -> None:
        while len(self._buffer) < size:
            try:
                data = await self._stream.read(_READ_BYTES)
            except Exception as error:  # the library has a dozen ways to say that a stream ended
                raise LinkClosed("the connection ended") from error
            if not data:
                raise LinkClosed("the connection ended")
            self.bytes_received += len(data)
            self._buffer += data

    async def send(self, *frames: bytes) -> None:
        """Encoded frames. Raises `LinkClosed`."""
        data = frames[0] if len(frames) == 1 else b"".join(frames)
        try:
            with trio.fail_after(WRITE_TIMEOUT_S):
                async with self._send_lock:
                    await self._stream.write(data)
        except trio.TooSlowError:
            raise LinkClosed(f"the peer read nothing for {WRITE_TIMEOUT_S:.0f} s") from None
        except Exception as error:  # as above
            raise LinkClosed("the connection ended") from error
        self.bytes_sent += len(data)

    async def receive_hello(self) -> Hello:
        """The peer's first frame. Raises `Refused` when it is a refusal."""
        frame = await self.receive()
        if isinstance(frame, Refusal):
            raise Refused(frame.code, frame.reason)
        if not isinstance(frame, Hello):
            raise StrangerError(f"the first control frame is a {type(frame).__name__}, not a Hello")
        return frame
