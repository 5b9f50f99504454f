"""A roster's plan from what is known of its peers' links: the one whose slowest peer is predicted to be done first.

Only a coordinator plans; what it makes is checked by the predicate of `protocol.planning` like any other. Where nothing
is known, plans are those of `protocol.grouping`, with equal shares.

Shapes: `n` READYs, `s` shards, `p` parts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from protocol import grouping, planning
from protocol.codecs import codec
from protocol.links import NO_REPORTS, RatesArray, Reports, Terrain, failing, terrain_of
from protocol.messages import Roster
from protocol.names import PeerId
from protocol.plan import Plan
from protocol.planning import MAX_FAN
from protocol.rules import Rules
from protocol.shares import (
    LARGEST_SHARE,
    WholeVector,
    flat_shares,
    program_shares,
    seconds_of,
    whole_shares,
)
from protocol.weights import bits


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What a coordinator knows of the peers of a roster beyond their READYs."""

    reports: Reports = field(default_factory=lambda: NO_REPORTS)
    nils: Mapping[PeerId, Collection[PeerId]] = field(default_factory=lambda: MappingProxyType({}))
    """Electors → peers that their NILs of this round name: exchanges with those failed."""

    def terrain(self, roster: Roster) -> Terrain:
        return terrain_of(self.reports, roster, failing(roster, self.nils))


NOTHING_KNOWN = Outlook()


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    plan: Plan
    durations_s: tuple[float, ...]
    """One a level, and DOWN's (`protocol.planning.level_durations`), before anything is learned."""


def make_plan(draft: Roster, contributing: int, rules: Rules, outlook: Outlook = NOTHING_KNOWN) -> Planned:
    """The plan of a roster that has none yet. `contributing`: bitmap of its READYs with a slot, not empty."""
    terrain = outlook.terrain(draft)

    def make(leading: int) -> Plan:
        return _flat(draft, contributing, leading, rules, terrain)

    plain = len(draft.readys) > MAX_FAN + 1 or not (terrain.rated or terrain.apart.any())
    if plain:
        plan = grouping.plan_for(draft, contributing, rules)
    else:
        plan = grouping.within_limits(draft, contributing, rules, make)
    return Planned(plan=plan, durations_s=predicted_durations(plan, draft, contributing, rules, terrain))


def predicted_durations(
    plan: Plan, roster: Roster, contributing: int, rules: Rules, terrain: Terrain
) -> tuple[float, ...]:
    dealt = planning.deal(roster.base.digest(), rules.part_count, plan)
    transfer_s = None
    if terrain.rated:
        transfer_s = predicted_transfer(seconds_of(plan, contributing, terrain, rules), dealt)
    return planning.level_durations(
        plan, contributing, dealt, rules, transfer_s=transfer_s, latency_s=terrain.slowest_round_trip_s
    )


def predicted_transfer(seconds: RatesArray, dealt: tuple[int, ...]) -> float:
    """Seconds until the busiest resource is done, with the parts as they are dealt. `seconds` [r, s]."""
    parts = np.bincount(np.asarray(dealt, np.int64), minlength=seconds.shape[1])
    return float((seconds @ (parts / len(dealt))).max())


# ---------------------------------------------------------------- flat


def _flat(draft: Roster, contributing: int, leading: int, rules: Rules, terrain: Terrain) -> Plan:
    peers = len(draft.readys)
    roots = roots_among(contributing & leading or contributing, terrain.apart)
    most = _largest_shares(draft, roots, contributing, rules)
    if terrain.rated and np.isfinite(terrain.pair_bytes_s).any() and roots.bit_count() > 1:
        even = planning.flat_plan(peers, contributing, [roots >> index & 1 for index in range(peers)])
        of_roots = program_shares(seconds_of(even, contributing, terrain, rules), most[list(bits(roots))])
        shares = np.zeros(peers)
        shares[list(bits(roots))] = of_roots
    elif terrain.rated:
        shares = flat_shares(peers, contributing, most, terrain, rules)
    else:
        shares = _alike(roots, peers)
    return planning.flat_plan(peers, contributing, whole_shares(shares))


def roots_among(candidates: int, apart: npt.NDArray[np.bool_]) -> int:
    """Bitmap of those to whom all others can send; if there is nobody, of those whom most can."""
    missing = apart.sum(axis=1)
    fewest = min(missing[index] for index in bits(candidates))
    return sum(1 << index for index in bits(candidates) if missing[index] == fewest)


def _largest_shares(draft: Roster, roots: int, contributing: int, rules: Rules) -> RatesArray:
    """[n] For roots at most `LARGEST_SHARE`, and what their byte limits leave beside what any leaf moves."""
    peers = len(draft.readys)
    whole, part = WholeVector.of(rules).encoded, codec(rules.codec).encoded_bytes(rules.part_elements)
    even = 1.0 / roots.bit_count()
    most = np.zeros(peers)
    for index in bits(roots):
        ready, most[index] = draft.readys[index].message, max(LARGEST_SHARE, even)
        for limit, others in (
            (ready.upload_limit_bytes, peers - 2),
            (ready.download_limit_bytes, contributing.bit_count() - 2),
        ):
            if limit and others > 0:
                # Dealing rounds to parts: one of them is kept back.
                most[index] = min(most[index], max(0.0, (limit - whole) / others - part) / whole)
    if most.sum() < 1.0:
        # Too little altogether: whoever is over its limit then is spared, one after another (`within_limits`).
        return _alike(roots, peers)
    return most


def _alike(roots: int, peers: int) -> RatesArray:
    return np.array([float(roots >> index & 1) for index in range(peers)])
