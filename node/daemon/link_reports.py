"""The peers' signed membership records as what a coordinator plans by (`protocol.links`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import aclosing

import trio

from node.daemon.membership import Membership, MembershipRecord, link_key
from protocol.events import ReportsChanged
from protocol.links import Link, Report, Reports
from protocol.names import PeerId

AT_MOST_EVERY_S = 5.0
A_PEER_S = 0.02
"""Added for each peer: records change all the time in a large run, and a plan is made once a round."""


def reports_of(records: Mapping[PeerId, MembershipRecord]) -> Reports:
    """Links are named by the ends of peer ids there: an end that two peers share says nothing."""
    named: dict[str, PeerId | None] = {}
    for peer in records:
        key = link_key(peer)
        named[key] = None if key in named else peer
    return {peer: _report(record, named) for peer, record in sorted(records.items())}


def _report(record: MembershipRecord, named: Mapping[str, PeerId | None]) -> Report:
    links: dict[PeerId, Link] = {}
    for key, link in record.links.items():
        other = named.get(key)
        if other is not None and other != record.peer_id:
            links[other] = Link(
                round_trip_s=link.round_trip_s,
                sent_bytes_s=link.sent_bytes_s or None,
                received_bytes_s=link.received_bytes_s or None,
            )
    return Report(
        links=links,
        up_bytes_s=record.up_bytes_s or None,
        down_bytes_s=record.down_bytes_s or None,
        tokens_per_s=record.tokens_per_s,
        dialable=record.data_reachable,
    )


async def keep_reports(membership: Membership, post: Callable[[ReportsChanged], None]) -> None:
    """Until cancelled: the newest table to the state machine, at once and then whenever it has changed."""
    async with aclosing(membership.changes()) as changes:
        async for _ in changes:
            reports = reports_of(membership.records)
            post(ReportsChanged(reports=reports))
            await trio.sleep(AT_MOST_EVERY_S + A_PEER_S * len(reports))
