"""Protocols that are broken on purpose: schedules must notice each of them, and the unbroken protocol passes the same.

Each mutant names the profile, the size and the seeds that show it. In the profile `duel`, whoever commits a round first
is cut off at that moment and others die: what the cut-off peer knows must bind the rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
from sim_profiles import build, play
from sim_sharing import shared_work
from sim_world import Switches, Violation

from protocol import chain, commits, peer, validity
from protocol.ballots import Ballots
from protocol.candidates import Candidate
from protocol.chain import ChainState
from protocol.journal import Journal, Promises
from protocol.judging import Judge
from protocol.messages import Certificate, Commit, Roster, Signed
from protocol.names import Base, Digest, PeerId
from protocol.record import Record
from protocol.rules import Rules
from protocol.votes import Agreement

WITHIN_S = 300.0
"""Deadline of one mutant, on a machine that has other things to do."""

Patch = pytest.MonkeyPatch


def no_lock(patch: Patch) -> None:
    patch.setattr(Agreement, "may_vote", lambda self, decision, *, attempt, valid_attempt: True)


def one_phase(patch: Patch) -> None:
    def phase_one_decides(self: Agreement) -> list[tuple[int, Digest, Certificate]]:
        made = [(attempt, self.certificate(attempt, 1)) for attempt, phase in sorted(self._votes) if phase == 1]
        return [(attempt, *found) for attempt, found in made if found is not None]

    patch.setattr(Agreement, "commit_certificates", phase_one_decides)


def quorum_over_the_roster(patch: Patch) -> None:
    """Half of those who are ready decide, not half of those who vote."""
    remember = Record.remember

    def lenient(self: Record, signed: Signed[Roster], *, problem: str | None) -> Candidate:
        here = {ready.sender for ready in signed.message.readys}.intersection(self.state.electors)
        self.quorum = self.agreement.quorum = self.rules.quorum.of(len(here))
        return remember(self, signed, problem=problem)

    patch.setattr(Record, "remember", lenient)
    patch.setattr(commits, "check_certificate", lambda *_: None)
    patch.setattr(validity, "quorum", lambda state, rules: 2)
    patch.setattr(peer.chain, "quorum", lambda state, rules: min(2, rules.quorum.of(len(state.electors))))


def demotion_by_certificate(patch: Patch) -> None:
    advance = chain._advance

    def by_certificate(state: ChainState, rules: Rules, commit: Commit) -> ChainState:
        advanced = advance(state, rules, commit)
        return replace(advanced, demoted=chain._next_demoted(state, commit.certificate.votes[0].message.attempt))

    patch.setattr(chain, "_advance", by_certificate)


def votes_without_bytes(patch: Patch) -> None:
    def content_known(self: Ballots, decision: Digest, certificate: Certificate) -> bool:
        return decision in self.record.contents and self.record.contents[decision][0] in self.record.candidates

    patch.setattr(Ballots, "_content_held", content_known)
    patch.setattr(Judge, "held", lambda self, signed, candidate: True)


def no_fence(patch: Patch) -> None:
    promises_at = peer.promises_at

    def forgetful(base: Base, data: bytes | None, *, lost: bool) -> Promises:
        promises = promises_at(base, data, lost=lost)
        return Promises(journal=promises.journal, fence=-1, barred=promises.barred)

    patch.setattr(peer, "promises_at", forgetful)


def lost_journal_is_a_new_one(patch: Patch) -> None:
    promises_at = peer.promises_at

    def forgetful(base: Base, data: bytes | None, *, lost: bool) -> Promises:
        promises = promises_at(base, data, lost=lost)
        return Promises(journal=Journal(), fence=-1) if lost else promises

    patch.setattr(peer, "promises_at", forgetful)


def two_electors(patch: Patch) -> None:
    def seated(prev: Digest, eligible: Sequence[PeerId], rules: Rules) -> tuple[PeerId, ...]:
        return tuple(sorted(eligible, key=lambda one: chain.elector_key(prev, one))[: rules.max_electors])

    patch.setattr(chain, "_seated", seated)


def nothing(patch: Patch) -> None:
    """The mutation is in the simulated node or engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    breaks: Callable[[Patch], None] = nothing
    switches: dict[str, bool] | None = None
    profile: str = "duel"
    peers: int = 3
    seeds: Sequence[int] = range(40)
    shows: tuple[str, ...] = ("I1",)
    """What the violation must begin with: any one of these."""
    accuse: bool = False
    """Whether accusing an honest peer counts as a violation, too."""


MUTANTS: dict[str, Mutant] = {
    "votes without locks": Mutant(breaks=no_lock),
    "one phase decides": Mutant(breaks=one_phase),
    "votes are not durable": Mutant(switches={"forget_votes": True}),
    "a lost journal is a new one": Mutant(breaks=lost_journal_is_a_new_one, profile="torn", peers=4),
    "the fence is ignored after a restart": Mutant(breaks=no_fence, profile="crashy", peers=4),
    "a contribution is frozen twice": Mutant(switches={"freeze_twice": True}, shows=("I2", "I3")),
    "takeover: parts are sent and summed again": Mutant(
        switches={"resend_parts": True}, profile="lossy", shows=("I2",)
    ),
    "a bitmap names who is not in the sum": Mutant(
        switches={"wrong_bitmap": True}, profile="lossy", peers=4, shows=("I2",)
    ),
    "own values stand in for an EMPTY part": Mutant(switches={"fill_empty": True}, profile="exchanges", peers=4),
    "the quorum is one of the roster": Mutant(breaks=quorum_over_the_roster, profile="partition", peers=5),
    "demotion by the certificate's attempt": Mutant(breaks=demotion_by_certificate, peers=4),
    "votes without the bytes on disk": Mutant(breaks=votes_without_bytes, profile="unable", peers=3, shows=("I2",)),
    "READY before the commit is applied": Mutant(switches={"early_ready": True}, profile="lossy", shows=("I3",)),
    "two electors": Mutant(breaks=two_electors, profile="small", shows=("I5",)),
    "counted work stays in the local model": Mutant(switches={"keep_counted": True}, profile="lossy", shows=("I3",)),
    "uncounted work is dropped": Mutant(switches={"drop_uncounted": True}, profile="lossy", shows=("I3",)),
}


def violation_of(mutant: Mutant, seed: int, switches: dict[str, bool] | None) -> str | None:
    with shared_work():
        world = build(mutant.profile, seed, mutant.peers, switches=Switches(accuse=mutant.accuse, **(switches or {})))
        try:
            play(world, mutant.profile)
        except Violation as violation:
            return str(violation)
    return None


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_the_mutant_is_caught_and_the_protocol_is_not(name: str) -> None:
    mutant, found, seed = MUTANTS[name], None, -1
    deadline_s = time.monotonic() + WITHIN_S
    with pytest.MonkeyPatch.context() as patch:
        mutant.breaks(patch)
        for seed in mutant.seeds:
            assert time.monotonic() < deadline_s, f"nothing was caught within {WITHIN_S:.0f} s, up to seed {seed}"
            found = violation_of(mutant, seed, mutant.switches)
            if found is not None:
                break
    assert found is not None, "no schedule notices"
    assert found.startswith(mutant.shows), f"seed {seed}: {found}"
    assert violation_of(mutant, seed, None) is None
