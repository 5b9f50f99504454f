"""The wire format: what goes out comes back, and no bytes of a stranger do anything but raise `WireError`."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
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
    peers,
    sign_headers,
    sign_ready,
    sign_roster,
)

from protocol import chain, wire
from protocol.bodies import MAX_BODY_BYTES
from protocol.evidence import wrong_mean
from protocol.fields import MAX_ATTEMPT, MAX_COUNT, MAX_EDGES, MAX_LEFT_OUT, MAX_PEERS, MAX_READYS
from protocol.messages import (
    NIL,
    Certificate,
    Fetch,
    Have,
    Heartbeat,
    Join,
    Leave,
    Message,
    Proposal,
    Ready,
    Reform,
    ReformVote,
    Roster,
    Signed,
    UnitRange,
    Vote,
)
from protocol.names import digest
from protocol.pb import round_pb2 as pb

PEERS = peers(3)
RULES = make_rules(PEERS, parts=3)
STATE = chain.genesis(RULES)
ME = PEERS[0]


def signed_samples() -> Iterator[Signed[Any]]:
    """One rich message of every kind."""
    readys = [sign_ready(STATE, RULES, peer) for peer in PEERS]
    roster = sign_roster(STATE, RULES, readys, attempt=1, joins=("Joiner",), leaves=(PEERS[2],), absent=0b100)
    headers = sign_headers(RULES, roster, empty=(1,))
    value = chain.decision(STATE.base.digest(), wire.roster_id(roster), headers)
    reformed = make_reform(STATE, PEERS[:2], k=3)
    messages: list[Message] = [
        Ready(
            base=STATE.base,
            ranges_done=(UnitRange(epoch=0, start=3, stop=9), UnitRange(epoch=2, start=0, stop=1)),
            tokens=((2, 100), (1, 0)),
            norm=1.5,
            largest=0.25,
            units_wanted=7,
            upload_limit_bytes=10**9,
            download_limit_bytes=10**8,
            failed_edges=PEERS[1:],
            parts_root=digest(b"parts"),
        ),
        Join(base=STATE.base, units_wanted=8),
        Leave(base=STATE.base),
        roster.message,
        Proposal(
            base=STATE.base,
            attempt=2,
            roster_id=wire.roster_id(roster),
            headers=headers,
            valid_attempt=1,
            valid_certificate=certify(STATE, value, PEERS, attempt=1, phase=1),
        ),
        Vote(base=STATE.base, attempt=4, phase=1, value=NIL, failed_edges=PEERS[:1], left_out=(readys[2],)),
        Vote(base=STATE.base, attempt=4, phase=2, value=value),
        make_commit(STATE, RULES, roster, headers),
        reformed.reform,
        ReformVote(base=STATE.base, k=3, sign=False),
        ReformVote(base=STATE.base, k=3, sign=True, reform=reformed.body),
        reformed,
        Heartbeat(base=STATE.base, attempt=9, able=True, incarnation=bytes(range(16))),
        Fetch(hash=digest(b"wanted")),
        Have(hash=digest(b"wanted"), content=b"content"),
        wrong_mean(STATE.base, next(header for header in headers if header is not None)),
    ]
    header = headers[0]
    assert header is not None
    yield header
    for message in messages:
        yield wire.sign(CheapKeyring(ME), ME, message)


SAMPLES = tuple(signed_samples())
IDS = [f"{wire.kind_name(type(sample.message))}-{number}" for number, sample in enumerate(SAMPLES)]


def test_every_kind_is_sampled() -> None:
    assert {type(sample.message) for sample in SAMPLES} == set(MAX_BODY_BYTES)


@pytest.mark.parametrize("sample", SAMPLES, ids=IDS)
def test_what_goes_out_comes_back(sample: Signed[Any]) -> None:
    arrived = wire.decode(wire.encode(sample))
    assert arrived == sample
    assert wire.verify(KEYRING, arrived)
    assert wire.encode(arrived) == wire.encode(sample)
    assert wire.encode_body(arrived.message) == sample.body


@pytest.mark.parametrize("sample", SAMPLES, ids=IDS)
def test_a_signature_binds_sender_kind_and_body(sample: Signed[Any]) -> None:
    assert not wire.verify(KEYRING, replace(sample, sender=PEERS[1] if sample.sender != PEERS[1] else PEERS[0]))
    assert not wire.verify(KEYRING, replace(sample, body=sample.body + b"\0"))
    for other in SAMPLES:
        if type(other.message) is not type(sample.message):
            # The same body under another kind: what a replay across kinds would look like.
            assert not wire.verify(KEYRING, replace(sample, message=other.message))


def test_nested_bodies_stay_as_they_arrived() -> None:
    """Another implementation may write fields in another order; its signature must survive nesting."""
    ready = sign_ready(STATE, RULES, PEERS[1])
    # The same message with its first field moved to the end: protobuf reads it alike.
    field = pb.Ready(base=pb.Ready.FromString(ready.body).base).SerializeToString()
    assert ready.body.startswith(field)
    body = ready.body[len(field) :] + field
    said = wire.statement_of(ready.message, body)
    assert said is not None
    signature = CheapKeyring(PEERS[1]).sign(wire.statement_bytes(Ready, said))
    odd = Signed(sender=PEERS[1], message=ready.message, body=body, signature=signature)
    roster = sign_roster(STATE, RULES, [sign_ready(STATE, RULES, PEERS[0]), odd])
    arrived = wire.decode(wire.encode(roster)).message.readys[1]
    assert arrived.body == body != wire.encode_body(ready.message)
    assert wire.verify(KEYRING, arrived)


def test_a_vote_on_a_reform_has_one_form() -> None:
    """A Reformed keeps the votes' signatures only: verifiers write their bodies anew."""
    vote = next(sample for sample in SAMPLES if isinstance(sample.message, ReformVote) and sample.message.sign)
    field = pb.ReformVote(base=pb.ReformVote.FromString(vote.body).base).SerializeToString()
    body = vote.body[len(field) :] + field
    assert pb.ReformVote.FromString(body) == pb.ReformVote.FromString(vote.body)
    wire.decode(wire.encode(vote))
    with pytest.raises(wire.WireError, match="canonical"):
        wire.decode(wire.encode(replace(vote, body=body)))


def test_a_roster_is_named_by_its_body() -> None:
    readys = [sign_ready(STATE, RULES, peer) for peer in PEERS]
    first, second = (sign_roster(STATE, RULES, readys, attempt=attempt) for attempt in (0, 1))
    assert wire.roster_id(first) != wire.roster_id(second)
    assert wire.roster_id(first) == wire.roster_id(replace(first, signature=b"another"))


def bad(message: Message) -> bytes:
    return wire.encode(wire.sign(CheapKeyring(ME), ME, message))


READY = Ready(base=STATE.base)
BAD_MESSAGES: dict[str, Message] = {
    "norm NaN": replace(READY, norm=math.nan),
    "root too short": replace(READY, parts_root=bytes(31)),
    "norm infinite": replace(READY, norm=math.inf),
    "norm negative": replace(READY, norm=-1.0),
    "largest infinite": replace(READY, largest=math.inf),
    "tokens too many": replace(READY, tokens=((1, MAX_COUNT + 1),)),
    "token run of no part": replace(READY, tokens=((0, 5),)),
    "token runs over too many parts": replace(READY, tokens=((1 << 30, 5),)),
    "unit range empty": replace(READY, ranges_done=(UnitRange(epoch=0, start=4, stop=4),)),
    "unit range reversed": replace(READY, ranges_done=(UnitRange(epoch=0, start=5, stop=4),)),
    "epoch absurd": replace(READY, ranges_done=(UnitRange(epoch=1 << 50, start=5, stop=6),)),
    "too many edges": replace(READY, failed_edges=(ME,) * (MAX_EDGES + 1)),
    "edge that is no peer id": replace(READY, failed_edges=("no such peer!",)),
    "edge too long": replace(READY, failed_edges=("P" * 65,)),
    "round absurd": replace(READY, base=replace(STATE.base, round=1 << 60)),
    "short digest": replace(READY, base=replace(STATE.base, prev=b"short")),
    "phase 3": Vote(base=STATE.base, attempt=0, phase=3, value=NIL),
    "attempt absurd": Vote(base=STATE.base, attempt=MAX_ATTEMPT + 1, phase=1, value=NIL),
    "value of 31 bytes": Vote(base=STATE.base, attempt=0, phase=1, value=bytes(31)),
    "a vote for D with reasons": Vote(base=STATE.base, attempt=0, phase=1, value=bytes(32), failed_edges=(ME,)),
    "valid attempt without certificate": Proposal(
        base=STATE.base, attempt=1, roster_id=bytes(32), headers=(), valid_attempt=0
    ),
    "members out of order": Reform(base=STATE.base, k=0, members=("B", "A")),
    "members twice": Reform(base=STATE.base, k=0, members=("A", "A")),
    "no members": Reform(base=STATE.base, k=0, members=()),
    "signs nothing": ReformVote(base=STATE.base, k=0, sign=True),
    "signs another k": ReformVote(
        base=STATE.base, k=1, sign=True, reform=wire.encode_body(Reform(base=STATE.base, k=0, members=(ME,)))
    ),
    "incarnation too long": Heartbeat(base=STATE.base, attempt=0, able=True, incarnation=bytes(33)),
}


@pytest.mark.parametrize("name", BAD_MESSAGES)
def test_values_out_of_bounds_are_refused(name: str) -> None:
    with pytest.raises(wire.WireError):
        wire.decode(bad(BAD_MESSAGES[name]))


def test_sizes_are_refused_before_they_are_parsed() -> None:
    for kind, limit in MAX_BODY_BYTES.items():
        with pytest.raises(wire.WireError, match="over the limit"):
            wire.decode_body(kind, bytes(limit + 1))  # type: ignore[type-var]
    with pytest.raises(wire.WireError, match="over the limit"):
        wire.decode(bytes(wire.MAX_ENVELOPE_BYTES + 1))


def test_a_plan_must_fit_its_roster() -> None:
    roster = sign_roster(STATE, RULES, [sign_ready(STATE, RULES, peer) for peer in PEERS]).message
    assert roster.plan is not None
    shard = roster.plan.shards[0]
    for parents in ((-1, 0), (-1, 0, 0, 0), (-1, -1, 0), (0, 0, 0), (-1, 0, 7)):
        broken = replace(roster, plan=replace(roster.plan, shards=(replace(shard, parents=parents),)))
        with pytest.raises(wire.WireError):
            wire.decode(bad(broken))
    with pytest.raises(wire.WireError):
        wire.decode(bad(replace(roster, plan=replace(roster.plan, shards=()))))
    with pytest.raises(wire.WireError):
        wire.decode(bad(replace(roster, absent=0b1000)))


def test_nobody_has_to_parse_more_than_a_message_can_need() -> None:
    """READYs hold thousands of ranges each: how many of them a message may carry is what parsing it may cost."""
    ready = sign_ready(STATE, RULES, PEERS[0])
    with pytest.raises(wire.WireError, match="1025 READYs are more than 1024"):
        wire.decode(bad(Roster(base=STATE.base, attempt=0, readys=(ready,) * (MAX_READYS + 1))))
    refusal = Vote(base=STATE.base, attempt=0, phase=1, value=NIL, left_out=(ready,) * MAX_LEFT_OUT)
    assert wire.decode(bad(refusal)).message == refusal
    with pytest.raises(wire.WireError, match="READYs left out are more than"):
        wire.decode(bad(replace(refusal, left_out=(ready,) * (MAX_LEFT_OUT + 1))))
    reasons = replace(refusal, failed_edges=peers(MAX_EDGES))
    certificate = Certificate(votes=(wire.sign(CheapKeyring(ME), ME, reasons),))
    proposal = Proposal(
        base=STATE.base,
        attempt=1,
        roster_id=digest(b"r"),
        headers=(),
        valid_attempt=0,
        valid_certificate=certificate,
    )
    with pytest.raises(wire.WireError, match="a vote in a certificate is over"):
        wire.decode(bad(proposal))


def test_bitmaps_have_one_encoding() -> None:
    header = next(sample for sample in SAMPLES if wire.kind_name(type(sample.message)) == "part_header")
    parsed = pb.PartHeader.FromString(header.body)
    for bitmap in (parsed.bitmap + b"\0", b"\1" * (MAX_PEERS // 8 + 1)):
        parsed.bitmap = bitmap
        with pytest.raises(wire.WireError):
            wire.decode_body(type(header.message), parsed.SerializeToString())


def test_mutated_bytes_never_crash() -> None:
    """4,000 mutants of envelopes of every kind: each decodes or raises `WireError`; what decodes, encodes."""
    rng = random.Random(2)
    sources = [wire.encode(sample) for sample in SAMPLES]
    decoded = 0
    for _ in range(4000):
        data = bytearray(rng.choice(sources))
        for _ in range(rng.randint(1, 4)):
            choice = rng.randrange(5)
            at = rng.randrange(len(data)) if data else 0
            if choice == 0 and data:
                data[at] ^= 1 << rng.randrange(8)
            elif choice == 1 and data:
                data[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF))
            elif choice == 2:
                del data[at : at + rng.randint(1, 40)]
            elif choice == 3:
                data[at:at] = rng.randbytes(rng.randint(1, 12))
            else:
                other = rng.choice(sources)
                start = rng.randrange(len(other))
                data[at:at] = other[start : start + rng.randint(1, 60)]
        try:
            arrived = wire.decode(bytes(data))
        except wire.WireError:
            continue
        decoded += 1
        wire.decode(wire.encode(arrived))
    # Most mutants of signatures and hashes still have the form of a message: both branches were taken.
    assert 200 < decoded < 3800


def test_garbage_never_crashes() -> None:
    rng = random.Random(3)
    for size in [*range(40), *(rng.randrange(2000) for _ in range(500))]:
        with pytest.raises(wire.WireError):
            wire.decode(rng.randbytes(size))
