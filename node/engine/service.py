"""The engine's life around its daemons: one `Engine` per daemon connection, the next one after it."""

from __future__ import annotations

import array
import os
import signal
import socket
import ssl

import trio

from node.engine import api
from node.engine.engine import Engine, Say
from node.engine.engines import engine_named
from node.engine.snapshots import SnapshotError
from node.engine.state import StateError
from node.ipc import FrameError, FrameStream

DaemonStream = FrameStream[api.Request, api.FromEngine]


async def serve(supervisor_fd: int) -> None:
    """Serve one daemon after another, until the supervisor's socket ends or SIGTERM comes."""
    next_daemon, daemons = trio.open_memory_channel[socket.socket](1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_receive_daemons, _socket(supervisor_fd), next_daemon, nursery.cancel_scope)
        nursery.start_soon(_end_on_sigterm, nursery.cancel_scope)
        async for sock in daemons:
            await serve_daemon(sock)


async def _end_on_sigterm(scope: trio.CancelScope) -> None:
    with trio.open_signal_receiver(signal.SIGTERM) as signals:
        async for _ in signals:
            scope.cancel()


async def serve_daemon(sock: socket.socket) -> None:
    """Until this daemon's connection ends."""
    stream: DaemonStream = FrameStream(sock, api.Request)

    async def say(message: api.FromEngine) -> None:
        try:
            await stream.send(message)
        except trio.BrokenResourceError:
            nursery.cancel_scope.cancel()

    engine: Engine | None = None
    try:
        async with trio.open_nursery() as nursery:
            while True:
                try:
                    request = await stream.receive()
                except (trio.EndOfChannel, FrameError):
                    break
                if engine is not None:
                    await engine.handle(request)
                elif isinstance(request, api.Open):
                    engine = await _open(request, stream.take_fds(), nursery, say)
                else:
                    await say(api.Failed(id=request.id, reason="the engine is not open; send Open first"))
            nursery.cancel_scope.cancel()
    finally:
        if engine is not None:
            engine.close()
        stream.close()


async def _open(request: api.Open, memory: tuple[int, ...], nursery: trio.Nursery, say: Say) -> Engine | None:
    engine: Engine | None = None
    try:
        engine = engine_named(request.engine)(request, memory, nursery, say)
        port = await engine.open()
    except (StateError, SnapshotError, ValueError, OSError, ssl.SSLError) as error:
        if engine is not None:
            engine.close()
        await say(api.Failed(id=request.id, reason=_why_not_open(request, error)))
        return None
    finally:
        for fd in memory:  # the mappings stay
            os.close(fd)
    await say(api.Opened(id=request.id, port=port))
    return engine


def _why_not_open(request: api.Open, error: Exception) -> str:
    if isinstance(error, OSError) and not isinstance(error, ssl.SSLError):
        where = error.filename or f"{request.listen_host}:{request.listen_port}"
        return f"the engine cannot open {where}: {error.strerror or error}; free it or choose another"
    return f"the engine cannot open: {error}"


async def _receive_daemons(
    sock: socket.socket, daemons: trio.MemorySendChannel[socket.socket], scope: trio.CancelScope
) -> None:
    supervisor = trio.socket.from_stdlib_socket(sock)
    while True:
        try:
            data, ancillary, _, _ = await supervisor.recvmsg(4096, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
        except OSError:
            break
        if not data:
            break
        for level, kind, body in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(body[: len(body) - len(body) % fds.itemsize])
                for fd in fds:
                    await daemons.send(_socket(fd))
    scope.cancel()


def _socket(fd: int) -> socket.socket:
    os.set_inheritable(fd, False)
    sock = socket.socket(fileno=fd)
    sock.setblocking(False)
    return sock
