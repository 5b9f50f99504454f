"""Named kinds of schedules, and how one is run."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.names import PeerId
from sim_model import make_rules
from sim_world import Switches, Weather, World


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    weather: Weather
    weather_s: float
    """How long it lasts."""
    joiners: int = 0
    min_peers: int = 1
    within_s: float = 240.0
    """Fair weather after which everyone must have got further together."""
    says: str = ""


PROFILES: dict[str, Profile] = {
    "calm": Profile(weather=Weather(), weather_s=0.0, within_s=60.0, says="nothing goes wrong"),
    "lossy": Profile(
        weather=Weather(loss=0.15, duplication=0.1, late=0.1), weather_s=30.0, says="lost, repeated, reordered"
    ),
    "crashy": Profile(
        weather=Weather(loss=0.03, late=0.03, crashes=0.02, crash_in_effects=0.002, journal_losses=0.0),
        weather_s=60.0,
        says="nodes die at any effect and come back",
    ),
    "torn": Profile(
        weather=Weather(crashes=0.02, journal_losses=0.3, down_s=(0.5, 8.0)),
        weather_s=60.0,
        within_s=400.0,
        says="nodes come back without their journal",
    ),
    "partition": Profile(
        weather=Weather(partitions=0.05, one_way=0.3, loss=0.02),
        weather_s=120.0,
        within_s=400.0,
        says="splits and heals",
    ),
    "churn": Profile(
        weather=Weather(crashes=0.01, leaves=0.01, loss=0.02, down_s=(0.5, 30.0)),
        weather_s=90.0,
        joiners=2,
        within_s=400.0,
        says="peers come, leave and die",
    ),
    "joiners": Profile(weather=Weather(loss=0.02), weather_s=30.0, joiners=3, says="others join one founder or more"),
}


def peer_names(count: int) -> tuple[PeerId, ...]:
    return tuple(f"Peer{chr(ord('A') + number)}" for number in range(count))


def build(profile_name: str, seed: int, peers: int, *, switches: Switches | None = None, trace: bool = False) -> World:
    """The world of one schedule. `peers` are founders."""
    profile = PROFILES[profile_name]
    names = peer_names(peers + profile.joiners)
    return World(
        seed=seed,
        rules=make_rules(names[:peers], min_peers=profile.min_peers),
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
