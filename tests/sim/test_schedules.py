"""Random schedules: safety after every event, progress once the weather clears (protocol section 12).

A failure prints how to replay it with its trace. `scripts/simulate` plays as many more as one likes.
"""

from __future__ import annotations

import pytest
from sim_profiles import build, play
from sim_sharing import shared_work
from sim_world import Violation

SHORT = [
    ("calm", 1, 10),
    ("calm", 2, 10),
    ("calm", 3, 10),
    ("calm", 5, 10),
    ("lossy", 1, 10),
    ("lossy", 2, 10),
    ("lossy", 3, 10),
    ("lossy", 4, 10),
    ("crashy", 1, 10),
    ("crashy", 2, 10),
    ("crashy", 3, 15),
    ("crashy", 4, 10),
    ("torn", 1, 10),
    ("torn", 2, 10),
    ("torn", 3, 10),
    ("duel", 3, 15),
    ("duel", 4, 5),
    ("partition", 2, 8),
    ("partition", 3, 8),
    ("partition", 4, 4),
    ("churn", 1, 6),
    ("churn", 2, 6),
    ("small", 1, 8),
    ("pair", 1, 10),
    ("joiners", 1, 8),
    ("open", 1, 4),
    ("open", 4, 6),
    ("few", 4, 4),
    ("few", 7, 4),
    ("stalling", 1, 8),
    ("stalling", 3, 8),
]


@pytest.mark.slow
@pytest.mark.parametrize(("profile", "peers", "seeds"), SHORT)
def test_no_schedule_breaks_an_invariant(profile: str, peers: int, seeds: int) -> None:
    for seed in range(seeds):
        with shared_work():
            world = build(profile, seed, peers)
            try:
                play(world, profile)
            except Violation as violation:
                pytest.fail(
                    f"{violation}\nreplay: scripts/simulate --profile {profile} --peers {peers} --seed {seed}",
                    pytrace=False,
                )


def test_a_schedule_replays_exactly() -> None:
    traces = []
    for _ in range(2):
        world = build("crashy", 7, 3, trace=True)
        play(world, "crashy")
        traces.append(world.trace)
    assert traces[0] == traces[1]
    assert len(traces[0] or ()) > 100
