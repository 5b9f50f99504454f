"""Named kinds of schedules, and how one is run."""

from __future__ import annotations

from dataclasses import dataclass

from sim_model import make_rules
from sim_world import Switches, Weather, World

from protocol.names import PeerId
from protocol.rules import Quorum


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    weather: Weather
    weather_s: float
    """How long it lasts."""
    joiners: int = 0
    min_peers: int = 1
    quorum: Quorum = Quorum.MAJORITY
    max_electors: int = 64
    within_s: float = 240.0
    """Fair weather after which everyone must have got further together."""
    says: str = ""


PROFILES: dict[str, Profile] = {
    "calm": Profile(weather=Weather(), weather_s=0.0, within_s=60.0, says="nothing goes wrong"),
    "lossy": Profile(
        weather=Weather(loss=0.15, duplication=0.1, late=0.1, transfer_loss=0.05),
        weather_s=20.0,
        says="messages lost, repeated, reordered; transfers broken off",
    ),
    "crashy": Profile(
        weather=Weather(loss=0.03, late=0.03, crashes=0.02, crash_in_effects=0.002),
        weather_s=40.0,
        says="nodes die between any two effects and come back",
    ),
    "torn": Profile(
        weather=Weather(crashes=0.02, journal_losses=0.3, down_s=(0.5, 8.0)),
        weather_s=40.0,
        within_s=400.0,
        says="nodes come back without their journal",
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
        weather_s=90.0,
        within_s=400.0,
        says="whoever commits first is cut off, while others die and come back",
    ),
    "partition": Profile(
        weather=Weather(partitions=0.05, one_way=0.3, loss=0.02),
        weather_s=80.0,
        within_s=400.0,
        says="splits, also in one direction only, and heals",
    ),
    "churn": Profile(
        weather=Weather(crashes=0.01, leaves=0.01, loss=0.02, down_s=(0.5, 30.0)),
        weather_s=60.0,
        joiners=2,
        within_s=400.0,
        says="peers come, leave and die",
    ),
    "small": Profile(
        weather=Weather(crashes=0.02, leaves=0.005, down_s=(5.0, 60.0)),
        weather_s=90.0,
        joiners=2,
        within_s=400.0,
        says="between one and three peers, most of them often away for long",
    ),
    "stalling": Profile(
        weather=Weather(loss=0.02, stalls=0.5, crashes=0.005),
        weather_s=60.0,
        says="trainers that miss their deadlines, all of them at times",
    ),
    "joiners": Profile(weather=Weather(loss=0.02), weather_s=25.0, joiners=3, says="others join, one after another"),
    "pair": Profile(
        weather=Weather(loss=0.02, crashes=0.005),
        weather_s=40.0,
        joiners=1,
        min_peers=2,
        within_s=400.0,
        says="a round needs two contributors, and a founder alone has to wait for one",
    ),
    "open": Profile(
        weather=Weather(loss=0.03, late=0.03, crashes=0.008, crash_in_effects=0.001, leaves=0.002, transfer_loss=0.02),
        weather_s=60.0,
        joiners=2,
        quorum=Quorum.TWO_THIRDS,
        within_s=400.0,
        says="an open run: two thirds decide, and electors are admitted a quarter at a time",
    ),
    "few": Profile(
        weather=Weather(
            delay_s=(0.01, 0.3), loss=0.05, crashes=0.01, isolations=0.2, isolation_crashes=0.1, down_s=(0.5, 8.0)
        ),
        weather_s=60.0,
        max_electors=3,
        within_s=400.0,
        says="only three may vote, whoever they are after each commit",
    ),
}


def peer_names(count: int) -> tuple[PeerId, ...]:
    return tuple((f"Peer{chr(ord('A') + number)}" if number < 26 else f"Peer{number:03d}") for number in range(count))


def build(profile_name: str, seed: int, peers: int, *, switches: Switches | None = None, trace: bool = False) -> World:
    """The world of one schedule. `peers` are founders."""
    profile = PROFILES[profile_name]
    names = peer_names(peers + profile.joiners)
    return World(
        seed=seed,
        rules=make_rules(
            names[:peers],
            min_peers=profile.min_peers,
            quorum=profile.quorum,
            max_electors=profile.max_electors,
        ),
        weather=profile.weather,
        joiners=names[peers:],
        switches=switches,
        trace=trace,
    )


def play(world: World, profile_name: str, *, rounds: int = 3) -> None:
    """Bad weather, then fair weather in which everyone must get `rounds` further together. Raises `Violation`."""
    profile = PROFILES[profile_name]
    world.start()
    world.run(profile.weather_s)
    world.clear()
    world.expect_progress(rounds, profile.within_s)
