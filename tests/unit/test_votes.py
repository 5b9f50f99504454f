"""Votes, certificates, attempts and locks of one round."""

from __future__ import annotations

import pytest
from chain_samples import CheapKeyring, make_rules, peers

from protocol import chain, wire
from protocol.messages import NIL, Signed, Vote
from protocol.names import Digest, PeerId, digest
from protocol.votes import ATTEMPTS_KEPT, Agreement, Lock

FIVE = peers(5)
STATE = chain.genesis(make_rules(FIVE))
D, OTHER = digest(b"a decision"), digest(b"another")


def vote(sender: PeerId, attempt: int, phase: int, value: Digest) -> Signed[Vote]:
    message = Vote(base=STATE.base, attempt=attempt, phase=phase, value=value)
    return wire.sign(CheapKeyring(sender), sender, message)


def agreement() -> Agreement:
    return Agreement(electors=FIVE, quorum=3)


def test_a_certificate_is_a_quorum_of_equal_votes_of_one_attempt_and_phase() -> None:
    votes = agreement()
    for sender, value in zip(FIVE, (D, OTHER, D, NIL), strict=False):
        assert votes.add(vote(sender, 0, 1, value)) is None
    assert votes.certificate(0, 1) is None
    assert votes.add(vote(FIVE[4], 1, 1, D)) is None
    assert votes.add(vote(FIVE[4], 0, 2, D)) is None
    assert votes.certificate(0, 1) is None
    votes.add(vote(FIVE[4], 0, 1, D))
    made = votes.certificate(0, 1)
    assert made is not None
    assert made[0] == D
    assert [signed.sender for signed in made[1].votes] == [FIVE[0], FIVE[2], FIVE[4]]


def test_nil_certifies_nothing() -> None:
    votes = agreement()
    for sender in FIVE:
        votes.add(vote(sender, 0, 2, NIL))
    assert votes.certificate(0, 2) is None
    assert votes.nils(0, 2) == 5


def test_the_first_vote_counts_and_the_second_is_named() -> None:
    votes = agreement()
    votes.add(vote(FIVE[0], 0, 1, D))
    assert votes.add(vote(FIVE[0], 0, 1, D)) is None
    assert "twice" in (votes.add(vote(FIVE[0], 0, 1, OTHER)) or "")
    kept = votes.of(FIVE[0], 0, 1)
    assert kept is not None
    assert kept.message.value == D


@pytest.mark.parametrize(("sender", "phase", "attempt"), [("Stranger", 1, 0), (FIVE[0], 3, 0), (FIVE[0], 0, 0)])
def test_votes_that_cannot_be_are_named(sender: PeerId, phase: int, attempt: int) -> None:
    assert agreement().add(vote(sender, attempt, phase, D)) is not None


def test_undecidable_counts_the_electors_not_heard_from() -> None:
    votes = agreement()
    votes.add(vote(FIVE[0], 0, 1, NIL))
    votes.add(vote(FIVE[1], 0, 1, NIL))
    assert not votes.undecidable(0, 1)
    votes.add(vote(FIVE[2], 0, 1, D))
    assert not votes.undecidable(0, 1)
    votes.add(vote(FIVE[3], 0, 1, OTHER))
    assert votes.undecidable(0, 1)


def test_more_than_n_minus_q_electors_take_me_along() -> None:
    votes = agreement()
    votes.add(vote(FIVE[0], 7, 1, NIL))
    votes.add(vote(FIVE[1], 4, 2, NIL))
    assert votes.later_attempt(0) is None
    votes.add(vote(FIVE[2], 2, 1, NIL))
    assert votes.later_attempt(0) == 2
    assert votes.later_attempt(2) is None


def test_one_elector_cannot_fill_the_memory() -> None:
    votes = agreement()
    for attempt in range(1000):
        votes.add(vote(FIVE[0], attempt, 1, NIL))
    assert len(votes._votes) == ATTEMPTS_KEPT
    assert votes.of(FIVE[0], 999, 1) is not None
    assert votes.of(FIVE[0], 0, 1) is None


def test_a_certificate_that_comes_late_is_still_found() -> None:
    votes = agreement()
    for attempt in range(3):
        for sender in FIVE[:3]:
            votes.add(vote(sender, attempt, 2, D if attempt == 0 and sender != FIVE[2] else NIL))
    assert votes.commit_certificates() == []
    votes.add(vote(FIVE[3], 0, 2, D))
    ((attempt, decision, _),) = votes.commit_certificates()
    assert (attempt, decision) == (0, D)


@pytest.mark.parametrize(
    ("lock", "decision", "valid_attempt", "may"),
    [
        (None, D, None, True),
        (None, D, 1, True),
        (Lock(attempt=1, decision=D), D, None, True),
        (Lock(attempt=1, decision=OTHER), D, None, False),
        (Lock(attempt=1, decision=OTHER), D, 0, False),
        (Lock(attempt=1, decision=OTHER), D, 1, True),
        (Lock(attempt=1, decision=OTHER), D, 2, True),
        (Lock(attempt=2, decision=D), D, 0, True),
        (None, D, 3, False),
        (None, D, 4, False),
    ],
)
def test_a_lock_yields_only_to_a_certificate_that_is_not_older(
    lock: Lock | None, decision: Digest, valid_attempt: int | None, may: bool
) -> None:
    votes = agreement()
    votes.lock = lock
    assert votes.may_vote(decision, attempt=3, valid_attempt=valid_attempt) is may
