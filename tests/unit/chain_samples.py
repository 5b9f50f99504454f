"""Chains for tests: peers that all behave, with a cheap keyring, and knobs for who takes part in what."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from protocol import chain, wire
from protocol.chain import ChainState
from protocol.codecs import codec
from protocol.grouping import plan_for
from protocol.messages import (
    Certificate,
    Commit,
    Join,
    Leave,
    PartHeader,
    Ready,
    Reform,
    Reformed,
    ReformVote,
    Roster,
    Signed,
    UnitRange,
    Vote,
)
from protocol.names import Digest, PeerId, digest, encode_integer
from protocol.planning import contributing_of, deal, level_durations
from protocol.rules import Quorum, Rules


class CheapKeyring:
    """Signatures that only `me` makes, checked by hashing: a stand-in for ed25519."""

    def __init__(self, me: PeerId) -> None:
        self.me = me

    def sign(self, message: bytes) -> bytes:
        return digest(b"cheap", self.me.encode(), message)

    def verify(self, signer: PeerId, message: bytes, signature: bytes) -> bool:
        return signature == digest(b"cheap", signer.encode(), message)


KEYRING = CheapKeyring("verifier")


def peers(count: int) -> tuple[PeerId, ...]:
    return tuple(f"Peer{number:03d}" for number in range(count))


def make_rules(
    founders: Sequence[PeerId], *, quorum: Quorum = Quorum.MAJORITY, parts: int = 4, **more: object
) -> Rules:
    values: dict[str, object] = {
        "run": digest(b"a run for tests"),
        "founders": tuple(founders),
        "initial_state_hash": digest(b"state", encode_integer(0)),
        "quorum": quorum,
        "elements": parts * 512,
        "part_elements": 512,
        "epoch_units": 1000,
        "lease_cap_units": 8,
        "unit_tokens": 100,
    }
    return Rules(**{**values, **more})  # type: ignore[arg-type]


def sign_ready(
    state: ChainState,
    rules: Rules,
    peer: PeerId,
    *,
    tokens: int = 400,
    units_wanted: int = 4,
    units_done: int | None = None,
    norm: float = 1.0,
) -> Signed[Ready]:
    """`units_done`: the first so many of the lease; None: half of it."""
    entry = chain.member(state, peer)
    lease = () if entry is None else entry.lease
    left = sum(map(len, lease)) // 2 if units_done is None else units_done
    done = []
    for item in lease:
        if left > 0:
            stop = min(item.stop, item.start + left)
            done.append(UnitRange(epoch=item.epoch, start=item.start, stop=stop))
            left -= stop - item.start
    ready = Ready(
        base=state.base,
        ranges_done=tuple(done),
        tokens=((rules.part_count, tokens),) if tokens else (),
        parts_root=digest(b"parts", peer.encode()) if tokens else b"",
        norm=norm,
        largest=norm / 2,
        units_wanted=units_wanted,
    )
    return wire.sign(CheapKeyring(peer), peer, ready)


def sign_roster(
    state: ChainState,
    rules: Rules,
    readys: Iterable[Signed[Ready]],
    *,
    attempt: int = 0,
    joins: Iterable[PeerId] = (),
    leaves: Iterable[PeerId] = (),
    parts: bool = True,
    absent: int = 0,
) -> Signed[Roster]:
    readys = tuple(sorted(readys, key=lambda signed: signed.sender))
    plan, durations = None, ()
    draft = Roster(base=state.base, attempt=attempt, readys=readys, absent=absent)
    if parts:
        contributing = contributing_of(draft, rules)
        plan = plan_for(draft, contributing, rules)
        durations = level_durations(plan, contributing, deal(state.base.digest(), rules.part_count, plan), rules)
    roster = Roster(
        base=state.base,
        attempt=attempt,
        readys=readys,
        joins=tuple(wire.sign(CheapKeyring(peer), peer, Join(base=state.base, units_wanted=4)) for peer in joins),
        leaves=tuple(wire.sign(CheapKeyring(peer), peer, Leave(base=state.base)) for peer in leaves),
        plan=plan,
        durations_s=durations,
        absent=absent,
    )
    leader = chain.coordinator(state, attempt)
    return wire.sign(CheapKeyring(leader), leader, roster)


def payload_hash(roster_id: Digest, part: int) -> Digest:
    return digest(b"payload", roster_id, encode_integer(part))


def sign_headers(
    rules: Rules,
    signed_roster: Signed[Roster],
    *,
    empty: Iterable[int] = (),
    without: Mapping[int, int] | None = None,
) -> tuple[Signed[PartHeader] | None, ...]:
    """`without`: per part, bits that its bitmap lacks."""
    roster = signed_roster.message
    if roster.plan is None:
        return ()
    contributing = contributing_of(roster, rules)
    dealt = deal(roster.base.digest(), rules.part_count, roster.plan)
    name = wire.roster_id(signed_roster)
    headers: list[Signed[PartHeader] | None] = []
    for part in range(rules.part_count):
        first, end = rules.part_range(part)
        root = roster.readys[roster.plan.shards[dealt[part]].root].sender
        header = PartHeader(
            roster_id=name,
            part=part,
            bitmap=contributing & ~(without or {}).get(part, 0),
            hash=payload_hash(name, part),
            length=codec(rules.codec).encoded_bytes(end - first),
        )
        headers.append(None if part in set(empty) else wire.sign(CheapKeyring(root), root, header))
    return tuple(headers)


def certify(
    state: ChainState, value: Digest, voters: Iterable[PeerId], *, attempt: int = 0, phase: int = 2
) -> Certificate:
    vote = Vote(base=state.base, attempt=attempt, phase=phase, value=value)
    return Certificate(votes=tuple(wire.sign(CheapKeyring(peer), peer, vote) for peer in voters))


def make_commit(
    state: ChainState,
    rules: Rules,
    signed_roster: Signed[Roster],
    headers: tuple[Signed[PartHeader] | None, ...] | None = None,
    *,
    voters: Sequence[PeerId] | None = None,
    attempt: int | None = None,
) -> Commit:
    headers = sign_headers(rules, signed_roster) if headers is None else headers
    voters = state.electors[: chain.quorum(state, rules)] if voters is None else voters
    attempt = signed_roster.message.attempt if attempt is None else attempt
    value = chain.decision(state.base.digest(), wire.roster_id(signed_roster), headers)
    return Commit(roster=signed_roster, headers=headers, certificate=certify(state, value, voters, attempt=attempt))


def plain_commit(state: ChainState, rules: Rules, ready: Iterable[PeerId] | None = None, **roster: object) -> Commit:
    """A round in which `ready` (None: all members) contribute alike."""
    names = [peer for peer, _ in state.members] if ready is None else list(ready)
    readys = [sign_ready(state, rules, peer) for peer in names]
    return make_commit(state, rules, sign_roster(state, rules, readys, **roster))  # type: ignore[arg-type]


def next_hash(state: ChainState) -> Digest:
    return digest(b"state", encode_integer(state.base.round + 1))


def step(state: ChainState, rules: Rules, commit: Commit) -> ChainState:
    has_parts = commit.roster.message.plan is not None
    return chain.next_state(state, rules, commit, next_hash(state) if has_parts else state.base.state_hash)


def make_reform(
    state: ChainState, members: Sequence[PeerId], *, k: int = 0, signers: Sequence[PeerId] | None = None
) -> Reformed:
    reform = Reform(base=state.base, k=k, members=tuple(sorted(members)))
    body = wire.encode_body(reform)
    vote = ReformVote(base=state.base, k=k, sign=True, reform=body)
    signers = reform.members if signers is None else signers
    return Reformed(
        reform=reform,
        body=body,
        signatures=tuple((peer, wire.sign(CheapKeyring(peer), peer, vote).signature) for peer in signers),
    )
