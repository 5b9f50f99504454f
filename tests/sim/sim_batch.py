"""Many schedules over the cores, and a table of what they were."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from sim_profiles import PROFILES, build, play
from sim_sharing import shared_work
from sim_world import Violation

CHUNK = 20
"""Schedules that a process plays before it reports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Schedules of one kind: seeds `first` … `first + count - 1`."""

    profile: str
    peers: int
    first: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """What came of the schedules of a cell."""

    profile: str
    peers: int
    schedules: int
    commits: int
    events: int
    failures: tuple[tuple[int, str], ...]
    """(seed, what was violated)"""
    cpu_s: float
    longest_s: float
    """The longest that a connected quorum took for a commit."""


def replay_command(profile: str, peers: int, seed: int) -> str:
    return f"scripts/simulate --profile {profile} --peers {peers} --seed {seed}"


def spread(profiles: Sequence[str], sizes: Sequence[int], schedules: int, first: int = 0) -> list[Cell]:
    """`schedules` as evenly as they go over the profiles, and over the sizes that each is for."""
    cells = []
    for number, profile in enumerate(profiles):
        share = schedules // len(profiles) + (number < schedules % len(profiles))
        kind = PROFILES[profile]
        fitting = [size for size in sizes if kind.least <= size <= kind.most]
        if not fitting:
            # Better the nearest size than none.
            fitting = [min(max(sizes[0], kind.least), kind.most)]
        for index, peers in enumerate(fitting):
            count = share // len(fitting) + (index < share % len(fitting))
            cells += [Cell(profile=profile, peers=peers, first=first, count=count)] if count else []
    return cells


def play_cell(cell: Cell) -> Tally:
    started_s = time.process_time()
    commits = events = 0
    longest_s = 0.0
    failures: list[tuple[int, str]] = []
    for seed in range(cell.first, cell.first + cell.count):
        with shared_work():
            world = build(cell.profile, seed, cell.peers)
            try:
                play(world, cell.profile)
            except Violation as violation:
                failures.append((seed, str(violation)))
            except Exception as error:  # noqa: BLE001 - whatever a schedule provokes is its result
                failures.append((seed, f"{type(error).__name__}: {error}"))
        commits, events = commits + world.oracle.commits, events + world.events
        longest_s = max(longest_s, world.watch.longest_s)
    return Tally(
        profile=cell.profile,
        peers=cell.peers,
        schedules=cell.count,
        commits=commits,
        events=events,
        failures=tuple(failures),
        cpu_s=time.process_time() - started_s,
        longest_s=longest_s,
    )


def chunks(cells: Iterable[Cell]) -> Iterator[Cell]:
    for cell in cells:
        size = max(1, CHUNK * 5 // cell.peers) if cell.peers > 5 else CHUNK
        for start in range(0, cell.count, size):
            yield Cell(
                profile=cell.profile,
                peers=cell.peers,
                first=cell.first + start,
                count=min(size, cell.count - start),
            )


def play_cells(cells: Iterable[Cell], *, jobs: int, within_s: float | None = None) -> Iterator[Tally]:
    """Plays all, `jobs` processes at a time, and hands out tallies as they come, the largest swarms first.

    Raises `multiprocessing.TimeoutError` when they are not done `within_s`; no process outlives the iteration.
    """
    work = sorted(chunks(cells), key=lambda cell: -cell.peers)
    if jobs == 1:
        yield from map(play_cell, work)
        return
    deadline_s = None if within_s is None else time.monotonic() + within_s
    with multiprocessing.get_context("spawn").Pool(
        jobs, initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_IGN)
    ) as pool:  # Ctrl-C is for who waits for them
        arriving = pool.imap_unordered(play_cell, work)
        for _ in work:
            yield arriving.next(None if deadline_s is None else max(0.1, deadline_s - time.monotonic()))


def cores() -> int:
    return len(os.sched_getaffinity(0))


def table(tallies: Iterable[Tally]) -> str:
    """One line per profile, in Markdown."""
    lines = [
        "| profile | peers | schedules | commits | events | violations | core-s | per core-s | longest wait |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    ordered = sorted(tallies, key=lambda tally: list(PROFILES).index(tally.profile))
    everything = list(ordered)
    for profile, group in itertools.groupby(ordered, key=lambda tally: tally.profile):
        lines.append(_line(profile, list(group)))
    lines.append(_line("all", everything))
    return "\n".join(lines)


def _line(name: str, tallies: Sequence[Tally]) -> str:
    sizes = sorted({tally.peers for tally in tallies})
    schedules, cpu_s = sum(tally.schedules for tally in tallies), sum(tally.cpu_s for tally in tallies)
    peers = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]}–{sizes[-1]}"
    return (
        f"| {name} | {peers} | {schedules:,} | {sum(tally.commits for tally in tallies):,} | "
        f"{sum(tally.events for tally in tallies):,} | {sum(len(tally.failures) for tally in tallies)} | "
        f"{cpu_s:.0f} | {schedules / max(cpu_s, 1e-9):.1f} | {max(tally.longest_s for tally in tallies):.0f} s |"
    )
