"""The chain: who counts, what is leased to whom, and how a commit changes both (protocol sections 1 and 2).

Everything here is a pure function of the chain state and of the content that a decision binds. Nothing depends on a
certificate: two peers that hold different certificates for one commit derive the same state.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import itemgetter

import numpy as np

from protocol.leases import Ranges, Supply, normal, subtract
from protocol.messages import Commit, PartHeader, Reformed, Roster, Signed, UnitRange
from protocol.names import ZERO_DIGEST, Base, Digest, PeerId, digest, encode_integer, initial_lineage
from protocol.rules import Quorum, Rules
from protocol.wire import roster_id as id_of_roster

BANNED_KEPT = 1024
"""The oldest is forgotten: each was a member, so that whoever fills this has been admitted a thousand times."""
DEMOTED_ROUNDS = 8
"""Rounds for which the coordinator of a failed attempt comes last."""
ELECTOR_WINDOW_ROUNDS = 4
"""Open runs: an elector votes while it was counted within this many rounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    joined_round: int
    """First round it may contribute to; founders: 0."""
    last_ready_rounds: tuple[int, ...] = ()
    """Rounds (at most the two newest) whose committed roster held its READY."""
    last_counted_round: int | None = None
    """Newest round that counted it in a part; founders count as counted before round 0 (-1)."""
    lease: tuple[UnitRange, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainState:
    """All that follows from the commits so far. `base.round` is the round being worked on."""

    base: Base
    members: tuple[tuple[PeerId, Member], ...]
    """Ascending by peer id."""
    electors: tuple[PeerId, ...]
    """Ascending by `H(prev, peer)` of the commit that elected them; never two."""
    demoted: tuple[tuple[PeerId, int], ...] = ()
    """(peer, first round in which it is no longer demoted), ascending by peer id."""
    returned: tuple[UnitRange, ...] = ()
    """Ranges to lease first: what departed members did not train on."""
    cursor_epoch: int = 0
    cursor_unit: int = 0
    tokens_total: int = 0
    """Tokens counted by all commits, averaged over the elements of the vector."""
    banned: tuple[PeerId, ...] = ()
    """Left out for good by evidence in a committed roster, oldest first: neither their READYs nor their JOINs count in
    this lineage and its children."""


# ---------------------------------------------------------------- questions


def member(state: ChainState, peer: PeerId) -> Member | None:
    """`peer`'s entry in `M_r`; None: it is no member."""
    index = bisect_left(state.members, peer, key=itemgetter(0))
    if index < len(state.members) and state.members[index][0] == peer:
        return state.members[index][1]
    return None


def coordinator(state: ChainState, attempt: int) -> PeerId:
    """Who leads `attempt` of the current round: never a question of who seems alive."""
    order = coordinators(state)
    return order[attempt % len(order)]


def coordinators(state: ChainState) -> tuple[PeerId, ...]:
    """The electors in the order in which they lead the attempts of the current round."""
    late = frozenset(peer for peer, until in state.demoted if until > state.base.round)
    return _coordinators(state.base.prev, state.electors, late)


def quorum(state: ChainState, rules: Rules) -> int:
    """`q(E_r)`: how many electors decide."""
    return rules.quorum.of(len(state.electors))


def decision(base_digest: Digest, roster_id: Digest, headers: Sequence[Signed[PartHeader] | None]) -> Digest:
    """`D`: what electors vote for. Binds the header bodies, or EMPTY, of every part; no attempt, no signature."""
    content = digest(b"atoll/headers", *(b"\0" if header is None else b"\1" + header.body for header in headers))
    return digest(b"atoll/decision", base_digest, roster_id, content)


def counted_bits(headers: Iterable[Signed[PartHeader] | None]) -> int:
    """Bitmap of the READYs that are counted in at least one part."""
    bits = 0
    for header in headers:
        if header is not None:
            bits |= header.message.bitmap
    return bits


def elector_key(prev: Digest, peer: PeerId) -> Digest:
    """`H(prev, peer)`: an order of peers that nobody can choose."""
    return digest(b"atoll/order", prev, peer.encode())


@lru_cache(maxsize=256)
def _coordinators(prev: Digest, electors: tuple[PeerId, ...], late: frozenset[PeerId]) -> tuple[PeerId, ...]:
    return tuple(sorted(electors, key=lambda peer: (peer in late, elector_key(prev, peer))))


def lineage_of(reformed: Reformed) -> Digest:
    """`L′ = H(body)`: whoever signed has no part in the name."""
    return digest(b"atoll/reform", reformed.body)


# ---------------------------------------------------------------- from state to state


def genesis(rules: Rules) -> ChainState:
    """Before round 0: the founders are members, count as counted, and hold leases as if each had asked for the cap."""
    base = Base(
        run=rules.run,
        lineage=initial_lineage(rules.run),
        round=0,
        prev=ZERO_DIGEST,
        state_hash=rules.initial_state_hash,
    )
    supply = Supply(returned=(), cursor_epoch=0, cursor_unit=0, epoch_units=rules.epoch_units)
    members: list[tuple[PeerId, Member]] = []
    for peer in sorted(set(rules.founders)):
        lease, supply = supply.top_up((), rules.lease_cap_units)
        members.append((peer, Member(joined_round=0, last_counted_round=-1, lease=lease)))
    return ChainState(
        base=base,
        members=tuple(members),
        electors=_seated(base.prev, [peer for peer, _ in members], rules),
        cursor_epoch=supply.cursor_epoch,
        cursor_unit=supply.cursor_unit,
    )


def commit_hash(state: ChainState, rules: Rules, commit: Commit) -> Digest:
    """`commit_r = H(prev, D, next sets and leases)`. It is also `next_state(…).base.prev`."""
    return _name(state, commit, _advance(state, rules, commit))


def next_state(state: ChainState, rules: Rules, commit: Commit, state_hash: Digest) -> ChainState:
    """The chain after `commit`, whose application gave the outer state `state_hash`.

    Raises `ValueError` if a roster without parts is said to have changed the outer state.
    """
    if commit.roster.message.plan is None and state_hash != state.base.state_hash:
        raise ValueError(
            f"a commit without parts leaves the state {state.base.state_hash.hex()[:16]}, "
            f"but {state_hash.hex()[:16]} was given; apply it again"
        )
    advanced = _advance(state, rules, commit)
    base = Base(
        run=state.base.run,
        lineage=state.base.lineage,
        round=state.base.round + 1,
        prev=_name(state, commit, advanced),
        state_hash=state_hash,
    )
    return replace(advanced, base=base)


def reform_state(state: ChainState, rules: Rules, reformed: Reformed) -> ChainState:
    """The new lineage (protocol section 10): `L′ = H(body)`, `M′ = E′`, everybody else's leases return.

    Round, previous commit and outer state are kept. All of E′ count as counted, so that each may vote at once.
    """
    old = dict(state.members)
    counted = state.base.round - 1
    members: list[tuple[PeerId, Member]] = []
    for peer in sorted(set(reformed.reform.members)):
        entry = old.pop(peer, None) or Member(joined_round=state.base.round)
        newest = counted if entry.last_counted_round is None else max(counted, entry.last_counted_round)
        members.append((peer, replace(entry, last_counted_round=newest)))
    leftover = [item for entry in old.values() for item in entry.lease]
    return replace(
        state,
        base=replace(state.base, lineage=lineage_of(reformed)),
        members=tuple(members),
        electors=_seated(state.base.prev, [peer for peer, _ in members], rules),
        returned=normal((*state.returned, *leftover)),
    )


# ---------------------------------------------------------------- the parts of a step


def _advance(state: ChainState, rules: Rules, commit: Commit) -> ChainState:
    """`state` with the sets and leases that follow `commit`; its base is still the old one."""
    roster = commit.roster.message
    counted = counted_bits(commit.headers)
    supply = Supply(
        returned=state.returned,
        cursor_epoch=state.cursor_epoch,
        cursor_unit=state.cursor_unit,
        epoch_units=rules.epoch_units,
    )
    members, leftover, caught = _next_members(state, roster, counted)
    supply = supply.give_back(leftover)
    wanted = {ready.sender: ready.message.units_wanted for ready in roster.readys}
    wanted |= {join.sender: join.message.units_wanted for join in roster.joins}
    leased: list[tuple[PeerId, Member]] = []
    for peer in sorted(members):
        units = min(wanted.get(peer, 0), rules.lease_cap_units)
        lease, supply = supply.top_up(members[peer].lease, units)
        leased.append((peer, replace(members[peer], lease=lease)))
    return ChainState(
        base=state.base,
        members=tuple(leased),
        electors=_next_electors(state, rules, members, roster.plan is not None),
        demoted=_next_demoted(state, roster.attempt),
        returned=supply.returned,
        cursor_epoch=supply.cursor_epoch,
        cursor_unit=supply.cursor_unit,
        tokens_total=state.tokens_total + sum(counted_tokens(rules, commit).values()),
        banned=(*state.banned, *caught)[-BANNED_KEPT:],
    )


def _next_members(
    state: ChainState, roster: Roster, counted: int
) -> tuple[dict[PeerId, Member], list[UnitRange], list[PeerId]]:
    """`M` after the commit, before leases are topped up; the ranges that departed members leave behind; who of them
    was caught.
    """
    round_ = state.base.round
    bit_of = {signed.sender: bit for bit, signed in enumerate(roster.readys)}
    members: dict[PeerId, Member] = {}
    for peer, entry in state.members:
        bit = bit_of.get(peer)
        if bit is not None:
            entry = replace(entry, last_ready_rounds=(*entry.last_ready_rounds[-1:], round_))
            if counted >> bit & 1:
                lease = subtract(entry.lease, roster.readys[bit].message.ranges_done)
                entry = replace(entry, last_counted_round=round_, lease=lease)
        members[peer] = entry
    known = frozenset(members)
    leaving = {signed.sender for signed in roster.leaves} & known
    missing = {
        peer
        for peer, entry in members.items()
        if peer not in bit_of and round_ > entry.joined_round and (round_ - 1) not in entry.last_ready_rounds
    }
    joining = {signed.sender for signed in roster.joins} - known
    caught = {evidence.culprit for evidence in roster.evidence}
    if not joining and known <= leaving | missing | caught:
        # A run without members could never go on: the last ones stay until somebody joins.
        leaving, missing = set(), set()
        caught = set() if known <= caught else caught
    leftover: list[UnitRange] = []
    for peer in (leaving | missing | caught) & known:
        leftover.extend(members.pop(peer).lease)
    for peer in joining:
        members[peer] = Member(joined_round=round_ + 1)
    return members, leftover, sorted(caught)


def _next_electors(
    state: ChainState, rules: Rules, members: dict[PeerId, Member], has_parts: bool
) -> tuple[PeerId, ...]:
    prev, round_ = state.base.prev, state.base.round
    voting = [peer for peer in state.electors if peer in members]
    if rules.quorum is Quorum.MAJORITY:
        # Everyone in M has a READY in one of the last two rosters or joined since: counted once is enough.
        eligible = [peer for peer, entry in members.items() if entry.last_counted_round is not None]
        if len(eligible) == 2:
            # One of the two will decide alone: never the one that this very roster had to do without.
            here = [peer for peer in eligible if members[peer].last_ready_rounds[-1:] == (round_,)]
            eligible = here or eligible
    elif not has_parts:
        # Nobody could be counted: that must not unseat the electors of an open run.
        eligible = voting
    else:
        recent = {
            peer
            for peer, entry in members.items()
            if entry.last_counted_round is not None and round_ - entry.last_counted_round < ELECTOR_WINDOW_ROUNDS
        }
        kept = [peer for peer in voting if peer in recent]
        fresh = sorted(recent.difference(kept), key=lambda peer: elector_key(prev, peer))
        room = max(1, len(state.electors) // 4)
        if len(kept) + min(room, len(fresh)) == 2 and len(fresh) > room:
            # Two would become one, and a sole elector could never become three.
            room += 1
        eligible = kept + fresh[:room]
    return _seated(prev, eligible or voting or list(members), rules)


def _seated(prev: Digest, eligible: Iterable[PeerId], rules: Rules) -> tuple[PeerId, ...]:
    """The first `max_electors` by `H(prev, peer)`; never two, so that neither can block the other."""
    seats = sorted(eligible, key=lambda peer: elector_key(prev, peer))[: rules.max_electors]
    return tuple(seats[:1] if len(seats) == 2 else seats)


def _next_demoted(state: ChainState, attempt: int) -> tuple[tuple[PeerId, int], ...]:
    """Coordinators of the attempts below the committed roster's own come last for a while."""
    after = state.base.round + 1
    demoted = {peer: until for peer, until in state.demoted if until > after}
    for failed in range(min(attempt, len(state.electors))):
        demoted[coordinator(state, failed)] = after + DEMOTED_ROUNDS
    return tuple(sorted(demoted.items()))


def counted_tokens(rules: Rules, commit: Commit) -> dict[PeerId, int]:
    """Tokens that this commit counts, by whom: the mean over all elements of a READY's tokens there, rounded down."""
    headers, readys = commit.headers, commit.roster.message.readys
    if not any(headers) or not readys:
        return {}
    # bits: (parts, READYs); part_elements: (parts,)
    width = (len(readys) + 7) // 8
    packed = b"".join(
        bytes(width) if header is None else header.message.bitmap.to_bytes(width, "little") for header in headers
    )
    bits = np.unpackbits(np.frombuffer(packed, np.uint8).reshape(len(headers), width), axis=1, bitorder="little")
    part_elements = np.full(len(headers), rules.part_elements, np.int64)
    part_elements[-1] = rules.part_range(rules.part_count - 1)[1] - rules.part_range(rules.part_count - 1)[0]
    counted: dict[PeerId, int] = {}
    for bit, signed in enumerate(readys):
        if runs := signed.message.tokens:
            counts, tokens = zip(*runs, strict=True)
            start = 0
            weighted = 0
            for parts, value in zip(counts, tokens, strict=True):
                elements = int((part_elements[start : start + parts] * bits[start : start + parts, bit]).sum())
                weighted += elements * value
                start += parts
            if tokens_here := weighted // rules.elements:
                counted[signed.sender] = tokens_here
    return counted


def _name(state: ChainState, commit: Commit, advanced: ChainState) -> Digest:
    decided = decision(state.base.digest(), id_of_roster(commit.roster), commit.headers)
    return digest(b"atoll/commit", state.base.prev, decided, _encode(advanced))


def _encode(state: ChainState) -> bytes:
    """Sets and leases as bytes, for hashing: every list is preceded by its length."""
    fields: list[bytes] = [encode_integer(len(state.members))]
    for peer, entry in state.members:
        counted = 0 if entry.last_counted_round is None else entry.last_counted_round + 2
        fields += [_text(peer), encode_integer(entry.joined_round), encode_integer(counted)]
        fields.append(encode_integer(len(entry.last_ready_rounds)))
        fields += [encode_integer(item) for item in entry.last_ready_rounds]
        fields += _ranges(entry.lease)
    fields.append(encode_integer(len(state.electors)))
    fields += [_text(peer) for peer in state.electors]
    fields.append(encode_integer(len(state.demoted)))
    for peer, until in state.demoted:
        fields += [_text(peer), encode_integer(until)]
    fields += _ranges(state.returned)
    fields += [encode_integer(item) for item in (state.cursor_epoch, state.cursor_unit, state.tokens_total)]
    fields.append(encode_integer(len(state.banned)))
    fields += [_text(peer) for peer in state.banned]
    return b"".join(fields)


def _text(value: str) -> bytes:
    data = value.encode()
    return encode_integer(len(data)) + data


def _ranges(ranges: Ranges) -> list[bytes]:
    fields = [encode_integer(len(ranges))]
    for item in ranges:
        fields += [encode_integer(item.epoch), encode_integer(item.start), encode_integer(item.stop)]
    return fields
