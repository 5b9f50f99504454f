"""CI's schedules are played beside the tests of real processes, and looked at last (`sim_beside`)."""

from __future__ import annotations

import pytest
from sim_beside import Beside

SCHEDULES = "test_schedules.py"
PLAYING = pytest.StashKey[Beside]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name == SCHEDULES)


def pytest_collection_finish(session: pytest.Session) -> None:
    """With nothing to wait for, the fixture plays them itself, on all that the cores have."""
    wanted = any(
        item.path.name == SCHEDULES and "tallies" in getattr(item, "fixturenames", ()) for item in session.items
    )
    others = any(item.get_closest_marker("swarm") or item.get_closest_marker("chaos") for item in session.items)
    if wanted and others and not session.config.option.collectonly:
        session.config.stash[PLAYING] = Beside()


def pytest_unconfigure(config: pytest.Config) -> None:
    if PLAYING in config.stash:
        config.stash[PLAYING].close()


@pytest.fixture(scope="session")
def played_beside(request: pytest.FixtureRequest) -> Beside | None:
    return request.config.stash.get(PLAYING, None)
