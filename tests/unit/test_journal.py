"""The durable record: whole or not at all."""

from __future__ import annotations

import random

import pytest

from protocol.journal import (
    BARRED_KEPT,
    Journal,
    JournalTorn,
    LockedOn,
    OwnVote,
    SignedReform,
    ValidValue,
    barred_with,
    decode_journal,
)
from protocol.names import digest, encode_integer

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
