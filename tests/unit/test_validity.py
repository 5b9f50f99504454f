"""Section 6: each way in which a message can be wrong is refused, with a sentence; the right one is not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from chain_samples import (
    KEYRING,
    CheapKeyring,
    certify,
    make_commit,
    make_reform,
    make_rules,
    payload_hash,
    peers,
    plain_commit,
    sign_headers,
    sign_ready,
    sign_roster,
    step,
)

from protocol import chain, wire
from protocol.assembly import Assembly
from protocol.chain import ChainState
from protocol.commits import InvalidCommit, check_headers, verify_commit, verify_reform
from protocol.evidence import evidence_of
from protocol.messages import (
    Certificate,
    Commit,
    Evidence,
    Join,
    Leave,
    Message,
    PartHeader,
    Proposal,
    Ready,
    ReformVote,
    Roster,
    Signed,
    UnitRange,
    Vote,
)
from protocol.names import Digest, PeerId, digest
from protocol.planning import ROSTER_MAX
from protocol.rules import Quorum, Rules
from protocol.validity import check_join, check_leave, check_proposal, check_ready, check_roster, token_limit

PEERS = peers(5)
RULES = make_rules(PEERS, min_peers=2)
STATE = chain.genesis(RULES)


def signed(peer: PeerId, message: Message) -> Signed[Any]:
    return wire.sign(CheapKeyring(peer), peer, message)


def altered(original: Signed[Any], **changes: object) -> Signed[Any]:
    """The same sender's signature under a changed message."""
    return signed(original.sender, replace(original.message, **changes))


def proposal_of(
    state: ChainState, roster: Signed[Roster], headers: tuple[Signed[PartHeader] | None, ...], **more: object
) -> Signed[Proposal]:
    attempt = int(more.pop("attempt", roster.message.attempt))  # type: ignore[call-overload]
    message = Proposal(
        base=state.base,
        attempt=attempt,
        roster_id=wire.roster_id(roster),
        headers=headers,
        **more,  # type: ignore[arg-type]
    )
    return signed(chain.coordinator(state, attempt), message)


def judge(
    roster: Signed[Roster],
    headers: tuple[Signed[PartHeader] | None, ...],
    *,
    proposal: Signed[Proposal] | None = None,
    held_parts: set[Digest] | None = None,
    held_readys: tuple[PeerId, ...] = (),
    earlier: tuple[tuple[Roster, int], ...] = (),
    rules: Rules = RULES,
    state: ChainState = STATE,
) -> str | None:
    return check_proposal(
        state,
        rules,
        proposal_of(state, roster, headers) if proposal is None else proposal,
        roster,
        held_parts={header.message.hash for header in headers if header} if held_parts is None else held_parts,
        held_readys_longer_than_grace=held_readys,
        earlier_bitmaps=earlier,
        keyring=KEYRING,
    )


def full_roster(attempt: int = 0, **more: Any) -> Signed[Roster]:
    return sign_roster(STATE, RULES, [sign_ready(STATE, RULES, peer) for peer in PEERS], attempt=attempt, **more)


# ---------------------------------------------------------------- READY, JOIN, LEAVE

READY = sign_ready(STATE, RULES, PEERS[0])
LEASE = STATE.members[0][1].lease[0]
BAD_READYS: Mapping[str, tuple[Signed[Ready], str]] = {
    "another round": (altered(READY, base=replace(STATE.base, round=1)), "round 1"),
    "another state": (altered(READY, base=replace(STATE.base, state_hash=digest(b"x"))), "with state"),
    "another lineage": (altered(READY, base=replace(STATE.base, lineage=digest(b"x"))), "not of round"),
    "a stranger": (sign_ready(STATE, RULES, "Stranger", tokens=100), "not a member's"),
    "too few parts": (altered(READY, tokens=((3, 100),)), "cover 3 parts"),
    "too many parts": (altered(READY, tokens=((5, 100),)), "cover 5 parts"),
    "too many tokens": (altered(READY, tokens=((3, 1), (1, 3201))), "claims 3201 tokens"),
    "units of another": (altered(READY, ranges_done=(STATE.members[1][1].lease[0],)), "does not lease"),
    "units twice": (altered(READY, ranges_done=(LEASE, replace(LEASE, stop=LEASE.start + 1))), "twice"),
    "units beyond": (altered(READY, ranges_done=(replace(LEASE, stop=LEASE.stop + 1),)), "does not lease"),
    "another epoch": (altered(READY, ranges_done=(UnitRange(epoch=1, start=0, stop=1),)), "does not lease"),
    "bytes not bound": (altered(READY, parts_root=b""), "binds the bytes"),
    "too greedy": (altered(READY, units_wanted=9), "the cap of 8"),
}


def test_a_good_ready() -> None:
    assert check_ready(STATE, RULES, READY) is None
    assert check_ready(STATE, RULES, altered(READY, tokens=((4, 3200),), units_wanted=8)) is None
    assert check_ready(STATE, RULES, altered(READY, tokens=())) is None
    assert check_ready(STATE, RULES, altered(READY, ranges_done=(LEASE,))) is None


def test_tokens_follow_the_lease() -> None:
    assert token_limit(STATE, RULES, PEERS[0]) == (16 + 16) * 100
    assert token_limit(STATE, RULES, "Stranger") == 16 * 100


@pytest.mark.parametrize("name", BAD_READYS)
def test_a_bad_ready(name: str) -> None:
    ready, why = BAD_READYS[name]
    assert why in (check_ready(STATE, RULES, ready) or "accepted")
    # Nor may it stand in a roster.
    others = [sign_ready(STATE, RULES, peer) for peer in PEERS[1:]]
    roster = sign_roster(STATE, RULES, [ready, *others], parts=False)
    assert why in (check_roster(STATE, RULES, roster, KEYRING) or "accepted")


def test_joins() -> None:
    join = signed("Joiner", Join(base=STATE.base, units_wanted=8))
    assert check_join(STATE, RULES, join) is None
    assert "is a member's" in (check_join(STATE, RULES, signed(PEERS[0], join.message)) or "")
    assert "round 7" in (check_join(STATE, RULES, altered(join, base=replace(STATE.base, round=7))) or "")
    later = replace(STATE, base=replace(STATE.base, round=1, prev=digest(b"commit 0")))
    assert check_join(later, RULES, join) is None, "the tip has moved on once since"
    assert "round 0" in (check_join(replace(later, base=replace(later.base, round=2)), RULES, join) or "")
    elsewhere = replace(later, base=replace(later.base, lineage=digest(b"another lineage")))
    assert check_join(elsewhere, RULES, join) is not None
    assert "cap of 8" in (check_join(STATE, RULES, altered(join, units_wanted=9)) or "")
    closed = replace(RULES, allowed_peers=("Friend",))
    assert "may not join" in (check_join(STATE, closed, join) or "")
    assert check_join(STATE, closed, signed("Friend", join.message)) is None


def test_leaves_hold_until_the_peer_joins_anew() -> None:
    rules, state = RULES, STATE
    leave = signed(PEERS[0], Leave(base=state.base))
    assert check_leave(state, leave) is None
    assert "not a member's" in (check_leave(state, signed("Stranger", leave.message)) or "")
    assert "round 1" in (check_leave(state, altered(leave, base=replace(state.base, round=1))) or "")
    assert "lineage" in (check_leave(state, altered(leave, base=replace(state.base, lineage=digest(b"x")))) or "")
    # It is still good a round later, and no longer once its sender has left and joined again.
    later = step(state, rules, plain_commit(state, rules))
    assert check_leave(later, leave) is None
    gone = step(later, rules, plain_commit(later, rules, leaves=(PEERS[0],)))
    assert check_leave(gone, leave) is not None
    back = step(gone, rules, plain_commit(gone, rules, joins=(PEERS[0],)))
    assert chain.member(back, PEERS[0]) is not None
    assert "round 0" in (check_leave(back, leave) or "accepted")


# ---------------------------------------------------------------- ROSTER


def test_a_good_roster() -> None:
    assert check_roster(STATE, RULES, full_roster(), KEYRING) is None
    assert check_roster(STATE, RULES, full_roster(joins=("J",), leaves=(PEERS[1],)), KEYRING) is None


def resigned(roster: Signed[Roster], **changes: object) -> Signed[Roster]:
    return altered(roster, **changes)


def forged(original: Signed[Any]) -> Signed[Any]:
    return replace(original, signature=bytes(32))


def two_readys(peer: PeerId) -> Evidence:
    evidence = evidence_of(*(signed(peer, replace(READY.message, norm=norm)) for norm in (1.0, 2.0)))
    assert evidence is not None
    return evidence


def bad_rosters() -> dict[str, tuple[Signed[Roster], str]]:
    good = full_roster()
    readys = good.message.readys
    leader = good.sender
    usurper = next(peer for peer in PEERS if peer != leader)
    quorum = chain.quorum(STATE, RULES)
    few = [sign_ready(STATE, RULES, peer) for peer in PEERS[: quorum - 1]]
    idle = [sign_ready(STATE, RULES, peer, tokens=400 if peer == PEERS[0] else 0) for peer in PEERS]
    join = signed("J", Join(base=STATE.base, units_wanted=1))
    leave = signed(PEERS[1], Leave(base=STATE.base))
    caught = two_readys(PEERS[0])
    return {
        "another base": (resigned(good, base=replace(STATE.base, prev=digest(b"x"))), "another place"),
        "not the coordinator": (signed(usurper, good.message), "not signed by"),
        "of another attempt": (resigned(good, attempt=1), "not signed by"),
        "forged": (forged(good), "not signed by"),
        "READY forged": (resigned(good, readys=(forged(readys[0]), *readys[1:])), "not signed by it"),
        "READY twice": (resigned(good, readys=(readys[0], readys[0], *readys[1:])), "ascending"),
        "READYs unsorted": (resigned(good, readys=readys[::-1]), "ascending"),
        "too few electors": (sign_roster(STATE, RULES, few), f"{quorum} are needed"),
        "too few contributors": (sign_roster(STATE, RULES, idle), "fewer than min_peers = 2"),
        "no parts, no joins": (resigned(good, plan=None, durations_s=()), "neither a join nor evidence"),
        "no parts though many": (resigned(good, plan=None, durations_s=(), joins=(join,)), "no parts although 5"),
        "join of a member": (resigned(good, joins=(signed(PEERS[0], join.message),)), "is a member's"),
        "join twice": (resigned(good, joins=(join, join)), "twice"),
        "join forged": (resigned(good, joins=(forged(join),)), "JOIN of J"),
        "leave forged": (resigned(good, leaves=(forged(leave),)), "LEAVE of"),
        "leave of a stranger": (resigned(good, leaves=(signed("S", leave.message),)), "not a member's"),
        "evidence forged": (resigned(good, evidence=(replace(caught, culprit=PEERS[1]),)), "did not sign"),
        "evidence twice": (resigned(good, evidence=(caught, caught)), "one piece a peer"),
        "evidence of a stranger": (resigned(good, evidence=(two_readys("S"),)), "no member"),
        "slot of a peer that is caught": (resigned(good, evidence=(caught,)), "plan breaks the rules"),
        "no durations": (resigned(good, durations_s=()), "plan breaks the rules"),
        "absent at once": (full_roster(absent=0b1), "calls Peer000 absent"),
    }


BAD_ROSTERS = bad_rosters()


@pytest.mark.parametrize("name", BAD_ROSTERS)
def test_a_bad_roster(name: str) -> None:
    roster, why = BAD_ROSTERS[name]
    assert why in (check_roster(STATE, RULES, roster, KEYRING) or "accepted")


def test_a_roster_of_too_many_is_refused() -> None:
    many = peers(ROSTER_MAX + 1)
    rules = make_rules(many)
    state = chain.genesis(rules)
    readys = [sign_ready(state, rules, peer) for peer in many]
    for count, expected in ((ROSTER_MAX, None), (ROSTER_MAX + 1, "the roster has 1025 READYs, more than 1024")):
        roster = sign_roster(state, rules, readys[:count])
        assert check_roster(state, rules, roster, KEYRING) == expected


def test_nobody_joins_beyond_what_a_roster_holds() -> None:
    """More members than READYs of a roster would fall out of it by turns, and join for ever."""
    many = peers(ROSTER_MAX - 1)
    rules = make_rules(many)
    state = chain.genesis(rules)
    readys = [sign_ready(state, rules, peer) for peer in many[:600]]
    assert check_roster(state, rules, sign_roster(state, rules, readys, joins=("J",)), KEYRING) is None
    roster = sign_roster(state, rules, readys, joins=("J", "K"))
    assert "joins 2 peers where 1023 members leave room for 1" in (check_roster(state, rules, roster, KEYRING) or "")
    assembly = Assembly(state=state, rules=rules)
    for ready in readys:
        assembly.add_ready(ready, 0.0)
    for joiner in ("K", "J"):
        assembly.add_join(wire.sign(CheapKeyring(joiner), joiner, Join(base=state.base, units_wanted=4)))
    made = assembly.roster(attempt=0, leaves={}, absent=())
    assert made is not None
    assert [join.sender for join in made.joins] == ["K"], "who asked first"


def test_a_roster_without_parts_applies_joins() -> None:
    idle = [sign_ready(STATE, RULES, peer, tokens=0) for peer in PEERS]
    roster = sign_roster(STATE, RULES, idle, joins=("J",), parts=False)
    assert check_roster(STATE, RULES, roster, KEYRING) is None
    assert judge(roster, ()) is None


def test_a_quorum_is_of_electors_not_of_members() -> None:
    joiners = tuple(f"J{number}" for number in range(4))
    state = step(STATE, RULES, plain_commit(STATE, RULES, joins=joiners))
    few = [sign_ready(state, RULES, peer) for peer in (*state.electors[:2], *joiners)]
    assert "READYs of 2 electors; 3 are" in (check_roster(state, RULES, sign_roster(state, RULES, few), KEYRING) or "")
    enough = [sign_ready(state, RULES, peer) for peer in (*state.electors[:3], *joiners)]
    assert check_roster(state, RULES, sign_roster(state, RULES, enough), KEYRING) is None


def test_omissions() -> None:
    readys = [sign_ready(STATE, RULES, peer) for peer in PEERS[:4]]
    for attempt in (0, 1, 2):
        roster = sign_roster(STATE, RULES, readys, attempt=attempt)
        assert judge(roster, sign_headers(RULES, roster)) is None
        why = judge(roster, sign_headers(RULES, roster), held_readys=(PEERS[0], PEERS[4]))
        assert "leaves out the READY of Peer004" in (why or "accepted")
    roster = sign_roster(STATE, RULES, readys, attempt=3)
    assert judge(roster, sign_headers(RULES, roster), held_readys=(PEERS[4],)) is None
    # An old roster that is proposed again late is judged as of the proposal.
    old = sign_roster(STATE, RULES, readys, attempt=1)
    headers = sign_headers(RULES, old)
    again = proposal_of(STATE, old, headers, attempt=3)
    assert judge(old, headers, proposal=again, held_readys=(PEERS[4],)) is None
    # Who leaves need not be waited for.
    leaving = sign_roster(STATE, RULES, readys, leaves=(PEERS[4],))
    assert judge(leaving, sign_headers(RULES, leaving), held_readys=(PEERS[4],)) is None


def test_absences() -> None:
    earlier = full_roster()
    missing = 0b00100
    later = full_roster(attempt=1, absent=missing)
    headers = sign_headers(RULES, later)
    assert judge(later, headers, earlier=((earlier.message, 0b11011),)) is None
    assert "Peer002 absent" in (judge(later, headers) or "accepted")
    assert "Peer002 absent" in (judge(later, headers, earlier=((earlier.message, 0b11111),)) or "accepted")
    # It must have been an earlier attempt, of this round.
    same = full_roster(attempt=1).message
    assert "absent" in (judge(later, headers, earlier=((same, 0b11011),)) or "accepted")
    other = replace(earlier.message, base=replace(STATE.base, round=9))
    assert "absent" in (judge(later, headers, earlier=((other, 0b11011),)) or "accepted")
    trusting = full_roster(attempt=3, absent=missing)
    assert judge(trusting, sign_headers(RULES, trusting)) is None


# ---------------------------------------------------------------- PROPOSAL


def test_a_good_proposal() -> None:
    roster = full_roster()
    for empty in ((), (0,), (1, 3)):
        assert judge(roster, sign_headers(RULES, roster, empty=empty)) is None


def test_half_of_the_parts_must_be_there() -> None:
    roster = full_roster()
    why = judge(roster, sign_headers(RULES, roster, empty=(0, 1, 2)))
    assert "only 1 of 4 parts" in (why or "accepted")


def test_half_of_the_weight_must_be_in_each_part() -> None:
    tokens = dict(zip(PEERS, (100, 100, 100, 300, 300), strict=True))
    readys = [sign_ready(STATE, RULES, peer, tokens=tokens[peer]) for peer in PEERS]
    roster = sign_roster(STATE, RULES, readys)
    # The median is 100, so 300 counts in full and the whole weighs 900.
    assert judge(roster, sign_headers(RULES, roster, without={2: 0b00111})) is None
    assert judge(roster, sign_headers(RULES, roster, without={2: 0b10001})) is None
    why = judge(roster, sign_headers(RULES, roster, without={2: 0b11000}))
    assert "part 2 has less than half" in (why or "accepted")


def test_weights_differ_by_part() -> None:
    readys = [sign_ready(STATE, RULES, peer) for peer in PEERS]
    heavy = altered(readys[0], tokens=((1, 900), (3, 300)))
    light = [altered(ready, tokens=((4, 300),)) for ready in readys[1:3]]
    roster = sign_roster(STATE, RULES, [heavy, *light])
    # Part 0 weighs 900 + 300 + 300: without the heavy one it is below half, elsewhere it is not.
    assert judge(roster, sign_headers(RULES, roster, without={1: 0b001, 3: 0b001})) is None
    why = judge(roster, sign_headers(RULES, roster, without={0: 0b001}))
    assert "part 0 has less than half" in (why or "accepted")
    # The same bitmap may do in one part and not in the next.
    heavy = altered(readys[0], tokens=((3, 300), (1, 900)))
    roster = sign_roster(STATE, RULES, [heavy, *light])
    assert judge(roster, sign_headers(RULES, roster, without={0: 0b001})) is None
    why = judge(roster, sign_headers(RULES, roster, without={0: 0b001, 3: 0b001}))
    assert "part 3 has less than half" in (why or "accepted")


def test_parts_must_be_held() -> None:
    roster = full_roster()
    headers = sign_headers(RULES, roster)
    name = wire.roster_id(roster)
    held = {payload_hash(name, part) for part in range(3)}
    assert "part 3 is not held" in (judge(roster, headers, held_parts=held) or "accepted")


def header_changes() -> dict[str, tuple[Callable[[Signed[PartHeader]], Signed[PartHeader]], str]]:
    return {
        "another part": (lambda header: altered(header, part=2), "another part"),
        "another roster": (lambda header: altered(header, roster_id=digest(b"x")), "another part or roster"),
        "no contributor": (lambda header: altered(header, bitmap=0), "empty"),
        "a stranger's bit": (lambda header: altered(header, bitmap=0b100001), "without a slot"),
        "wrong size": (lambda header: altered(header, length=7), "7 bytes instead of"),
        "not the root": (
            lambda header: signed(next(peer for peer in PEERS if peer != header.sender), header.message),
            "not signed by its root",
        ),
        "forged": (forged, "not signed by its root"),
    }


@pytest.mark.parametrize("name", header_changes())
def test_a_bad_header(name: str) -> None:
    change, why = header_changes()[name]
    roster = full_roster()
    headers = sign_headers(RULES, roster)
    assert headers[1] is not None
    broken = (headers[0], change(headers[1]), *headers[2:])
    assert why in (judge(roster, broken) or "accepted")


def test_bits_without_a_slot_are_refused() -> None:
    """A peer whose norm is far beyond the others' stands in the roster, but not in a mean."""
    readys = [sign_ready(STATE, RULES, peer, norm=100.0 if peer == PEERS[1] else 1.0) for peer in PEERS]
    roster = sign_roster(STATE, RULES, readys)
    headers = sign_headers(RULES, roster)
    assert headers[0] is not None
    assert headers[0].message.bitmap == 0b11101
    assert judge(roster, headers) is None
    broken = (altered(headers[0], bitmap=0b11111), *headers[1:])
    assert "without a slot" in (judge(roster, broken) or "accepted")


def test_a_bad_proposal() -> None:
    roster = full_roster()
    headers = sign_headers(RULES, roster)
    good = proposal_of(STATE, roster, headers)
    usurper = next(peer for peer in PEERS if peer != good.sender)
    cases = {
        "another place": altered(good, base=replace(STATE.base, round=3)),
        "not signed by": signed(usurper, good.message),
        "the coordinator of attempt 0": forged(good),
        "another roster": altered(good, roster_id=digest(b"x")),
        "3 part headers for 4": altered(good, headers=headers[:3]),
    }
    for why, proposal in cases.items():
        assert why in (judge(roster, proposal.message.headers, proposal=proposal) or "accepted")
    late = full_roster(attempt=1)
    early = proposal_of(STATE, late, sign_headers(RULES, late), attempt=0)
    assert "the later 1" in (judge(late, early.message.headers, proposal=early) or "accepted")


def test_a_valid_value_comes_with_its_certificate() -> None:
    roster = full_roster()
    headers = sign_headers(RULES, roster)
    value = chain.decision(STATE.base.digest(), wire.roster_id(roster), headers)

    def carried(attempt: int, valid_attempt: int, certificate: Certificate) -> str | None:
        proposal = proposal_of(
            STATE, roster, headers, attempt=attempt, valid_attempt=valid_attempt, valid_certificate=certificate
        )
        return judge(roster, headers, proposal=proposal)

    quorum = chain.quorum(STATE, RULES)
    voters = STATE.electors[:quorum]
    good = certify(STATE, value, voters, attempt=0, phase=1)
    assert carried(1, 0, good) is None
    assert carried(5, 0, good) is None
    assert "carries a certificate of attempt 1" in (carried(1, 1, good) or "accepted")
    assert "not of attempt 1" in (carried(2, 1, good) or "accepted")
    assert "for something else" in (carried(1, 0, certify(STATE, value, voters, phase=2)) or "accepted")
    assert "for something else" in (carried(1, 0, certify(STATE, digest(b"x"), voters, phase=1)) or "accepted")
    assert "are needed" in (carried(1, 0, certify(STATE, value, voters[1:], phase=1)) or "accepted")


# ---------------------------------------------------------------- commits and reforms


def good_commit() -> Commit:
    return plain_commit(STATE, RULES)


def test_a_good_commit() -> None:
    verify_commit(STATE, RULES, good_commit(), KEYRING)
    # All electors' votes, or those of a later attempt, are as good.
    roster = full_roster()
    verify_commit(STATE, RULES, make_commit(STATE, RULES, roster, voters=STATE.electors, attempt=7), KEYRING)
    idle = [sign_ready(STATE, RULES, peer, tokens=0) for peer in PEERS]
    bare = sign_roster(STATE, RULES, idle, joins=("J",), parts=False)
    verify_commit(STATE, RULES, make_commit(STATE, RULES, bare), KEYRING)


def bad_commits() -> dict[str, tuple[Commit, str]]:
    commit = good_commit()
    votes = commit.certificate.votes
    headers = commit.headers
    assert headers[0] is not None
    voters = STATE.electors[: chain.quorum(STATE, RULES)]
    value = votes[0].message.value
    outsider = signed("Stranger", votes[0].message)
    other_attempt = signed(votes[-1].sender, replace(votes[-1].message, attempt=1))
    late = make_commit(STATE, RULES, full_roster(attempt=2), attempt=1)

    def with_votes(*chosen: Signed[Vote]) -> Commit:
        return replace(commit, certificate=Certificate(votes=chosen))

    def certified(changed: Commit) -> Commit:
        decided = chain.decision(STATE.base.digest(), wire.roster_id(changed.roster), changed.headers)
        return replace(changed, certificate=certify(STATE, decided, voters))

    return {
        "too few votes": (with_votes(*votes[:-1]), "are needed"),
        "no votes": (with_votes(), "are needed"),
        "a vote twice": (with_votes(votes[0], *votes[:-1]), "votes twice"),
        "a stranger's vote": (with_votes(*votes[:-1], outsider), "no elector"),
        "votes of two attempts": (with_votes(*votes[:-1], other_attempt), "for something else"),
        "a forged vote": (with_votes(*votes[:-1], forged(votes[-1])), "not signed by it"),
        "phase 1": (replace(commit, certificate=certify(STATE, value, voters, phase=1)), "for something else"),
        "another value": (
            replace(commit, certificate=certify(STATE, digest(b"x"), voters)),
            "for something else",
        ),
        "another header": (replace(commit, headers=(None, *headers[1:])), "for something else"),
        "a part left out": (replace(commit, headers=headers[:-1]), "for something else"),
        "a part too few": (certified(replace(commit, headers=headers[:-1])), "3 part headers"),
        "a forged header": (replace(commit, headers=(forged(headers[0]), *headers[1:])), "not signed by its root"),
        "a forged roster": (replace(commit, roster=forged(commit.roster)), "not signed by"),
        "another roster": (replace(commit, roster=full_roster(joins=("J",))), "for something else"),
        "headers of another roster": (
            certified(replace(commit, roster=full_roster(joins=("J",)))),
            "another part or roster",
        ),
        "votes before the roster": (late, "before its roster's"),
    }


BAD_COMMITS = bad_commits()


@pytest.mark.parametrize("name", BAD_COMMITS)
def test_a_bad_commit(name: str) -> None:
    commit, why = BAD_COMMITS[name]
    with pytest.raises(InvalidCommit, match=why):
        verify_commit(STATE, RULES, commit, KEYRING)


def test_without_a_quorum_behind_it_a_commit_costs_nothing() -> None:
    """Thousands of genuine headers under no certificate must not keep a node busy with their signatures."""
    checked: list[PeerId] = []

    class Counting(CheapKeyring):
        def verify(self, signer: PeerId, message: bytes, signature: bytes) -> bool:
            checked.append(signer)
            return super().verify(signer, message, signature)

    commit = replace(good_commit(), certificate=Certificate(votes=good_commit().certificate.votes[:1]))
    with pytest.raises(InvalidCommit, match="are needed"):
        verify_commit(STATE, RULES, commit, Counting("verifier"))
    assert checked == [commit.roster.sender]


def test_headers_that_are_held_are_not_verified_again() -> None:
    """Neither is any other of the same part taken for one that is held."""

    class Never(CheapKeyring):
        def verify(self, signer: PeerId, message: bytes, signature: bytes) -> bool:
            return False

    roster = full_roster()
    headers = sign_headers(RULES, roster)
    held = [header for header in headers if header is not None]
    assert check_headers(RULES, roster, headers, Never("verifier"), held=held) is None
    assert "not signed by its root" in (check_headers(RULES, roster, headers, Never("verifier")) or "accepted")
    for wrong in (forged(held[0]), altered(held[0], length=1), replace(held[0], sender="Stranger")):
        why = check_headers(RULES, roster, (wrong, *headers[1:]), Never("verifier"), held=held)
        assert "not signed by its root" in (why or "accepted")


def test_a_commit_of_another_place() -> None:
    later = step(STATE, RULES, good_commit())
    with pytest.raises(InvalidCommit, match="the chain is at round 1"):
        verify_commit(later, RULES, good_commit(), KEYRING)
    corrupt = replace(STATE, base=replace(STATE.base, state_hash=digest(b"corrupt")))
    with pytest.raises(InvalidCommit, match="with state"):
        verify_commit(corrupt, RULES, good_commit(), KEYRING)


def test_open_runs_need_two_thirds() -> None:
    rules = replace(RULES, quorum=Quorum.TWO_THIRDS)
    state = chain.genesis(rules)
    roster = sign_roster(state, rules, [sign_ready(state, rules, peer) for peer in PEERS])
    verify_commit(state, rules, make_commit(state, rules, roster, voters=state.electors[:4]), KEYRING)
    with pytest.raises(InvalidCommit, match="4 to 5 are needed"):
        verify_commit(state, rules, make_commit(state, rules, roster, voters=state.electors[:3]), KEYRING)


def test_reforms() -> None:
    members = PEERS[:2]
    good = make_reform(STATE, members)
    verify_reform(STATE, RULES, good, KEYRING)
    verify_reform(STATE, replace(RULES, quorum=Quorum.MAJORITY), make_reform(STATE, (*members, "Caught")), KEYRING)
    with pytest.raises(InvalidCommit, match="Caught is in a reform of an open run without being a member"):
        verify_reform(
            STATE, replace(RULES, quorum=Quorum.TWO_THIRDS), make_reform(STATE, (*members, "Caught")), KEYRING
        )
    cases = {
        "below min_peers": make_reform(STATE, members[:1]),
        "not one signature of each": make_reform(STATE, members, signers=members[:1]),
        "without a single member": make_reform(STATE, ("S1", "S2")),
        "does not verify": replace(
            good, signatures=((members[0], good.signatures[0][1]), (members[1], good.signatures[0][1]))
        ),
        "is of round 4": make_reform(replace(STATE, base=replace(STATE.base, round=4)), members),
    }
    for why, reformed in cases.items():
        with pytest.raises(InvalidCommit, match=why):
            verify_reform(STATE, RULES, reformed, KEYRING)
    with pytest.raises(InvalidCommit, match="not one signature of each"):
        verify_reform(STATE, RULES, make_reform(STATE, members, signers=PEERS[:3]), KEYRING)
    closed = replace(RULES, allowed_peers=PEERS)
    with pytest.raises(InvalidCommit, match="may not join"):
        verify_reform(STATE, closed, make_reform(STATE, (*members, "Caught")), KEYRING)


def test_a_willing_vote_is_no_signature() -> None:
    """Only the vote that carries the body signs it: being willing for the same k must not count."""
    members = PEERS[:2]
    good = make_reform(STATE, members)
    willing = signed(members[1], ReformVote(base=STATE.base, k=0, sign=False))
    forged_reform = replace(good, signatures=(good.signatures[0], (members[1], willing.signature)))
    with pytest.raises(InvalidCommit, match="does not verify"):
        verify_reform(STATE, RULES, forged_reform, KEYRING)
