"""The verdict on a soak, from what was seen and what the homes hold."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from node.status import Status
from scripts.soaking import slope
from scripts.soaking.accounts import Account
from scripts.soaking.conduct import Conductor, Struck
from scripts.soaking.report import Recovery, Report, Work
from scripts.soaking.schedule import Happening, Kind
from scripts.soaking.slope import Slope
from scripts.soaking.watch import SeenRound, Watch

LAG_S = 0.5
"""From a commit at one node to when another has applied it: a round begins there so much later."""


# ---------------------------------------------------------------- pieces


def recoveries(struck: Sequence[Struck]) -> dict[str, Recovery]:
    by_kind: dict[str, list[Struck]] = defaultdict(list)
    for one in struck:
        if not one.for_good:
            by_kind[one.happening.kind.value].append(one)
    found = {}
    for kind, all_of_it in sorted(by_kind.items()):
        took = [one.took_s for one in all_of_it if one.took_s is not None and not one.missed and not one.overtaken]
        found[kind] = Recovery(
            events=len(all_of_it),
            measured=len(took),
            median_s=statistics.median(took) if took else None,
            worst_s=max(took, default=None),
            never=sum(1 for one in all_of_it if one.recovered_s is None and not one.overtaken),
        )
    return found


def unexplained(rounds: dict[tuple[str, int], SeenRound], struck: Sequence[Struck]) -> list[str]:
    """Exclusions that no event of ours explains: none had hit the peer or the round's leader without being over.

    A leader that is struck may have lost the others' READYs, or may not have waited for them.
    """
    found = []
    first_counted: dict[str, float] = {}
    for seen in rounds.values():
        for peer in seen.contributors:
            first_counted[peer] = min(first_counted.get(peer, seen.first_s), seen.first_s)
    for (_, number), seen in sorted(rounds.items(), key=lambda item: item[1].first_s):
        began_s = seen.first_s - seen.seconds - LAG_S
        for peer, why in seen.excluded.items():
            starting = seen.first_s <= first_counted.get(peer, float("inf"))
            disturbed = any(
                one.peer in (peer, seen.leader) and one.at_s <= seen.first_s and one.until_s >= began_s
                for one in struck
            )
            if not (starting or disturbed):
                found.append(f"round {number} at {seen.first_s:.0f} s: {peer[-8:]}: {why}")
    return found


def mismatches(rounds: dict[tuple[str, int], SeenRound]) -> list[str]:
    return [
        f"round {number} of lineage {lineage[:12]}: "
        + ", ".join(f"{state[:12]} at {sorted(nodes)}" for state, nodes in seen.hashes.items())
        for (lineage, number), seen in rounds.items()
        if len(seen.hashes) > 1
    ]


def forks(accounts: Sequence[Account], seen: set[str], first_lineage: str) -> list[str]:
    """Two commits of one round of a lineage, or a lineage that no REFORM made."""
    commits: dict[tuple[bytes, int], set[bytes]] = defaultdict(set)
    reformed = {first_lineage}
    for account in accounts:
        for key, names in account.commits.items():
            commits[key] |= names
        reformed |= {lineage.hex() for lineage in account.reformed}
    found = [
        f"round {number} of lineage {lineage.hex()[:12]} has {len(names)} commits"
        for (lineage, number), names in sorted(commits.items())
        if len(names) > 1
    ]
    known = {lineage.hex() for lineage, _ in commits} | seen
    return found + [f"lineage {lineage[:12]} came without a REFORM" for lineage in sorted(known - reformed)]


def work(accounts: Sequence[Account]) -> list[Work]:
    """Each node's account beside what its own chain and the longest one count of it."""
    longest = max(accounts, key=lambda account: account.tip[1], default=None)
    return [
        Work(
            peer=account.peer,
            parts=account.work.parts,
            produced=account.work.produced,
            counted=account.work.counted,
            carried=account.work.carried,
            discarded=account.work.discarded,
            counted_by_own_chain=account.chain.get(account.peer, 0),
            counted_by_longest=(longest or account).chain.get(account.peer, 0),
            on_longest=longest is not None and (account.tip == longest.tip or account.tip in longest.commits),
        )
        for account in accounts
    ]


def slopes(watch: Watch, values: str) -> dict[str, Slope | None]:
    roles = sorted({life.role for life in watch.lives.values()})
    scale = 1 / (1 << 20) if values == "resident_bytes" else 1.0
    return {
        role: slope.together(
            (life.times_s, [value * scale for value in getattr(life, values)])
            for life in watch.lives.values()
            if life.role == role
        )
        for role in roles
    }


def live_work(statuses: Iterable[Status]) -> list[Work]:
    """While the nodes run, by their own word alone."""
    return [
        Work(
            peer=status.peer_id,
            parts=status.work.exact.parts,
            produced=status.work.exact.produced,
            counted=status.work.exact.counted,
            carried=status.work.exact.carried,
            discarded=status.work.exact.discarded,
            counted_by_own_chain=status.work.exact.counted,
            counted_by_longest=status.work.exact.counted,
            on_longest=True,
        )
        for status in statuses
    ]


# ---------------------------------------------------------------- the whole


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for, and where it runs."""

    command: str
    date: str
    seed: int
    nodes: int
    guests: int
    every_s: float
    only: tuple[str, ...]
    preset: str
    planned_minutes: float
    steps: int
    machine: str
    network: str


def judge(
    plan: Plan,
    conductor: Conductor,
    *,
    seconds: float,
    work_of_all: list[Work],
    forks_found: list[str],
    one_lineage: bool,
    unfinished: str | None,
) -> Report:
    watch = conductor.watch
    lengths = [seen.seconds for seen in watch.rounds.values()]
    reasons: dict[str, int] = defaultdict(int)
    for seen in watch.rounds.values():
        for why in seen.excluded.values():
            reasons[why] += 1
    happened = [one.happening for one in conductor.struck if not one.for_good]
    lineages = {lineage for lineage, _ in watch.rounds}
    return Report(
        **msgspec.structs.asdict(plan),
        minutes=seconds / 60,
        unfinished=unfinished,
        rounds=len(watch.rounds),
        rounds_per_minute=len(watch.rounds) / seconds * 60 if seconds else 0.0,
        round_s_median=statistics.median(lengths) if lengths else None,
        round_s_worst=max(lengths, default=None),
        events=count(happened),
        recoveries=recoveries(conductor.struck),
        reforms=max(0, len(lineages) - 1),
        forks=forks_found,
        mismatches=mismatches(watch.rounds),
        exclusions=dict(reasons),
        unexplained=unexplained(watch.rounds, conductor.struck),
        work=work_of_all,
        memory_mib_per_hour=slopes(watch, "resident_bytes"),
        descriptors_per_hour=slopes(watch, "descriptors"),
        validation_loss=watch.validation[1] if watch.validation is not None else None,
        ended=list(conductor.ended),
        late=list(conductor.late),
        left_behind=list(conductor.swarm.left_behind),
        said=dict(conductor.said.loud),
        broken=list(conductor.said.broken),
        one_lineage=one_lineage,
        unbalanced=dict(watch.unbalanced),
    )


def count(happenings: Sequence[Happening]) -> dict[str, int]:
    return {kind.value: found for kind in Kind if (found := sum(1 for one in happenings if one.kind is kind))}
