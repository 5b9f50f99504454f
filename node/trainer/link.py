"""The connection of a training program to its daemon: one background thread that receives, reconnects and never raises.

The thread turns what the daemon says into an inbox that the training loop reads without a lock: between rounds a step
costs one look at an empty queue. Plain blocking sockets, because the library runs inside anybody's loop.
"""

from __future__ import annotations

import array
import contextlib
import logging
import mmap
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

import node
from node import manifest as manifests
from node.home import Home
from node.ipc import MAX_FDS, MAX_FRAME_BYTES, FrameError
from node.trainer import wire
from node.trainer.errors import NoDaemon

logger = logging.getLogger(__name__)

Vector: TypeAlias = npt.NDArray[np.float32]

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 1.0
"""Pauses between attempts to reconnect double from the first to the longest: a daemon that is back is found before it
has caught up, and an attempt is one call to the kernel."""
SILENCE_S = 60.0
"""A daemon that said nothing for this long is taken for dead; it repeats `Waiting` every few seconds while it lives."""
SEND_TIMEOUT_S = 10.0
_POLL_S = 1.0
_LENGTH = struct.Struct("<I")
_DECODER: msgspec.msgpack.Decoder[wire.ToTrainer] = msgspec.msgpack.Decoder(wire.ToTrainer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The shared vectors, mapped (design section 2). `N`: the manifest's `layout.elements`."""

    theta: Vector
    """[N], not writable."""
    delta: Vector
    """[N]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connected:
    """The daemon let us in; everything that an earlier connection said is void."""

    welcome: wire.Welcome
    manifest: manifests.Manifest
    memory: Memory
    connection: int
    """Counts connections; messages are sent on the connection they are meant for, or not at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    reason: str


Mail: TypeAlias = Connected | Lost | wire.Waiting | wire.Refused | wire.Freeze | wire.Committed | wire.Goodbye


class _Unusable(Exception):
    """This connection cannot be used; the message says why."""


class DaemonLink:
    """Attaches to the daemon of `home` and stays attached.

    `start` connects in the caller's thread, so that a missing daemon is an error where it can be read. After that the
    training loop takes mail with `take`, waits with `wait`, and sends with `send`.
    """

    def __init__(self, home: Home, *, name: str) -> None:
        self._home = home
        self._name = name
        self._layout_digest: bytes | None = None
        self._inbox: deque[Mail] = deque()
        self._arrived = threading.Condition()
        self._send_lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._fds: list[int] = []
        self._buffer = bytearray()
        self._connection = 0
        self._welcomed = False
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._encoder = msgspec.msgpack.Encoder()

    # ------------------------------------------------------------ called by the training loop

    def start(self, wait_s: float) -> None:
        """Connect, trying for `wait_s`, then receive in the background. Raises `NoDaemon`."""
        deadline = time.monotonic() + wait_s
        while True:
            try:
                self._connect()
                break
            except OSError as error:
                if time.monotonic() >= deadline:
                    raise NoDaemon(
                        f"no daemon answers on {self._home.attach_socket} ({error.strerror or error}): start "
                        f"`atoll daemon` for the home {self._home.path}, or name another by ATOLL_HOME"
                    ) from error
            time.sleep(FIRST_PAUSE_S)
        self._thread = threading.Thread(target=self._receive_forever, name="atoll-link", daemon=True)
        self._thread.start()

    def declare(self, layout_digest: bytes) -> None:
        """What later `Attach` messages say about the model."""
        self._layout_digest = layout_digest

    @property
    def has_mail(self) -> bool:
        """Whether `take` would return something. No lock, so that every step can ask."""
        return bool(self._inbox)

    def take(self) -> Mail | None:
        """The oldest unread message, without waiting."""
        try:
            return self._inbox.popleft()
        except IndexError:
            return None

    def wait(self, timeout_s: float) -> bool:
        """Until there is mail, at most `timeout_s`."""
        with self._arrived:
            return self._arrived.wait_for(lambda: bool(self._inbox), timeout_s)

    def send(self, message: wire.FromTrainer, connection: int, *, or_drop: bool = False) -> bool:
        """False when that connection is gone: the next `Connected` says where things stand.

        With `or_drop` the message is dropped rather than waited for when the daemon is slow to read.
        """
        payload = self._encoder.encode(message)
        with self._send_lock:
            if self._socket is None or connection != self._connection:
                return False
            if or_drop and not select.select((), (self._socket,), (), 0.0)[1]:
                return False
            try:
                self._socket.sendall(_LENGTH.pack(len(payload)) + payload)
            except OSError:
                # A partly sent frame cannot be taken back; the receiving thread sees the end and reconnects.
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)
                return False
        return True

    def close(self, reason: str) -> None:
        """Say goodbye and end the thread. Nothing may be called afterwards."""
        if self._closing.is_set():
            return
        self._closing.set()
        self.send(wire.Goodbye(reason=reason), self._connection)
        with self._send_lock:
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)
        if self._thread is not None:
            self._thread.join(timeout=2 * _POLL_S)

    def send_failure(self, reason: str) -> None:
        self.send(wire.TrainerFailed(reason=reason), self._connection)

    # ------------------------------------------------------------ the background thread

    def _receive_forever(self) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._closing.is_set():
            try:
                if self._socket is None:
                    self._connect()
                self._receive_until_end()
            except (OSError, FrameError, _Unusable) as error:
                if self._welcomed:
                    pause_s = FIRST_PAUSE_S
                self._disconnect()
                if self._closing.is_set():
                    return
                self._put(Lost(reason=_sentence(error)))
            self._closing.wait(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _connect(self) -> None:
        """Raises `OSError`. The `Attach` goes out here, before anybody else may send."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            # Kernel timeouts, not Python's: those would make the descriptor non-blocking for both threads.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(SEND_TIMEOUT_S))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(_POLL_S))
            sock.connect(os.fspath(self._home.live_socket("attach_socket")))
            payload = self._encoder.encode(
                wire.Attach(
                    version=node.__version__, pid=os.getpid(), layout_digest=self._layout_digest, name=self._name
                )
            )
            sock.sendall(_LENGTH.pack(len(payload)) + payload)
        except OSError:
            sock.close()
            raise
        with self._send_lock:
            self._socket = sock
            self._connection += 1
        self._buffer.clear()
        self._welcomed = False

    def _disconnect(self) -> None:
        with self._send_lock:
            if self._socket is not None:
                self._socket.close()
                self._socket = None
        self._close_fds()

    def _receive_until_end(self) -> None:
        assert self._socket is not None
        while True:
            message = self._receive(self._socket)
            if isinstance(message, wire.Welcome):
                connected = self._map(message)
                self._welcomed = True
                with self._arrived:
                    self._inbox.clear()
                self._put(connected)
            else:
                self._put(message)
                if isinstance(message, wire.Refused):
                    raise _Unusable(message.reason)

    def _receive(self, sock: socket.socket) -> wire.ToTrainer:
        self._fill(sock, _LENGTH.size)
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > MAX_FRAME_BYTES:
            raise FrameError(f"a frame of {length} bytes is over the limit of {MAX_FRAME_BYTES}")
        self._fill(sock, _LENGTH.size + length)
        payload = bytes(self._buffer[_LENGTH.size : _LENGTH.size + length])
        del self._buffer[: _LENGTH.size + length]
        try:
            return _DECODER.decode(payload)
        except msgspec.DecodeError as error:
            raise FrameError(f"a frame does not decode: {error}") from error

    def _fill(self, sock: socket.socket, size: int) -> None:
        silent_since = time.monotonic()
        while len(self._buffer) < size:
            try:
                data, ancillary, _, _ = sock.recvmsg(
                    1 << 18, socket.CMSG_SPACE(MAX_FDS * array.array("i").itemsize), socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                if self._closing.is_set():
                    raise _Unusable("closing") from None
                if time.monotonic() - silent_since > SILENCE_S:
                    raise _Unusable(f"the daemon said nothing for {SILENCE_S:.0f} s") from None
                continue
            for level, kind, body in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    fds = array.array("i")
                    fds.frombytes(body[: len(body) - len(body) % fds.itemsize])
                    self._fds.extend(fds)
            if not data:
                raise _Unusable("the daemon closed the connection")
            self._buffer += data

    def _map(self, welcome: wire.Welcome) -> Connected:
        try:
            manifest = msgspec.json.decode(welcome.manifest, type=manifests.Manifest)
        except msgspec.DecodeError as error:
            raise _Unusable(f"the daemon's manifest does not decode: {error}") from error
        if len(self._fds) != 2:
            raise _Unusable(f"the daemon sent {len(self._fds)} descriptors with its welcome instead of theta and delta")
        theta, delta = self._fds
        memory = Memory(
            theta=_map_vector(theta, manifest.layout.elements, writable=False),
            delta=_map_vector(delta, manifest.layout.elements, writable=True),
        )
        self._close_fds()
        return Connected(welcome=welcome, manifest=manifest, memory=memory, connection=self._connection)

    def _close_fds(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()

    def _put(self, mail: Mail) -> None:
        with self._arrived:
            if isinstance(mail, wire.Waiting | Lost) and self._inbox and isinstance(self._inbox[-1], type(mail)):
                self._inbox.pop()  # a program that does not look for a while must not find thousands of these
            self._inbox.append(mail)
            self._arrived.notify_all()


def _map_vector(fd: int, elements: int, *, writable: bool) -> Vector:
    """The mapping lives as long as the array; the descriptor may be closed at once."""
    size = os.fstat(fd).st_size
    if size != elements * 4:
        raise _Unusable(f"the daemon shares a vector of {size} bytes, but the run's model has {elements} fp32 elements")
    protection = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
    return np.frombuffer(mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=protection), dtype=np.float32)


def _timeval(seconds: float) -> bytes:
    return struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"no daemon answers ({error.strerror or error})"
    return str(error)
