"""`scripts/simulate`: many schedules, or one with its trace."""

from __future__ import annotations

import argparse
import sys
import time

from sim_profiles import PROFILES, build, play
from sim_sharing import shared_work
from sim_world import Violation


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def main() -> int:
    profiles = "\n".join(f"  {name:10} {profile.says}" for name, profile in PROFILES.items())
    parser = argparse.ArgumentParser(
        description="Plays random schedules against the protocol and checks its invariants after every event.",
        epilog=f"profiles:\n{profiles}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--profile", choices=PROFILES, default="crashy")
    parser.add_argument("--peers", type=int, default=4, help="founders (the profile adds its joiners)")
    parser.add_argument("--seeds", type=int, default=100, help="how many schedules, from --first on")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, help="replay this one and print its trace")
    parser.add_argument("--tail", type=int, default=200, help="lines of the trace to print; 0: all")
    given = parser.parse_args()
    if not 1 <= given.peers <= 26 - PROFILES[given.profile].joiners:
        parser.error(f"--peers {given.peers}: choose 1 to {26 - PROFILES[given.profile].joiners}")
    seeds = [given.seed] if given.seed is not None else range(given.first, given.first + given.seeds)
    started_s, events, commits = time.perf_counter(), 0, 0
    for seed in seeds:
        with shared_work():
            world = build(given.profile, seed, given.peers, trace=given.seed is not None)
            failure: Exception | None = None
            try:
                play(world, given.profile)
            except Exception as error:  # noqa: BLE001 - whatever a schedule provokes is its result
                failure = error
        events, commits = events + world.events, commits + world.oracle.commits
        if world.trace is not None:
            say("\n".join(world.trace[-given.tail :] if given.tail else world.trace))
        if failure is not None:
            say(f"{type(failure).__name__} in seed {seed} at {world.now_s:.3f} s: {failure}")
            if given.seed is None:
                say(f"replay: scripts/simulate --profile {given.profile} --peers {given.peers} --seed {seed}")
            elif not isinstance(failure, Violation):
                raise failure
            return 1
    seconds = time.perf_counter() - started_s
    say(
        f"{len(seeds)} schedules of {given.profile!r} with {given.peers} founders: no violation; "
        f"{commits} commits, {events} events, {len(seeds) / seconds:.1f} schedules/s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
