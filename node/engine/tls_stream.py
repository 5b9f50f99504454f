"""TLS over one TCP connection, for bulk: a task switch for what the kernel has, not for each record of 16 KiB.

trio's own TLS stream stops at a checkpoint or two for every record, and is woken for every packet. Here a reader is
woken when the kernel has as much as the line brings in `BATCH_S`, what came is decrypted straight into its place, and
writes are encrypted a slice at a time. One task may read while another writes; a task that is cancelled in the middle
leaves a stream that is of no use any more, as with trio's.
"""

from __future__ import annotations

import os
import socket
import ssl

import trio

WRITE_SLICE_BYTES = 1 << 18
READ_BYTES = 1 << 17
"""At most, of the kernel at a time."""
BATCH_S = 0.02
"""A reader is woken so much later than the first byte came, up to twice that; its deadlines are seconds."""
LEAST_BATCH_BYTES = 1 << 11
MAX_RECORD_BYTES = (1 << 14) + 512
"""Of one TLS record; OpenSSL may hold all but a byte of one."""


class TlsStream:
    _buffer = memoryview(bytearray(READ_BYTES))
    """Of all streams together: nobody waits while something is in it."""

    def __init__(self, tcp: trio.SocketStream, context: ssl.SSLContext, *, server_side: bool = False) -> None:
        self.transport_stream = tcp
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side)
        self._writing = trio.StrictFIFOLock()
        self._batch = Batch(tcp.socket)

    async def do_handshake(self) -> None:
        """Raises `ssl.SSLError`, `trio.EndOfChannel`, trio's errors of streams."""
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                await self._flush()
                await self._read_more(1)
            else:
                await self._flush()
                return

    def peer_certificate(self) -> bytes | None:
        """As DER."""
        return self._tls.getpeercert(binary_form=True)

    @property
    def protocol(self) -> str | None:
        """Chosen by ALPN."""
        return self._tls.selected_alpn_protocol()

    # ---------------------------------------------------------------- writing

    async def send_all(self, *data: bytes | bytearray | memoryview) -> None:
        """Each of `data` in turn; returns when the kernel has taken all. Raises trio's errors of streams."""
        async with self._writing:
            for piece in data:
                view = memoryview(piece)
                for start in range(0, len(view), WRITE_SLICE_BYTES):
                    part = view[start : start + WRITE_SLICE_BYTES]
                    while part:
                        part = part[self._tls.write(part) :]
                    if self._outgoing.pending >= WRITE_SLICE_BYTES:
                        await self._write_out()
            await self._write_out()

    async def _flush(self) -> None:
        async with self._writing:
            await self._write_out()

    async def _write_out(self) -> None:
        view = memoryview(self._outgoing.read())
        try:
            while view:
                view = view[await self.transport_stream.socket.send(view) :]
        except OSError as error:
            raise trio.BrokenResourceError(error.strerror or "the connection broke") from error

    # ---------------------------------------------------------------- reading

    async def receive_some(self, most: int) -> bytes:
        """At least one byte; empty at the end. Raises `ssl.SSLError`, trio's errors of streams."""
        data = bytearray(most)
        try:
            return bytes(data[: await self._receive(memoryview(data), 1)])
        except trio.EndOfChannel:
            return b""

    async def receive_exactly(self, size: int) -> bytearray:
        """Raises `trio.EndOfChannel` at the end, `ssl.SSLError`, trio's errors of streams."""
        data = bytearray(size)
        view = memoryview(data)
        while view:
            view = view[await self._receive(view, len(view)) :]
        return data

    async def receive_into(self, view: memoryview) -> int:
        """At least one byte into the beginning of `view`, which is known to be filled. Raises as `receive_exactly`."""
        return await self._receive(view, len(view))

    async def _receive(self, view: memoryview, expected: int) -> int:
        """At least one byte into `view`; `expected` are sure to come."""
        got = self._decrypt(view)
        while not got:
            # Encryption makes nothing shorter: so much is still to come, but for what is here and not decrypted yet.
            await self._read_more(expected - self._incoming.pending - MAX_RECORD_BYTES)
            got = self._decrypt(view)
        if self._outgoing.pending:  # an answer to a change of keys
            await self._flush()
        return got

    async def _read_more(self, expected: int) -> None:
        count = await self._batch.receive(self._buffer, expected)
        if not count:
            raise trio.EndOfChannel
        self._incoming.write(self._buffer[:count])

    def _decrypt(self, view: memoryview) -> int:
        got = 0
        try:
            while got < len(view):
                read: int = self._tls.read(len(view) - got, view[got:])  # type: ignore[assignment]
                if not read:
                    raise trio.EndOfChannel
                got += read
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            if not got:
                raise trio.EndOfChannel from None
        return got


class Batch:
    """How much a reader waits for: what the line brings in `BATCH_S`, never more than what is sure to come."""

    def __init__(self, sock: trio.socket.SocketType) -> None:
        self._socket = sock
        self._wanted = LEAST_BATCH_BYTES
        self._told = 1
        """The kernel wakes a reader when it has so many bytes."""

    async def receive(self, buffer: memoryview, expected: int) -> int:
        """Bytes that were put into `buffer`; 0 at the end. Raises `trio.BrokenResourceError`, `ClosedResourceError`."""
        least = max(1, min(self._wanted, expected, len(buffer)))
        if least != self._told:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least)
            self._told = least
        before_s = trio.current_time()
        while True:
            # Not read before that: it would get what little has come since the last time.
            await trio.lowlevel.wait_readable(self._socket.fileno())
            try:
                count = os.readv(self._socket.fileno(), [buffer])
            except BlockingIOError:
                continue
            except OSError as error:
                raise trio.BrokenResourceError(error.strerror or "the connection broke") from error
            break
        if least == self._wanted:
            took_s = trio.current_time() - before_s
            if took_s > 2 * BATCH_S:
                self._wanted = max(LEAST_BATCH_BYTES, self._wanted // 2)
            elif took_s < BATCH_S:
                self._wanted = min(READ_BYTES, self._wanted * 2)
        return count
