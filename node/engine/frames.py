"""Frames of the data channels between engines: a fixed header, a small typed meta block, a payload (design section 8).

    kind  what                        id          part        slot            meta        payload
    UP    a contribution or a sum     roster id   part        sender's bit    UpMeta      codec or sum-codec bytes
    DOWN  a reduced part              roster id   part        -               DownMeta    codec bytes
    WANT  "I take part; send these"   roster id   -           -               -           two bitmaps, see `pack_want`
    ASK   a request                   subject     request     -               AskMeta     -
    ANSWER / HAVE_NOT  its answer     subject     request     -               -           bytes asked for / -
    ALIVE nothing, to show life       zero        -           -               -           -

A header is checked before anything behind it is buffered; lengths over the limits here end the connection.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

import msgspec

from node.errors import StrangerError

MAX_META_BYTES = 4096
MAX_PAYLOAD_BYTES = 1 << 28
"""Nothing in the protocol has larger frames: a part of 64 Mi elements in fp32."""

_HEADER = struct.Struct("<BxHIIHxx32s")
HEADER_BYTES = _HEADER.size


class Kind(IntEnum):
    UP = 1
    DOWN = 2
    WANT = 3
    ASK = 4
    ANSWER = 5
    HAVE_NOT = 6
    ALIVE = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    kind: Kind
    id: bytes
    """32 bytes: a roster's id, or the hash that a request is about."""
    part: int = 0
    """Part number; for requests and answers the request's number, unique per link and direction."""
    slot: int = 0
    meta_bytes: int = 0
    payload_bytes: int = 0

    def pack(self) -> bytes:
        return _HEADER.pack(self.kind, self.meta_bytes, self.part, self.payload_bytes, self.slot, self.id)

    @classmethod
    def unpack(cls, data: bytes | bytearray) -> Header:
        """Raises `StrangerError` for an unknown kind or a length over the limits."""
        kind, meta_bytes, part, payload_bytes, slot, subject = _HEADER.unpack(data)
        if kind not in _KINDS:
            raise StrangerError(f"a frame of unknown kind: {kind}")
        if meta_bytes > MAX_META_BYTES:
            raise StrangerError(f"a frame whose meta block is over the limit: {meta_bytes} bytes")
        if payload_bytes > MAX_PAYLOAD_BYTES:
            raise StrangerError(f"a frame whose payload is over the limit: {payload_bytes} bytes")
        return cls(
            kind=Kind(kind), id=subject, part=part, slot=slot, meta_bytes=meta_bytes, payload_bytes=payload_bytes
        )


_KINDS = frozenset(int(kind) for kind in Kind)


class UpMeta(msgspec.Struct, frozen=True, array_like=True):
    """What stands beside an UP payload."""

    bitmap: bytes
    """Little-endian: the contributions in this payload."""
    proof: bytes
    """That a leaf's payload is under its READY's `parts_root` (`protocol.commitment`); empty for a partial sum."""


class DownMeta(msgspec.Struct, frozen=True, array_like=True):
    """The part's header as its root signed it, forwarded verbatim."""

    root: str
    body: bytes
    signature: bytes


class Subject(IntEnum):
    """What a request is about; the frame's id is the part's, artifact's or state's hash."""

    PART = 1
    ARTIFACT = 2
    ARTIFACT_CHUNKS = 3
    """The hashes of an artifact's chunks."""
    SNAPSHOT = 4
    SNAPSHOT_CHUNKS = 5
    LEAF = 6
    """A part of a contribution, by its READY's root: codec bytes, then their proof (`protocol.commitment`)."""
    PROBE = 7
    """As many bytes as asked for, of no meaning."""


class AskMeta(msgspec.Struct, frozen=True, array_like=True):
    subject: int
    chunk: int = 0
    """Which chunk, of artifacts and snapshots; which part, of a contribution; how many bytes, of a probe."""
    round: int = 0
    """Of a snapshot."""


class MetaDecoder:
    """Typed decoding of meta blocks; raises `StrangerError` for anything malformed."""

    def __init__(self) -> None:
        self._up = msgspec.msgpack.Decoder(UpMeta)
        self._down = msgspec.msgpack.Decoder(DownMeta)
        self._ask = msgspec.msgpack.Decoder(AskMeta)

    def up(self, data: bytes) -> UpMeta:
        try:
            return self._up.decode(data)
        except msgspec.DecodeError as error:
            raise StrangerError(f"an UP frame's meta block does not decode: {error}") from error

    def down(self, data: bytes) -> DownMeta:
        try:
            return self._down.decode(data)
        except msgspec.DecodeError as error:
            raise StrangerError(f"a DOWN frame's meta block does not decode: {error}") from error

    def ask(self, data: bytes) -> AskMeta:
        try:
            return self._ask.decode(data)
        except msgspec.DecodeError as error:
            raise StrangerError(f"a request does not decode: {error}") from error


def want_payload_bytes(part_count: int) -> int:
    return 2 * ((part_count + 7) // 8)


def pack_want(ups_held: int, downs_held: int, part_count: int) -> bytes:
    """Bitmaps over parts: UPs of the receiver of this frame that its sender needs no more, and DOWNs that it holds."""
    size = (part_count + 7) // 8
    return ups_held.to_bytes(size, "little") + downs_held.to_bytes(size, "little")


def unpack_want(payload: bytes | bytearray) -> tuple[int, int]:
    size = len(payload) // 2
    return int.from_bytes(payload[:size], "little"), int.from_bytes(payload[size:], "little")
