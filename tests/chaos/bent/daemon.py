"""The daemon's places and lies.

Places, each when the message has been handed to the network: `ready`, `roster`, `proposal`, `vote-1`, `vote-2`; and
`committed` when a commit is about to be applied.

Lies in READY: `tokens-absurd` (2⁵² for every part), `tokens-many` (all that a READY may claim, whatever was trained),
`norm-nan`, `ranges-stolen` (units that somebody else holds).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from node.daemon.driver import Driver
from protocol import events, wire
from protocol.messages import Proposal, Ready, Roster, UnitRange, Vote
from protocol.round import Round
from tests.chaos.bent import bends
from tests.chaos.bent.strikes import Striker


def point_of(message: object) -> str | None:
    match message:
        case Ready():
            return "ready"
        case Roster():
            return "roster"
        case Proposal():
            return "proposal"
        case Vote():
            return f"vote-{message.phase}"
    return None


def bend() -> None:
    striker = Striker()
    perform = Driver._perform
    send_ready = Round._send_ready

    async def bent_perform(self: Driver, effect: events.Effect) -> None:
        if isinstance(effect, events.Apply):
            striker.passing("committed", self.machine.state.base.round)
        await perform(self, effect)
        if isinstance(effect, events.Send):
            signed: Any = wire.decode(effect.data)
            point = point_of(signed.message)
            if point is not None and signed.sender == self.machine.me:
                striker.passing(point, signed.message.base.round)

    def bent_send_ready(self: Round, ready: Ready) -> bool:
        return send_ready(self, bent_ready(self, ready))

    Driver._perform = bent_perform  # type: ignore[method-assign]
    Round._send_ready = bent_send_ready  # type: ignore[method-assign]


def bent_ready(round_: Round, ready: Ready) -> Ready:
    lies = bends.active()
    if not ready.contributes:
        return ready
    if "tokens-absurd" in lies:
        ready = replace(ready, tokens=((round_.rules.part_count, 2**52),))
    if "tokens-many" in lies:
        cap = 3 * round_.rules.lease_cap_units * round_.rules.unit_tokens
        ready = replace(ready, tokens=((round_.rules.part_count, cap),))
    if "norm-nan" in lies:
        ready = replace(ready, norm=float("nan"))
    if "ranges-stolen" in lies:
        others = [held for peer, member in round_.state.members if peer != round_.me for held in member.lease]
        ready = replace(ready, ranges_done=tuple(UnitRange(epoch=r.epoch, start=r.start, stop=r.stop) for r in others))
    return ready
