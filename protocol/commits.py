"""Commits and reforms from others, verified against the chain that they extend (protocol sections 1, 5, 9 and 10)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from protocol.chain import ChainState, coordinator, decision, member, quorum
from protocol.messages import Certificate, Commit, PartHeader, Reformed, ReformVote, Roster, Signed
from protocol.names import Base, Digest, Keyring, PeerId
from protocol.planning import check_plan, contributing_of, deal
from protocol.rules import Quorum, Rules
from protocol.wire import encode_body, roster_id, signing_bytes, verify


class InvalidCommit(Exception):
    """A commit or reform that does not extend the chain; the text is one sentence that says why."""


def verify_commit(state: ChainState, rules: Rules, commit: Commit, keyring: Keyring) -> None:
    """Raises `InvalidCommit` unless `commit` follows `state`.

    What a quorum of electors certified is not judged again (READYs, weights, omissions); what it certified is checked
    to be exactly this content, and the content to have the form that applying it takes for granted.
    """
    signed = commit.roster
    roster = signed.message
    if roster.base != state.base:
        raise InvalidCommit(_place(roster.base, state))
    leader = coordinator(state, roster.attempt)
    if signed.sender != leader or not verify(keyring, signed):
        raise InvalidCommit(f"its roster is not signed by {leader}, the coordinator of attempt {roster.attempt}")
    # The certificate before the headers: who has no quorum behind it costs no thousands of checks.
    decided = decision(state.base.digest(), roster_id(signed), commit.headers)
    if why := check_certificate(state, rules, commit.certificate, decided, 2, keyring):
        raise InvalidCommit(why)
    if why := check_plan(roster, rules):
        raise InvalidCommit(f"its plan breaks the rules: {why}")
    if why := check_headers(rules, signed, commit.headers, keyring):
        raise InvalidCommit(why)
    first = commit.certificate.votes[0].message.attempt
    if first < roster.attempt:
        raise InvalidCommit(f"its certificate is of attempt {first}, before its roster's {roster.attempt}")


def check_certificate(
    state: ChainState, rules: Rules, certificate: Certificate, value: Digest, phase: int, keyring: Keyring
) -> str | None:
    """Why these are not `q(E_r)` distinct electors' votes for `value` in one attempt, or None."""
    needed = quorum(state, rules)
    votes = certificate.votes
    if not needed <= len(votes) <= len(state.electors):
        return f"its certificate has {len(votes)} votes; {needed} to {len(state.electors)} are needed"
    electors = frozenset(state.electors)
    seen: set[PeerId] = set()
    attempt = votes[0].message.attempt
    for signed in votes:
        vote = signed.message
        if signed.sender not in electors or signed.sender in seen:
            return f"its certificate has a vote of {signed.sender}, who is no elector or votes twice"
        seen.add(signed.sender)
        if (vote.base, vote.attempt, vote.phase, vote.value) != (state.base, attempt, phase, value):
            return f"the vote of {signed.sender} in its certificate is for something else"
        if not verify(keyring, signed):
            return f"the vote of {signed.sender} in its certificate is not signed by it"
    return None


def check_headers(
    rules: Rules,
    signed_roster: Signed[Roster],
    headers: Sequence[Signed[PartHeader] | None],
    keyring: Keyring,
    *,
    held: Collection[Signed[PartHeader]] = (),
) -> str | None:
    """Why `headers` are not one per part, EMPTY or signed by the part's root over contributors of the roster.

    `held`: headers whose signatures were verified when their parts came; they are not verified again.
    """
    roster = signed_roster.message
    if roster.plan is None:
        return f"a roster without parts comes with {len(headers)} part headers" if headers else None
    if len(headers) != rules.part_count:
        return f"it has {len(headers)} part headers for {rules.part_count} parts"
    contributing = contributing_of(roster, rules)
    roster_digest = roster_id(signed_roster)
    roots = [roster.readys[shard.root].sender for shard in roster.plan.shards]
    dealt = deal(roster.base.digest(), rules.part_count, roster.plan)
    known = {(header.sender, header.body, header.signature) for header in held}
    for part, signed in enumerate(headers):
        if signed is None:
            continue
        header = signed.message
        if header.part != part or header.roster_id != roster_digest:
            return f"the header of part {part} is of another part or roster"
        if header.bitmap == 0 or header.bitmap & ~contributing:
            return f"the bitmap of part {part} is empty or names READYs without a slot"
        genuine = (signed.sender, signed.body, signed.signature) in known or verify(keyring, signed)
        if signed.sender != roots[dealt[part]] or not genuine:
            return f"the header of part {part} is not signed by its root {roots[dealt[part]]}"
    return None


def verify_reform(state: ChainState, rules: Rules, reformed: Reformed, keyring: Keyring) -> None:
    """Raises `InvalidCommit` unless all of E′ signed a new lineage that starts from `state` (protocol section 10)."""
    reform = reformed.reform
    if reform.base != state.base:
        raise InvalidCommit(_place(reform.base, state))
    if len(reform.members) < max(1, rules.min_peers):
        raise InvalidCommit(f"a reform of {len(reform.members)} members is below min_peers = {rules.min_peers}")
    if all(member(state, peer) is None for peer in reform.members):
        raise InvalidCommit("a reform without a single member of the lineage that it leaves")
    outsiders = [peer for peer in reform.members if member(state, peer) is None]
    if outsiders and rules.quorum is Quorum.TWO_THIRDS:
        # In an open run keys cost nothing: one member and many of its own would outnumber everybody.
        raise InvalidCommit(f"{outsiders[0]} is in a reform of an open run without being a member; let it join first")
    caught = [peer for peer in reform.members if peer in state.banned]
    if caught:
        raise InvalidCommit(f"{caught[0]} is in a reform although evidence has left it out of this run")
    if rules.allowed_peers is not None:
        for peer in reform.members:
            if member(state, peer) is None and peer not in rules.allowed_peers:
                raise InvalidCommit(f"{peer} is in a reform but may not join this run")
    signatures = dict(reformed.signatures)
    if len(reformed.signatures) != len(signatures) or tuple(sorted(signatures)) != reform.members:
        raise InvalidCommit(f"a reform of {len(reform.members)} members has not one signature of each")
    # Each signed a ReformVote, whose one canonical body follows from the reform's.
    vote = encode_body(ReformVote(base=reform.base, k=reform.k, sign=True, reform=reformed.body))
    message = signing_bytes(ReformVote, vote)
    for peer, signature in reformed.signatures:
        if not keyring.verify(peer, message, signature):
            raise InvalidCommit(f"the signature of {peer} under a reform does not verify")


def _place(base: Base, state: ChainState) -> str:
    return (
        f"it is of round {base.round} of lineage {base.lineage.hex()[:16]} after {base.prev.hex()[:16]} with state "
        f"{base.state_hash.hex()[:16]}; the chain is at round {state.base.round} of {state.base.lineage.hex()[:16]} "
        f"after {state.base.prev.hex()[:16]} with state {state.base.state_hash.hex()[:16]}"
    )
