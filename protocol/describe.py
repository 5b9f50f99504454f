"""What a peer is doing and waiting for, in words that `status` shows."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from protocol import chain
from protocol.names import PeerId
from protocol.validity import room_for_joins

if TYPE_CHECKING:
    from protocol.peer import PeerMachine

NAMED = 3
"""Peers named in a sentence; the others are counted."""


def describe(machine: PeerMachine) -> tuple[str, str]:
    """(phase, reason). The reason is one sentence and never empty."""
    round_ = machine.round
    number = machine.state.base.round
    if machine.stopped:
        return "paused", "an alarm, or a state that the others do not hold, stopped the rounds here; the log says which"
    if machine.finished:
        return "finished", f"the run is over after {number} rounds; commits and parts are still served"
    if machine.final:
        return "finished", f"waiting until every live peer has the last state, of round {number}"
    if machine.me in machine.state.banned:
        return "paused", (
            "the run has evidence against this node's key and has left it out for good: look in its log, and join with "
            "a new identity"
        )
    if machine.reforming.active:
        electors, missing = len(machine.state.electors), machine.reforming.missing()
        return "reforming", (
            f"only {electors - len(missing)} of {electors} electors are heard, without {names(missing)}, and "
            f"{machine.reforming.quorum} decide: collecting signatures for a new lineage (call {machine.reforming.k})"
        )
    if round_.applying:
        return "applying", f"applying the commit of round {number}"
    if round_.commit is not None:
        return "applying", f"fetching parts of the commit of round {number}"
    if machine.standing.leaving:
        return "leaving", "the other peers were told; waiting to be stopped"
    kept = machine.probation.says(machine.state)
    if kept is not None:
        return "joining", kept
    if chain.member(machine.state, machine.me) is None:
        if machine.wants_membership and not room_for_joins(machine.state):
            return (
                "joining",
                f"waiting for a place: the run has {len(machine.state.members)} members, the most",
            )
        if machine.wants_membership:
            return "joining", f"the JOIN of round {number} waits for the next commit"
        return "joining", f"following without being a member; waiting for the commit of round {number}"
    if not machine.standing.voting:
        return "joining", "earlier promises of this node are not known or bind it elsewhere: waiting to join anew"
    return _working(machine)


def _working(machine: PeerMachine) -> tuple[str, str]:
    round_, assembly = machine.round, machine.round.assembly
    refused = round_.refusals.get(max(round_.refusals, default=-1))
    aside = "" if refused is None else f"; attempt {max(round_.refusals)} failed here: {refused}"
    lost = _lost_quorum(machine)
    if lost is not None:
        if machine.reforming.too_few():
            return "paused", lost
        aside += f"; {lost}"
    if machine.meeting.says is not None:
        aside += f"; {machine.meeting.says}"
    if round_.my_ready is None:
        if machine.standing.comparing and machine.meeting.says is not None:
            return "paused", machine.meeting.says
        if machine.standing.remaining_s is None:
            return "training", f"no trainer is attached; the contribution of others is awaited{aside}"
        if round_.asked_until_s is not None:
            return "training", f"the trainer is asked for its contribution to round {machine.state.base.round}{aside}"
        return "training", f"training for about {machine.standing.remaining_s:.0f} s more{aside}"
    candidate = round_.current()
    if round_.attempt in round_.proposals or (round_.attempt, 1) in round_.my_votes:
        missing = [peer for peer in machine.state.electors if round_.agreement.of(peer, round_.attempt, 2) is None]
        return "voting", f"attempt {round_.attempt} waits for the votes of {names(missing)}{aside}"
    if candidate is not None:
        held = len(round_.held_parts(candidate))
        if held == len(candidate.roots) or candidate.ended:
            return "voting", f"attempt {round_.attempt} waits for the proposal of {names([round_.leader()])}{aside}"
        return "exchanging", f"{held} of {len(candidate.roots)} parts of attempt {round_.attempt} are held{aside}"
    contributors, needed = assembly.contributors(), max(1, machine.rules.min_peers)
    if contributors < needed and not assembly.joins:
        return "paused", f"{contributors} of at least {needed} contributors are ready (min_peers){aside}"
    if assembly.quorum_since_s is None:
        return "waiting", (
            f"{assembly.electors_ready()} of {len(machine.state.electors)} electors are ready, "
            f"{round_.quorum} are needed{aside}"
        )
    here, _ = machine.standing.live_members(machine.state)
    missing = sorted(here - assembly.readys.keys())
    if round_.leader() == machine.me:
        return "assembling", f"the roster of attempt {round_.attempt} waits for {names(missing)}{aside}"
    who = names([round_.leader()])
    return "waiting", f"attempt {round_.attempt} waits for the roster of {who}{aside}"


def _lost_quorum(machine: PeerMachine) -> str | None:
    """Who is missing, since when, and what happens next and when; None while a quorum of electors is heard."""
    reforming, rules = machine.reforming, machine.rules
    since_s = reforming.lost_since_s
    if since_s is None:
        return None
    now_s = machine.outbox.now_s
    electors, missing = len(machine.state.electors), reforming.missing()
    text = (
        f"only {electors - len(missing)} of {electors} electors are heard, {names(missing)} not for "
        f"{now_s - since_s:.0f} s"
    )
    if reforming.waits_for_the_beginning():
        return f"{text}: the run begins when {reforming.quorum} are"
    if reforming.too_few():
        return f"{text}: paused until {rules.min_peers} members are there (min_peers)"
    left_s = max(0.0, since_s + rules.fork_timeout_s - now_s)
    return f"{text}: a new lineage of those that are heard is formed in {left_s:.0f} s"


def names(peers: Collection[PeerId]) -> str:
    """A few of `peers` by the end of their ids, and how many more there are."""
    if not peers:
        return "nobody"
    shown = ", ".join(f"…{peer[-6:]}" for peer in list(peers)[:NAMED])
    return shown if len(peers) <= NAMED else f"{shown} and {len(peers) - NAMED} more"
