"""What goes wrong in a schedule, and how often."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Weather:
    """Faults of a schedule. Rates are per simulated second and peer unless said otherwise; pairs are ranges."""

    # Messages
    delay_s: tuple[float, float] = (0.005, 0.05)
    delay_lasts: bool = False
    """The delay stays when the weather clears: these peers are far apart."""
    loss: float = 0.0
    duplication: float = 0.0
    late: float = 0.0
    """Share of messages that are delayed by up to `late_s` more."""
    late_s: float = 3.0
    late_votes: float = 0.0
    """Share of phase-2 votes and commits that are delayed by `late_votes_s`: a CC comes attempts late."""
    late_votes_s: tuple[float, float] = (8.0, 60.0)
    stale: float = 0.0
    """Share of messages that somebody else hands over again after `stale_s`: attempts, lives, lineages later."""
    stale_s: tuple[float, float] = (3.0, 60.0)

    # Transfers between engines
    transfer_loss: float = 0.0
    """Share that breaks off."""
    drips: float = 0.0
    """Share of peers whose transfers crawl, for `drip_s` each."""
    drip_s: tuple[float, float] = (2.0, 60.0)
    exchange_deaths: float = 0.0
    """Chance to die after any one step of an exchange: started, a payload arrived, a part closed, signed, came down."""

    # Links
    sites: int = 0
    """Peers stand in so many sites with one line each, and report what they measure (`sim_links`); 0: nobody does."""
    hidden: float = 0.0
    """Share of peers that nobody can dial."""

    # Partitions
    partitions: float = 0.0
    """Per second, for the whole swarm."""
    partition_s: tuple[float, float] = (5.0, 60.0)
    split: tuple[int, ...] = ()
    """Sizes of the sides in proportion; empty: two sides of any size."""
    one_way: float = 0.0
    """Share of partitions that cut one direction only."""
    isolations: float = 0.0
    """Chance that the first peer to commit a round is cut off at that very moment, what it last sent included."""
    isolation_crashes: float = 0.0
    """Chance of each other peer to die at that moment."""

    # Nodes
    crashes: float = 0.0
    crash_in_effects: float = 0.0
    """Chance, per event that has effects, to die between two of them."""
    down_s: tuple[float, float] = (0.5, 20.0)
    journal_losses: float = 0.0
    """Chance, per death, that the journal is gone."""
    outbox_losses: float = 0.0
    """Chance, per death, that the frozen contribution is gone."""
    leaves: float = 0.0
    turnover: float = 0.0
    """Chance, per round, that half of the peers die or leave when its first commit is known."""
    mass_losses: float = 0.0
    """Per second, for the whole swarm: one less than a quorum of the electors die at once."""
    vanishing: float = 0.0
    """Chance of any peer to die right after its READY."""
    fastest_dies: float = 0.0
    """Chance of a round's first peer that is ready to die right then."""
    failing_storage: float = 0.0
    """Rate at which a peer's disk stops taking parts, for `failing_s`; it says so after a while."""
    failing_s: tuple[float, float] = (3.0, 25.0)
    catch_up_s: tuple[float, float] = (0.1, 1.0)
    """Time that a snapshot takes to download. Who needs longer than a round arrives behind the tip."""

    # Trainers
    training_s: tuple[float, float] = (0.5, 2.0)
    apply_s: tuple[float, float] = (0.0, 0.02)
    stalls: float = 0.0
    """Chance that a trainer does not answer in time: READY goes out without work, the work comes later."""
    stall_s: tuple[float, float] = (0.0, 15.0)

    def cleared(self) -> Weather:
        """Fair weather for the same peers."""
        if self.delay_lasts:
            return Weather(training_s=self.training_s, apply_s=self.apply_s, delay_s=self.delay_s)
        return Weather(training_s=self.training_s, apply_s=self.apply_s)
