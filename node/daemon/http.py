"""Status, metrics and control over HTTP: a Unix socket always, TCP when the operator asks for it (design section 11).

    GET  /status /peers /metrics /health     on both
    POST /stop /export                       on the Unix socket alone: its directory is this user's

Whoever connects can neither stay, nor drip, nor fill anything: connections are few, short, and their answers cached.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from math import inf
from pathlib import Path
from typing import Protocol, cast

import msgspec
import structlog
import trio
from hypercorn.config import Config
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ASGIFramework, ConnectionState
from hypercorn.utils import wrap_app
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from node.artifacts import write_atomically
from node.daemon.metrics import exposition
from node.errors import OperatorError
from node.status import ExportPoint, Peers, Status

MAX_CONNECTIONS = 32
"""At a time, on each of the two listeners; more are closed at once."""
CONNECTION_S = 20.0
"""The life of a connection that asks for nothing long."""
EXPORT_S = 600.0
STATUS_FRESH_S = 0.2
"""Requests within this time share one status."""

log = structlog.get_logger()


class _Started(Protocol):
    """`trio.TaskStatus[str | None]`, which the stubs that a dependency installs for an older trio do not know."""

    def started(self, value: str | None) -> None: ...


class StatusSource(Protocol):
    """What the server needs from the daemon."""

    def status(self) -> Status: ...

    def stop(self) -> None:
        """Begin to leave, as SIGTERM does; returns at once."""

    async def export_point(self) -> ExportPoint:
        """Make sure that a snapshot of the current state is on disk. Raises `OperatorError` when there is no state."""


async def serve(
    source: StatusSource,
    control_socket: Path,
    http: str = "off",
    *,
    last_status: Path | None = None,
    task_status: _Started = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until cancelled; starts with the `HOST:PORT` really bound, None with `off`. Raises `OperatorError`.

    At the end, the status is written to `last_status`: how a run ended can be asked when the daemon has gone.
    """
    cache = _StatusCache(source)
    control = trio.SocketListener(_unix_listener(control_socket))
    try:
        async with control, trio.open_nursery() as nursery:
            bound = None
            if http != "off":
                listener = _tcp_listener(http)
                host, port, *_ = listener.getsockname()
                bound = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
                nursery.start_soon(_accept, trio.SocketListener(listener), _application(cache, control=False))
            nursery.start_soon(_accept, control, _application(cache, control=True))
            task_status.started(bound)
    finally:
        _remove(control_socket)
        if last_status is not None:
            _write_last(source, last_status)


# ---------------------------------------------------------------- what is served


class _StatusCache:
    def __init__(self, source: StatusSource) -> None:
        self.source = source
        self._status: Status | None = None
        self._made_s = -inf

    def status(self) -> Status:
        now_s = trio.current_time()
        if self._status is None or now_s - self._made_s > STATUS_FRESH_S:
            self._status = self.source.status()
            self._made_s = now_s
        return self._status


def _application(cache: _StatusCache, *, control: bool) -> Starlette:
    async def status(_: Request) -> Response:
        return _json(cache.status())

    async def peers(_: Request) -> Response:
        now = cache.status()
        return _json(Peers(peer_id=now.peer_id, peers=now.member_list))

    async def metrics(_: Request) -> Response:
        return Response(exposition(cache.status()), media_type=CONTENT_TYPE_LATEST)

    async def health(_: Request) -> Response:
        now = cache.status()
        return _json({"phase": now.phase, "reason": now.reason})

    async def stop(_: Request) -> Response:
        cache.source.stop()
        return _json({"leaving": True})

    async def export(_: Request) -> Response:
        try:
            return _json(await cache.source.export_point())
        except OperatorError as error:
            return _json({"error": str(error)}, status_code=409)

    routes = [
        Route("/status", status),
        Route("/peers", peers),
        Route("/metrics", metrics),
        Route("/health", health),
    ]
    if control:
        routes += [Route("/stop", stop, methods=["POST"]), Route("/export", export, methods=["POST"])]
    return Starlette(routes=routes)


def _json(value: object, status_code: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status_code=status_code, media_type="application/json")


# ---------------------------------------------------------------- listening


def _unix_listener(path: Path) -> trio.socket.SocketType:
    """A socket left by a daemon that was killed is replaced; the home's lock says that it is nobody's."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.unlink(missing_ok=True)
        sock.bind(str(path))
        os.chmod(path, 0o600)
        sock.listen(MAX_CONNECTIONS)
    except OSError as error:
        sock.close()
        raise OperatorError(
            f"the control socket {path} cannot be made ({error.strerror}); see its directory"
        ) from error
    return trio.socket.from_stdlib_socket(sock)


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)


def _write_last(source: StatusSource, path: Path) -> None:
    try:
        write_atomically(msgspec.json.encode(source.status()), path)
    except Exception:
        log.exception("the last status could not be written", path=str(path))


def _tcp_listener(http: str) -> trio.socket.SocketType:
    host, _, port = http.rpartition(":")
    host = host.strip("[]") or "127.0.0.1"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise OperatorError(f"--http {http} is not an address of this machine ({error.strerror})") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(MAX_CONNECTIONS)
    except OSError as error:
        sock.close()
        what = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror})"
        raise OperatorError(f"--http {http} {what}; choose another port, or `off`") from error
    return trio.socket.from_stdlib_socket(sock)


# ---------------------------------------------------------------- serving within bounds


async def _accept(listener: trio.SocketListener, application: Starlette) -> None:
    config = Config()
    config.accesslog = None
    config.errorlog = None
    config.keep_alive_timeout = 5
    config.read_timeout = 5
    config.keep_alive_max_requests = 100
    config.include_server_header = False
    wrapped = wrap_app(cast(ASGIFramework, application), config.wsgi_max_body_size, "asgi")
    server = partial(TCPServer, wrapped, config, WorkerContext(None))
    slots = trio.CapacityLimiter(MAX_CONNECTIONS)
    await trio.serve_listeners(partial(_handle, slots, server), [listener])


async def _handle(
    slots: trio.CapacityLimiter, server: Callable[..., Awaitable[None]], stream: trio.SocketStream
) -> None:
    try:
        slots.acquire_on_behalf_of_nowait(stream)
    except trio.WouldBlock:
        await stream.aclose()
        return
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_end_in_time, stream, nursery.cancel_scope)
            await server(ConnectionState({}), stream)
            nursery.cancel_scope.cancel()
    except* (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
        pass  # the client went away
    except* Exception:
        # A defect of ours or of the server's, with this client's bytes: its connection ends, nothing else does.
        log.exception("a status request failed")
    finally:
        slots.release_on_behalf_of(stream)
        stream.socket.close()


async def _end_in_time(stream: trio.SocketStream, connection: trio.CancelScope) -> None:
    """The server shields its sends, which may wait for a client that never reads: the socket goes first."""
    try:
        await trio.sleep(EXPORT_S if stream.socket.family == socket.AF_UNIX else CONNECTION_S)
    finally:
        stream.socket.close()
    connection.cancel()
