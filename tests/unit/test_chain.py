"""The chain: who counts after each commit, against the text of protocol section 2."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from dataclasses import replace

import pytest
from chain_samples import (
    KEYRING,
    make_commit,
    make_reform,
    make_rules,
    next_hash,
    peers,
    plain_commit,
    sign_headers,
    sign_ready,
    sign_roster,
    step,
)

from protocol import chain
from protocol.chain import ChainState
from protocol.commits import verify_commit
from protocol.leases import count
from protocol.messages import Certificate, UnitRange
from protocol.names import PeerId, digest, initial_lineage
from protocol.plan import Plan, Shard
from protocol.rules import Quorum, Rules
from protocol.wire import decode_commit, encode_commit

Units = set[tuple[int, int]]


def units_of(ranges: Iterable[UnitRange]) -> Units:
    return {(item.epoch, unit) for item in ranges for unit in range(item.start, item.stop)}


def check_state(state: ChainState, rules: Rules) -> None:
    """What must hold after every commit."""
    names = [peer for peer, _ in state.members]
    assert names == sorted(set(names))
    assert names
    assert set(state.electors) <= set(names)
    assert len(set(state.electors)) == len(state.electors)
    assert 1 <= len(state.electors) <= rules.max_electors
    assert len(state.electors) != 2
    held: list[tuple[int, int]] = [unit for _, entry in state.members for unit in units_of(entry.lease)]
    returned = units_of(state.returned)
    assert len(held) == len(set(held)), "a unit is leased twice"
    assert not set(held) & returned, "a leased unit waits to be leased"
    assert all(unit < (state.cursor_epoch, state.cursor_unit) for unit in returned.union(held))
    assert all(count(entry.lease) <= 2 * rules.lease_cap_units for _, entry in state.members)


# ---------------------------------------------------------------- genesis


def test_genesis() -> None:
    rules = make_rules(("B", "C", "A"))
    state = chain.genesis(rules)
    check_state(state, rules)
    assert [peer for peer, _ in state.members] == ["A", "B", "C"]
    assert sorted(state.electors) == ["A", "B", "C"]
    assert (state.base.round, state.base.prev) == (0, bytes(32))
    assert state.base.lineage == initial_lineage(rules.run)
    assert state.base.state_hash == rules.initial_state_hash
    assert all(count(entry.lease) == 2 * rules.lease_cap_units for _, entry in state.members)


@pytest.mark.parametrize(("founders", "electors"), [(1, 1), (2, 1), (3, 3), (5, 5)])
def test_electors_at_the_start_are_never_two(founders: int, electors: int) -> None:
    state = chain.genesis(make_rules(peers(founders)))
    assert len(state.electors) == electors


def test_max_electors_two_means_one() -> None:
    state = chain.genesis(make_rules(peers(5), max_electors=2))
    assert len(state.electors) == 1


@pytest.mark.parametrize(
    ("kind", "electors", "quorum"),
    [
        (Quorum.MAJORITY, 1, 1),
        (Quorum.MAJORITY, 3, 2),
        (Quorum.MAJORITY, 4, 3),
        (Quorum.MAJORITY, 64, 33),
        (Quorum.TWO_THIRDS, 1, 1),
        (Quorum.TWO_THIRDS, 3, 3),
        (Quorum.TWO_THIRDS, 4, 3),
        (Quorum.TWO_THIRDS, 64, 43),
    ],
)
def test_quorum(kind: Quorum, electors: int, quorum: int) -> None:
    rules = make_rules(peers(electors), quorum=kind)
    assert chain.quorum(chain.genesis(rules), rules) == quorum


# ---------------------------------------------------------------- random histories


@pytest.mark.parametrize("seed", range(40))
def test_random_histories(seed: int) -> None:
    """Peers come, go, fall silent and miss parts; leases, sets and names are checked after every commit."""
    rng = random.Random(seed)
    founders = rng.randint(1, 7)
    rules = make_rules(
        peers(founders),
        quorum=rng.choice(list(Quorum)),
        max_electors=rng.choice((2, 3, 5, 64)),
        epoch_units=rng.choice((30, 200, 0)),
        parts=3,
    )
    state = chain.genesis(rules)
    consumed: Units = set()
    rosters: dict[int, set[PeerId]] = {}
    strangers = iter(f"Stranger{number:03d}" for number in range(1000))
    for _ in range(30):
        check_state(state, rules)
        before = state
        members = [peer for peer, _ in state.members]
        ready = [peer for peer in members if rng.random() < 0.8]
        ready = sorted({*ready, *state.electors[: chain.quorum(state, rules)]})
        readys = [
            sign_ready(state, rules, peer, units_wanted=rng.randint(0, 8), tokens=rng.choice((0, 100, 300)))
            for peer in ready
        ]
        parts = any(item.message.contributes for item in readys) and rng.random() < 0.85
        joins = [next(strangers) for _ in range(rng.choice((0, 0, 0, 1, 3)))]
        leaves = [peer for peer in members if rng.random() < 0.07]
        attempt = rng.choice((0, 0, 0, 1, 4))
        roster = sign_roster(state, rules, readys, joins=joins, leaves=leaves, parts=parts, attempt=attempt)
        missed = {part: rng.getrandbits(len(readys)) for part in range(rules.part_count)}
        headers = tuple(
            None if header is None or header.message.bitmap == 0 else header
            for header in sign_headers(rules, roster, empty=(rng.randrange(6),), without=missed)
        )
        commit = make_commit(state, rules, roster, headers)
        verify_commit(state, rules, commit, KEYRING)
        state = step(state, rules, commit)
        rosters[before.base.round] = set(ready)

        # Names: one commit, one hash; the certificate and the headers' signatures are not in it.
        assert state.base.prev == chain.commit_hash(before, rules, commit)
        assert state.base.round == before.base.round + 1
        other = replace(
            commit,
            certificate=Certificate(votes=()),
            headers=tuple(item and replace(item, signature=b"other") for item in commit.headers),
        )
        assert step(before, rules, other) == state
        assert step(before, rules, decode_commit(encode_commit(commit))) == state

        # Members: text of section 2, from the rosters themselves.
        expected = set(joins)
        for peer, entry in before.members:
            silent = peer not in rosters[before.base.round]
            if before.base.round > entry.joined_round:
                silent = silent and peer not in rosters[before.base.round - 1]
            else:
                silent = False
            if peer not in leaves and not silent:
                expected.add(peer)
        assert {peer for peer, _ in state.members} == (expected or set(members))

        # Leases: consumed exactly what the counted ones did; nothing is lost, nothing appears from nowhere.
        counted = chain.counted_bits(headers)
        for bit, item in enumerate(roster.message.readys):
            if counted >> bit & 1:
                done = units_of(item.message.ranges_done)
                assert not done & consumed, "a unit was trained on twice"
                consumed |= done
        held = {unit for _, entry in state.members for unit in units_of(entry.lease)}
        inside = held | units_of(state.returned) | consumed
        if rules.epoch_units:
            handed_out = state.cursor_epoch * rules.epoch_units + state.cursor_unit
        else:
            handed_out = state.cursor_unit
        assert len(inside) == handed_out


# ---------------------------------------------------------------- members and electors


def test_a_member_leaves_after_two_silent_rosters() -> None:
    rules = make_rules(peers(4))
    state = chain.genesis(rules)
    loud = peers(4)[:3]
    state = step(state, rules, plain_commit(state, rules, loud))
    assert chain.member(state, peers(4)[3]) is not None
    lease = chain.member(state, peers(4)[3]).lease  # type: ignore[union-attr]
    state = step(state, rules, plain_commit(state, rules, loud))
    assert chain.member(state, peers(4)[3]) is None
    # Its lease went straight to those who asked for units.
    again = {unit for _, entry in state.members for unit in units_of(entry.lease)} | units_of(state.returned)
    assert units_of(lease) <= again


def test_a_joiner_has_its_first_two_rosters() -> None:
    rules = make_rules(peers(3))
    state = chain.genesis(rules)
    state = step(state, rules, plain_commit(state, rules, joins=("Joiner",)))
    entry = chain.member(state, "Joiner")
    assert entry is not None
    assert entry.joined_round == 1
    assert count(entry.lease) == 8
    assert "Joiner" not in state.electors
    state = step(state, rules, plain_commit(state, rules, peers(3)))
    assert chain.member(state, "Joiner") is not None
    state = step(state, rules, plain_commit(state, rules, peers(3)))
    assert chain.member(state, "Joiner") is None


def test_a_joiner_votes_once_counted() -> None:
    rules = make_rules(peers(3))
    state = chain.genesis(rules)
    state = step(state, rules, plain_commit(state, rules, joins=("Joiner",)))
    # READY without work: a member, but not counted.
    readys = [sign_ready(state, rules, peer) for peer in peers(3)] + [sign_ready(state, rules, "Joiner", tokens=0)]
    state = step(state, rules, make_commit(state, rules, sign_roster(state, rules, readys)))
    assert "Joiner" not in state.electors
    state = step(state, rules, plain_commit(state, rules))
    assert sorted(state.electors) == sorted((*peers(3), "Joiner"))


def test_counted_in_one_part_is_enough() -> None:
    rules = make_rules(peers(3))
    state = chain.genesis(rules)
    readys = [sign_ready(state, rules, peer) for peer in peers(3)]
    roster = sign_roster(state, rules, readys)
    only_last = dict.fromkeys(range(rules.part_count - 1), 0b001)
    after = step(state, rules, make_commit(state, rules, roster, sign_headers(rules, roster, without=only_last)))
    entry, old = chain.member(after, peers(3)[0]), chain.member(state, peers(3)[0])
    assert entry is not None
    assert old is not None
    assert entry.last_counted_round == 0
    done = units_of(readys[0].message.ranges_done)
    assert done
    assert not units_of(entry.lease) & done
    nowhere = dict.fromkeys(range(rules.part_count), 0b001)
    after = step(state, rules, make_commit(state, rules, roster, sign_headers(rules, roster, without=nowhere)))
    entry = chain.member(after, peers(3)[0])
    assert entry is not None
    assert entry.last_counted_round == -1
    assert units_of(entry.lease) >= units_of(old.lease)


def test_two_eligible_give_one_elector() -> None:
    rules = make_rules(peers(1))
    state = chain.genesis(rules)
    state = step(state, rules, plain_commit(state, rules, joins=("Joiner",)))
    seen = set()
    for _ in range(12):
        prev = state.base.prev
        state = step(state, rules, plain_commit(state, rules))
        assert state.electors == (min(("Joiner", *peers(1)), key=lambda peer: chain.elector_key(prev, peer)),)
        seen.add(state.electors)
    assert len(seen) == 2, "over twelve rounds both have their turn"


def test_from_one_elector_to_three_in_an_open_run() -> None:
    """With room for one new elector a commit, two eligible would for ever become one."""
    rules = make_rules(peers(1), quorum=Quorum.TWO_THIRDS)
    state = chain.genesis(rules)
    state = step(state, rules, plain_commit(state, rules, joins=("J1", "J2", "J3")))
    state = step(state, rules, plain_commit(state, rules))
    assert len(state.electors) == 3


def test_open_runs_admit_a_quarter_at_a_time() -> None:
    rules = make_rules(peers(8), quorum=Quorum.TWO_THIRDS)
    state = chain.genesis(rules)
    joiners = tuple(f"J{number}" for number in range(6))
    state = step(state, rules, plain_commit(state, rules, joins=joiners))
    sizes = []
    for _ in range(4):
        old, prev = state.electors, state.base.prev
        state = step(state, rules, plain_commit(state, rules))
        fresh = set(state.electors) - set(old)
        waiting = sorted(set(joiners) - set(old), key=lambda peer: chain.elector_key(prev, peer))
        assert fresh == set(waiting[: max(1, len(old) // 4)])
        assert set(old) <= set(state.electors)
        sizes.append(len(state.electors))
    assert sizes == [10, 12, 14, 14]


def test_open_runs_drop_electors_that_are_not_counted() -> None:
    rules = make_rules(peers(5), quorum=Quorum.TWO_THIRDS)
    state = chain.genesis(rules)
    idle = peers(5)[4]
    for round_ in range(5):
        # Counted before round 0, so within the last four rounds up to round 2.
        assert (idle in state.electors) == (round_ <= 3)
        readys = [sign_ready(state, rules, peer, tokens=0 if peer == idle else 400) for peer in peers(5)]
        state = step(state, rules, make_commit(state, rules, sign_roster(state, rules, readys)))
    assert chain.member(state, idle) is not None


def test_rosters_without_parts_unseat_nobody() -> None:
    for quorum in Quorum:
        rules = make_rules(peers(3), quorum=quorum)
        state = chain.genesis(rules)
        for number in range(6):
            before = state
            readys = [sign_ready(state, rules, peer, tokens=0) for peer in peers(3)]
            roster = sign_roster(state, rules, readys, joins=(f"J{number}",), parts=False)
            state = step(state, rules, make_commit(state, rules, roster))
            assert sorted(state.electors) == list(peers(3))
            assert state.base.state_hash == before.base.state_hash
            assert state.tokens_total == 0
            assert chain.member(state, f"J{number}") is not None


def test_a_roster_without_parts_cannot_change_the_state() -> None:
    rules = make_rules(peers(3))
    state = chain.genesis(rules)
    readys = [sign_ready(state, rules, peer, tokens=0) for peer in peers(3)]
    commit = make_commit(state, rules, sign_roster(state, rules, readys, joins=("J",), parts=False))
    with pytest.raises(ValueError, match="without parts"):
        chain.next_state(state, rules, commit, digest(b"another state"))


def test_the_last_member_cannot_leave_an_empty_run() -> None:
    rules = make_rules(peers(1))
    state = chain.genesis(rules)
    stayed = step(state, rules, plain_commit(state, rules, leaves=peers(1)))
    assert stayed.electors == peers(1)
    handed_over = step(state, rules, plain_commit(state, rules, leaves=peers(1), joins=("Heir",)))
    assert [peer for peer, _ in handed_over.members] == ["Heir"]
    assert handed_over.electors == ("Heir",)


def test_max_electors_are_the_first_by_hash() -> None:
    rules = make_rules(peers(9), max_electors=5)
    state = chain.genesis(rules)
    for _ in range(3):
        prev = state.base.prev
        state = step(state, rules, plain_commit(state, rules))
        assert state.electors == tuple(sorted(peers(9), key=lambda peer: chain.elector_key(prev, peer))[:5])


# ---------------------------------------------------------------- coordinators


def test_every_elector_coordinates_in_turn() -> None:
    state = chain.genesis(make_rules(peers(5)))
    order = [chain.coordinator(state, attempt) for attempt in range(10)]
    assert sorted(order[:5]) == list(peers(5))
    assert order[5:] == order[:5]


def test_coordinators_of_failed_attempts_come_last_for_eight_rounds() -> None:
    rules = make_rules(peers(5))
    state = chain.genesis(rules)
    failed = {chain.coordinator(state, attempt) for attempt in range(2)}
    state = step(state, rules, plain_commit(state, rules, attempt=2))
    for _ in range(8):
        order = [chain.coordinator(state, attempt) for attempt in range(5)]
        assert set(order[3:]) == failed
        keys = [chain.elector_key(state.base.prev, peer) for peer in order]
        assert keys[:3] == sorted(keys[:3])
        assert keys[3:] == sorted(keys[3:])
        state = step(state, rules, plain_commit(state, rules))
    order = [chain.coordinator(state, attempt) for attempt in range(5)]
    assert order == sorted(peers(5), key=lambda peer: chain.elector_key(state.base.prev, peer))
    assert state.demoted == ()


def test_demotion_follows_the_roster_not_the_certificate() -> None:
    """The roster of attempt 0 may be decided in attempt 3; whoever failed in between is not in the chain."""
    rules = make_rules(peers(5))
    state = chain.genesis(rules)
    readys = [sign_ready(state, rules, peer) for peer in peers(5)]
    roster = sign_roster(state, rules, readys)
    early, late = (make_commit(state, rules, roster, attempt=attempt) for attempt in (0, 3))
    assert early.certificate != late.certificate
    assert step(state, rules, early) == step(state, rules, late)
    assert step(state, rules, late).demoted == ()


# ---------------------------------------------------------------- decisions, tokens


def test_a_decision_binds_every_header() -> None:
    rules = make_rules(peers(3))
    state = chain.genesis(rules)
    roster = sign_roster(state, rules, [sign_ready(state, rules, peer) for peer in peers(3)])
    headers = sign_headers(rules, roster)
    name = digest(b"roster")
    seen = {chain.decision(state.base.digest(), name, headers)}
    for part in range(rules.part_count):
        seen.add(chain.decision(state.base.digest(), name, (*headers[:part], None, *headers[part + 1 :])))
    seen.add(chain.decision(state.base.digest(), name, headers[:-1]))
    seen.add(chain.decision(state.base.digest(), digest(b"another"), headers))
    seen.add(chain.decision(digest(b"base"), name, headers))
    seen.add(chain.decision(state.base.digest(), name, ()))
    seen.add(chain.decision(state.base.digest(), name, (None,)))
    assert len(seen) == rules.part_count + 6


def test_tokens_are_counted_by_element() -> None:
    # Three parts of 512 elements and one of 256.
    rules = make_rules(peers(3), parts=4, elements=3 * 512 + 256)
    state = chain.genesis(rules)
    readys = [sign_ready(state, rules, peer, tokens=700) for peer in peers(3)]
    roster = sign_roster(state, rules, readys)
    headers = sign_headers(rules, roster, without={0: 0b001, 3: 0b010})
    after = step(state, rules, make_commit(state, rules, roster, headers))
    elements = rules.elements
    expected = 700 * (elements - 512) // elements + 700 * (elements - 256) // elements + 700
    assert after.tokens_total == expected


def test_tokens_of_several_runs() -> None:
    rules = make_rules(peers(3), parts=4)
    state = chain.genesis(rules)
    readys = [sign_ready(state, rules, peer) for peer in peers(3)]
    runs = replace(readys[0].message, tokens=((1, 100), (2, 200), (1, 700)))
    readys[0] = replace(readys[0], message=runs)
    roster = sign_roster(state, rules, readys)
    headers = sign_headers(rules, roster, empty=(2,))
    after = step(state, rules, make_commit(state, rules, roster, headers))
    assert after.tokens_total == (100 + 200 + 700) // 4 + 2 * (400 * 3 // 4)


# ---------------------------------------------------------------- reform


def test_a_reform_starts_a_lineage() -> None:
    rules = make_rules(peers(5))
    state = chain.genesis(rules)
    state = step(state, rules, plain_commit(state, rules))
    reformed = make_reform(state, (*peers(5)[:2], "Caught"))
    after = chain.reform_state(state, rules, reformed)
    check_state(after, rules)
    assert [peer for peer, _ in after.members] == sorted((*peers(5)[:2], "Caught"))
    assert sorted(after.electors) == sorted((*peers(5)[:2], "Caught"))
    assert after.base.lineage not in (state.base.lineage, bytes(32))
    assert replace(after.base, lineage=state.base.lineage) == state.base
    gone = {unit for peer in peers(5)[2:] for unit in units_of(chain.member(state, peer).lease)}  # type: ignore[union-attr]
    assert units_of(after.returned) == gone | units_of(state.returned)
    # It goes on from there, and the caught-up joiner may stay silent once.
    after = step(after, rules, plain_commit(after, rules, peers(5)[:2]))
    assert chain.member(after, "Caught") is not None
    check_state(after, rules)


@pytest.mark.parametrize(("members", "electors"), [(1, 1), (2, 1), (3, 3), (4, 4)])
def test_a_reform_never_seats_two(members: int, electors: int) -> None:
    rules = make_rules(peers(5))
    state = chain.genesis(rules)
    after = chain.reform_state(state, rules, make_reform(state, peers(5)[:members]))
    assert len(after.electors) == electors


def test_the_lineage_is_the_body_not_its_signatures() -> None:
    rules = make_rules(peers(3))
    state = chain.genesis(rules)
    first = make_reform(state, peers(3)[:1])
    again = replace(first, signatures=())
    assert chain.reform_state(state, rules, first) == chain.reform_state(state, rules, again)
    assert chain.lineage_of(first) != chain.lineage_of(make_reform(state, peers(3)[:1], k=1))


# ---------------------------------------------------------------- cost


@pytest.mark.slow
def test_two_hundred_members_are_cheap() -> None:
    """A step is a few milliseconds even with 200 members and 500 parts: it runs in the daemon's event loop."""
    names = peers(200)
    rules = make_rules(names, parts=500, epoch_units=100_000)
    state = chain.genesis(rules)
    readys = [sign_ready(state, rules, peer) for peer in names]
    shard = Shard(share=1, parents=(-1, *(0 for _ in names[1:])))
    bare = sign_roster(state, rules, readys, parts=False)
    roster = replace(bare, message=replace(bare.message, plan=Plan(shards=(shard,))))
    commit = make_commit(state, rules, roster)
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        chain.next_state(state, rules, commit, next_hash(state))
        seconds.append(time.perf_counter() - started)
    assert min(seconds) < 0.1
