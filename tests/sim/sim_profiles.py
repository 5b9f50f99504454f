"""Named kinds of schedules, and how one is run."""

from __future__ import annotations

import random
from dataclasses import dataclass

from sim_hostile import AS_LEADER, AS_PEER, AS_ROOT, AS_VOTER
from sim_model import make_rules
from sim_weather import Weather
from sim_world import Switches, World

from protocol.names import PeerId
from protocol.rules import Quorum


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    weather: Weather
    weather_s: float
    """How long it lasts."""
    joiners: int = 0
    """Of the peers, how many are not founders."""
    least: int = 1
    """Peers, joiners included."""
    most: int = 200
    min_peers: int = 1
    quorum: Quorum = Quorum.MAJORITY
    max_electors: int = 64
    final_round: int | None = None
    hostile: tuple[str, ...] = ()
    """Kinds of mischief that the hostile ones of the peers choose from: as many peers as the protocol tolerates."""
    within_s: float = 240.0
    """Fair weather after which everyone must have got further together."""
    says: str = ""


PROFILES: dict[str, Profile] = {
    "calm": Profile(weather=Weather(), weather_s=0.0, within_s=60.0, says="nothing goes wrong"),
    "far": Profile(
        weather=Weather(delay_s=(1.5, 2.5), delay_lasts=True, apply_s=(0.0, 0.5)),
        weather_s=30.0,
        least=3,
        within_s=240.0,
        says="every message takes 2 s ± 0.5 s, for ever",
    ),
    "lossy": Profile(
        weather=Weather(loss=0.15, duplication=0.1, late=0.1, transfer_loss=0.05),
        weather_s=15.0,
        says="messages lost, repeated, reordered; transfers broken off",
    ),
    "stale": Profile(
        weather=Weather(loss=0.05, stale=0.2, late_votes=0.15, crashes=0.02, partitions=0.03, partition_s=(3.0, 15.0)),
        weather_s=40.0,
        within_s=400.0,
        says="old messages handed over again attempts, lives and lineages later; votes and CCs far too late",
    ),
    "crashy": Profile(
        weather=Weather(loss=0.03, late=0.03, crashes=0.04, crash_in_effects=0.004, down_s=(0.5, 12.0)),
        weather_s=25.0,
        says="nodes die between any two effects and come back",
    ),
    "exchanges": Profile(
        weather=Weather(exchange_deaths=0.02, transfer_loss=0.02, outbox_losses=0.2, down_s=(0.5, 8.0)),
        weather_s=30.0,
        within_s=400.0,
        says="roots, leaves and coordinators die at any step of an exchange, some without their frozen work",
    ),
    "torn": Profile(
        weather=Weather(crashes=0.03, journal_losses=0.3, outbox_losses=0.3, down_s=(0.5, 6.0)),
        weather_s=30.0,
        within_s=400.0,
        says="nodes come back without their journal, or without the work that they froze",
    ),
    "duel": Profile(
        weather=Weather(
            delay_s=(0.02, 0.6),
            loss=0.1,
            transfer_loss=0.25,
            isolations=0.5,
            isolation_crashes=0.4,
            partition_s=(12.0, 40.0),
            down_s=(0.2, 2.0),
        ),
        weather_s=60.0,
        least=3,
        within_s=400.0,
        says="whoever commits first is cut off, while others die and come back",
    ),
    "partition": Profile(
        weather=Weather(partitions=0.1, one_way=0.3, loss=0.02, partition_s=(4.0, 45.0)),
        weather_s=55.0,
        least=2,
        within_s=400.0,
        says="splits, also in one direction only, and heals",
    ),
    "lineages": Profile(
        weather=Weather(partitions=0.04, partition_s=(35.0, 90.0), one_way=0.1, crashes=0.003, down_s=(0.5, 40.0)),
        weather_s=110.0,
        within_s=600.0,
        says="splits long enough for lineages of their own, deaths in between, and all meet again",
    ),
    "halves": Profile(
        weather=Weather(partitions=0.1, split=(1, 1), partition_s=(5.0, 60.0), crashes=0.005),
        weather_s=60.0,
        least=2,
        within_s=400.0,
        says="splits 50/50",
    ),
    "sixty-forty": Profile(
        weather=Weather(partitions=0.1, split=(3, 2), partition_s=(5.0, 60.0), crashes=0.005),
        weather_s=60.0,
        least=3,
        within_s=400.0,
        says="splits 60/40",
    ),
    "thirds": Profile(
        weather=Weather(partitions=0.1, split=(1, 1, 1), partition_s=(5.0, 60.0)),
        weather_s=60.0,
        least=3,
        within_s=500.0,
        says="splits three ways",
    ),
    "flapping": Profile(
        weather=Weather(partitions=1.0, one_way=0.2, partition_s=(0.2, 4.0), loss=0.02),
        weather_s=40.0,
        least=2,
        within_s=400.0,
        says="links that come and go within seconds",
    ),
    "churn": Profile(
        weather=Weather(crashes=0.02, leaves=0.02, loss=0.02, down_s=(0.5, 20.0)),
        weather_s=35.0,
        joiners=2,
        least=3,
        within_s=400.0,
        says="peers come, leave and die",
    ),
    "turnover": Profile(
        weather=Weather(turnover=0.6, down_s=(0.5, 6.0), loss=0.01),
        weather_s=35.0,
        joiners=2,
        least=4,
        within_s=400.0,
        says="half of the peers die or leave, round after round",
    ),
    "small": Profile(
        weather=Weather(crashes=0.03, leaves=0.008, down_s=(5.0, 45.0)),
        weather_s=60.0,
        joiners=2,
        least=3,
        most=3,
        within_s=400.0,
        says="between one and three peers, most of them often away for long",
    ),
    "losses": Profile(
        weather=Weather(mass_losses=0.04, down_s=(3.0, 40.0), loss=0.02),
        weather_s=60.0,
        least=3,
        within_s=400.0,
        says="one less than a quorum of the electors die at once",
    ),
    "vanishing": Profile(
        weather=Weather(fastest_dies=0.3, vanishing=0.1, down_s=(0.5, 15.0)),
        weather_s=35.0,
        least=2,
        within_s=400.0,
        says="peers die right after READY, the fastest above all",
    ),
    "dripping": Profile(
        weather=Weather(drips=0.34, vanishing=0.03, loss=0.02),
        weather_s=45.0,
        least=3,
        within_s=400.0,
        says="a third of the peers have transfers that crawl, or vanish after READY",
    ),
    "unable": Profile(
        weather=Weather(failing_storage=0.03, loss=0.02, crashes=0.005),
        weather_s=45.0,
        least=2,
        within_s=400.0,
        says="electors are heard, but their disks take nothing for a while",
    ),
    "stalling": Profile(
        weather=Weather(loss=0.02, stalls=0.5, crashes=0.008),
        weather_s=40.0,
        says="trainers that miss their deadlines, all of them at times",
    ),
    "joiners": Profile(
        weather=Weather(loss=0.02), weather_s=20.0, joiners=2, least=3, says="others join, one after another"
    ),
    "slow-joiners": Profile(
        weather=Weather(loss=0.02, catch_up_s=(4.0, 25.0), crashes=0.015, down_s=(5.0, 25.0)),
        weather_s=45.0,
        joiners=2,
        least=3,
        within_s=400.0,
        says="who joins or comes back takes longer to catch up than rounds take",
    ),
    "pair": Profile(
        weather=Weather(loss=0.02, crashes=0.01),
        weather_s=30.0,
        joiners=199,
        least=2,
        most=4,
        min_peers=2,
        within_s=400.0,
        says="a round needs two contributors, and a founder alone has to wait for one",
    ),
    "finishers": Profile(
        weather=Weather(loss=0.05, late=0.05, crashes=0.02, down_s=(0.5, 12.0)),
        weather_s=20.0,
        final_round=7,
        within_s=400.0,
        says="a run of seven rounds; who has finished goes away",
    ),
    "open": Profile(
        weather=Weather(loss=0.03, late=0.03, crashes=0.012, crash_in_effects=0.002, leaves=0.003, transfer_loss=0.02),
        weather_s=40.0,
        joiners=2,
        least=3,
        quorum=Quorum.TWO_THIRDS,
        within_s=400.0,
        says="an open run: two thirds decide, and electors are admitted a quarter at a time",
    ),
    "few": Profile(
        weather=Weather(
            delay_s=(0.01, 0.3), loss=0.05, crashes=0.015, isolations=0.2, isolation_crashes=0.1, down_s=(0.5, 8.0)
        ),
        weather_s=40.0,
        least=4,
        max_electors=3,
        within_s=400.0,
        says="only three may vote, whoever they are after each commit",
    ),
    "sites": Profile(
        weather=Weather(
            sites=2, hidden=0.3, loss=0.02, transfer_loss=0.01, exchange_deaths=0.002, crashes=0.005, down_s=(0.5, 8.0)
        ),
        weather_s=60.0,
        joiners=1,
        least=3,
        within_s=400.0,
        says="two sites with one line each, unequal links, some that nobody can dial; plans follow what is measured",
    ),
    "hostile": Profile(
        weather=Weather(loss=0.02),
        weather_s=30.0,
        least=3,
        hostile=AS_LEADER + AS_PEER + AS_ROOT,
        within_s=400.0,
        says="fewer than half are hostile: as coordinators, roots, and with what they send; they vote honestly",
    ),
    "traitors": Profile(
        weather=Weather(loss=0.02, late=0.02),
        weather_s=30.0,
        least=4,
        quorum=Quorum.TWO_THIRDS,
        hostile=AS_LEADER + AS_PEER + AS_ROOT + AS_VOTER,
        within_s=400.0,
        says="an open run in which fewer than a third are hostile in any way, two votes at once included",
    ),
}


LARGE = 30
"""Peers from which on a swarm is large."""
HUGE = 100
"""Peers from which on plans have groups, and every event costs as much as a schedule of few peers does."""


def peer_names(count: int) -> tuple[PeerId, ...]:
    return tuple(f"Peer{chr(ord('A') + number)}" if number < 26 else f"Peer{number:03}" for number in range(count))


def build(
    profile_name: str,
    seed: int,
    peers: int,
    *,
    switches: Switches | None = None,
    trace: bool = False,
) -> World:
    """The world of one schedule of `peers` peers, the profile's joiners among them."""
    profile = PROFILES[profile_name]
    if not profile.least <= peers <= profile.most:
        raise ValueError(f"the profile {profile_name!r} is for {profile.least} to {profile.most} peers, not {peers}")
    names = peer_names(peers)
    founders = max(1, peers - profile.joiners)
    hostile: dict[PeerId, frozenset[str]] = {}
    if profile.hostile:
        chance = random.Random(seed)
        tolerated = peers - profile.quorum.of(peers)
        for peer in chance.sample(names, chance.randrange(1, tolerated + 1)):
            hostile[peer] = frozenset(chance.sample(profile.hostile, chance.randrange(1, 4)))
    return World(
        seed=seed,
        rules=make_rules(
            names[:founders],
            min_peers=profile.min_peers,
            quorum=profile.quorum,
            max_electors=profile.max_electors,
            final_round=profile.final_round,
            # Hundreds need no news of each other every second; half of all events would be heartbeats.
            heartbeat_s=1.0 if peers < LARGE else 4.0,
        ),
        weather=profile.weather,
        joiners=names[founders:],
        hostile=hostile,
        switches=switches,
        trace=trace,
    )


def play(world: World, profile_name: str, *, rounds: int | None = None) -> None:
    """Bad weather, then fair weather in which everyone must get `rounds` further together. Raises `Violation`.

    `rounds`: 3 unless it is given, 2 among very many: a member that is missed twice in a row is none any more.
    """
    profile, peers = PROFILES[profile_name], len(world.nodes)
    world.start()
    # Among many, as many faults strike in less time.
    world.run(profile.weather_s / (1 if peers < LARGE else 3 if peers < HUGE else 6))
    world.clear()
    world.expect_progress(rounds or (3 if peers < HUGE else 2), profile.within_s)
    for node in world.up():
        if node.kept is None:
            world.oracle.check_counted(node.peer, node.account, node.counted_at, node.course)
