"""Frames between the processes of one machine: a 4-byte length, then msgpack; file descriptors ride beside a frame.

Every message is a tagged `msgspec.Struct`, so a frame decodes to a typed value or fails with a sentence.
"""

from __future__ import annotations

import array
import os
import socket
import struct
from typing import Generic, TypeVar

import msgspec
import trio

MAX_FRAME_BYTES = 64 * 1024 * 1024
MAX_FDS = 8
_LENGTH = struct.Struct("<I")

InT = TypeVar("InT")
OutT = TypeVar("OutT")


class FrameError(Exception):
    """The other process sent something that is not one of our frames, or closed in the middle of one."""


class FrameStream(Generic[InT, OutT]):
    """One end of a Unix stream socket in trio: `send(message, fds)`, `receive() -> message`, `take_fds()`.

    `incoming` is the (union) type of what arrives. Sends are serialised by a lock; one task receives.
    """

    def __init__(self, sock: socket.socket, incoming: object) -> None:
        self._socket = trio.socket.from_stdlib_socket(sock)
        self._decoder: msgspec.msgpack.Decoder[InT] = msgspec.msgpack.Decoder(incoming)
        self._encoder = msgspec.msgpack.Encoder()
        self._send_lock = trio.Lock()
        self._torn = False
        """A frame was begun and not ended."""
        self._buffer = bytearray()
        self._fds: list[int] = []

    async def send(self, message: OutT, fds: tuple[int, ...] = ()) -> None:
        """Raises `trio.BrokenResourceError` when the other end is gone."""
        payload = self._encoder.encode(message)
        data = memoryview(_LENGTH.pack(len(payload)) + payload)
        async with self._send_lock:
            if self._torn:
                raise trio.BrokenResourceError("an earlier frame was cut by a cancellation: nothing can follow it")
            try:
                if fds:
                    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds).tobytes())]
                    sent = await self._socket.sendmsg([data], ancillary)
                    data = data[sent:]
                    self._torn = True
                while data:
                    data = data[await self._socket.send(data) :]
                    self._torn = True
            except OSError as error:
                raise trio.BrokenResourceError from error
            self._torn = False

    async def receive(self) -> InT:
        """The next message. Raises `trio.EndOfChannel` at a clean end, `FrameError` on anything malformed."""
        await self._fill(_LENGTH.size)
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > MAX_FRAME_BYTES:
            raise FrameError(f"a frame of {length} bytes is over the limit of {MAX_FRAME_BYTES}")
        await self._fill(_LENGTH.size + length)
        payload = bytes(self._buffer[_LENGTH.size : _LENGTH.size + length])
        del self._buffer[: _LENGTH.size + length]
        try:
            return self._decoder.decode(payload)
        except msgspec.DecodeError as error:
            raise FrameError(f"a frame does not decode: {error}") from error

    async def _fill(self, size: int) -> None:
        while len(self._buffer) < size:
            try:
                data, ancillary, _, _ = await self._socket.recvmsg(
                    1 << 18, socket.CMSG_SPACE(MAX_FDS * 4), socket.MSG_CMSG_CLOEXEC
                )
            except OSError as error:
                raise trio.EndOfChannel from error
            for level, kind, body in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    fds = array.array("i")
                    fds.frombytes(body[: len(body) - len(body) % fds.itemsize])
                    self._fds.extend(fds)
            if not data:
                if self._buffer:
                    raise FrameError("the connection closed in the middle of a frame")
                raise trio.EndOfChannel
            self._buffer += data

    def take_fds(self) -> tuple[int, ...]:
        """Descriptors that arrived with the frames received so far; the caller owns them."""
        fds, self._fds = tuple(self._fds), []
        return fds

    def close(self) -> None:
        self._socket.close()
        for fd in self.take_fds():
            os.close(fd)
