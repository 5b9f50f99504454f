"""When a message may be believed: the predicates of protocol section 6, each with its reason.

Every function answers None for valid, else one sentence. What a voter knows beyond the chain (parts it holds, READYs it
has held for long, what earlier attempts brought) is passed in. Signatures are checked where a keyring is asked for.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Sequence
from itertools import pairwise
from typing import Any

from protocol.chain import ChainState, coordinator, decision, member, quorum
from protocol.codecs import codec
from protocol.commits import check_certificate, check_headers
from protocol.evidence import check_evidence
from protocol.leases import count, covers
from protocol.messages import Join, Leave, Offence, PartHeader, Proposal, Ready, Roster, Signed
from protocol.names import Base, Digest, Keyring, PeerId
from protocol.planning import ROSTER_MAX, check_plan, contributing_of
from protocol.ready_limits import ready_limit_bytes
from protocol.rules import Rules
from protocol.weights import RosterWeights, check_runs
from protocol.wire import roster_id, verify

TRUSTING_ATTEMPT = 3
"""From this attempt on, omissions and absences are not checked: an attempt must be able to end somewhere."""

EarlierBitmaps = Iterable[tuple[Roster, int]]
"""Rosters of earlier attempts of this round, each with the union of the bitmaps of the headers seen for it."""


# ---------------------------------------------------------------- READY, JOIN, LEAVE


def token_limit(state: ChainState, rules: Rules, peer: PeerId) -> int:
    """The most tokens that `peer` may claim for a part: its lease, and as many extra units as a lease can hold.

    The extra lease also leaves room for parts that earlier commits did not count while they consumed the lease.
    """
    entry = member(state, peer)
    leased = 0 if entry is None else count(entry.lease)
    return (leased + 2 * rules.lease_cap_units) * rules.unit_tokens


def check_ready(state: ChainState, rules: Rules, signed: Signed[Ready]) -> str | None:
    """Whether this READY may stand in a roster of the current round. Its signature is the caller's matter."""
    ready, sender = signed.message, signed.sender
    if why := _check_base(state, ready.base, "READY", sender):
        return why
    entry = member(state, sender)
    if entry is None:
        return f"the READY of {sender} is not a member's"
    if len(signed.body) > (limit := ready_limit_bytes(len(state.members))):
        return f"the READY of {sender} has {len(signed.body)} bytes; {len(state.members)} members have {limit} each"
    if why := check_runs(ready.tokens, rules.part_count):
        return f"the READY of {sender}: {why}"
    most = max((tokens for _, tokens in ready.tokens), default=0)
    if most > (limit := token_limit(state, rules, sender)):
        return f"the READY of {sender} claims {most} tokens, more than the {limit} that its lease allows"
    if ready.contributes and not ready.parts_root:
        return f"the READY of {sender} offers work without a root that binds the bytes of its parts"
    if not covers(entry.lease, ready.ranges_done):
        return f"the READY of {sender} has done units twice, or units that it does not lease"
    return _check_wanted(rules, ready.units_wanted, "READY", sender)


def check_join(state: ChainState, rules: Rules, signed: Signed[Join]) -> str | None:
    """Whether this JOIN may stand in a roster of the current round. Its signature is the caller's matter.

    It may be of the round before: over slow links a JOIN of the tip comes when the tip has moved on, every time.
    """
    join, sender = signed.message, signed.sender
    if not is_of_round_before(state, join.base) and (why := _check_base(state, join.base, "JOIN", sender)):
        return why
    if member(state, sender) is not None:
        return f"the JOIN of {sender} is a member's"
    if sender in state.banned:
        return f"the JOIN of {sender} is of a peer that evidence has left out for good"
    if rules.allowed_peers is not None and sender not in rules.allowed_peers:
        return f"{sender} may not join this run: it is not on the run's list of peers"
    return _check_wanted(rules, join.units_wanted, "JOIN", sender)


def room_for_joins(state: ChainState) -> int:
    """How many may join now. More members than READYs of a roster would fall out of `M` by turns."""
    return max(0, ROSTER_MAX - len(state.members))


def is_of_round_before(state: ChainState, base: Base) -> bool:
    """Whether `base` is of this lineage's round before the current one. (Which commit led to it, the state forgets.)"""
    mine = state.base
    return (base.run, base.lineage, base.round) == (mine.run, mine.lineage, mine.round - 1)


def check_leave(state: ChainState, signed: Signed[Leave]) -> str | None:
    """Whether this LEAVE holds now: it does for every round from its own on, until its sender joins anew."""
    base, sender = signed.message.base, signed.sender
    if (base.run, base.lineage) != (state.base.run, state.base.lineage):
        return f"the LEAVE of {sender} is of another run or lineage"
    entry = member(state, sender)
    if entry is None:
        return f"the LEAVE of {sender} is not a member's"
    if not entry.joined_round <= base.round <= state.base.round:
        return f"the LEAVE of {sender} is of round {base.round}, not of {entry.joined_round} to {state.base.round}"
    return None


# ---------------------------------------------------------------- ROSTER


def check_roster(
    state: ChainState,
    rules: Rules,
    signed_roster: Signed[Roster],
    keyring: Keyring,
    *,
    held_readys_longer_than_grace: Collection[PeerId] = (),
    earlier_bitmaps: EarlierBitmaps = (),
    attempt: int | None = None,
) -> str | None:
    """Whether an exchange over this roster can end in a valid proposal.

    `held_readys_longer_than_grace`: senders of valid READYs of this round that I had held for longer than the grace
    period when this roster first reached me. `attempt`: of the proposal that carries the roster; None: the roster's
    own.
    """
    roster = signed_roster.message
    attempt = roster.attempt if attempt is None else attempt
    if roster.base != state.base:
        return f"the roster is of another place in the chain than round {state.base.round}"
    leader = coordinator(state, roster.attempt)
    if signed_roster.sender != leader or not verify(keyring, signed_roster):
        return f"the roster is not signed by {leader}, the coordinator of attempt {roster.attempt}"
    if why := _check_evidence(state, rules, roster, keyring):
        return why
    if why := _check_people(state, rules, roster, keyring):
        return why
    if attempt < TRUSTING_ATTEMPT:
        if why := _check_omissions(roster, held_readys_longer_than_grace):
            return why
        if why := _check_absences(roster, earlier_bitmaps):
            return why
    if why := check_plan(roster, rules):
        return f"the roster's plan breaks the rules: {why}"
    contributors = contributing_of(roster, rules).bit_count()
    if roster.plan is not None:
        if contributors < rules.min_peers:
            return f"the roster has {contributors} contributors, fewer than min_peers = {rules.min_peers}"
    elif not roster.joins and not roster.evidence:
        return "the roster has no parts and applies neither a join nor evidence"
    elif contributors >= rules.min_peers:
        return f"the roster has no parts although {contributors} contributors are ready"
    return None


def _check_evidence(state: ChainState, rules: Rules, roster: Roster, keyring: Keyring) -> str | None:
    """A wrong mean is only looked at here: whether it is wrong takes the parts' bytes, which a voter asks for."""
    culprits = [evidence.culprit for evidence in roster.evidence]
    if any(first >= second for first, second in pairwise(culprits)):
        return "the roster's evidence is not one piece a peer in ascending order of peer id"
    for evidence in roster.evidence:
        # Who was counted and left since is recomputed all the same; what strangers sign concerns nobody.
        stranger = member(state, evidence.culprit) is None and evidence.offence is not Offence.WRONG_MEAN
        if stranger or evidence.culprit in state.banned:
            return f"the roster carries evidence against {evidence.culprit}, who is no member"
        if why := check_evidence(rules, evidence, keyring):
            return f"the roster carries evidence that is none: {why}"
    return None


def _check_people(state: ChainState, rules: Rules, roster: Roster, keyring: Keyring) -> str | None:
    senders = [signed.sender for signed in roster.readys]
    if len(senders) > ROSTER_MAX:
        return f"the roster has {len(senders)} READYs, more than {ROSTER_MAX}"
    if any(first >= second for first, second in pairwise(senders)):
        return "the roster's READYs are not in ascending order of peer id"
    electors = len(set(senders).intersection(state.electors))
    if electors < (needed := quorum(state, rules)):
        return f"the roster has READYs of {electors} electors; {needed} are needed"
    for ready in roster.readys:
        if why := check_ready(state, rules, ready):
            return why
    if len(roster.joins) > (room := room_for_joins(state)):
        return f"the roster joins {len(roster.joins)} peers where {len(state.members)} members leave room for {room}"
    for join in roster.joins:
        if why := check_join(state, rules, join):
            return why
    for leave in roster.leaves:
        if why := check_leave(state, leave):
            return why
    groups: tuple[tuple[Signed[Any], ...], ...] = (roster.readys, roster.joins, roster.leaves)
    for group in groups:
        if len({each.sender for each in group}) != len(group):
            return "a peer joins or leaves twice in the roster"
        for each in group:
            if not verify(keyring, each):
                return f"the {type(each.message).__name__.upper()} of {each.sender} in the roster is not signed by it"
    return None


def _check_omissions(roster: Roster, held: Collection[PeerId]) -> str | None:
    if len(roster.readys) >= ROSTER_MAX:
        return None
    present = {ready.sender for ready in roster.readys} | {leave.sender for leave in roster.leaves}
    present |= {evidence.culprit for evidence in roster.evidence}
    for peer in sorted(held):
        if peer not in present:
            return f"the roster leaves out the READY of {peer}, which was there in time"
    return None


def _check_absences(roster: Roster, earlier_bitmaps: EarlierBitmaps) -> str | None:
    if not roster.absent:
        return None
    missed: set[PeerId] = set()
    for earlier, bitmap in earlier_bitmaps:
        if earlier.base == roster.base and earlier.attempt < roster.attempt:
            missed |= {
                signed.sender
                for bit, signed in enumerate(earlier.readys)
                if signed.message.contributes and not bitmap >> bit & 1
            }
    for bit, signed in enumerate(roster.readys):
        if roster.absent >> bit & 1 and signed.sender not in missed:
            return f"the roster calls {signed.sender} absent, whom no earlier attempt of this round missed"
    return None


# ---------------------------------------------------------------- PROPOSAL


def check_proposal(
    state: ChainState,
    rules: Rules,
    proposal: Signed[Proposal],
    roster: Signed[Roster],
    *,
    held_parts: Container[Digest],
    held_readys_longer_than_grace: Collection[PeerId],
    earlier_bitmaps: EarlierBitmaps,
    keyring: Keyring,
) -> str | None:
    """Whether an elector may vote for this proposal (locks aside), whose roster is `roster`.

    `held_parts`: hashes of the payloads that are verified (size, hash, finite values) and on disk here. The other
    arguments are those of `check_roster`, for the moment at which `roster` first reached this peer.
    """
    proposed = proposal.message
    if proposed.base != state.base:
        return f"the proposal is of another place in the chain than round {state.base.round}"
    leader = coordinator(state, proposed.attempt)
    if proposal.sender != leader or not verify(keyring, proposal):
        return f"the proposal is not signed by {leader}, the coordinator of attempt {proposed.attempt}"
    if proposed.roster_id != roster_id(roster):
        return f"the proposal is over another roster than {roster_id(roster).hex()[:16]}"
    if roster.message.attempt > proposed.attempt:
        return f"the proposal of attempt {proposed.attempt} is over a roster of the later {roster.message.attempt}"
    why = check_roster(
        state,
        rules,
        roster,
        keyring,
        held_readys_longer_than_grace=held_readys_longer_than_grace,
        earlier_bitmaps=earlier_bitmaps,
        attempt=proposed.attempt,
    )
    return (
        why
        or check_headers(rules, roster, proposed.headers, keyring)
        or check_result(rules, roster.message, proposed.headers, held_parts)
        or _check_valid_value(state, rules, proposed, keyring)
    )


def check_result(
    rules: Rules, roster: Roster, headers: Sequence[Signed[PartHeader] | None], held_parts: Container[Digest]
) -> str | None:
    """Whether these parts suffice: held, of the right size, each with half of the weight, and half of all parts there.

    Takes the headers as well-formed (`protocol.commits.check_headers`).
    """
    if roster.plan is None:
        return None
    there = sum(header is not None for header in headers)
    if 2 * there < rules.part_count:
        return f"only {there} of {rules.part_count} parts have a result; at least half are needed"
    size_of = codec(rules.codec).encoded_bytes
    runs = [ready.message.tokens for ready in roster.readys]
    weights = RosterWeights(runs, contributing_of(roster, rules), rules.weight_cap_ratio)
    for part, signed in enumerate(headers):
        if signed is None:
            continue
        header = signed.message
        first, end = rules.part_range(part)
        if header.length != size_of(end - first):
            return f"part {part} has {header.length} bytes instead of {size_of(end - first)}"
        if not weights.enough(part, header.bitmap):
            return f"part {part} has less than half of the roster's weight"
        if header.hash not in held_parts:
            return f"part {part} is not held here"
    return None


def _check_valid_value(state: ChainState, rules: Rules, proposal: Proposal, keyring: Keyring) -> str | None:
    certificate = proposal.valid_certificate
    if certificate is None or proposal.valid_attempt is None:
        return None
    if proposal.valid_attempt >= proposal.attempt:
        return f"the proposal of attempt {proposal.attempt} carries a certificate of attempt {proposal.valid_attempt}"
    decided = decision(state.base.digest(), proposal.roster_id, proposal.headers)
    if why := check_certificate(state, rules, certificate, decided, 1, keyring):
        return f"the proposal's valid value: {why}"
    if certificate.votes[0].message.attempt != proposal.valid_attempt:
        return f"the proposal's certificate is not of attempt {proposal.valid_attempt}"
    return None


# ---------------------------------------------------------------- shared


def _check_base(state: ChainState, base: Base, name: str, sender: PeerId) -> str | None:
    if base == state.base:
        return None
    return (
        f"the {name} of {sender} is of round {base.round} after {base.prev.hex()[:16]} with state "
        f"{base.state_hash.hex()[:16]}, not of round {state.base.round} after {state.base.prev.hex()[:16]} with state "
        f"{state.base.state_hash.hex()[:16]}"
    )


def _check_wanted(rules: Rules, units: int, name: str, sender: PeerId) -> str | None:
    if units > rules.lease_cap_units:
        return f"the {name} of {sender} wants {units} units, more than the cap of {rules.lease_cap_units}"
    return None
