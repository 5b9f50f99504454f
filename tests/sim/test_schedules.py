"""Random schedules: safety after every event, progress once the weather clears (protocol section 12).

3,000 schedules of 3 to 7 peers over all profiles, 30 of 50 peers and three of 200, over all cores. A failure prints how
to replay it with its trace; `scripts/simulate` plays as many more as one likes.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import sim_record
from sim_batch import Cell, Tally, play_cells, replay_command
from sim_beside import Beside, cells, play_now
from sim_profiles import PROFILES, build, play
from sim_sharing import shared_work


@pytest.fixture(scope="module")
def tallies(played_beside: Beside | None) -> list[Tally]:
    return play_now() if played_beside is None else played_beside.result()


@pytest.mark.slow
@pytest.mark.parametrize("profile", PROFILES)
def test_no_schedule_breaks_an_invariant(profile: str, tallies: list[Tally]) -> None:
    played = [tally for tally in tallies if tally.profile == profile]
    failures = [
        f"{what}\nreplay: {replay_command(profile, tally.peers, seed)}"
        for tally in played
        for seed, what in tally.failures
    ]
    if failures:
        pytest.fail("\n".join(failures), pytrace=False)
    assert sum(tally.schedules for tally in played) >= 30
    assert sum(tally.commits for tally in played) >= 100


def test_as_many_schedules_as_are_promised() -> None:
    planned = cells()
    assert sum(cell.count for cell in planned if 3 <= cell.peers <= 7) >= 3000
    assert sum(cell.count for cell in planned if cell.peers == 50) >= 30
    assert sum(cell.count for cell in planned if cell.peers == 200) >= 3


def test_a_schedule_replays_exactly() -> None:
    traces = []
    for _ in range(2):
        world = build("crashy", 7, 3, trace=True)
        play(world, "crashy")
        traces.append(world.trace)
    assert traces[0] == traces[1]
    assert len(traces[0] or ()) > 100


def test_shared_work_changes_nothing() -> None:
    def trace() -> list[str] | None:
        world = build("exchanges", 3, 4, trace=True)
        play(world, "exchanges")
        return world.trace

    with shared_work():
        shared = trace()
    assert shared == trace()


def test_a_record_names_what_was_played_and_what_failed() -> None:
    tallies = list(play_cells([Cell(profile="calm", peers=3, first=0, count=2)], jobs=1))
    failed = replace(tallies[0], profile="lossy", failures=((1, "two commits"),))
    batch = sim_record.Batch(
        command="scripts/simulate --seeds 4",
        date="2026-12-01",
        machine="2 cores",
        sizes=(3, 3),
        rows=sim_record.rows_of([failed, *tallies]),
    )
    made = sim_record.section([batch])
    assert f"| 3 | 4 | {2 * tallies[0].commits:,} | {2 * tallies[0].events:,} | 1 |" in made
    assert "| calm | 2 |" in made
    assert "| lossy | 2 (**1**) |" in made
