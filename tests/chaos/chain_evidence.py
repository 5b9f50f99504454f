"""What a chain on disk says of work: who was counted with which units and tokens, recomputed from the commits alone."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from node.cli.runs import HomeRun
from node.daemon.chain_log import HEADER_BYTES, ChainLog, FrameKind
from node.home import Home
from protocol.messages import Commit
from protocol.names import PeerId
from protocol.wire import decode_commit


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """All that the commits of one chain count."""

    rounds: int
    reforms: int
    lineages: tuple[str, ...]
    """Hex, in the order in which they follow each other."""
    part_tokens: dict[PeerId, int]
    """A token that is counted in every part is as many as there are parts."""
    twice: tuple[str, ...]
    """Units that are done in two contributions: none, if all is well."""


def read_chain(home: Home, run: HomeRun, name: str = "chain.log") -> Counted:
    """Of the node's newest chain. A copy is read: the log is its daemon's."""
    commits: list[Commit] = []
    reforms = 0
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory) / "chain.log"
        shutil.copyfile(home.run_directory(run.run_id) / name, copy)
        log = ChainLog(copy, run.run_id)
        try:
            for frame in log.frames(HEADER_BYTES):
                if frame.kind is FrameKind.COMMIT:
                    commits.append(decode_commit(frame.payload))
                elif frame.kind is FrameKind.REFORM:
                    reforms += 1
        finally:
            log.close()
    return counted(commits, reforms)


def counted(commits: list[Commit], reforms: int) -> Counted:
    done: Counter[tuple[int, int]] = Counter()
    tokens: Counter[PeerId] = Counter()
    for commit in commits:
        roster = commit.roster.message
        for bit, ready in enumerate(roster.readys):
            values = [
                value
                for value, header in zip(tokens_by_part(ready.message.tokens), commit.headers, strict=False)
                if header is not None and header.message.bitmap >> bit & 1
            ]
            tokens[ready.sender] += sum(values)
            if values:
                spans = ready.message.ranges_done
                done.update((span.epoch, unit) for span in spans for unit in range(span.start, span.stop))
    rounds = [commit.roster.message.base.round for commit in commits]
    assert rounds == list(range(len(rounds))), "the chain on disk has a hole"
    return Counted(
        rounds=len(commits),
        reforms=reforms,
        lineages=tuple(dict.fromkeys(commit.roster.message.base.lineage.hex() for commit in commits)),
        part_tokens=dict(tokens),
        twice=tuple(f"unit {unit} of epoch {epoch}" for (epoch, unit), times in done.items() if times > 1),
    )


def tokens_by_part(runs: tuple[tuple[int, int], ...]) -> list[int]:
    return [value for count, value in runs for _ in range(count)]
