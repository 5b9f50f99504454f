"""`scripts/simulate`: many schedules and their table, or one with its trace."""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import sys
import time
from datetime import UTC, datetime

import sim_record
from sim_batch import Tally, cores, play_cells, replay_command, spread, table
from sim_profiles import PROFILES, build, play
from sim_sharing import shared_work

PROGRESS_EVERY_S = 60.0
INTERRUPTED = 130


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def sizes(text: str) -> list[int]:
    first, _, last = text.partition("-")
    try:
        found = list(range(int(first), int(last or first) + 1))
    except ValueError:
        found = []
    if not found or found[0] < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of peers; say 5, or 3-7")
    return found


def main() -> int:
    profiles = "\n".join(f"  {name:12} {profile.says}" for name, profile in PROFILES.items())
    parser = argparse.ArgumentParser(
        description="Plays random schedules against the protocol and checks its invariants after every event.",
        epilog=f"profiles:\n{profiles}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--profile", choices=[*PROFILES, "all"], default="all")
    parser.add_argument(
        "--peers", type=sizes, default=[3, 4, 5, 6, 7], help="5, or 3-7 (the profile's joiners included)"
    )
    parser.add_argument("--seeds", type=int, default=100, help="how many schedules, over all profiles and sizes")
    parser.add_argument("--first", type=int, default=0, help="the first seed of each profile and size")
    parser.add_argument("--jobs", type=int, default=cores(), help="processes (default: one a core)")
    parser.add_argument("--seed", type=int, help="replay this one and print its trace")
    parser.add_argument("--tail", type=int, default=200, help="lines of the trace to print; 0: all")
    parser.add_argument(
        "--record", action="store_true", help="put the figures into docs/simulation.json and docs/results.md"
    )
    given = parser.parse_args()
    if given.seed is not None:
        if given.profile == "all" or len(given.peers) > 1:
            parser.error("--seed needs one --profile and one number of --peers")
        return replay(given.profile, given.peers[0], given.seed, given.tail)
    if given.record and given.profile != "all":
        parser.error("--record is for all profiles together; leave --profile out")
    return many(given)


def many(given: argparse.Namespace) -> int:
    """All that was asked for; Ctrl-C ends it with the figures of what was played."""
    chosen = list(PROFILES) if given.profile == "all" else [given.profile]
    cells = spread(chosen, given.peers, given.seeds, given.first)
    planned = sum(cell.count for cell in cells)
    tallies: list[Tally] = []
    told_s = time.monotonic()
    interrupted = False
    try:
        for tally in play_cells(cells, jobs=given.jobs):
            tallies.append(tally)
            for seed, what in tally.failures:
                say(f"{what}\nreplay: {replay_command(tally.profile, tally.peers, seed)}")
            if time.monotonic() - told_s >= PROGRESS_EVERY_S:
                told_s = time.monotonic()
                sys.stderr.write(f"{sum(tally.schedules for tally in tallies):,} of {planned:,} schedules\n")
    except KeyboardInterrupt:
        interrupted = True
        say(f"interrupted: {sum(tally.schedules for tally in tallies):,} of {planned:,} schedules were played")
    if tallies:
        say(table(tallies))
    if interrupted:
        return INTERRUPTED
    if given.record:
        batch = sim_record.Batch(
            command=shlex.join(["scripts/simulate", *sys.argv[1:]]),
            date=datetime.now(UTC).strftime("%Y-%m-%d"),
            machine=f"{os.cpu_count()} cores {platform.machine()}",
            sizes=(min(given.peers), max(given.peers)),
            rows=sim_record.rows_of(tallies),
        )
        sim_record.record(batch)
    return 1 if any(tally.failures for tally in tallies) else 0


def replay(profile: str, peers: int, seed: int, tail: int) -> int:
    failure: Exception | None = None
    try:
        with shared_work():
            world = build(profile, seed, peers, trace=True)
            try:
                play(world, profile)
            except Exception as error:  # noqa: BLE001 - whatever a schedule provokes is its result
                failure = error
    except ValueError as error:
        say(str(error))
        return 2
    trace = world.trace or []
    say("\n".join(trace[-tail:] if tail else trace))
    if failure is None:
        say(f"no violation in {world.now_s:.0f} s: {world.oracle.commits} commits, {world.events} events")
        return 0
    say(f"{type(failure).__name__} at {world.now_s:.3f} s: {failure}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
