"""READYs as they come in, when a coordinator goes, and what stands in its roster."""

from __future__ import annotations

import pytest
from chain_samples import CheapKeyring, make_rules, peers

from protocol import chain, planning, validity, wire
from protocol.assembly import Assembly, Pace, absent_after
from protocol.evidence import evidence_of
from protocol.messages import Evidence, Join, Leave, Ready, Signed
from protocol.names import PeerId
from protocol.rules import Rules

FIVE = peers(5)
RULES = make_rules(FIVE)
STATE = chain.genesis(RULES)


def ready(sender: PeerId, *, tokens: int = 8, norm: float = 1.0) -> Signed[Ready]:
    runs = ((RULES.part_count, tokens),) if tokens else ()
    message = Ready(base=STATE.base, tokens=runs, norm=norm, largest=0.1, parts_root=bytes(32))
    return wire.sign(CheapKeyring(sender), sender, message)


def join(sender: PeerId) -> Signed[Join]:
    return wire.sign(CheapKeyring(sender), sender, Join(base=STATE.base, units_wanted=2))


def leave(sender: PeerId) -> Signed[Leave]:
    return wire.sign(CheapKeyring(sender), sender, Leave(base=STATE.base))


def assembled(count: int, rules: Rules = RULES) -> Assembly:
    assembly = Assembly(state=STATE, rules=rules)
    for number, sender in enumerate(FIVE[:count]):
        assert assembly.add_ready(ready(sender), float(number)) is None
    return assembly


def test_nothing_is_due_before_a_quorum_of_electors() -> None:
    pace = Pace()
    assert assembled(2).due_s(same_round=set(FIVE[:2]), behind=set(), pace=pace, now_s=9.0) is None
    assert assembled(3).quorum_since_s == 2.0


def test_with_everyone_ready_the_roster_is_due_at_once() -> None:
    assert assembled(3).due_s(same_round=set(FIVE[:3]), behind=set(), pace=Pace(), now_s=2.0) == 2.0


def test_missing_members_are_waited_for_within_bounds() -> None:
    assembly, pace = assembled(3), Pace()
    due = {"same_round": set(FIVE[:4]), "behind": set(), "now_s": 2.0}
    assert assembly.due_s(pace=pace, **due) == pytest.approx(RULES.assembly_max_s)
    for _ in range(3):
        pace.learn(assembly)
    # Arrivals 0, 1, 2 s after the first: median 1, MAD 1, so 5 s after the first, which came at 0.
    assert assembly.due_s(pace=pace, **due) == pytest.approx(max(5.0, 2.0 + 2 * RULES.grace_s))
    assert (
        assembly.due_s(same_round=set(FIVE[:3]), behind=set(FIVE[3:4]), pace=pace, now_s=2.0) == 2.0 + 2 * RULES.grace_s
    )


def test_a_ready_with_work_replaces_one_without_and_nothing_else_does() -> None:
    assembly = Assembly(state=STATE, rules=RULES)
    assert assembly.add_ready(ready(FIVE[0], tokens=0), 0.0) is None
    assert assembly.contributors() == 0
    assert assembly.add_ready(ready(FIVE[0]), 1.0) is None
    assert assembly.contributors() == 1
    assert assembly.add_ready(ready(FIVE[0], tokens=0), 2.0) is None
    assert assembly.contributors() == 1
    assert assembly.add_ready(ready(FIVE[0], tokens=9), 3.0) is not None
    assert assembly.received_s[FIVE[0]] == 0.0


def test_every_voter_accepts_the_roster() -> None:
    assembly = assembled(4)
    assembly.add_join(join("Newcomer"))
    roster = assembly.roster(attempt=0, leaves={FIVE[4]: leave(FIVE[4])}, absent=())
    assert roster is not None
    leader = chain.coordinator(STATE, 0)
    signed = wire.sign(CheapKeyring(leader), leader, roster)
    assert validity.check_roster(STATE, RULES, signed, CheapKeyring("voter")) is None
    assert [entry.sender for entry in roster.readys] == list(FIVE[:4])
    assert [entry.sender for entry in roster.joins] == ["Newcomer"]
    assert [entry.sender for entry in roster.leaves] == [FIVE[4]]


def test_leavers_stay_out_unless_their_votes_are_needed() -> None:
    roster = assembled(4).roster(attempt=0, leaves={FIVE[0]: leave(FIVE[0])}, absent=())
    assert roster is not None
    assert [entry.sender for entry in roster.readys] == list(FIVE[1:4])
    needed = assembled(3).roster(attempt=0, leaves={FIVE[0]: leave(FIVE[0])}, absent=())
    assert needed is not None
    assert [entry.sender for entry in needed.readys] == list(FIVE[:3])


def caught(peer: PeerId) -> Evidence:
    evidence = evidence_of(*(ready(peer, norm=norm) for norm in (1.0, 2.0)))
    assert evidence is not None
    return evidence


def test_who_is_caught_stays_out_unless_its_vote_is_needed_and_has_no_slot_then() -> None:
    roster = assembled(4).roster(attempt=0, leaves={}, absent=(), evidence=(caught(FIVE[0]),))
    assert roster is not None
    assert [entry.sender for entry in roster.readys] == list(FIVE[1:4])
    needed = assembled(3).roster(attempt=0, leaves={}, absent=(), evidence=(caught(FIVE[0]),))
    assert needed is not None
    assert [entry.sender for entry in needed.readys] == list(FIVE[:3])
    assert planning.contributing_of(needed, RULES) == 0b110
    for made, held in ((roster, FIVE[:4]), (needed, FIVE[:3])):
        leader = chain.coordinator(STATE, 0)
        signed = wire.sign(CheapKeyring(leader), leader, made)
        keyring = CheapKeyring("voter")
        assert validity.check_roster(STATE, RULES, signed, keyring, held_readys_longer_than_grace=held) is None


def test_evidence_alone_is_worth_a_roster_without_parts() -> None:
    rules = make_rules(FIVE, min_peers=4)
    roster = assembled(4, rules).roster(attempt=0, leaves={}, absent=(), evidence=(caught(FIVE[0]),))
    assert roster is not None
    assert roster.plan is None
    assert [piece.culprit for piece in roster.evidence] == [FIVE[0]]


def test_too_few_contributors_make_a_roster_without_parts_only_for_joins() -> None:
    rules = make_rules(FIVE, min_peers=4)
    assembly = assembled(3, rules)
    assert not assembly.enough()
    assert assembly.roster(attempt=0, leaves={}, absent=()) is None
    assembly.add_join(join("Newcomer"))
    assert assembly.enough()
    roster = assembly.roster(attempt=0, leaves={}, absent=())
    assert roster is not None
    assert roster.plan is None
    leader = chain.coordinator(STATE, 0)
    signed = wire.sign(CheapKeyring(leader), leader, roster)
    assert validity.check_roster(STATE, rules, signed, CheapKeyring("voter")) is None


def test_of_a_round_of_many_the_late_alone_do_not_set_the_pace() -> None:
    rules = make_rules(peers(400))
    state = chain.genesis(rules)
    assembly, pace = Assembly(state=state, rules=rules), Pace()
    for number, sender in enumerate(peers(400)):
        message = Ready(base=state.base, tokens=((rules.part_count, 8),), norm=1.0, largest=0.1, parts_root=bytes(32))
        assembly.add_ready(wire.sign(CheapKeyring(sender), sender, message), 0.01 * number)
    for _ in range(3):
        pace.learn(assembly)
    # Arrivals from 0 to 4 s: median 2 s, and half of them within 1 s of it.
    assert pace.patience_s(rules) == pytest.approx(2.0 + 4 * 1.0, abs=0.1)


def test_a_full_roster_leaves_nobody_out() -> None:
    """More are ready than one roster holds: the electors are in it, and no voter takes the others for left out."""
    many = peers(planning.ROSTER_MAX + 6)
    rules = make_rules(many)
    state = chain.genesis(rules)
    assembly = Assembly(state=state, rules=rules)
    for sender in many:
        message = Ready(base=state.base, tokens=((rules.part_count, 8),), norm=1.0, largest=0.1, parts_root=bytes(32))
        assembly.add_ready(wire.sign(CheapKeyring(sender), sender, message), 0.0)
    roster = assembly.roster(attempt=0, leaves={}, absent=())
    assert roster is not None
    inside = [entry.sender for entry in roster.readys]
    assert len(inside) == planning.ROSTER_MAX
    assert set(state.electors) <= set(inside)
    leader = chain.coordinator(state, 0)
    signed = wire.sign(CheapKeyring(leader), leader, roster)
    held = set(many) - set(inside)
    keyring = CheapKeyring("voter")
    assert validity.check_roster(state, rules, signed, keyring, held_readys_longer_than_grace=held) is None


@pytest.mark.parametrize("joins", [False, True])
def test_whom_the_round_cannot_do_without_is_not_absent(joins: bool) -> None:
    """Three contributors are needed and there are three: one that an earlier attempt missed gets another chance."""
    rules = make_rules(FIVE[:3], min_peers=3)
    state = chain.genesis(rules)
    assembly = Assembly(state=state, rules=rules)
    for sender in FIVE[:3]:
        message = Ready(base=state.base, tokens=((rules.part_count, 8),), norm=1.0, largest=0.1, parts_root=bytes(32))
        assembly.add_ready(wire.sign(CheapKeyring(sender), sender, message), 0.0)
    if joins:
        newcomer = wire.sign(CheapKeyring("Newcomer"), "Newcomer", Join(base=state.base, units_wanted=2))
        assembly.add_join(newcomer)
    roster = assembly.roster(attempt=1, leaves={}, absent={FIVE[2]})
    assert roster is not None
    assert roster.plan is not None
    assert roster.absent == 0
    leader = chain.coordinator(state, 1)
    signed = wire.sign(CheapKeyring(leader), leader, roster)
    assert validity.check_roster(state, rules, signed, CheapKeyring("voter")) is None


def test_a_leaver_joins_nothing() -> None:
    assembly = assembled(3)
    assembly.add_join(join("Newcomer"))
    assembly.forget("Newcomer")
    assert not assembly.joins


def test_who_may_be_absent() -> None:
    roster = assembled(4).roster(attempt=0, leaves={}, absent=())
    assert roster is not None
    assert absent_after(roster, [0b0011, 0b0101], FIVE) == {FIVE[3]}
    assert absent_after(roster, [], FIVE[:3]) == {FIVE[3]}
    assert absent_after(roster, [], FIVE) == set()
