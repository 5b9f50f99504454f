"""A daemon without a network: asks the supervisor for everything, and does as its first argument says."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import trio

from node.daemon.supervisor_client import EngineHandle, EngineRestarted, SupervisorClient, TrainerExited
from node.errors import OperatorError

HOME = Path(os.environ["ATOLL_HOME"])
THETA_BYTES, MOMENTUM_BYTES = 4096 * 4, 4096 * 4 - 1024


def tell(what: str, **values: object) -> None:
    """One line of the story that the test reads."""
    with (HOME / "story.jsonl").open("a") as story:
        story.write(json.dumps({"what": what, "pid": os.getpid(), **values}) + "\n")


async def engine_pid(engine: EngineHandle) -> int:
    """What the stand-in engine answers on a new connection."""
    stream = trio.SocketStream(trio.socket.from_stdlib_socket(engine.socket))
    return int(await stream.receive_some(64))


async def run(mode: str) -> int:
    client = SupervisorClient.from_environment()
    if mode == "refuse":
        client.refuse("the port 4001 is busy; choose another by --listen")
        return 2
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.run)
        if mode == "greedy":
            try:
                await client.start_engine(1 << 50, 1 << 50, 1 << 50)
            except OperatorError as error:
                sys.stderr.write(f"{error}\n")
                nursery.cancel_scope.cancel()
                return 2
        with trio.open_signal_receiver(signal.SIGTERM) as signals:
            engine = await client.start_engine(THETA_BYTES, MOMENTUM_BYTES, THETA_BYTES)
            mark = os.pread(engine.delta_fd, 5, 0)
            os.pwrite(engine.delta_fd, b"delta", 0)
            refused = []
            for descriptor, size in ((engine.theta_fd, 0), (engine.theta_read_fd, None)):
                try:
                    os.ftruncate(descriptor, 0) if size == 0 else os.pwrite(descriptor, b"x", 0)
                except OSError as error:
                    refused.append(error.errno)
            pid = await engine_pid(engine)
            tell("engine", engine=pid, fresh=engine.fresh, life=engine.life, mark=mark.decode(), refused=refused)
            await client.start_trainer()
            await client.ready(["/ip4/127.0.0.1/tcp/4001/p2p/12D3"], None)
            processes = await client.processes()
            tell("ready", pids=processes.pids, resident=processes.resident_bytes)
            sys.stdout.write("round 1: 2 contributors\n")
            sys.stdout.flush()
            nursery.start_soon(follow, client)
            async for _ in signals:
                tell("signal")
                if mode == "stubborn":
                    continue
                nursery.cancel_scope.cancel()
                return 0
    return 0


async def follow(client: SupervisorClient) -> None:
    async for event in client.events:
        match event:
            case EngineRestarted():
                engine = await client.start_engine(THETA_BYTES, MOMENTUM_BYTES, THETA_BYTES)
                pid = await engine_pid(engine)
                tell("engine again", engine=pid, fresh=engine.fresh, life=engine.life, told=event.life)
            case TrainerExited():
                tell("trainer exited", code=event.code, reason=event.reason, again=event.restart_in_s is not None)


if sys.argv[1] == "crash":
    sys.exit("no libp2p here")
if sys.argv[1] == "fall":
    sys.stderr.write("round 7 has two decisions\n")
    sys.exit(3)
sys.exit(trio.run(run, sys.argv[1]))
