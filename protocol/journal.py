"""The durable record of what this peer has promised (protocol section 5, "Start").

One small file, replaced atomically by the driver at every `Persist`. It is never rolled back: a torn or missing one is
told to the machine as lost, and a peer that has lost its promises does not vote (`PeerMachine`).
"""

from __future__ import annotations

import msgspec

from protocol.names import DIGEST_BYTES, ZERO_DIGEST, Base, Digest, digest

MAGIC = b"ATOLLJ01"
UNKNOWN_PAST = 2**62
"""A fence above every attempt: nothing is known of what an earlier life signed."""
BARRED_KEPT = 32
"""Lineages remembered as barred; a peer that leaves more than this many lineages at one state has other worries."""


class JournalTorn(ValueError):
    """The journal's bytes are not a journal that this version wrote whole."""


class OwnVote(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    attempt: int
    phase: int
    envelope: bytes


class LockedOn(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    attempt: int
    decision: Digest


class ValidValue(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A value that a quorum voted for in phase 1, with all that is needed to propose it again."""

    attempt: int
    roster: bytes
    """Envelope of the ROSTER."""
    headers: tuple[bytes | None, ...]
    """Envelopes of the part headers; None is EMPTY."""
    certificate: tuple[bytes, ...]
    """Envelopes of the phase-1 votes."""


class SignedReform(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The REFORM with the highest `k` that I signed at this base."""

    k: int
    envelope: bytes


class Journal(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Everything a peer must remember across a crash, for the one base that it last promised anything about."""

    run: Digest = ZERO_DIGEST
    lineage: Digest = ZERO_DIGEST
    round: int = 0
    base: Digest = ZERO_DIGEST
    """Digest of the base; promises bind only there."""
    attempt: int = 0
    """The highest attempt that I voted in."""
    touched_attempt: int = -1
    """The highest attempt whose roster I may have signed something for (ROSTER, PROPOSAL, header, UP); -1: none."""
    ready: bytes = b""
    """Envelope of my READY; empty: not sent. Every attempt and every life repeats this one."""
    votes: tuple[OwnVote, ...] = ()
    lock: LockedOn | None = None
    valid: ValidValue | None = None
    reform: SignedReform | None = None
    barred: tuple[Digest, ...] = ()
    """Lineages in which I do not vote until I have joined them anew."""
    past_unknown: bool = False
    """A journal was lost: what it held may have bound me in any lineage, so all are barred but those of `rejoined`."""
    rejoined: tuple[Digest, ...] = ()
    """Lineages whose members I was not among since the loss; whatever was promised there before binds no more."""
    convicted: tuple[bytes, ...] = ()
    """Envelopes of evidence that I have verified, signed by me: what it took to recompute a mean may be gone."""

    def encode(self) -> bytes:
        payload = msgspec.msgpack.encode(self)
        return MAGIC + digest(MAGIC, payload) + payload


def decode_journal(data: bytes) -> Journal:
    """The journal that `Journal.encode` wrote; raises `JournalTorn` when any byte of it is not as written."""
    head = len(MAGIC)
    if data[:head] != MAGIC:
        raise JournalTorn(f"the vote journal starts with {data[:head]!r}, not {MAGIC!r}: it is not used")
    checksum, payload = data[head : head + DIGEST_BYTES], data[head + DIGEST_BYTES :]
    if digest(MAGIC, payload) != checksum:
        raise JournalTorn(f"the vote journal's {len(payload)} bytes do not match their checksum: it is not used")
    try:
        return msgspec.msgpack.decode(payload, type=Journal)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise JournalTorn(f"the vote journal cannot be read ({error}): it is not used") from error


def barred_with(barred: tuple[Digest, ...], lineage: Digest) -> tuple[Digest, ...]:
    """`barred` and `lineage`, newest last, bounded."""
    return (*(known for known in barred if known != lineage), lineage)[-BARRED_KEPT:]


class Promises(msgspec.Struct, frozen=True, kw_only=True):
    """What an earlier life promised, as far as it matters at one place in the chain."""

    journal: Journal
    """Promises at this very base; empty if there are none."""
    fence: int
    """Attempts up to this one may have been touched: nothing of theirs is signed again; -1: none."""
    barred: tuple[Digest, ...] = ()
    lost: bool = False
    """There was a journal, and nothing is known of what it held."""
    past_unknown: bool = False
    rejoined: tuple[Digest, ...] = ()
    """As in `Journal`."""
    convicted: tuple[bytes, ...] = ()


def promises_at(base: Base, data: bytes | None, *, lost: bool) -> Promises:
    """What the journal's bytes say at `base`. `lost`: there was a journal, and it is gone; so is a torn one."""
    promised = Journal()
    if data is not None and not lost:
        try:
            promised = decode_journal(data)
        except JournalTorn:
            lost = True
    if lost:
        return Promises(
            journal=Journal(), fence=UNKNOWN_PAST, barred=(base.lineage,), lost=True, past_unknown=True, rejoined=()
        )
    if promised.run != base.run:
        return Promises(journal=Journal(), fence=-1)
    unknown, rejoined = promised.past_unknown, promised.rejoined
    if promised.base == base.digest():
        journal, fence, barred = promised, promised.touched_attempt, promised.barred
    elif promised.lineage == base.lineage and promised.round < base.round:
        journal, fence, barred = Journal(), -1, promised.barred
    else:
        # The journal speaks of another lineage, or of a round that this state has not reached: it says no more what was
        # promised before, there or here.
        journal, barred = Journal(), barred_with(promised.barred, promised.lineage)
        forgotten = base.lineage in barred or (unknown and base.lineage not in rejoined)
        fence = UNKNOWN_PAST if forgotten else -1
    return Promises(
        journal=journal,
        fence=fence,
        barred=barred,
        past_unknown=unknown,
        rejoined=rejoined,
        convicted=promised.convicted,
    )
