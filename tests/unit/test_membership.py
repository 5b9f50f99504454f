"""Membership records: signed, numbered, bounded, believed for a while."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
import trio
import trio.testing

from node.daemon import membership
from node.daemon.identity import Identity
from node.daemon.membership import LinkSummary, Membership, MembershipRecord, Verdict, parse_record, sign_record
from node.errors import StrangerError

RUN = b"r" * 32


def table(identity: Identity, incarnation: bytes = b"i", **options: Any) -> Membership:
    made = Membership(peer_id=identity.peer_id, keyring=identity, version="0.1.0", incarnation=incarnation, **options)
    made.publish(run=RUN)
    return made


def in_virtual_time(main: Callable[[], Awaitable[None]]) -> None:
    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def record(identity: Identity, sequence: int = 1, **fields: Any) -> MembershipRecord:
    fields = {"run": RUN, "incarnation": b"i", "version": "0.1.0", **fields}
    return MembershipRecord(peer_id=identity.peer_id, sequence=sequence, **fields)


def signed(identity: Identity, sequence: int = 1, **fields: Any) -> bytes:
    return sign_record(record(identity, sequence, **fields), identity)


def test_the_higher_number_wins_and_travels_as_it_was_signed() -> None:
    async def main() -> None:
        peer = Identity.generate()
        mine = table(Identity.generate())
        newer = signed(peer, 7, round=5, tokens_per_s=12.5, data_addresses=("203.0.113.5:9",), name="left")
        assert mine.accept(signed(peer, 3)) is Verdict.NEWS
        assert mine.accept(newer) is Verdict.NEWS
        assert mine.accept(signed(peer, 6)) is Verdict.KNOWN
        assert mine.accept(newer) is Verdict.KNOWN
        held = mine.records[peer.peer_id]
        assert (held.round, held.tokens_per_s, held.data_addresses, held.name) == (5, 12.5, ("203.0.113.5:9",), "left")
        assert newer in mine.table()

    in_virtual_time(main)


def test_nobody_speaks_in_anothers_name() -> None:
    async def main() -> None:
        peer, forger = Identity.generate(), Identity.generate()
        mine = table(Identity.generate())
        with pytest.raises(StrangerError, match=f"wrong signature in the name of {peer.peer_id}"):
            mine.accept(sign_record(record(peer), forger))
        body, signature = msgspec.msgpack.decode(signed(peer), type=tuple[bytes, bytes])
        with pytest.raises(StrangerError, match="wrong signature"):
            mine.accept(msgspec.msgpack.encode((body, signature[:-1] + bytes([signature[-1] ^ 1]))))
        # The same bytes signed for another purpose are no record.
        with pytest.raises(StrangerError, match="wrong signature"):
            mine.accept(msgspec.msgpack.encode((body, peer.sign(body))))
        assert not mine.records.keys() - {mine.mine.peer_id}

    in_virtual_time(main)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"addresses": ("nonsense",)}, "malformed address"),
        ({"addresses": ("/ip4/203.0.113.5/tcp/1",) * 17}, "more than 16"),
        ({"data_addresses": ("203.0.113.5",)}, "is not host:port"),
        ({"data_addresses": ("203.0.113.5:99999",)}, "is not host:port"),
        ({"data_addresses": ("-rf /:1",)}, "is not host:port"),
        ({"certificate_sha256": b"short"}, "hash of the wrong length"),
        ({"state_hash": b"short"}, "hash of the wrong length"),
        ({"round": -1}, "negative"),
        ({"sequence": -1}, "negative"),
        ({"lifetime_s": 1e9}, "wants to live"),
        ({"lifetime_s": float("nan")}, "wants to live"),
        ({"tokens_per_s": float("inf")}, "not finite"),
        ({"up_bytes_s": float("nan")}, "not finite"),
        ({"down_bytes_s": -1.0}, "negative"),
        ({"links": {"x": LinkSummary(float("nan"))}}, "not finite"),
        ({"links": {"x": LinkSummary(0.1, -5.0)}}, "negative"),
    ],
)
def test_absurd_records_are_refused(fields: dict[str, Any], says: str) -> None:
    peer = Identity.generate()
    with pytest.raises(StrangerError, match=says):
        parse_record(signed(peer, **fields))


@pytest.mark.parametrize("data", [b"", b"\xff" * 100, b"\x92\xc4\x00\xc4\x00", b"\x91" * 3000, bytes(5000)])
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(StrangerError):
        parse_record(data)


def test_a_record_of_an_older_node_says_nothing_of_what_its_line_carries() -> None:
    peer = Identity.generate()
    fields = msgspec.to_builtins(record(peer), builtin_types=(bytes,))
    del fields["up_bytes_s"], fields["down_bytes_s"]
    body = msgspec.msgpack.encode(fields)
    parsed, _, _ = parse_record(msgspec.msgpack.encode((body, peer.sign(body))))
    assert parsed.peer_id == peer.peer_id
    assert parsed.up_bytes_s is None
    assert parsed.down_bytes_s is None


def test_a_record_that_is_too_long_cannot_be_made() -> None:
    peer = Identity.generate()
    links = {f"{number:08}": LinkSummary(0.1, 1.0, 1.0) for number in range(membership.MAX_LINKS)}
    signed(peer, links=links, addresses=tuple(f"/ip4/203.0.113.5/tcp/{port}" for port in range(1, 17)))
    with pytest.raises(ValueError, match="over the limit of 4096"):
        signed(peer, name="x" * 5000)


def test_belief_ends_by_the_local_clock_and_does_not_come_back() -> None:
    async def main() -> None:
        peer = Identity.generate()
        mine = table(Identity.generate())
        last = signed(peer, 7, lifetime_s=20.0)
        mine.accept(last)
        await trio.sleep(19.0)
        assert mine.expire() == []
        await trio.sleep(2.0)
        assert [gone.peer_id for gone in mine.expire()] == [peer.peer_id]
        assert peer.peer_id not in mine.records
        # A joiner that still has it would otherwise make the dead immortal.
        assert mine.accept(last) is Verdict.KNOWN
        assert peer.peer_id not in mine.records
        assert mine.accept(signed(peer, 8)) is Verdict.NEWS
        assert peer.peer_id in mine.records

    in_virtual_time(main)


def test_who_said_goodbye_comes_back_in_a_new_life_only() -> None:
    async def main() -> None:
        peer = Identity.generate()
        mine = table(Identity.generate())
        mine.accept(signed(peer, 3))
        mine.forget(peer.peer_id)
        assert mine.accept(signed(peer, 4)) is Verdict.KNOWN, "passed on by others, later than the goodbye came"
        assert peer.peer_id not in mine.records
        assert mine.accept(signed(peer, 5, incarnation=b"next life")) is Verdict.NEWS
        mine.forget(Identity.generate().peer_id)

    in_virtual_time(main)


def test_a_peer_whose_clock_went_back_learns_its_number_from_the_others() -> None:
    async def main() -> None:
        peer = Identity.generate()
        others = table(Identity.generate())
        first_life = table(peer, b"first")
        others.accept(first_life.renew())
        restarted = table(peer, b"second")
        restarted._mine = msgspec.structs.replace(restarted.mine, sequence=5)  # its clock says 1970
        assert others.accept(restarted.renew()) is Verdict.OUTDATED
        newer = others.data_of(peer.peer_id)
        assert newer is not None
        restarted.accept(newer)
        assert restarted.unpublished.is_set()
        assert others.accept(restarted.renew()) is Verdict.NEWS
        assert others.records[peer.peer_id].incarnation == b"second"

    in_virtual_time(main)


def test_a_second_machine_with_this_key_is_noticed_and_one_earlier_life_is_not() -> None:
    async def main() -> None:
        peer = Identity.generate()
        alarms: list[str] = []
        one = table(peer, b"one", on_duplicate=alarms.append)
        other = table(peer, b"other")
        for _ in range(membership.LIVES_BEFORE_ALARM):
            assert not alarms
            other.accept(one.renew())
            one.accept(other.renew())
        assert len(alarms) == 1

    in_virtual_time(main)


def test_a_flood_from_one_peer_is_damped() -> None:
    async def main() -> None:
        peer = Identity.generate()
        mine = table(Identity.generate())
        verdicts = [mine.accept(signed(peer, number)) for number in range(1, 51)]
        assert verdicts.count(Verdict.NEWS) == membership.RECORDS_AT_ONCE
        await trio.sleep(2.0)
        assert mine.accept(signed(peer, 100)) is Verdict.NEWS

    in_virtual_time(main)


def test_the_table_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "MAX_RECORDS", 3)

    async def main() -> None:
        mine = table(Identity.generate())
        verdicts = [mine.accept(signed(Identity.generate(), lifetime_s=5.0)) for _ in range(5)]
        assert verdicts == [Verdict.NEWS] * 3 + [Verdict.KNOWN] * 2
        await trio.sleep(6.0)
        mine.expire()
        for _ in range(5):
            mine.accept(signed(Identity.generate(), lifetime_s=5.0))
        await trio.sleep(6.0)
        mine.expire()
        assert len(mine._former) == 3

    in_virtual_time(main)


def test_records_of_another_run_are_not_taken() -> None:
    async def main() -> None:
        mine = table(Identity.generate())
        peer = Identity.generate()
        assert mine.accept(signed(peer, run=b"o" * 32)) is Verdict.KNOWN
        assert peer.peer_id not in mine.records
        nowhere = Membership(peer_id=peer.peer_id, keyring=peer, version="0.1.0", incarnation=b"i")
        assert nowhere.accept(signed(Identity.generate(), run=b"")) is Verdict.KNOWN
        assert not nowhere.records

    in_virtual_time(main)


def test_changes_wake_a_waiting_reader_once_for_several() -> None:
    async def main() -> None:
        mine = table(Identity.generate())
        seen: list[int] = []

        async def watch() -> None:
            async for _ in mine.changes():
                seen.append(len(mine.records))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            await trio.testing.wait_all_tasks_blocked()
            assert seen == [1]
            for _ in range(3):
                mine.accept(signed(Identity.generate()))
            await trio.testing.wait_all_tasks_blocked()
            assert seen == [1, 4]
            mine.publish(round=3)
            await trio.testing.wait_all_tasks_blocked()
            assert seen == [1, 4, 4]
            mine.publish(round=3)
            await trio.testing.wait_all_tasks_blocked()
            assert seen == [1, 4, 4]
            nursery.cancel_scope.cancel()

    in_virtual_time(main)


def test_own_fields_are_checked() -> None:
    async def main() -> None:
        mine = table(Identity.generate())
        with pytest.raises(TypeError, match="no settable field rounds"):
            mine.publish(rounds=3)
        with pytest.raises(TypeError, match="sequence"):
            mine.publish(sequence=3)

    in_virtual_time(main)
