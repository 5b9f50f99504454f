"""hivemind's averager as a child process of the engine: started, told, listened to, ended, started again.

Nothing of it is waited for without a deadline: one that does not do as told in time is killed, and the next one starts.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import trio

from node.engine.geometry import Geometry
from node.engine.hivemind.environment import command
from node.engine.hivemind.vectors import SharedVector
from node.engine.hivemind.words import (
    Begin,
    Begun,
    Contact,
    Ended,
    FromAverager,
    Listening,
    OfRoster,
    ProcessFailed,
    Stop,
    ToAverager,
)
from node.errors import AtollError

START_S = 300.0
"""Importing PyTorch and hivemind takes 4 s of a processor, which a busy machine may spread over minutes. A process that
dies in it is noticed at once."""
END_S = 5.0
"""From SIGKILL to the end of its process."""
ANSWER_S = 10.0
"""From `begin` to `begun`, and from `stop` to `ended`."""
FIRST_BACKOFF_S = 0.5
LAST_BACKOFF_S = 30.0
HEALTHY_S = 60.0
MAX_LINE_BYTES = 1 << 20
PIECE_BYTES = 1 << 17
"""Of what hivemind sends at a time: a message counts as progress only when it is whole, so it must be small."""
COMPRESSIONS = {"fp32": "none", "fp16": "fp16", "int8": "uniform8"}
"""hivemind's codec for ours of a manifest."""
VALUE_BYTES = {"fp32": 4, "fp16": 2, "int8": 1}

ENVIRONMENT = {
    "HIVEMIND_LOGLEVEL": "ERROR",
    "HIVEMIND_MEMORY_SHARING_STRATEGY": "file_descriptor",  # the other one needs a process more, and files in /dev/shm
    "OMP_NUM_THREADS": "1",
}

log = logging.getLogger("atoll.engine")


class AveragerGone(AtollError):
    """The averager's process is not there, or does not do what it is told: one sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AveragerSettings:
    python: str
    """Interpreter with hivemind; empty: this one."""
    host: str
    port: int
    """0: any free one."""
    directory: Path
    """For its sockets: its own."""


class Turn:
    """The averager's work on one roster."""

    def __init__(self, process: AveragerProcess, roster: str) -> None:
        self._process = process
        self._roster = roster
        self.scope = trio.CancelScope()
        """Of whoever has the turn: the next one takes it away."""
        self.is_over = False
        """The means in memory may be another roster's."""
        self.is_begun = False
        """The averager was told of it."""
        self.has_ended = False
        """Nothing of it goes on in the averager any more."""
        self._to_events, self.events = trio.open_memory_channel[OfRoster](math.inf)

    @property
    def roster(self) -> str:
        return self._roster

    async def tell(self, message: ToAverager) -> None:
        """Raises `AveragerGone`."""
        await self._process.tell(message)

    def put(self, event: OfRoster) -> None:
        self.has_ended = self.has_ended or isinstance(event, Ended)
        self._to_events.send_nowait(event)

    def end(self) -> None:
        """No events come any more."""
        self._to_events.close()


class AveragerProcess:
    def __init__(self, settings: AveragerSettings, geometry: Geometry) -> None:
        """Raises `ValueError` for a codec that hivemind does not have."""
        if geometry.codec.name not in COMPRESSIONS:
            known = ", ".join(sorted(COMPRESSIONS))
            raise ValueError(f"hivemind has no codec like {geometry.codec.name!r}: set rounds.codec to one of {known}")
        self._settings = settings
        self._geometry = geometry
        self.contribution = SharedVector("contribution", geometry.elements)
        self.means = SharedVector("means", geometry.elements)
        self.contact: Contact | None = None
        """None: there is no process that could average."""
        self.why_not = "hivemind's averager is starting"
        self.pid: int | None = None
        self._changed = trio.lowlevel.ParkingLot()
        self._socket: trio.socket.SocketType | None = None
        self._sending = trio.Lock()
        self._turns = trio.Lock()
        self._turn: Turn | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._encoder = msgspec.json.Encoder()
        self._decoder: msgspec.json.Decoder[FromAverager] = msgspec.json.Decoder(FromAverager)

    # ---------------------------------------------------------------- life

    async def run(self) -> None:
        """Keep one running; whatever ends it, the next one starts, ever later while they die young."""
        backoff_s = 0.0
        while True:
            started_s = trio.current_time()
            await self._live()
            if trio.current_time() - started_s > HEALTHY_S:
                backoff_s = 0.0
            log.warning("hivemind's averager has ended (%s); starting it again in %.1f s", self.why_not, backoff_s)
            await trio.sleep(backoff_s)
            backoff_s = min(max(2 * backoff_s, FIRST_BACKOFF_S), LAST_BACKOFF_S)

    async def ready(self) -> None:
        """Wait for the first one. Raises `AveragerGone` when it cannot be started."""
        with trio.move_on_after(START_S):
            while self.contact is None and self._process is not None:
                await self._changed.park()
        if self.contact is None:
            raise AveragerGone(f"hivemind's averager does not start: {self.why_not}")

    def start(self) -> None:
        """Raises `OSError`."""
        directory = self._settings.directory
        shutil.rmtree(directory, ignore_errors=True)  # of one that was killed
        directory.mkdir(parents=True, mode=0o700)
        ours, theirs = socket.socketpair()
        geometry = self._geometry
        told = {
            "socket_fd": theirs.fileno(),
            "input_fd": self.contribution.fd,
            "output_fd": self.means.fd,
            "elements": geometry.elements,
            "part_elements": geometry.part_elements,
            "piece_elements": self.piece_elements,
            "host": self._settings.host or "0.0.0.0",
            "port": self._settings.port,
            "directory": str(directory),
            "compression": COMPRESSIONS[geometry.codec.name],
        }
        try:
            # By this thread, not by one of a pool: the kernel ends the child with the thread that started it.
            self._process = subprocess.Popen(
                [*command(self._settings.python), json.dumps(told)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), self.contribution.fd, self.means.fd),
                env=os.environ | ENVIRONMENT,
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self._pidfd = os.pidfd_open(self._process.pid)
        ours.setblocking(False)
        self._socket = trio.socket.from_stdlib_socket(ours)
        self.pid = self._process.pid
        self.why_not = "hivemind's averager is starting"

    @property
    def piece_elements(self) -> int:
        """Values of one message, at most. All peers of a run must have the same."""
        return min(PIECE_BYTES // VALUE_BYTES[self._geometry.codec.name], self._geometry.part_elements)

    async def _live(self) -> None:
        """Until the process has ended; nothing of it is left then."""
        try:
            if self._process is None:
                self.start()
            await self._listen()
        except OSError as error:
            self.why_not = f"it cannot be started: {error.strerror or error}"
        except (msgspec.DecodeError, AveragerGone) as error:
            self.why_not = str(error)
        finally:
            with trio.CancelScope(shield=True):
                await self._bury()

    async def _bury(self) -> None:
        self.contact = None
        if self._turn is not None:
            self._turn.end()
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            self._process.kill()  # p2pd follows: its client is gone
            with trio.move_on_after(END_S):
                await trio.lowlevel.wait_readable(self._pidfd)
            os.close(self._pidfd)
            code = self._process.poll()
            if code not in (0, None, -int(signal.SIGKILL)):
                self.why_not = f"{self.why_not} (exit status {code})"
            shutil.rmtree(self._settings.directory, ignore_errors=True)
            self._process = None
        self.pid = None
        self._changed.unpark_all()

    def close(self) -> None:
        """`run` has ended, or is being cancelled."""
        if self._process is not None:
            self._process.kill()
        self.contribution.close()
        self.means.close()

    # ---------------------------------------------------------------- words

    async def _listen(self) -> None:
        unread = bytearray()
        with trio.CancelScope(deadline=trio.current_time() + START_S) as starting:
            while data := await self._received():
                unread += data
                *lines, unread = unread.split(b"\n")
                if len(unread) > MAX_LINE_BYTES:
                    raise AveragerGone("it says a line without an end")
                for line in lines:
                    if self._heard(self._decoder.decode(line)):
                        starting.deadline = math.inf
        if starting.cancelled_caught:
            raise AveragerGone(f"it did not start within {START_S:.0f} s")
        if self.contact is not None:
            self.why_not = "its process ended"

    async def _received(self) -> bytes:
        """Empty: its end is closed."""
        assert self._socket is not None
        try:
            return await self._socket.recv(1 << 16)
        except ConnectionResetError:
            return b""

    def _heard(self, event: FromAverager) -> bool:
        """Whether it has started now."""
        match event:
            case Listening():
                self.contact = Contact(event.peer, event.port)
                self._changed.unpark_all()
                return True
            case ProcessFailed():
                raise AveragerGone(event.why)
            case _:
                if self._turn is not None and event.roster == self._turn.roster:
                    self._turn.put(event)
        return False

    async def tell(self, message: ToAverager) -> None:
        """Raises `AveragerGone`."""
        data = memoryview(self._encoder.encode(message) + b"\n")
        async with self._sending:
            if self._socket is None or self.contact is None:
                raise AveragerGone(self.why_not)
            # A line that is begun is ended: what follows half a line would make no sense.
            with trio.CancelScope(shield=True), trio.move_on_after(ANSWER_S) as sending:
                try:
                    while data:
                        data = data[await self._socket.send(data) :]
                except OSError as error:
                    raise AveragerGone("its process ended") from error
            if sending.cancelled_caught:
                self._kill("it does not listen")
                raise AveragerGone(self.why_not)

    # ---------------------------------------------------------------- rosters

    @asynccontextmanager
    async def turn(self, roster: str, *, within_s: float) -> AsyncIterator[Turn]:
        """The averager, and both vectors, for one roster. Whoever has them is cancelled, and lets go of them first.

        One that is starting is waited for. With the block the averager's work ends. Raises `AveragerGone`.
        """
        if self._turn is not None:
            self._turn.scope.cancel()
        async with self._turns:
            turn = self._turn = Turn(self, roster)
            try:
                with trio.move_on_after(within_s):
                    while self.contact is None:
                        await self._changed.park()
                if self.contact is None:
                    raise AveragerGone(self.why_not)
                self.means.empty()
                with turn.scope:
                    yield turn
            finally:
                turn.is_over = True
                with trio.CancelScope(shield=True):
                    await self._end(turn)
                self._turn = None

    async def begin(self, turn: Turn, message: Begin) -> None:
        """Returns when it takes what other peers send. Raises `AveragerGone`."""
        turn.is_begun = True
        await turn.tell(message)
        with trio.move_on_after(ANSWER_S) as waiting:
            async for event in turn.events:
                if isinstance(event, Begun):
                    return
                if isinstance(event, Ended):
                    raise AveragerGone(event.why)
        if waiting.cancelled_caught:
            self._kill("it did not begin a roster in time")
        raise AveragerGone(self.why_not)

    async def _end(self, turn: Turn) -> None:
        """Until nothing of the roster goes on, or the process is gone."""
        if turn.has_ended or not turn.is_begun:
            return
        with trio.move_on_after(ANSWER_S) as waiting, contextlib.suppress(AveragerGone):
            await turn.tell(Stop(roster=turn.roster))
            async for event in turn.events:
                if isinstance(event, Ended):
                    return
        if waiting.cancelled_caught:
            self._kill("it did not end a roster in time")

    def _kill(self, why: str) -> None:
        self.why_not = why
        if self._process is not None:
            self._process.kill()  # `_listen` sees the end
