"""What the nodes say while they are disturbed: rounds, hashes, exclusions, memory. It never waits for a node."""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from node.cli.control import Control
from node.status import HistoryRound, Status
from scripts.soaking.swarm import SoakSwarm

SAMPLE_EVERY_S = 5.0
LOOK_EVERY_S = 0.4


@dataclass(kw_only=True)
class SeenRound:
    """One round of one lineage, as all nodes together tell of it."""

    first_s: float
    """When the first node had applied its commit, on the soak's clock."""
    seconds: float
    contributors: frozenset[str]
    excluded: dict[str, str]
    leader: str
    hashes: dict[str, set[int]]
    """State hash → nodes that hold it."""


@dataclass(kw_only=True)
class Life:
    """Samples of one process."""

    role: str
    times_s: list[float] = field(default_factory=list)
    resident_bytes: list[float] = field(default_factory=list)
    descriptors: list[float] = field(default_factory=list)


class Watch:
    """Call `look` often; it takes what has come and asks again."""

    def __init__(self, swarm: SoakSwarm, clock_s: float, samples: Path | None = None) -> None:
        """`clock_s`: the monotonic time that the soak counts from. `samples`: gets every one, a line of JSON each."""
        self._swarm = swarm
        self._samples = samples.open("w") if samples is not None else None
        self._began_s = clock_s
        self._began_unix_s = time.time() - (time.monotonic() - clock_s)
        self._pool = ThreadPoolExecutor(max_workers=16, thread_name_prefix="look")
        self._asked: dict[int, Future[Status | None]] = {}
        self._next_look_s: dict[int, float] = {}
        self._next_sample_s = 0.0
        self.unseen: set[int] = set()
        """Nodes that are frozen: they cannot answer."""
        self.rounds: dict[tuple[str, int], SeenRound] = {}
        self.latest: dict[int, Status] = {}
        self.answered_s: dict[int, float] = {}
        self.lives: dict[tuple[int, float], Life] = {}
        """By process id and its start."""
        self.unbalanced: dict[str, int] = {}
        """Peer → part-tokens that were missing from a status of it."""
        self.validation: tuple[int, float] | None = None
        """The newest (round, loss)."""

    @property
    def now_s(self) -> float:
        return time.monotonic() - self._began_s

    @property
    def newest_round(self) -> int:
        return max((number for _, number in self.rounds), default=-1)

    @property
    def main_lineage(self) -> str | None:
        """That most nodes are on, of those that run and are not frozen."""
        followed = Counter(
            status.lineage
            for index, status in self.latest.items()
            if self._swarm.nodes[index].running and index not in self.unseen and status.lineage
        )
        return max(followed, key=followed.__getitem__, default=None)

    def look(self) -> None:
        now_s = self.now_s
        for node in self._swarm.nodes:
            asked = self._asked.get(node.index)
            if asked is not None and asked.done():
                del self._asked[node.index]
                self._next_look_s[node.index] = now_s + LOOK_EVERY_S
                if (status := asked.result()) is not None:
                    self._take(node.index, status)
            elif asked is None and self._may_ask(node.index) and now_s >= self._next_look_s.get(node.index, 0.0):
                self._asked[node.index] = self._pool.submit(Control(node.home).status_now)
        if now_s >= self._next_sample_s:
            self._next_sample_s = now_s + SAMPLE_EVERY_S
            self._sample()

    def _may_ask(self, index: int) -> bool:
        return self._swarm.nodes[index].running and index not in self.unseen

    def _take(self, index: int, status: Status) -> None:
        now_s = self.now_s
        self.latest[index] = self._swarm.nodes[index].last = status
        self.answered_s[index] = now_s
        if status.work.exact.missing:
            self.unbalanced[status.peer_id] = status.work.exact.missing
        for line in status.history:
            self._take_round(index, line)
        if status.validation_loss is not None and (self.validation is None or status.round >= self.validation[0]):
            self.validation = status.round, status.validation_loss

    def _take_round(self, index: int, line: HistoryRound) -> None:
        key = line.lineage, line.round
        # All nodes share this machine's clock: when a busy machine lets us look does not matter.
        now_s = line.committed_unix_s - self._began_unix_s
        seen = self.rounds.get(key)
        if seen is None:
            self.rounds[key] = SeenRound(
                first_s=now_s,
                seconds=line.seconds,
                contributors=frozenset(line.contributors),
                excluded=dict(line.excluded),
                leader=line.leader,
                hashes={line.state_hash: {index}},
            )
            return
        if now_s < seen.first_s:
            seen.first_s, seen.seconds = now_s, line.seconds
        seen.hashes.setdefault(line.state_hash, set()).add(index)
        for peer, why in line.excluded.items():
            # Whoever saw the exchange knows more than who applied its commit.
            if why not in seen.excluded.get(peer, ""):
                seen.excluded[peer] = f"{seen.excluded[peer]} / {why}" if peer in seen.excluded else why

    def _sample(self) -> None:
        for node in self._swarm.nodes:
            if node.index in self.unseen:
                continue
            for role, process in self._swarm.processes(node.index).items():
                with contextlib.suppress(psutil.Error):
                    resident_bytes, descriptors = process.memory_info().rss, process.num_fds()
                    life = self.lives.setdefault((process.pid, process.create_time()), Life(role=role))
                    life.times_s.append(self.now_s)
                    life.resident_bytes.append(float(resident_bytes))
                    life.descriptors.append(float(descriptors))
                    self._write_sample(node.index, role, process.pid, resident_bytes, descriptors)
        if self._samples is not None:
            self._samples.flush()

    def _write_sample(self, node: int, role: str, pid: int, resident_bytes: int, descriptors: int) -> None:
        if self._samples is not None:
            line = {
                "at_s": round(self.now_s, 2),
                "node": node,
                "role": role,
                "pid": pid,
                "resident_bytes": resident_bytes,
                "descriptors": descriptors,
            }
            self._samples.write(json.dumps(line) + "\n")

    def close(self) -> None:
        if self._samples is not None:
            self._samples.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
