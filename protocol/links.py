"""What peers report of their links, and what it means for the READYs of one roster (design section 7).

Reports come from the peers' signed membership records; `node/` gathers them. They are a coordinator's advice and
nothing else: a plan that follows them well or badly is as valid as one that knows none of them, so no two peers need
the same ones. Shapes: `n` READYs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from protocol.messages import Roster
from protocol.names import PeerId
from protocol.planning import ASSUMED_RATE_BYTES_S, FASTEST_RATE_BYTES_S

SLOWEST_RATE_BYTES_S = 1e3
"""Reported rates below count as this much: whoever moves less has no part in a round anyway."""
SLOWEST_ROUND_TRIP_S = 30.0
SLOW_PAIR_RATIO = 4.0
"""A pair is slow by itself when it moved less than this fraction of what both its ends usually move to others."""

RatesArray: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One peer's own measurements of its link with another; None: not measured."""

    round_trip_s: float | None = None
    sent_bytes_s: float | None = None
    received_bytes_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one peer says of itself."""

    links: Mapping[PeerId, Link] = field(default_factory=dict)
    up_bytes_s: float | None = None
    """To all others together; None: not measured."""
    down_bytes_s: float | None = None
    tokens_per_s: float = 0.0
    """Training speed; 0: unknown, or it does not train."""
    dialable: bool | None = None
    """Whether others reach it by dialling; None: nobody tried yet."""


Reports: TypeAlias = Mapping[PeerId, Report]
NO_REPORTS: Reports = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Terrain:
    """The reports as arrays over a roster's READYs, gaps filled in."""

    up_bytes_s: RatesArray
    """[n]"""
    down_bytes_s: RatesArray
    """[n]"""
    rated: bool
    """Whether any rate was reported; else all are `ASSUMED_RATE_BYTES_S`, and shares follow none."""
    pair_bytes_s: RatesArray
    """[n, n] From row to column; infinity where nothing says that this very pair is slower than its ends."""
    round_trip_s: RatesArray
    """[n, n] Symmetric, zero diagonal; NaN where neither end knows."""
    apart: npt.NDArray[np.bool_]
    """[n, n] Symmetric: pairs that cannot exchange, or failed to lately. No plan uses them if it can help it."""

    slowest_round_trip_s: float
    """0 where none is known."""


def terrain_of(reports: Reports, roster: Roster, named: Mapping[PeerId, Collection[PeerId]]) -> Terrain:
    """The terrain of a roster's READYs.

    `named`: peer → peers that it says exchanges with failed (`failing`).
    """
    if not reports and not named:
        return _nothing_known(len(roster.readys))
    peers = [ready.sender for ready in roster.readys]
    mine = [reports.get(peer, _SILENT) for peer in peers]
    up, down = [one.up_bytes_s for one in mine], [one.down_bytes_s for one in mine]
    apart = _failed(peers, named) | _unreachable(peers, mine)
    between = round_trips(peers, reports)
    return Terrain(
        up_bytes_s=_filled(up),
        down_bytes_s=_filled(down),
        rated=any(rate is not None for rate in (*up, *down)),
        pair_bytes_s=slow_pairs(peers, reports),
        round_trip_s=between,
        apart=apart,
        slowest_round_trip_s=float(between[np.isfinite(between)].max(initial=0.0)),
    )


@lru_cache(maxsize=4)
def _nothing_known(peers: int) -> Terrain:
    """Shared by all who know nothing: among a thousand simulated peers, each learns from each round."""
    square = np.full((peers, peers), np.nan)
    assumed = np.full(peers, ASSUMED_RATE_BYTES_S)
    unbounded, apart = np.full_like(square, np.inf), np.zeros(square.shape, np.bool_)
    for array in (square, assumed, unbounded, apart):
        array.flags.writeable = False
    return Terrain(
        up_bytes_s=assumed,
        down_bytes_s=assumed,
        rated=False,
        pair_bytes_s=unbounded,
        round_trip_s=square,
        apart=apart,
        slowest_round_trip_s=0.0,
    )


_SILENT = Report()


def _filled(rates: Sequence[float | None]) -> RatesArray:
    """Who has not measured is taken for one like the others."""
    known = [min(max(rate, SLOWEST_RATE_BYTES_S), FASTEST_RATE_BYTES_S) for rate in rates if rate is not None]
    usual = sorted(known)[len(known) // 2] if known else ASSUMED_RATE_BYTES_S
    clipped = iter(known)
    return np.array([usual if rate is None else next(clipped) for rate in rates], np.float64)


def round_trips(peers: Sequence[PeerId], reports: Reports) -> RatesArray:
    """[n, n] The mean of what both ends say; NaN where neither says anything."""
    place = {peer: index for index, peer in enumerate(peers)}
    said = np.full((len(peers), len(peers)), np.nan)
    for row, peer in enumerate(peers):
        for other, link in reports.get(peer, _SILENT).links.items():
            column = place.get(other)
            if column is not None and column != row and link.round_trip_s is not None:
                said[row, column] = min(link.round_trip_s, SLOWEST_ROUND_TRIP_S)
    both = np.where(np.isnan(said), said.T, said)
    both = (both + both.T) / 2
    np.fill_diagonal(both, 0.0)
    return both


def slow_pairs(peers: Sequence[PeerId], reports: Reports) -> RatesArray:
    """[n, n] See `Terrain.pair_bytes_s`.

    What a pair achieved is mostly its ends' doing, who serve others at the same time. It is the pair's own limit only
    where it stands out on both sides.
    """
    place = {peer: index for index, peer in enumerate(peers)}
    achieved = np.full((len(peers), len(peers)), np.nan)
    for row, peer in enumerate(peers):
        for other, link in reports.get(peer, _SILENT).links.items():
            column = place.get(other)
            if column is None or column == row:
                continue
            for at, rate in (((row, column), link.sent_bytes_s), ((column, row), link.received_bytes_s)):
                if rate is not None:
                    # Of two that differ the better one was seen, and the other is the worse measurement.
                    achieved[at] = np.fmax(achieved[at], max(rate, SLOWEST_RATE_BYTES_S))
    usual = np.minimum(_usual(achieved)[:, None], _usual(achieved.T)[None, :])
    with np.errstate(invalid="ignore"):
        return np.where(achieved * SLOW_PAIR_RATIO < usual, achieved, np.inf)


def _usual(achieved: RatesArray) -> RatesArray:
    """[n] Median of each row; infinity for one without measurements."""
    known = (np.sort(row[~np.isnan(row)]) for row in achieved)
    return np.array([row[len(row) // 2] if len(row) else np.inf for row in known])


def failing(roster: Roster, nils: Mapping[PeerId, Collection[PeerId]]) -> dict[PeerId, set[PeerId]]:
    """Whom each peer names in its READY, and in this round's NILs (`nils`)."""
    named = {ready.sender: set(ready.message.failed_edges) for ready in roster.readys if ready.message.failed_edges}
    for peer, others in nils.items():
        if others:
            named.setdefault(peer, set()).update(others)
    return named


def _failed(peers: Sequence[PeerId], named: Mapping[PeerId, Collection[PeerId]]) -> npt.NDArray[np.bool_]:
    """Pairs of which both ends name each other, and pairs with a peer that at least two name.

    One voice is not enough: whoever names many would else decide who owns shards.
    """
    apart = np.zeros((len(peers), len(peers)), np.bool_)
    if not named:
        return apart
    voices: dict[PeerId, int] = {}
    for others in named.values():
        for other in others:
            voices[other] = voices.get(other, 0) + 1
    place = {peer: index for index, peer in enumerate(peers)}
    for peer, others in named.items():
        for other in others:
            if peer in place and other in place and (voices[other] > 1 or peer in named.get(other, ())):
                apart[place[peer], place[other]] = apart[place[other], place[peer]] = True
    np.fill_diagonal(apart, val=False)
    return apart


def _unreachable(peers: Sequence[PeerId], mine: Sequence[Report]) -> npt.NDArray[np.bool_]:
    """Pairs of which neither end can be dialled, unless they moved bytes lately all the same (over a volunteer)."""
    hidden = np.array([report.dialable is False for report in mine], np.bool_)
    apart = np.outer(hidden, hidden)
    if not apart.any():
        return apart
    place = {peer: index for index, peer in enumerate(peers)}
    for row, report in enumerate(mine):
        for other, link in report.links.items():
            column = place.get(other)
            if column is not None and (link.sent_bytes_s or link.received_bytes_s):
                apart[row, column] = apart[column, row] = False
    np.fill_diagonal(apart, val=False)
    return apart
