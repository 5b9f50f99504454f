"""The nodes of a soak, and what is done to them. Everything here is owned: what this process starts ends with it."""

from __future__ import annotations

import contextlib
import shutil
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
from pathlib import Path

import psutil

from node.cli.local_swarm import LocalNode, LocalSwarm
from scripts.soaking.bridge import Bridge
from scripts.soaking.sweeper import Sweeper

GONE_S = 3.0
"""What a killed node may leave behind is gone after this time, at the latest."""


class SoakSwarm(LocalSwarm):
    """A local swarm on loopback or on a bridge, whose nodes can be killed in part, frozen, cut off, and replaced."""

    def __init__(
        self,
        directory: Path,
        *,
        nodes: int,
        run: str,
        overrides: Sequence[str],
        bridge: Bridge | None,
        sweeper: Sweeper,
        report: Callable[[str], None],
    ) -> None:
        self._bridge = bridge
        self._sweeper = sweeper
        self.left_behind: list[str] = []
        """Command lines of processes that outlived their node."""
        super().__init__(directory, nodes=nodes, run=run, overrides=overrides, device="cpu", threads=1, report=report)

    def host(self, index: int) -> str:
        return self._bridge.host(index) if self._bridge is not None else super().host(index)

    def launcher(self, index: int) -> Sequence[str]:
        return ("ip", "netns", "exec", self._bridge.namespaces[index]) if self._bridge is not None else ()

    # ------------------------------------------------------------ processes

    def processes(self, index: int) -> dict[str, psutil.Process]:
        """Role → process, of those that run now."""
        node = self.nodes[index]
        if not node.running:
            return {}
        found: dict[str, psutil.Process] = {}
        with contextlib.suppress(psutil.Error):
            supervisor = psutil.Process(node.pid)
            found["supervisor"] = supervisor
            for child in supervisor.children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    for word in child.cmdline():
                        if word.startswith("node."):
                            found[word.removeprefix("node.")] = child
        return found

    def strike(self, index: int, role: str) -> bool:
        """SIGKILL to one process of a node. False: it does not run at the moment."""
        process = self.processes(index).get(role)
        if process is None:
            return False
        try:
            process.kill()
        except psutil.NoSuchProcess:
            return False
        return True

    def freeze(self, index: int) -> list[psutil.Process]:
        """SIGSTOP to the whole node; `thaw` takes what this returns."""
        stopped = list(self.processes(index).values())
        for process in stopped:
            with contextlib.suppress(psutil.Error):
                process.suspend()
                self._sweeper.tell("stopped", process.pid)
        return stopped

    def thaw(self, stopped: Sequence[psutil.Process]) -> None:
        for process in stopped:
            with contextlib.suppress(psutil.Error):
                process.resume()
            self._sweeper.tell("continued", process.pid)

    def unplug(self, index: int) -> None:
        assert self._bridge is not None
        self._bridge.unplug(index)

    def plug(self, index: int) -> None:
        assert self._bridge is not None
        self._bridge.plug(index)

    def kill_whole(self, index: int) -> None:
        """SIGKILL to its supervisor; nothing of it may be left."""
        processes = list(self.processes(index).values())
        self.kill(index)
        self.look_for_survivors(processes)

    def ask_to_leave(self, index: int) -> Future[float]:
        """SIGTERM. Returns at once; `has_left` says when it has, and the result how many seconds that took."""
        node = self.nodes[index]
        process = node.process
        assert process is not None
        node.was_ended = True
        asked_s = time.monotonic()
        process.send_signal(signal.SIGTERM)
        took: Future[float] = Future()

        def wait() -> None:  # in a thread of its own: the soak has other things to do when the process ends
            process.wait()
            took.set_result(time.monotonic() - asked_s)

        threading.Thread(target=wait, daemon=True).start()
        return took

    def has_left(self, index: int) -> bool:
        node = self.nodes[index]
        if node.process is not None and node.ended is None:
            node.ended = node.process.poll()
        return node.ended is not None

    def look_for_survivors(self, processes: Sequence[psutil.Process]) -> None:
        _, alive = psutil.wait_procs(list(processes), timeout=GONE_S)
        for process in alive:
            with contextlib.suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE:
                    self.left_behind.append(f"{process.pid} {' '.join(process.cmdline())}")

    # ------------------------------------------------------------ guests

    def make_guest(self, index: int) -> LocalNode:
        """A node with a new identity in home `index`; whoever lived there must have ended."""
        if index < len(self.nodes):
            assert not self.nodes[index].running
            shutil.rmtree(self.nodes[index].home.path, ignore_errors=True)
            self.nodes[index] = self._make_node(index)
        else:
            assert index == len(self.nodes), f"home {index} comes before home {len(self.nodes)}"
            self.nodes.append(self._make_node(index))
        return self.nodes[index]


def wait_ended(swarm: SoakSwarm, indices: Sequence[int], within_s: float) -> dict[int, float]:
    """SIGTERM to all of them together; seconds that each took. Those that take longer are killed, and missing here."""
    processes = {index: list(swarm.processes(index).values()) for index in indices}
    leaving = {index: swarm.ask_to_leave(index) for index in indices}
    futures.wait(leaving.values(), within_s)
    took = {index: one.result() for index, one in leaving.items() if one.done()}
    for index in indices:
        if index not in took:
            swarm.kill(index)
        swarm.has_left(index)
        swarm.look_for_survivors(processes[index])
    return took
