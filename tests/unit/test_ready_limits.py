"""A READY, a ROSTER of the most members, and what names every part by it: the sizes that the limits promise."""

from __future__ import annotations

import pytest
from chain_samples import CheapKeyring, make_rules, peers, sign_ready, sign_roster

from node.daemon.streams import MAX_FRAME_BYTES
from node.manifest_checks import MAX_PARTS
from protocol import chain, wire
from protocol.assembly import JOINS_KEPT
from protocol.bodies import MAX_BODY_BYTES
from protocol.fields import MAX_COUNT, MAX_EVIDENCE, MAX_READYS
from protocol.messages import (
    Certificate,
    Commit,
    Join,
    Leave,
    MessageT,
    PartHeader,
    Ready,
    Roster,
    Signed,
    UnitRange,
    Vote,
)
from protocol.names import Base, digest, initial_lineage
from protocol.plan import Plan, Shard
from protocol.planning import MAX_GROUPED_SHARDS
from protocol.ready_limits import EDGES_MAX, ranges_limit, ready_limit_bytes, runs_limit
from protocol.validity import check_ready

RUN = digest(b"run")
BASE = Base(run=RUN, lineage=initial_lineage(RUN), round=MAX_COUNT, prev=RUN, state_hash=RUN)
ID = "12D3KooW" + "x" * 44


@pytest.mark.parametrize("members", [1, 2, 16, 64, 65, 200, 1000, 1024, 5000])
def test_what_a_node_may_name_fits(members: int) -> None:
    largest = Ready(
        base=BASE,
        ranges_done=(UnitRange(epoch=4000, start=MAX_COUNT - 1, stop=MAX_COUNT),) * ranges_limit(members),
        tokens=((1 << 14, MAX_COUNT),) * runs_limit(members),
        norm=1.0,
        largest=1.0,
        units_wanted=MAX_COUNT,
        upload_limit_bytes=MAX_COUNT,
        download_limit_bytes=MAX_COUNT,
        failed_edges=(ID,) * EDGES_MAX,
        parts_root=RUN,
    )
    body = wire.encode_body(largest)
    assert 0.9 * ready_limit_bytes(members) - 700 < len(body) <= ready_limit_bytes(members)


def test_the_limits_that_the_text_names() -> None:
    assert [ready_limit_bytes(members) for members in (1, 64, 200, 1024)] == [63_488, 63_488, 18_923, 2_048]
    assert [runs_limit(members) for members in (1, 64, 200, 1024)] == [3603, 3603, 1032, 59]
    assert [ranges_limit(members) for members in (1, 64, 200, 1024)] == [678, 678, 194, 11]


def test_a_ready_longer_than_its_share_is_refused() -> None:
    """Padding that the format ignores counts, too: a roster of such READYs could not be sent."""
    rules = make_rules(peers(3))
    state = chain.genesis(rules)
    ready = sign_ready(state, rules, "Peer000")
    assert check_ready(state, rules, ready) is None
    body = ready.body + b"\xfa\x7f\x80\xf0\x03" + bytes(63_488)  # an unknown field of 63,488 bytes
    padded = wire.make_signed(Ready, "Peer000", body, CheapKeyring("Peer000").sign(body))
    assert padded.message == ready.message
    assert "members have 63488 each" in (check_ready(state, rules, padded) or "")


@pytest.mark.slow
@pytest.mark.parametrize(("members", "most_bytes"), [(64, 40_000), (200, 110_000), (1024, 520_000)])
def test_a_roster_of_all_members_is_small_beside_a_frame(members: int, most_bytes: int) -> None:
    """Ids, bases and signatures as long as real ones; one run of tokens and one range each."""
    ids = [f"12D3KooW{number:044}" for number in range(members)]
    rules = make_rules(ids, parts=2048)
    state = chain.genesis(rules)
    readys = [sign_ready(state, rules, peer, tokens=100) for peer in ids]
    roster = sign_roster(state, rules, readys)
    assert len(roster.message.readys) == members <= MAX_READYS
    assert 0.5 * most_bytes < len(roster.body) < most_bytes


def test_a_commit_over_the_most_parts_by_the_most_members_fits_into_a_frame() -> None:
    """What names every part of the largest model that a manifest may have, by the largest roster, is one frame."""

    def envelope(message: MessageT, body: bytes = b"") -> Signed[MessageT]:
        return Signed(sender=ID, message=message, body=body or wire.encode_body(message), signature=bytes(64))

    longest = envelope(Ready(base=BASE), bytes(ready_limit_bytes(MAX_READYS)))
    shard = Shard(share=1, parents=(*range(1, MAX_READYS), -1))
    roster = Roster(
        base=BASE,
        attempt=1,
        readys=(longest,) * MAX_READYS,
        joins=(envelope(Join(base=BASE, units_wanted=MAX_COUNT)),) * JOINS_KEPT,
        leaves=(envelope(Leave(base=BASE)),) * MAX_READYS,
        plan=Plan(shards=(shard,) * MAX_GROUPED_SHARDS),
        durations_s=(1.0,) * 4,
        absent=(1 << MAX_READYS) - 1,
    )
    header = PartHeader(roster_id=RUN, part=MAX_PARTS - 1, bitmap=(1 << MAX_READYS) - 1, hash=RUN, length=1 << 27)
    votes = (envelope(Vote(base=BASE, attempt=1, phase=2, value=RUN)),) * 64
    commit = Commit(
        roster=envelope(roster), headers=(envelope(header),) * MAX_PARTS, certificate=Certificate(votes=votes)
    )
    evidence_bytes = MAX_EVIDENCE * 2048
    assert len(wire.encode_body(roster)) + evidence_bytes < MAX_BODY_BYTES[Roster]
    assert len(wire.encode_commit(commit)) + evidence_bytes < MAX_FRAME_BYTES
