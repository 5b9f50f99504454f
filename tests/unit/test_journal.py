"""The durable record: whole or not at all."""

from __future__ import annotations

import random
from dataclasses import replace

import msgspec
import pytest

from protocol.journal import (
    BARRED_KEPT,
    UNKNOWN_PAST,
    Journal,
    JournalTorn,
    LockedOn,
    OwnVote,
    SignedReform,
    ValidValue,
    barred_with,
    decode_journal,
    promises_at,
)
from protocol.names import Base, digest, encode_integer

FULL = Journal(
    run=digest(b"run"),
    lineage=digest(b"lineage"),
    round=7,
    base=digest(b"base"),
    attempt=3,
    touched_attempt=2,
    ready=b"a READY",
    votes=(OwnVote(attempt=3, phase=1, envelope=b"vote"), OwnVote(attempt=3, phase=2, envelope=b"vote 2")),
    lock=LockedOn(attempt=3, decision=digest(b"D")),
    valid=ValidValue(attempt=3, roster=b"roster", headers=(b"header", None), certificate=(b"v", b"w")),
    reform=SignedReform(k=1, envelope=b"reform"),
    barred=(digest(b"old"),),
    convicted=(b"evidence",),
)


@pytest.mark.parametrize("journal", [Journal(), FULL])
def test_what_is_written_is_read(journal: Journal) -> None:
    assert decode_journal(journal.encode()) == journal


def test_every_torn_journal_is_noticed() -> None:
    data = FULL.encode()
    for length in range(len(data)):
        with pytest.raises(JournalTorn):
            decode_journal(data[:length])
    chance = random.Random(1)
    for _ in range(500):
        damaged = bytearray(data)
        damaged[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        with pytest.raises(JournalTorn):
            decode_journal(bytes(damaged))
    with pytest.raises(JournalTorn):
        decode_journal(data + b"\0")


def test_barred_lineages_are_bounded_and_the_newest_stay() -> None:
    barred: tuple[bytes, ...] = ()
    for number in range(2 * BARRED_KEPT):
        barred = barred_with(barred, digest(encode_integer(number)))
    assert len(barred) == BARRED_KEPT
    assert barred[-1] == digest(encode_integer(2 * BARRED_KEPT - 1))
    assert barred_with(barred, barred[0])[-1] == barred[0]
    assert len(set(barred_with(barred, barred[0]))) == BARRED_KEPT


def test_a_lost_journal_binds_in_every_lineage_until_it_is_joined_anew() -> None:
    """A life voted in `first`, signed itself into `second`, lost its journal there, and comes back to `first`."""
    first, second = (
        Base(run=digest(b"run"), lineage=digest(name), round=5, prev=digest(b"prev"), state_hash=digest(b"state"))
        for name in (b"first", b"second")
    )
    lost = promises_at(second, None, lost=True)
    assert lost.past_unknown
    written = Journal(
        run=second.run,
        lineage=second.lineage,
        round=5,
        base=second.digest(),
        barred=lost.barred,
        past_unknown=lost.past_unknown,
    )
    back = promises_at(first, written.encode(), lost=False)
    assert (back.fence, back.past_unknown) == (UNKNOWN_PAST, True)
    rejoined = msgspec.structs.replace(written, rejoined=(first.lineage,))
    again = promises_at(first, rejoined.encode(), lost=False)
    assert (again.fence, again.rejoined) == (-1, (first.lineage,))


def test_what_was_verified_is_remembered_wherever_the_chain_has_gone_since() -> None:
    run, lineage = FULL.run, FULL.lineage
    here = Base(run=run, lineage=lineage, round=8, prev=digest(b"prev"), state_hash=digest(b"state"))
    elsewhere = replace(here, lineage=digest(b"another"))
    for base in (here, elsewhere):
        assert promises_at(base, FULL.encode(), lost=False).convicted == FULL.convicted
    assert promises_at(replace(here, run=digest(b"another")), FULL.encode(), lost=False).convicted == ()
    assert promises_at(here, FULL.encode(), lost=True).convicted == ()
