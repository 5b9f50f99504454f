"""What peers report, as the arrays a plan is made from."""

from __future__ import annotations

import math

import numpy as np
import pytest
import trio
import trio.testing
from roster_samples import ready, roster

from node.daemon.identity import Identity
from node.daemon.link_reports import A_PEER_S, AT_MOST_EVERY_S, keep_reports, reports_of
from node.daemon.membership import LinkSummary, Membership, MembershipRecord, link_key
from protocol.events import ReportsChanged
from protocol.links import Link, Report, Terrain, failing, terrain_of
from protocol.planning import ASSUMED_RATE_BYTES_S, FASTEST_RATE_BYTES_S

PEERS = [f"peer{index:03}" for index in range(4)]


def terrain(reports: dict[str, Report], *, failed: dict[int, tuple[int, ...]] | None = None, peers: int = 4) -> Terrain:
    failed = failed or {}
    made = roster(
        [ready(failed_edges=tuple(PEERS[other] for other in failed.get(index, ()))) for index in range(peers)], None
    )
    return terrain_of(reports, made, failing(made, {}))


def test_without_reports_nothing_is_known() -> None:
    made = terrain({})
    assert not made.rated
    assert set(made.up_bytes_s) == set(made.down_bytes_s) == {ASSUMED_RATE_BYTES_S}
    assert np.isinf(made.pair_bytes_s).all()
    assert not made.apart.any()
    assert made.slowest_round_trip_s == 0.0


def test_who_has_not_measured_is_taken_for_one_like_the_others() -> None:
    made = terrain(
        {
            PEERS[0]: Report(up_bytes_s=1e6),
            PEERS[1]: Report(up_bytes_s=5e6),
            PEERS[2]: Report(up_bytes_s=9e12, down_bytes_s=0.5),
        }
    )
    assert made.rated
    assert made.up_bytes_s.tolist() == [1e6, 5e6, FASTEST_RATE_BYTES_S, 5e6]
    assert set(made.down_bytes_s) == {1e3}, "who says less than a byte a second is taken for slow, not for dead"


def test_round_trips_are_the_mean_of_what_both_ends_say() -> None:
    made = terrain(
        {
            PEERS[0]: Report(links={PEERS[1]: Link(round_trip_s=0.1), PEERS[2]: Link(round_trip_s=0.2)}),
            PEERS[1]: Report(links={PEERS[0]: Link(round_trip_s=0.3), "somebody else": Link(round_trip_s=9.0)}),
        }
    )
    assert made.round_trip_s[0, 1] == made.round_trip_s[1, 0] == pytest.approx(0.2)
    assert made.round_trip_s[2, 0] == 0.2
    assert math.isnan(made.round_trip_s[1, 2])
    assert made.slowest_round_trip_s == 0.2


def full_mesh(rate: float, slow: dict[tuple[int, int], float]) -> dict[str, Report]:
    return {
        PEERS[row]: Report(
            links={
                PEERS[column]: Link(sent_bytes_s=slow.get((row, column), rate)) for column in range(4) if column != row
            }
        )
        for row in range(4)
    }


def test_a_pair_is_slow_by_itself_only_where_it_stands_out_on_both_sides() -> None:
    slow = terrain(full_mesh(1e7, {(0, 1): 1e6}))
    assert slow.pair_bytes_s[0, 1] == 1e6
    assert np.isinf(slow.pair_bytes_s).sum() == 15
    uplink = terrain(full_mesh(1e7, {(0, 1): 1e6, (0, 2): 1e6, (0, 3): 1e6}))
    assert np.isinf(uplink.pair_bytes_s).all(), "a slow uplink is its node's doing"
    downlink = terrain(full_mesh(1e7, {(0, 3): 1e6, (1, 3): 1e6, (2, 3): 1e6}))
    assert np.isinf(downlink.pair_bytes_s).all()


def test_a_pair_is_apart_when_both_say_so_or_two_name_one_of_them() -> None:
    assert not terrain({}, failed={0: (1, 2, 3)}).apart.any(), "one voice decides nothing"
    both = terrain({}, failed={0: (1,), 1: (0,)}).apart
    assert [tuple(pair) for pair in np.argwhere(both)] == [(0, 1), (1, 0)]
    named_twice = terrain({}, failed={0: (3,), 1: (3, 2)}).apart
    assert sorted(map(tuple, np.argwhere(named_twice).tolist())) == [(0, 3), (1, 3), (3, 0), (3, 1)]


def test_nils_of_this_round_count_like_readys() -> None:
    made = roster([ready(failed_edges=(PEERS[1],)), ready(), ready()], None)
    apart = terrain_of({}, made, failing(made, {PEERS[1]: {PEERS[0]}})).apart
    assert apart[0, 1]
    assert apart.sum() == 2


def test_pairs_of_which_neither_can_be_dialled_are_apart_unless_they_moved_bytes() -> None:
    hidden = {PEERS[0]: Report(dialable=False), PEERS[2]: Report(dialable=False), PEERS[3]: Report(dialable=True)}
    assert sorted(map(tuple, np.argwhere(terrain(hidden).apart).tolist())) == [(0, 2), (2, 0)]
    hidden[PEERS[2]] = Report(dialable=False, links={PEERS[0]: Link(received_bytes_s=1e5)})
    assert not terrain(hidden).apart.any()


def test_records_become_reports() -> None:
    one, two, other = "12D3KooWaaaaaaaa", "12D3KooWbbbbbbbb", "12D3KooXbbbbbbbb"

    def record(peer: str, **fields: object) -> MembershipRecord:
        return MembershipRecord(peer_id=peer, run=b"r", sequence=1, incarnation=b"", version="1", **fields)

    reports = reports_of(
        {
            two: record(two, links={link_key(one): LinkSummary(0.05, 2e6, 0.0)}, up_bytes_s=3e6, tokens_per_s=7.0),
            one: record(
                one, links={link_key(two): LinkSummary(0.05), link_key(one): LinkSummary(0.0)}, data_reachable=False
            ),
        }
    )
    assert list(reports) == [one, two], "in an order of their own"
    assert reports[two] == Report(
        links={one: Link(round_trip_s=0.05, sent_bytes_s=2e6)}, up_bytes_s=3e6, tokens_per_s=7.0
    )
    assert reports[one] == Report(links={two: Link(round_trip_s=0.05)}, dialable=False)
    ambiguous = reports_of({peer: record(peer, links={link_key(two): LinkSummary(0.05)}) for peer in (one, two, other)})
    assert ambiguous[one].links == {}, "an end that two peers share says nothing"


def test_the_machine_is_told_at_once_and_then_no_more_often_than_a_plan_needs() -> None:
    me = Identity.generate()

    async def main() -> None:
        membership = Membership(peer_id=me.peer_id, keyring=me, version="1", incarnation=b"i")
        membership.publish(run=b"r" * 32)
        told: list[tuple[float, float | None]] = []

        def post(event: ReportsChanged) -> None:
            told.append((trio.current_time() - began_s, event.reports[me.peer_id].up_bytes_s))

        began_s = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keep_reports, membership, post)
            for second in range(10):
                await trio.sleep(1)
                membership.publish(up_bytes_s=float(second + 1))
            await trio.sleep(60)
            nursery.cancel_scope.cancel()
        every_s = AT_MOST_EVERY_S + A_PEER_S
        assert [at_s for at_s, _ in told] == pytest.approx([0.0, every_s, 2 * every_s])
        assert [rate for _, rate in told] == [None, 5.0, 10.0], "the newest of each time, the last one not forgotten"

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
