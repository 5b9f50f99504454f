"""Pieces of the data channels that need no peer: headers, tokens, strangers, duties, and bytes that are no frames."""

from __future__ import annotations

import random
from collections import Counter

import msgspec
import pytest
import trio
import trio.testing

from node.engine.drops import MAX_REASONS, Drops
from node.engine.exchange_duties import Duties
from node.engine.frames import (
    HEADER_BYTES,
    AskMeta,
    DownMeta,
    Header,
    Kind,
    MetaDecoder,
    UpMeta,
    pack_want,
    unpack_want,
    want_payload_bytes,
)
from node.engine.handshake import MAX_TOKENS_PER_PEER, HandshakeFailed, TokenBook, dial, split_address
from node.engine.strangers import FAIR_TIME_S, MAX_PER_HOST, MAX_TOTAL, Strangers
from node.errors import StrangerError
from protocol.codecs import codec
from protocol.fields import bitmap_bytes
from protocol.planning import deal, flat_plan
from protocol.stations import ExchangeView, Station


def test_a_header_survives_the_wire() -> None:
    header = Header(kind=Kind.UP, id=bytes(range(32)), part=7, slot=3, meta_bytes=90, payload_bytes=66_560)
    data = header.pack()
    assert len(data) == HEADER_BYTES
    assert Header.unpack(data) == header


def test_random_headers_and_metas_are_refused_or_read_never_more() -> None:
    rng = random.Random(1)
    metas = MetaDecoder()
    for _ in range(3000):
        data = rng.randbytes(HEADER_BYTES)
        try:
            header = Header.unpack(data)
        except StrangerError:
            continue
        assert header.meta_bytes <= 4096
    good = [msgspec.msgpack.encode(one) for one in (UpMeta(b"\1", b""), DownMeta("é", b"", b""), AskMeta(1, 2, 3))]
    for _ in range(3000):
        data = bytearray(rng.choice(good)) if rng.random() < 0.7 else bytearray(rng.randbytes(rng.randrange(40)))
        for _ in range(rng.randrange(3)):
            if data:
                data[rng.randrange(len(data))] = rng.randrange(256)
        for decode in (metas.up, metas.down, metas.ask):
            try:
                decode(bytes(data))
            except StrangerError:
                continue


@pytest.mark.parametrize("parts", [1, 7, 8, 9, 763])
def test_a_want_carries_both_bitmaps(parts: int) -> None:
    ups, downs = (1 << parts) - 1, 1 << (parts - 1)
    payload = pack_want(ups, downs, parts)
    assert len(payload) == want_payload_bytes(parts)
    assert unpack_want(payload) == (ups, downs)
    assert int.from_bytes(bitmap_bytes(downs), "little") == downs


def run(main: object) -> None:
    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))  # type: ignore[arg-type]


def test_a_token_opens_each_lane_once_until_it_expires() -> None:
    async def main() -> None:
        book = TokenBook()
        token = bytes(32)
        book.add("a", token, 10.0)
        assert not book.redeem("b", token, 0, 2)
        assert book.redeem("a", token, 0, 2)
        assert not book.redeem("a", token, 0, 2)
        assert not book.redeem("a", token, 1, 4), "another number of lanes"
        assert not book.redeem("a", token, 9, 10), "more lanes than allowed"
        assert book.redeem("a", token, 1, 2)
        assert not book.redeem("a", token, 1, 2)
        book.add("a", token, 10.0)
        await trio.sleep(11)
        assert not book.redeem("a", token, 0, 1)

    run(main)


def test_who_asks_for_many_tokens_displaces_only_its_own() -> None:
    async def main() -> None:
        book = TokenBook()
        book.add("modest", b"m" * 32, 30.0)
        greedy = [number.to_bytes(32, "big") for number in range(5000)]
        for token in greedy:
            book.add("greedy", token, 30.0)
        assert book.redeem("modest", b"m" * 32, 0, 1)
        assert not book.redeem("greedy", greedy[-MAX_TOKENS_PER_PEER - 1], 0, 1)
        assert all(book.redeem("greedy", token, 0, 1) for token in greedy[-MAX_TOKENS_PER_PEER:])

    trio.run(main, clock=trio.testing.MockClock())


def test_strangers_are_few_and_the_oldest_gives_way_after_its_fair_time() -> None:
    async def main() -> None:
        strangers = Strangers()
        flood = [strangers.admit("flooder") for _ in range(MAX_PER_HOST)]
        assert all(flood)
        assert strangers.admit("flooder") is None
        assert strangers.admit("honest") is not None, "another host has its own places"
        await trio.sleep(FAIR_TIME_S)
        assert strangers.admit("flooder") is not None
        assert flood[0] is not None
        assert flood[0].scope.cancel_called
        for number in range(MAX_TOTAL):
            strangers.admit(f"host {number}")
        assert len(strangers) == MAX_TOTAL
        assert strangers.admit("late") is None
        await trio.sleep(FAIR_TIME_S)
        assert strangers.admit("late") is not None
        assert len(strangers) == MAX_TOTAL

    run(main)


def test_reasons_cannot_fill_the_memory() -> None:
    drops = Drops()
    for number in range(10 * MAX_REASONS):
        drops.count(f"reason {number}")
        drops.count("a kind: with details", "sender")
    assert len(drops + Counter()) <= MAX_REASONS + 1
    assert (drops + Counter({"another": 2}))["another"] == 2


@pytest.mark.parametrize(
    ("address", "expected"),
    [("10.0.0.1:80", ("10.0.0.1", 80)), ("[::1]:9", ("::1", 9)), ("host.example:1", ("host.example", 1))],
)
def test_addresses(address: str, expected: tuple[str, int]) -> None:
    assert split_address(address) == expected


@pytest.mark.parametrize(
    "address", ["", "host", ":80", "host:port", "h:0", "h:65536", "h:-1", "h:" + "9" * 99, "h\0:1", "x" * 300 + ":1"]
)
def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        split_address(address)


def station(me: int, peers: int, parts: int) -> Station:
    plan = flat_plan(peers, (1 << peers) - 1)
    return Station(
        ExchangeView(
            my_index=me,
            contributing=(1 << peers) - 1,
            plan=plan,
            dealt=deal(bytes(32), parts, plan),
            tokens=(((parts, 1),),) * peers,
            weight_cap_ratio=3.0,
            durations_s=(1.0, 1.0),
            progress_s=1.0,
            slack_s=1.0,
            elements=256 * parts,
            part_elements=256,
            codec=codec("int8").name,
            sum_codec="sum16",
        )
    )


def test_what_is_owed_follows_from_what_the_other_lacks() -> None:
    me = station(0, 3, 12)
    duties = Duties(me, 12)
    assert duties.neighbours == {1, 2}
    mine_for_1 = {part for part in range(12) if me.up_target(part) == 1}
    assert {part for _, part in duties.owed_to(1)} == mine_for_1
    first = min(mine_for_1)
    duties.done(1, Kind.UP, first)
    # The link broke; it says that it lacks even the one that was sent, and has one that was not.
    last = max(mine_for_1)
    reduced = next(part for part in range(12) if me.root(part) == 0)
    duties.on_want(1, ups_held=1 << last, downs_held=0, partials=(), downs={reduced})
    assert (Kind.UP, first) in duties.owed_to(1)
    assert (Kind.UP, last) not in duties.owed_to(1)
    assert (Kind.DOWN, reduced) in duties.owed_to(1)
    duties.give_up(1)
    assert duties.owed_to(1) == []
    duties.add(1, Kind.DOWN, reduced)
    assert duties.owed_to(1) == [], "nothing is queued for who cannot be reached"


@pytest.mark.parametrize("address", ["\ud800:80", ".:80", "a..b:80", "x" * 200 + ":80", "h\u0130st.invalid:1", "%:1"])
def test_dialling_a_senseless_address_fails_as_unreachable(address: str) -> None:
    """Addresses come from strangers' records."""

    async def main() -> None:
        with trio.fail_after(20), pytest.raises(HandshakeFailed):
            await dial(address, certificate_sha256=bytes(32), peer_id="a", token=bytes(32), lane=0, lanes=1)

    trio.run(main)
