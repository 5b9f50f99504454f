"""The process: lines of JSON over a socket, one message each; the vectors lie in shared memory.

    argument           socket_fd, input_fd, output_fd, elements, part_elements, piece_elements, host, port, directory,
                       compression (`none`, `fp16` or `uniform8`)
    → begin            `job.Job`; ends the roster before it. ← begun, or ended
    → contact          roster, sender, peer (libp2p id), addresses: this contributor takes part
    → exclude          roster, sender: wait for it no longer
    → stop             roster. ← ended
    ← listening        peer, port: first of all
    ← delivered        roster, sender, part (the last piece of it), or none in between: a sign of life
    ← reduced          roster, part, senders or none: its mean is in the output vector
    ← lost             roster, sender, why, is_its_fault: nothing more of it is added here
    ← unreached        roster, reducer, why: this node's values do not reach it
    ← ended            roster, why (empty: all done), bytes_sent, bytes_received
    ← failed           why: the process ends

The input vector is this node's contribution; it must not change between `begun` and `ended`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import mmap
import os
import signal
import socket
import sys
import warnings
from typing import Any

import torch
import uvloop
from hivemind.compression import CompressionBase, Float16Compression, NoCompression, Uniform8BitQuantization

from . import guards, transport
from .averager import RosterAverager, RosterRunner
from .job import Job, Piece

MAX_LINE_BYTES = 64 << 20
MESSAGE_OVERHEAD_BYTES = 1 << 16
COMPRESSIONS: dict[str, type[CompressionBase]] = {
    "none": NoCompression,
    "fp16": Float16Compression,
    "uniform8": Uniform8BitQuantization,
}
_PR_SET_PDEATHSIG = 1


def main() -> None:
    # hivemind calls what newer versions of its libraries want otherwise; the engine's log is not the place for it.
    warnings.simplefilter("ignore")
    settings = json.loads(sys.argv[1])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    torch.set_num_threads(1)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(settings))


async def _run(settings: dict[str, Any]) -> None:
    reader, writer = await asyncio.open_unix_connection(
        sock=socket.socket(fileno=settings["socket_fd"]), limit=MAX_LINE_BYTES
    )
    say = Voice(writer)
    piece_bytes = 4 * settings["piece_elements"]
    traffic = guards.install(piece_bytes + MESSAGE_OVERHEAD_BYTES)
    try:
        p2p, p2pd = await transport.start(settings["host"], settings["port"], settings["directory"])
        averager = RosterAverager(p2p, COMPRESSIONS[settings["compression"]]())
        await averager.serve()
        say("listening", peer=str(p2p.peer_id), port=transport.port_of(p2p))
    except transport.TransportFailed as error:
        say("failed", why=str(error))
        await writer.drain()
        return
    work = Work(averager, settings, say, traffic)
    draining = asyncio.create_task(transport.drain(p2pd))
    listening = asyncio.create_task(_listen(reader, work))
    await asyncio.wait({draining, listening}, return_when=asyncio.FIRST_COMPLETED)
    if draining.done():
        say("failed", why="hivemind's p2pd has ended")
        await writer.drain()
    await work.end()
    await p2p.shutdown()


async def _listen(reader: asyncio.StreamReader, work: Work) -> None:
    while line := await reader.readline():
        await work.on_message(json.loads(line))


class Voice:
    """Says something to the engine."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    def __call__(self, event: str, **fields: Any) -> None:
        self._writer.write(json.dumps({"event": event} | fields).encode() + b"\n")


class Work:
    """At most one roster at a time."""

    def __init__(
        self, averager: RosterAverager, settings: dict[str, Any], say: Voice, traffic: type[guards.Traffic]
    ) -> None:
        self._averager = averager
        self._settings = settings
        self._say = say
        self._traffic = traffic
        self._input = _vector(settings["input_fd"], settings["elements"])
        self._output = _vector(settings["output_fd"], settings["elements"])
        self._roster = ""
        self._runner: RosterRunner | None = None
        self._task: asyncio.Task[None] | None = None
        self._connecting: set[asyncio.Task[None]] = set()

    async def on_message(self, said: dict[str, Any]) -> None:
        match said.pop("op"):
            case "begin":
                await self.end()
                begun = asyncio.get_running_loop().create_future()
                self._task = asyncio.create_task(self._average(Job.of(said), begun))
                await begun
            case "contact" if said["roster"] == self._roster and self._runner is not None:
                job = self._runner.job
                name = job.names[said["sender"]]
                task = asyncio.create_task(self._connect(self._runner, said["sender"], name, said))
                self._connecting.add(task)
                task.add_done_callback(self._connecting.discard)
            case "exclude" if said["roster"] == self._roster and self._runner is not None:
                await self._runner.give_up(said["sender"])
            case "stop" if said["roster"] == self._roster:
                await self.end()

    async def end(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        for task in self._connecting:
            task.cancel()

    async def _connect(self, runner: RosterRunner, sender: int, name: str, said: dict[str, Any]) -> None:
        await self._averager.connect(name, said["peer"], said["addresses"])
        runner.ready(sender)

    async def _average(self, job: Job, begun: asyncio.Future[None]) -> None:
        sent, received = self._traffic.sent, self._traffic.received
        why = ""
        pieces = job.pieces(
            self._settings["elements"], self._settings["part_elements"], self._settings["piece_elements"]
        )
        report = Account(job.roster, self._output, self._say)
        try:
            async with asyncio.timeout(job.deadline_s):
                async with self._averager.roster(job, self._input, pieces, report) as runner:
                    self._roster, self._runner = job.roster, runner
                    self._say("begun", roster=job.roster)
                    begun.set_result(None)
                    # What comes are the differences that would make this node's copy hivemind's average. Every copy is
                    # another one; the run's are what the roots encode.
                    async for _ in runner:
                        pass
        except TimeoutError:
            why = f"it did not end within {job.deadline_s:.1f} s"
        except asyncio.CancelledError:
            why = "it was stopped"
            raise
        except Exception as error:  # noqa: BLE001 - whatever hivemind raises is the round's end, not the process's
            why = f"{type(error).__name__}: {error}"
        finally:
            self._roster, self._runner = "", None
            if not begun.done():
                begun.set_result(None)
            self._say(
                "ended",
                roster=job.roster,
                why=why,
                bytes_sent=self._traffic.sent - sent,
                bytes_received=self._traffic.received - received,
            )


class Account:
    """The `Report` of one roster: means go to the output vector, all else to the engine."""

    def __init__(self, roster: str, output: torch.Tensor, say: Voice) -> None:
        self._roster = roster
        self._output = output
        self._say = say
        self._senders: tuple[int, ...] | None = None
        """Of the part under way: whose values are in all of its pieces so far."""
        self._begun = False

    def delivered(self, piece: Piece, sender: int) -> None:
        self._say("delivered", roster=self._roster, sender=sender, part=piece.part if piece.is_last else None)

    def reduced(self, piece: Piece, mean: torch.Tensor, senders: tuple[int, ...] | None) -> None:
        self._output[piece.start : piece.stop] = mean
        if not self._begun:
            self._senders, self._begun = senders, True
        elif self._senders != senders:
            self._senders = None  # somebody was lost in the middle of the part: it is the mean of nothing
        if piece.is_last:
            self._begun = False
            self._say("reduced", roster=self._roster, part=piece.part, senders=self._senders)

    def lost(self, sender: int, why: str, *, is_its_fault: bool) -> None:
        self._say("lost", roster=self._roster, sender=sender, why=why, is_its_fault=is_its_fault)

    def unreached(self, reducer: int, why: str) -> None:
        self._say("unreached", roster=self._roster, reducer=reducer, why=why)


def _vector(fd: int, elements: int) -> torch.Tensor:
    """[elements] float32, the memory behind `fd`."""
    memory = mmap.mmap(fd, 4 * elements)
    os.close(fd)
    return torch.frombuffer(memory, dtype=torch.float32, count=elements)
