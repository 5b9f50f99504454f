"""A roster's plan from what is known of its peers' links: the one whose slowest peer is predicted to be done first.

Only a coordinator plans; what it makes is checked by the predicate of `protocol.planning` like any other. Where nothing
is known, plans are those of `protocol.grouping`, with equal shares.

Shapes: `n` READYs, `s` shards, `p` parts.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from protocol import grouping, planning
from protocol.clusters import Groups
from protocol.codecs import codec
from protocol.experience import Experience, Kind
from protocol.links import NO_REPORTS, RatesArray, Reports, Terrain, failing, terrain_of
from protocol.messages import Roster
from protocol.names import PeerId
from protocol.plan import Plan
from protocol.planning import MAX_FAN
from protocol.rules import Rules
from protocol.shares import (
    LARGEST_SHARE,
    NoAnswer,
    WholeVector,
    flat_shares,
    latency_of,
    program_shares,
    seconds_of,
    whole_shares,
)
from protocol.sites import NoSuchPlan, in_groups, rest_alone, site_plan
from protocol.weights import bits

ATTEMPTS_A_KIND = 2
"""After so many attempts of a round that came to nothing the other kind of plan gets as many."""
SPARED_BELOW = 3.0
"""Among more READYs than one root can have below it, whose line is slower than the median by this has no duties."""
WORTH_S = 0.025
"""Where the slowest line carries the whole vector in less, shares follow no rates: an exchange is a matter of round
trips and disks then, and what was measured of the memory of a busy machine would leave some of its nodes no shard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What a coordinator knows of the peers of a roster beyond their READYs."""

    reports: Reports = field(default_factory=lambda: NO_REPORTS)
    groups: Groups = ()
    """Peers that are near each other (`protocol.clusters`); empty: all are alike."""
    experience: Experience = field(default_factory=Experience)
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
    plans = _kinds(draft, contributing, rules, terrain, _places(outlook.groups, draft))
    kind = Kind.FLAT
    if len(plans) > 1:
        predicted_s = {one: _predicted(plan, draft, contributing, rules, terrain) for one, plan in plans.items()}
        kind = outlook.experience.choose(predicted_s, draft.base.round, may_try=draft.attempt == 0)
        if draft.attempt // ATTEMPTS_A_KIND % 2:
            kind = kind.other
    plan = plans[kind]
    return Planned(plan=plan, durations_s=predicted_durations(plan, draft, contributing, rules, terrain))


def kind_of(plan: Plan) -> Kind:
    return Kind.GROUPED if in_groups(plan) else Kind.FLAT


def _kinds(
    draft: Roster, contributing: int, rules: Rules, terrain: Terrain, groups: Sequence[Sequence[int]]
) -> dict[Kind, Plan]:
    """The plans to choose from, flat first; more than one root can have below it have groups of another kind."""
    if len(draft.readys) > MAX_FAN + 1:
        return {Kind.FLAT: grouping.plan_for(draft, contributing, rules, _spared(terrain))}
    plans = {
        Kind.FLAT: grouping.within_limits(
            draft, contributing, rules, partial(_flat, draft, contributing, rules, terrain)
        )
    }
    # Of a group with peers that are each alone, a flat plan in which those own nothing moves no more across.
    if sum(len(group) > 1 for group in groups) > 1 and _worth_it(terrain, rules):
        made = _grouped(draft, contributing, rules, terrain, groups)
        if made is not None:
            plans[Kind.GROUPED] = made
    return plans


def _spared(terrain: Terrain) -> int:
    """Of very many, whom duties would make slow, or leave without those whom it cannot reach."""
    speed = np.minimum(terrain.up_bytes_s, terrain.down_bytes_s)
    slow = speed * SPARED_BELOW < np.median(speed)
    return sum(1 << index for index in np.flatnonzero(slow | terrain.apart.any(axis=1)).tolist())


def _worth_it(terrain: Terrain, rules: Rules) -> bool:
    slowest = min(float(terrain.up_bytes_s.min()), float(terrain.down_bytes_s.min()))
    return WholeVector.of(rules).encoded >= WORTH_S * slowest


def _places(groups: Groups, draft: Roster) -> list[list[int]]:
    """Those groups as indices that tile the roster's READYs; who is in none is alone."""
    place = {ready.sender: index for index, ready in enumerate(draft.readys)}
    here = ([place[peer] for peer in group if peer in place] for group in groups)
    return rest_alone([group for group in here if group], len(draft.readys))


def _predicted(plan: Plan, roster: Roster, contributing: int, rules: Rules, terrain: Terrain) -> float:
    dealt = planning.deal(roster.base.digest(), rules.part_count, plan)
    seconds = seconds_of(plan, contributing, terrain, rules)
    return predicted_transfer(seconds, dealt) + latency_of(plan, terrain)


def predicted_durations(
    plan: Plan, roster: Roster, contributing: int, rules: Rules, terrain: Terrain
) -> tuple[float, ...]:
    """Durations before anything is learned from rounds.

    Rates that are faster than `ASSUMED_RATE_BYTES_S` are believed by half, in the logarithm: they say nothing of lines
    that nodes share, too short a time costs whole attempts, and too long a one hardly anything, since whoever is silent
    or gone is given up long before.
    """
    dealt = planning.deal(roster.base.digest(), rules.part_count, plan)
    transfer_s = None
    if terrain.rated:
        measured_s = predicted_transfer(seconds_of(plan, contributing, terrain, rules), dealt)
        assumed_s = planning.assumed_transfer(plan, contributing, dealt, rules)
        transfer_s = max(measured_s, math.sqrt(measured_s * assumed_s))
    return planning.level_durations(
        plan, contributing, dealt, rules, transfer_s=transfer_s, latency_s=terrain.slowest_round_trip_s
    )


def predicted_transfer(seconds: RatesArray, dealt: tuple[int, ...]) -> float:
    """Seconds until the busiest resource is done, with the parts as they are dealt. `seconds` [r, s]."""
    parts = np.bincount(np.asarray(dealt, np.int64), minlength=seconds.shape[1])
    return float((seconds @ (parts / len(dealt))).max())


# ---------------------------------------------------------------- flat


def _flat(draft: Roster, contributing: int, rules: Rules, terrain: Terrain, leading: int) -> Plan:
    peers = len(draft.readys)
    roots = roots_among(contributing & leading or contributing, terrain.apart)
    most = _largest_shares(draft, roots, contributing, rules)
    if not terrain.rated or not _worth_it(terrain, rules):
        shares = _alike(roots, peers)
    elif np.isfinite(terrain.pair_bytes_s).any() and roots.bit_count() > 1:
        even = planning.flat_plan(peers, contributing, [roots >> index & 1 for index in range(peers)])
        try:
            of_roots = program_shares(seconds_of(even, contributing, terrain, rules), most[list(bits(roots))])
        except NoAnswer:
            of_roots = flat_shares(peers, contributing, most, terrain, rules)[list(bits(roots))]
        shares = np.zeros(peers)
        shares[list(bits(roots))] = of_roots
    else:
        shares = flat_shares(peers, contributing, most, terrain, rules)
    return planning.flat_plan(peers, contributing, whole_shares(shares))


def roots_among(candidates: int, apart: npt.NDArray[np.bool_]) -> int:
    """Bitmap of those to whom all others can send; if there is nobody, of those whom most can.

    Whoever is apart from more than half of the others is the trouble itself, and owns nothing; that it is apart from
    them is held against nobody else.
    """
    trouble = _trouble(apart)
    missing = apart[:, ~trouble].sum(axis=1)
    sound = [index for index in bits(candidates) if not trouble[index]]
    fewest = min((missing[index] for index in sound), default=0)
    return sum(1 << index for index in sound if missing[index] == fewest) or candidates


def _trouble(apart: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """[n] Who is apart from more than half of the others."""
    return np.asarray(apart.sum(axis=1) * 2 > len(apart) - 1)


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


# ---------------------------------------------------------------- grouped


def _grouped(
    draft: Roster, contributing: int, rules: Rules, terrain: Terrain, groups: Sequence[Sequence[int]]
) -> Plan | None:
    """A plan over sites, within everybody's byte limits; None if there is none in which a byte goes by a head."""
    speed = np.minimum(terrain.up_bytes_s, terrain.down_bytes_s)
    trouble = _trouble(terrain.apart)
    apart = terrain.apart & ~trouble[:, None] & ~trouble[None, :]
    sound = sum(1 << index for index in np.flatnonzero(~trouble).tolist())

    def make(leading: int) -> Plan:
        even = site_plan(groups, contributing, leading & sound, speed, apart)
        if not in_groups(even):
            raise NoSuchPlan
        if not terrain.rated:
            return even
        most = np.full(len(even.shards), max(LARGEST_SHARE, 1.0 / len(even.shards)))
        shares = whole_shares(program_shares(seconds_of(even, contributing, terrain, rules), most))
        return Plan(
            shards=tuple(
                replace(shard, share=share) for shard, share in zip(even.shards, shares, strict=True) if share > 0
            )
        )

    try:
        plan = grouping.within_limits(draft, contributing, rules, make)
    except (NoSuchPlan, NoAnswer):
        return None
    return None if planning.over_limits(draft, plan, contributing, rules) else plan


def _alike(roots: int, peers: int) -> RatesArray:
    return np.array([float(roots >> index & 1) for index in range(peers)])
