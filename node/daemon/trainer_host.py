"""The daemon's side of the attach socket: one trainer at a time, its frames turned into events, nothing decided.

Who may touch the shared vectors (`node.trainer.wire`): a trainer reads `theta` and writes `delta` from its Welcome on,
until its Contribution; the engine has both from then on, until the `Committed` that gives them back. `hold` is how the
daemon gets them when a commit arrives first. Without that order a trainer would load half of one state and half of the
next.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import trio

import node
from node.daemon.attach_socket import is_same_user, listen
from node.home import Home
from node.ipc import FrameError, FrameStream
from node.trainer import wire

logger = logging.getLogger(__name__)

ATTACH_TIMEOUT_S = 10.0
"""How long a fresh connection may take for its first frame."""
SEND_TIMEOUT_S = 10.0
"""A trainer that does not read for this long is cut off: it can reconnect."""
SUCCESSION_S = 1.0
"""How long a second trainer waits before it is refused: the first may be ending, its last bytes still unread."""
KEEPALIVE_S = 10.0
"""`Waiting` is repeated this often, so that a trainer can tell a busy daemon from a dead one."""
MAX_CONNECTIONS = 8
"""One trainer, and a few that are being refused."""
EVENTS = 64
_OUT_OF_RESOURCES = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS}
_ACCEPT_PAUSE_S = 0.1

TrainerStream: TypeAlias = FrameStream[wire.FromTrainer, wire.ToTrainer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    """A trainer got its Welcome. It says `Loaded` when its model holds θ."""

    name: str
    pid: int
    layout_digest: bytes | None
    round: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Detached:
    """The trainer is gone, or was cut off; `reason` is one sentence."""

    name: str
    reason: str
    failed: bool
    """It said itself that it cannot go on, or it broke the protocol."""


TrainerEvent: TypeAlias = Attached | wire.Progress | wire.Validated | wire.Contribution | wire.Loaded | Detached


class _TaskStatus(Protocol):
    """`trio.TaskStatus[None]`, which the stubs that a dependency installs for an older trio do not know."""

    def started(self) -> None: ...


class _Cut(Exception):
    """The connection ends; the message says why."""

    def __init__(self, reason: str, *, failed: bool) -> None:
        super().__init__(reason)
        self.reason = reason
        self.failed = failed


class _Session:
    """One trainer that is attached or waits for its Welcome."""

    def __init__(self, stream: TrainerStream, attach: wire.Attach) -> None:
        self.stream = stream
        self.attach = attach
        self.round: int | None = None
        """Round of the last Welcome or Committed; None: not welcomed yet."""
        self.loading = False
        self.loaded = False
        """It has said that its model holds θ, at least once."""
        self.contributed = False
        self.gone = False
        self.scope = trio.CancelScope()
        self.cut: _Cut | None = None

    def end(self, reason: str, *, failed: bool) -> None:
        self.cut = self.cut or _Cut(reason, failed=failed)
        self.scope.cancel()


class TrainerHost:
    """Serves `home.attach_socket`. `events` is read by one task; the attributes are for `status`.

    Call `provide` before `run`; `poke` whenever its answer may have changed.
    """

    def __init__(
        self,
        home: Home,
        *,
        keepalive_s: float = KEEPALIVE_S,
        attach_timeout_s: float = ATTACH_TIMEOUT_S,
        send_timeout_s: float = SEND_TIMEOUT_S,
        succession_s: float = SUCCESSION_S,
    ) -> None:
        self._home = home
        self._keepalive_s = keepalive_s
        self._attach_timeout_s = attach_timeout_s
        self._send_timeout_s = send_timeout_s
        self._succession_s = succession_s
        self._welcome: Callable[[], wire.Welcome | wire.Waiting] = lambda: wire.Waiting(reason="the daemon is starting")
        self._fds: Callable[[], tuple[int, int]] | None = None
        self._session: _Session | None = None
        self._connections = 0
        self._changed = trio.Condition()
        self._poked = trio.Event()
        self._reason = "the round goes on"
        self._send_events: trio.MemorySendChannel[TrainerEvent]
        self.events: trio.MemoryReceiveChannel[TrainerEvent]
        self._send_events, self.events = trio.open_memory_channel[TrainerEvent](EVENTS)
        self.progress: wire.Progress | None = None
        """The newest; of the last trainer until another one is welcomed."""
        self.validation: wire.Validated | None = None
        """The newest that any trainer reported."""

    # ------------------------------------------------------------ what the driver sees

    @property
    def attached(self) -> bool:
        """A trainer has had its Welcome and is connected."""
        return self._session is not None and self._session.round is not None and not self._session.gone

    @property
    def loaded(self) -> bool:
        """The attached trainer has built its model: before, which may take minutes, it cannot train or hand over."""
        return self.attached and self._session is not None and self._session.loaded

    @property
    def name(self) -> str | None:
        """Of the trainer that is attached or waits for its Welcome."""
        return self._session.attach.name if self._session is not None else None

    @property
    def pid(self) -> int | None:
        return self._session.attach.pid if self._session is not None else None

    @property
    def vectors_free(self) -> bool:
        """Whether the engine may write theta and delta: nobody is attached, or its contribution is handed over."""
        return not self.attached or (self._session is not None and self._session.contributed)

    def provide(self, welcome: Callable[[], wire.Welcome | wire.Waiting], fds: Callable[[], tuple[int, int]]) -> None:
        """Where a Welcome comes from. `fds` returns theta (not writable) and delta; they stay the caller's.

        `welcome` returns `Waiting` while the state is not there, while the engine writes it, and while a contribution
        of this round by an earlier trainer is under way.
        """
        self._welcome = welcome
        self._fds = fds

    def poke(self) -> None:
        """The answer of `welcome` may have changed."""
        self._poked.set()
        self._poked = trio.Event()

    def explain(self, reason: str) -> None:
        """Why the attached trainer waits; told with the next keepalive, or at once after `poke`."""
        if reason != self._reason:
            self._reason = reason
            self.poke()

    async def freeze(self, round: int, within_s: float) -> None:
        """Ask for the contribution within `within_s`; 0: after the current step. Nobody attached: nothing happens."""
        if (session := self._attached()) is not None and session.round == round and not session.contributed:
            await self._send(session, wire.Freeze(round=round, within_s=within_s))

    async def hold(self, round: int, within_s: float) -> bool:
        """Get the vectors for the engine: freeze, await the contribution for `within_s`, else cut the trainer off.

        True: the trainer handed over and takes part in what is applied next. False: nobody was attached, or the trainer
        was too slow; it reconnects, finds another round than its own and starts from θ.
        """
        await self.freeze(round, 0.0)
        # One that still builds its model has no work to hand over, and takes θ anew when it is done.
        with trio.move_on_after(within_s if self.loaded else 0.0):
            async with self._changed:
                while not self.vectors_free:
                    await self._changed.wait()
        if (session := self._attached()) is None:
            return False
        if session.contributed:
            return True
        why = f"it did not hand over its work of round {round} within {within_s:.0f} s"
        session.end(why if session.loaded else f"round {round} was committed while it built its model", failed=False)
        async with self._changed:
            while self._session is session:
                await self._changed.wait()
        return False

    async def committed(self, message: wire.Committed) -> None:
        """Give the vectors back with what became of the contribution. Nobody attached: the next Welcome has it all."""
        if (session := self._attached()) is not None:
            session.round = message.start.round
            session.contributed = False
            session.loading = True
            await self._send(session, message)

    # ------------------------------------------------------------ serving

    async def run(self, *, task_status: _TaskStatus = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled. Raises `OperatorError` when the socket cannot be made."""
        path = self._home.attach_socket
        listener = listen(self._home, MAX_CONNECTIONS)
        try:
            async with trio.open_nursery() as nursery:
                task_status.started()
                while True:
                    try:
                        connection, _ = await listener.accept()
                    except OSError as error:
                        if error.errno not in _OUT_OF_RESOURCES:
                            raise
                        logger.warning("the attach socket cannot accept: %s", error.strerror)
                        await trio.sleep(_ACCEPT_PAUSE_S)
                        continue
                    if self._connections >= MAX_CONNECTIONS or not is_same_user(connection):
                        connection.close()
                        continue
                    self._connections += 1
                    nursery.start_soon(self._serve, _stdlib_socket(connection))
        finally:
            listener.close()
            with contextlib.suppress(FileNotFoundError):
                path.unlink()

    async def _serve(self, sock: socket.socket) -> None:
        stream: TrainerStream = FrameStream(sock, wire.FromTrainer)
        try:
            first = await self._first_frame(stream)
            if isinstance(first, str):
                with trio.move_on_after(self._send_timeout_s), contextlib.suppress(trio.BrokenResourceError):
                    await stream.send(wire.Refused(reason=first))
                return
            if first is not None:
                await self._serve_session(_Session(stream, first))
        finally:
            self._connections -= 1
            stream.close()

    async def _first_frame(self, stream: TrainerStream) -> wire.Attach | str | None:
        """The `Attach`, a sentence that refuses it, or None when there was none in time."""
        try:
            with trio.fail_after(self._attach_timeout_s):
                first = await stream.receive()
        except trio.TooSlowError:
            return f"no Attach within {self._attach_timeout_s:.0f} s"
        except trio.EndOfChannel:
            return None
        except FrameError as error:
            logger.warning("a program on the attach socket does not speak our protocol: %s", error)
            return f"{error}: attach with node.attach() of version {node.__version__}"
        if not isinstance(first, wire.Attach):
            return f"the first frame is {type(first).__name__} instead of Attach: attach with node.attach()"
        with trio.move_on_after(self._succession_s):
            async with self._changed:
                while self._session is not None:
                    await self._changed.wait()
        # From here to `_serve_session` nothing awaits: no two trainers find the place free.
        return self._refusal(first) or first

    def _refusal(self, attach: wire.Attach) -> str | None:
        if _minor(attach.version) != _minor(node.__version__):
            return (
                f"the trainer {attach.name!r} has version {attach.version}, this daemon {node.__version__}: "
                "install the same"
            )
        if self._session is not None:
            other = self._session.attach
            return (
                f"a trainer is attached already ({other.name!r}, process {other.pid}): stop it first, or give this one "
                "a daemon with another home"
            )
        return None

    async def _serve_session(self, session: _Session) -> None:
        self._session = session
        reason, failed = "the daemon ends", False
        try:
            with session.scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._receive, session)
                    await self._admit(session)
                    nursery.start_soon(self._keep_alive, session)
            assert session.cut is not None
            reason, failed = session.cut.reason, session.cut.failed
        finally:
            session.gone = True
            was_welcomed = session.round is not None
            self._session = None
            self.poke()
        log = logger.warning if failed else logger.info
        log("the trainer %r (process %d) is detached: %s", session.attach.name, session.attach.pid, reason)
        async with self._changed:
            self._changed.notify_all()
        with trio.move_on_after(self._send_timeout_s), contextlib.suppress(trio.BrokenResourceError):
            await session.stream.send(wire.Goodbye(reason=reason))
        if was_welcomed or failed:
            await self._send_events.send(Detached(name=session.attach.name, reason=reason, failed=failed))

    async def _admit(self, session: _Session) -> None:
        """Send `Waiting` until there is a Welcome, then that."""
        while True:
            poked = self._poked
            answer = self._welcome()
            if isinstance(answer, wire.Welcome):
                break
            await self._send(session, answer)
            with trio.move_on_after(self._keepalive_s):
                await poked.wait()
        assert self._fds is not None, "provide() comes before the first Welcome"
        # Set before the first await: a Committed that follows queues behind the Welcome in the stream.
        session.round = answer.start.round
        session.loading = True
        self.progress = None
        await self._send(session, answer, self._fds())
        attach = session.attach
        logger.info("the trainer %r (process %d) is attached at round %d", attach.name, attach.pid, session.round)
        await self._send_events.send(
            Attached(name=attach.name, pid=attach.pid, layout_digest=attach.layout_digest, round=answer.start.round)
        )

    async def _keep_alive(self, session: _Session) -> None:
        while True:
            poked, said = self._poked, self._reason
            with trio.move_on_after(self._keepalive_s) as timer:
                await poked.wait()
            if timer.cancelled_caught or self._reason != said:
                await self._send(session, wire.Waiting(reason=self._reason))

    async def _receive(self, session: _Session) -> None:
        """Frames to events, until the end; the end cancels the session."""
        try:
            while True:
                await self._handle(session, await session.stream.receive())
        except trio.EndOfChannel:
            session.end("its process ended or closed the connection", failed=False)
        except FrameError as error:
            session.end(f"it sent a malformed frame: {error}", failed=True)
        except _Cut as cut:
            session.end(cut.reason, failed=cut.failed)

    async def _handle(self, session: _Session, message: wire.FromTrainer) -> None:
        match message:
            case wire.Goodbye():
                raise _Cut(message.reason, failed=False)
            case wire.TrainerFailed():
                raise _Cut(message.reason, failed=True)
            case wire.Attach():
                raise _Cut("it attached twice on one connection", failed=True)
        if session.round is None:
            raise _Cut(f"it sent {type(message).__name__} before it was welcomed", failed=True)
        for fault in _faults(message):
            raise _Cut(f"it sent {type(message).__name__} with {fault}", failed=True)
        match message:
            case wire.Progress():
                self.progress = message
                # Best effort, and so that a slow driver never stops a trainer.
                with contextlib.suppress(trio.WouldBlock):
                    self._send_events.send_nowait(message)
                return
            case wire.Validated():
                self.validation = message
            case wire.Loaded():
                session.loading = False
                session.loaded = True
            case wire.Contribution():
                if message.round != session.round:
                    return  # of a round that was committed meanwhile: a Committed is on its way
                session.contributed = True
        async with self._changed:
            self._changed.notify_all()
        await self._send_events.send(message)

    def _attached(self) -> _Session | None:
        return self._session if self.attached else None

    async def _send(self, session: _Session, message: wire.ToTrainer, fds: tuple[int, ...] = ()) -> None:
        try:
            with trio.move_on_after(self._send_timeout_s) as timer:
                await session.stream.send(message, fds)
        except trio.BrokenResourceError:
            session.end("its process ended or closed the connection", failed=False)
            return
        if timer.cancelled_caught:
            # Part of a frame may be on its way: nothing can follow it.
            session.end(f"it did not read for {self._send_timeout_s:.0f} s", failed=True)


def _faults(message: wire.Progress | wire.Validated | wire.Contribution | wire.Loaded) -> list[str]:
    """What is impossible in a frame that decoded."""
    faults = []
    for field in ("round", "steps", "tokens", "units_wanted", "made"):
        value = getattr(message, field, 0)
        if not 0 <= value < 1 << 63:
            faults.append(f"{field} {value}")
    if isinstance(message, wire.Contribution):
        faults += [f"range {done}" for done in message.ranges_done if not 0 <= done.start < done.stop or done.epoch < 0]
    return faults


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


def _stdlib_socket(connection: trio.socket.SocketType) -> socket.socket:
    return socket.socket(fileno=connection.detach())
