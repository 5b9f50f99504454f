"""Evidence: what shows to anyone that a peer signed two things of which it may sign one (protocol section 7).

No honest peer can come to that, whatever dies and restarts: READY and votes are durable before they are sent, and what
a later life cannot know to be unsigned it does not sign (the fence of section 5). Two things are compared by what their
signatures cover (`protocol.messages.Statement`), so evidence is small however large a roster is.

A mean that is none is shown by its signed header alone: the round's commit says what it should have been, and READYs
bind the bytes to recompute it from. Only its form is looked at here.
"""

from __future__ import annotations

from typing import Any, Final

from protocol.messages import (
    Evidence,
    Message,
    Offence,
    PartHeader,
    Proposal,
    Ready,
    Roster,
    Signed,
    Statement,
    Vote,
)
from protocol.names import Base, Keyring
from protocol.rules import Rules
from protocol.wire import statement_bytes, statement_of, verify

_KINDS: Final[dict[Offence, type[Message]]] = {
    Offence.TWO_READYS: Ready,
    Offence.TWO_ROSTERS: Roster,
    Offence.TWO_PROPOSALS: Proposal,
    Offence.TWO_VOTES: Vote,
}


def evidence_of(first: Signed[Any], second: Signed[Any]) -> Evidence | None:
    """What two messages of one peer show, in an order that does not depend on which came first; None: nothing."""
    one, other = sorted((first, second), key=lambda signed: signed.body)
    if one.sender != other.sender or type(one.message) is not type(other.message):
        return None
    if isinstance(one.message, PartHeader):
        evidence = Evidence(culprit=one.sender, offence=Offence.TWO_HEADERS, headers=(one, other))
    else:
        said = [(statement_of(signed.message, signed.body), signed.signature) for signed in (one, other)]
        statements = tuple((statement, signature) for statement, signature in said if statement is not None)
        found = [offence for offence, kind in _KINDS.items() if isinstance(one.message, kind)]
        if not found:
            return None
        evidence = Evidence(culprit=one.sender, offence=found[0], statements=statements)
    return None if _why_compatible(evidence) else evidence


def wrong_mean(base: Base, header: Signed[PartHeader]) -> Evidence:
    """`header` stands in the commit of `base`'s round, and its part is not the mean of its bitmap."""
    return Evidence(culprit=header.sender, offence=Offence.WRONG_MEAN, headers=(header,), base=base)


def check_evidence(rules: Rules, evidence: Evidence, keyring: Keyring) -> str | None:
    """Why this shows nothing, or None. Of WRONG_MEAN it says only that its culprit signed that header."""
    bases = [statement.base for statement, _ in evidence.statements]
    if evidence.base is not None:
        bases.append(evidence.base)
    if any(base.run != rules.run for base in bases):
        return f"it is about another run than {rules.run.hex()[:16]}"
    if why := _why_compatible(evidence):
        return why
    for header in evidence.headers:
        if header.sender != evidence.culprit or not verify(keyring, header):
            return f"{evidence.culprit} did not sign the header of part {header.message.part}"
    for statement, signature in evidence.statements:
        message = statement_bytes(_KINDS[evidence.offence], statement)
        if not keyring.verify(evidence.culprit, message, signature):
            return f"{evidence.culprit} did not sign one of {evidence.offence}"
    return None


def _why_compatible(evidence: Evidence) -> str | None:
    """Why one peer may sign both, or None. (One statement of WRONG_MEAN excludes nothing by itself.)"""
    if evidence.offence is Offence.WRONG_MEAN:
        return None
    if evidence.offence is Offence.TWO_HEADERS:
        one, other = evidence.headers
        if (one.message.roster_id, one.message.part) != (other.message.roster_id, other.message.part):
            return "its headers are of two parts or rosters"
        return "its headers are the same" if one.body == other.body else None
    (first, _), (second, _) = evidence.statements
    if (first.base, first.attempt, first.phase) != (second.base, second.attempt, second.phase):
        return "its two statements are of two places in the run"
    if first.body_hash == second.body_hash:
        return "its two statements are the same"
    return _why_allowed(evidence.offence, first, second)


def _why_allowed(offence: Offence, first: Statement, second: Statement) -> str | None:
    if offence is Offence.TWO_READYS and not (first.with_work and second.with_work):
        return "a READY with work may replace one without"
    if offence is Offence.TWO_VOTES and first.value == second.value:
        return "its two votes are for the same value"
    return None
