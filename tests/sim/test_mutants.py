"""Protocols that are broken on purpose: the same schedules must notice each of them.

In the profile `duel`, whoever commits a round first is cut off at that moment and others die: what the cut-off peer
knows must bind the rest. The unbroken protocol passes the very same seeds.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sim_profiles import build, play
from sim_sharing import shared_work
from sim_world import Switches, Violation, World

from protocol.messages import Certificate
from protocol.names import Digest
from protocol.votes import Agreement

SEEDS = 40


def caught(make: Callable[[int], World]) -> str | None:
    """What the first schedule that fails says; None if all pass."""
    with shared_work():
        for seed in range(SEEDS):
            try:
                play(make(seed), "duel")
            except Violation as violation:
                return str(violation)
    return None


def duel(**switches: bool) -> Callable[[int], World]:
    return lambda seed: build("duel", seed, 3, switches=Switches(accuse=False, **switches))


@pytest.mark.slow
def test_voting_without_locks_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Agreement, "may_vote", lambda self, decision, *, attempt, valid_attempt: True)
    found = caught(duel())
    assert found is not None
    assert found.startswith("I1")


@pytest.mark.slow
def test_one_phase_voting_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def phase_one_decides(self: Agreement) -> list[tuple[int, Digest, Certificate]]:
        made = [(attempt, self.certificate(attempt, 1)) for attempt, phase in sorted(self._votes) if phase == 1]
        return [(attempt, *found) for attempt, found in made if found is not None]

    monkeypatch.setattr(Agreement, "commit_certificates", phase_one_decides)
    found = caught(duel())
    assert found is not None
    assert found.startswith("I1")


@pytest.mark.slow
def test_votes_that_are_not_durable_are_caught() -> None:
    found = caught(duel(forget_votes=True))
    assert found is not None
    # Whoever is seen voting twice is not listened to any more, which saves I1 and costs the rounds that need it.
    assert found.startswith(("I1", "I5"))


def test_freezing_a_contribution_twice_is_caught() -> None:
    found = caught(duel(freeze_twice=True))
    assert found is not None
    assert found.startswith(("I2", "I3"))
