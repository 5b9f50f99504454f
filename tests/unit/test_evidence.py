"""Evidence: what shows an offence, what does not, and how the chain leaves the culprit out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from chain_samples import KEYRING, CheapKeyring, make_commit, make_rules, peers, plain_commit, sign_ready, sign_roster

from protocol import chain, validity, wire
from protocol.commits import InvalidCommit, verify_commit
from protocol.evidence import check_evidence, evidence_of, wrong_mean
from protocol.fields import WireError
from protocol.leases import count
from protocol.messages import (
    NIL,
    Evidence,
    Join,
    Message,
    Offence,
    PartHeader,
    Proposal,
    Ready,
    Roster,
    Signed,
    Vote,
)
from protocol.names import PeerId, digest

PEERS = peers(4)
RULES = make_rules(PEERS)
STATE = chain.genesis(RULES)
ROSTER = sign_roster(STATE, RULES, [sign_ready(STATE, RULES, peer) for peer in PEERS])
ROSTER_ID = wire.roster_id(ROSTER)
HEADER = PartHeader(roster_id=ROSTER_ID, part=1, bitmap=3, hash=digest(b"one"), length=4)
VOTE = Vote(base=STATE.base, attempt=2, phase=1, value=digest(b"one"))
PROPOSAL = Proposal(base=STATE.base, attempt=1, roster_id=ROSTER_ID, headers=(None,) * RULES.part_count)
READY = sign_ready(STATE, RULES, PEERS[0]).message
OTHER_BASE = replace(STATE.base, round=7)


def signed(message: Message, peer: PeerId = PEERS[0]) -> Signed[Any]:
    return wire.sign(CheapKeyring(peer), peer, message)


OFFENCES: dict[Offence, tuple[Message, Message]] = {
    Offence.TWO_READYS: (READY, replace(READY, norm=2.0)),
    Offence.TWO_ROSTERS: (ROSTER.message, replace(ROSTER.message, durations_s=(9.0, 9.0))),
    Offence.TWO_PROPOSALS: (PROPOSAL, replace(PROPOSAL, roster_id=digest(b"other"))),
    Offence.TWO_VOTES: (VOTE, replace(VOTE, value=NIL)),
    Offence.TWO_HEADERS: (HEADER, replace(HEADER, bitmap=7)),
}
ALLOWED: dict[str, tuple[Message, Message]] = {
    "READY said again": (READY, READY),
    "READY that got work": (Ready(base=STATE.base), READY),
    "READY of the next round": (READY, replace(READY, base=OTHER_BASE)),
    "ROSTER of the next attempt": (ROSTER.message, replace(ROSTER.message, attempt=1)),
    "PROPOSAL of the next attempt": (PROPOSAL, replace(PROPOSAL, attempt=2)),
    "PROPOSAL of another lineage": (PROPOSAL, replace(PROPOSAL, base=replace(STATE.base, lineage=digest(b"x")))),
    "vote of the other phase": (VOTE, replace(VOTE, phase=2)),
    "vote with other reasons": (replace(VOTE, value=NIL), replace(VOTE, value=NIL, failed_edges=PEERS[1:])),
    "results of two parts": (HEADER, replace(HEADER, part=2)),
    "results of two rosters": (HEADER, replace(HEADER, roster_id=digest(b"x"))),
    "JOIN twice": (Join(base=STATE.base, units_wanted=1), Join(base=STATE.base, units_wanted=2)),
    "two kinds": (READY, VOTE),
}


@pytest.mark.parametrize("offence", OFFENCES)
def test_two_that_exclude_each_other_are_evidence_in_few_bytes(offence: Offence) -> None:
    first, second = (signed(message) for message in OFFENCES[offence])
    evidence = evidence_of(first, second)
    assert evidence is not None
    assert evidence == evidence_of(second, first), "the same whoever saw which first"
    assert (evidence.offence, evidence.culprit) == (offence, PEERS[0])
    assert check_evidence(RULES, evidence, KEYRING) is None
    data = wire.encode(signed(evidence, PEERS[2]))
    assert len(data) < 2048
    assert wire.decode(data).message == evidence
    assert check_evidence(RULES, replace(evidence, culprit=PEERS[1]), KEYRING) is not None
    assert "another run" in str(check_evidence(replace(RULES, run=digest(b"x")), evidence, KEYRING)) or evidence.headers
    for part in ("statements", "headers"):
        pair = getattr(evidence, part)
        if pair:
            assert check_evidence(RULES, replace(evidence, **{part: (pair[0], pair[0])}), KEYRING) is not None
    if evidence.statements:
        (one, _), other = evidence.statements
        forged = replace(evidence, statements=((one, b"?"), other))
        assert "did not sign" in str(check_evidence(RULES, forged, KEYRING))


@pytest.mark.parametrize("why", ALLOWED)
def test_what_a_peer_may_sign_is_no_evidence(why: str) -> None:
    assert evidence_of(*(signed(message) for message in ALLOWED[why])) is None


def test_two_peers_are_no_culprit() -> None:
    assert evidence_of(signed(VOTE), signed(replace(VOTE, value=NIL), PEERS[1])) is None


def test_a_statement_of_one_kind_does_not_pass_for_another() -> None:
    """A ROSTER and a PROPOSAL of one attempt say as much of themselves; their signatures tell them apart."""
    first, second = signed(ROSTER.message), signed(replace(PROPOSAL, attempt=0))
    statements = tuple(
        (statement, one.signature)
        for one in (first, second)
        if (statement := wire.statement_of(one.message, one.body)) is not None
    )
    evidence = Evidence(culprit=PEERS[0], offence=Offence.TWO_ROSTERS, statements=statements)
    assert "did not sign" in str(check_evidence(RULES, evidence, KEYRING))


def test_a_wrong_mean_needs_its_root_s_signature_and_its_round() -> None:
    evidence = wrong_mean(STATE.base, signed(HEADER))
    assert check_evidence(RULES, evidence, KEYRING) is None
    assert check_evidence(RULES, replace(evidence, culprit=PEERS[1]), KEYRING) is not None
    assert wire.decode(wire.encode(signed(evidence))).message == evidence
    with pytest.raises(WireError, match="evidence"):
        wire.decode(wire.encode(signed(replace(evidence, base=None))))


# ---------------------------------------------------------------- the chain


def with_evidence(culprit: PeerId) -> Signed[Roster]:
    """A roster that leaves the culprit out, over everyone else."""
    evidence = evidence_of(signed(READY, culprit), signed(replace(READY, norm=2.0), culprit))
    assert evidence is not None
    others = [sign_ready(STATE, RULES, peer) for peer in PEERS if peer != culprit]
    made = sign_roster(STATE, RULES, others)
    return signed(replace(made.message, evidence=(evidence,)), made.sender)


def test_who_is_caught_is_out_for_good() -> None:
    culprit = next(peer for peer in PEERS if peer != chain.coordinator(STATE, 0))
    roster = with_evidence(culprit)
    assert validity.check_roster(STATE, RULES, roster, KEYRING, held_readys_longer_than_grace=PEERS) is None
    commit = make_commit(STATE, RULES, roster)
    verify_commit(STATE, RULES, commit, KEYRING)
    after = chain.next_state(STATE, RULES, commit, digest(b"after"))
    assert after.banned == (culprit,)
    assert chain.member(after, culprit) is None
    assert culprit not in after.electors
    before = sum(count(entry.lease) for _, entry in STATE.members)
    leased = sum(count(entry.lease) for _, entry in after.members) + count(after.returned)
    done = sum(count(ready.message.ranges_done) for ready in roster.message.readys)
    assert leased >= before - done, "what the culprit held is leased again"
    join = wire.sign(CheapKeyring(culprit), culprit, Join(base=after.base, units_wanted=1))
    assert "left out for good" in str(validity.check_join(after, RULES, join))
    later = chain.next_state(after, RULES, plain_commit(after, RULES), digest(b"later"))
    assert later.banned == (culprit,)


def test_the_ban_is_part_of_the_commit_s_name() -> None:
    """Two chains that differ only in who is banned are two chains."""
    commit = plain_commit(STATE, RULES)
    other = replace(STATE, banned=("Somebody",))
    assert chain.commit_hash(STATE, RULES, commit) != chain.commit_hash(other, RULES, commit)


def test_the_last_member_is_not_left_out() -> None:
    rules = make_rules(PEERS[:1])
    state = chain.genesis(rules)
    evidence = evidence_of(signed(READY), signed(replace(READY, norm=2.0)))
    assert evidence is not None
    made = sign_roster(state, rules, [sign_ready(state, rules, PEERS[0])])
    commit = make_commit(state, rules, made)
    roster = signed(replace(made.message, evidence=(evidence,)), made.sender)
    after = chain.next_state(state, rules, replace(commit, roster=roster), digest(b"after"))
    assert (after.banned, [peer for peer, _ in after.members]) == ((), [PEERS[0]])


def test_a_reform_with_somebody_who_is_banned_is_none() -> None:
    from chain_samples import make_reform

    from protocol.commits import verify_reform

    state = replace(STATE, banned=("Outsider",))
    with pytest.raises(InvalidCommit, match="left it out"):
        verify_reform(state, RULES, make_reform(state, (*PEERS[:2], "Outsider"), k=0), KEYRING)
