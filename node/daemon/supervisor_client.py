"""The daemon's half of its link to the supervisor (`node.supervisor.link` has the messages)."""

from __future__ import annotations

import array
import contextlib
import json
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import trio

from node.errors import OperatorError
from node.supervisor.link import MAX_DESCRIPTORS, MAX_MESSAGE_BYTES, SUPERVISOR_VARIABLE

ANSWER_TIMEOUT_S = 60.0
"""Reserving the vectors of a large model zeroes their pages: about 0.4 s a gigabyte."""
MAX_WAITING_EVENTS = 64


class SupervisorGone(Exception):
    """The supervisor has ended; so must this process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHandle:
    """A new connection to an engine. The caller owns the socket and all descriptors."""

    socket: socket.socket
    theta_fd: int
    momentum_fd: int
    delta_fd: int
    theta_read_fd: int
    """Opened for reading only: for the trainer."""
    fresh: bool
    """The vectors were allocated by this call: they are zero and hold no state."""
    life: int
    """Which of the supervisor's engine processes it connects to, counted from 1."""

    def close(self) -> None:
        self.socket.close()
        for descriptor in (self.theta_fd, self.momentum_fd, self.delta_fd, self.theta_read_fd):
            os.close(descriptor)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRestarted:
    """The engine died and runs again: ask `start_engine` for a connection to the new one."""

    life: int
    """Of the new one. An `EngineHandle` of that life connects to it already: the news is older than the handle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerExited:
    code: int
    """Exit status; negative: the signal that killed it."""
    reason: str
    """Its last words, one line."""
    restart_in_s: float | None
    """None: it is not started again (it finished, or it refused to run)."""
    crashes: int = 1
    """In a row, without a life of half a minute between them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Processes:
    pids: dict[str, int]
    resident_bytes: dict[str, int]
    crashes: dict[str, int]
    """Role → times in a row that it died young, of those that did so twice or more."""


SupervisorEvent: TypeAlias = EngineRestarted | TrainerExited


class SupervisorClient:
    """Requests are answered in order, one at a time; `run` receives, for as long as the daemon lives."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = trio.socket.from_stdlib_socket(sock)
        self._lock = trio.Lock()
        self._answers: trio.MemorySendChannel[tuple[dict[str, Any], list[int]]]
        self._answers, self._answered = trio.open_memory_channel(1)
        self._events, self.events = trio.open_memory_channel[SupervisorEvent](MAX_WAITING_EVENTS)

    @classmethod
    def from_environment(cls) -> SupervisorClient:
        """Raises `OperatorError` when this process was not started by a supervisor."""
        text = os.environ.pop(SUPERVISOR_VARIABLE, None)
        if text is None:
            raise OperatorError(f"{SUPERVISOR_VARIABLE} is not set: start the daemon by `atoll daemon`, not by hand")
        os.set_inheritable(int(text), False)
        return cls(socket.socket(fileno=int(text)))

    async def run(self) -> None:
        """Raises `SupervisorGone` when the link ends. Events beyond `MAX_WAITING_EVENTS` unread ones are dropped."""
        try:
            while True:
                message, descriptors = await self._receive()
                if "event" in message:
                    self._on_event(message)
                else:
                    await self._answers.send((message, descriptors))
        finally:  # whoever waits for an answer, or for an event, learns that none will come
            self._answers.close()
            self._events.close()

    def _on_event(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(trio.WouldBlock):
            if message["event"] == "engine_restarted":
                self._events.send_nowait(EngineRestarted(life=message["life"]))
            elif message["event"] == "trainer_exited":
                exited = TrainerExited(
                    code=message["code"],
                    reason=message["reason"],
                    restart_in_s=message["restart_in_s"],
                    crashes=message.get("crashes", 1),
                )
                self._events.send_nowait(exited)

    async def start_engine(self, theta_bytes: int, momentum_bytes: int, delta_bytes: int) -> EngineHandle:
        """Start the engine if it does not run, and connect to it. Raises `OperatorError` when memory is short."""
        sizes = {"theta": theta_bytes, "momentum": momentum_bytes, "delta": delta_bytes}
        answer, descriptors = await self._request({"op": "start_engine", "bytes": sizes})
        connection, theta, momentum, delta, theta_read = descriptors
        return EngineHandle(
            socket=socket.socket(fileno=connection),
            theta_fd=theta,
            momentum_fd=momentum,
            delta_fd=delta,
            theta_read_fd=theta_read,
            fresh=bool(answer["fresh"]),
            life=int(answer["life"]),
        )

    async def start_trainer(self) -> None:
        """No effect when it runs already."""
        await self._request({"op": "start_trainer"})

    async def stop_trainer(self) -> None:
        """SIGTERM to the trainer, SIGKILL 5 s later; it is not started again."""
        await self._request({"op": "stop_trainer"})

    async def ready(self, addresses: Sequence[str], http: str | None) -> None:
        """The node listens: the supervisor tells the operator and writes `daemon.json`. May be repeated."""
        await self._request({"op": "listening", "addresses": list(addresses), "http": http or "off"})

    async def processes(self) -> Processes:
        answer, _ = await self._request({"op": "processes"})
        return Processes(
            pids=answer["pids"], resident_bytes=answer["resident_bytes"], crashes=answer.get("crashes", {})
        )

    def refuse(self, sentence: str) -> None:
        """Leave a sentence for the operator; then end with exit status 2. Needs no running event loop."""
        with contextlib.suppress(OSError):
            os.write(self._socket.fileno(), json.dumps({"op": "fatal", "error": sentence}).encode())

    async def _request(self, request: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        async with self._lock:
            # A request that was given up must not hand its late answer to the next one.
            with trio.CancelScope(shield=True), trio.move_on_after(ANSWER_TIMEOUT_S):
                ended: Exception | None = None
                try:
                    await self._socket.send(json.dumps(request).encode())
                    answer, descriptors = await self._answered.receive()
                except (OSError, trio.EndOfChannel) as error:
                    ended = error
                else:
                    if not answer.get("ok"):
                        raise OperatorError(str(answer.get("error")))
                    return answer, descriptors
            if ended is not None:
                # Nobody receives any more when this daemon itself comes to its end: that is no failure.
                await trio.lowlevel.checkpoint_if_cancelled()
                raise SupervisorGone("the supervisor has ended") from ended
        raise SupervisorGone(f"the supervisor did not answer {request['op']!r} within {ANSWER_TIMEOUT_S:.0f} s")

    async def _receive(self) -> tuple[dict[str, Any], list[int]]:
        try:
            data, ancillary, _, _ = await self._socket.recvmsg(
                MAX_MESSAGE_BYTES, socket.CMSG_SPACE(MAX_DESCRIPTORS * 4), socket.MSG_CMSG_CLOEXEC
            )
        except OSError as error:
            raise SupervisorGone("the supervisor has ended") from error
        if not data:
            raise SupervisorGone("the supervisor has ended")
        descriptors = array.array("i")
        for level, kind, body in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors.frombytes(body[: len(body) - len(body) % descriptors.itemsize])
        return json.loads(data), list(descriptors)
