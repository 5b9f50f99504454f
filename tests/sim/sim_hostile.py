"""Peers that do mischief: the real machine runs, and what it says to others is bent."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sim_model import Payload

from protocol import wire
from protocol.grouping import plan_for
from protocol.messages import NIL, Proposal, Ready, Roster, Signed, UnitRange, Vote
from protocol.names import Digest, PeerId
from protocol.planning import contributing_of, deal, level_durations
from protocol.rules import Rules

if TYPE_CHECKING:
    from sim_node import Node

AS_LEADER = ("silent", "slow", "hasty", "two_faced")
AS_PEER = ("absurd", "two_readys", "garbage", "drips")
AS_ROOT = ("fabricates", "selective", "corrupts")
AS_VOTER = ("votes_both_ways", "votes_nil")
"""Tolerated below a third of the electors of an open run; a closed run trusts its electors to vote honestly."""


class Mischief:
    """Args:
    kinds: of `AS_LEADER`, `AS_PEER`, `AS_ROOT`, `AS_VOTER`.
    """

    def __init__(self, node: Node, kinds: frozenset[str]) -> None:
        self.node = node
        self.kinds = kinds
        self._decision: Digest = NIL
        """The last one that it voted for."""

    def prepare(self) -> None:
        """Before the machine handles an event."""
        machine = self.node.machine
        if machine is not None and "hasty" in self.kinds:
            assembly = machine.round.assembly
            assembly.due_s = lambda **_: None if assembly.quorum_since_s is None else 0.0  # type: ignore[method-assign]

    def send(self, to: PeerId | None, data: bytes) -> None:
        world, me = self.node.world, self.node.peer
        others = [peer for peer in world.nodes if peer != me]
        if "garbage" in self.kinds and world.random.random() < 0.2:
            junk = bytearray(data)
            for _ in range(world.random.randrange(1, 5)):
                junk[world.random.randrange(len(junk))] ^= 1 << world.random.randrange(8)
            world.send(me, None, bytes(junk))
            world.send(me, None, world.random.randbytes(world.random.randrange(1, 80)))
        signed = wire.decode(data)
        if signed.sender != me:
            world.send(me, to, data)
            return
        first, second = self._versions(signed)
        delay_s = 0.0
        if isinstance(signed.message, Roster | Proposal):
            if "silent" in self.kinds:
                return
            delay_s = world.random.uniform(3.0, 20.0) if "slow" in self.kinds else 0.0
        half = len(others) // 2
        for number, peer in enumerate(others):
            if to in (None, peer):
                version = first if second is None or number < half else second
                self.node.later(delay_s, _sending(self.node, peer, version))

    def _versions(self, signed: Signed[Any]) -> tuple[bytes, bytes | None]:
        """What one half of the others gets, and the other half, if it gets something else."""
        message, rules = signed.message, self.node.world.rules
        same = wire.encode(signed)
        match message:
            case Ready() if "absurd" in self.kinds:
                return self._sign(self._absurd(message)), None
            case Ready() if "two_readys" in self.kinds and message.contributes:
                return same, self._sign(replace(message, units_wanted=message.units_wanted ^ 1))
            case Roster() if "two_faced" in self.kinds and len(message.readys) > 2:
                return same, self._sign(without(message.readys[-1].sender, rules)(message))
            case Proposal() if "two_faced" in self.kinds and any(message.headers):
                headers = list(message.headers)
                headers[headers.index(next(header for header in headers if header is not None))] = None
                return same, self._sign(replace(message, headers=tuple(headers)))
            case Vote() if "votes_nil" in self.kinds:
                return self._sign(replace(message, value=NIL)), None
            case Vote() if "votes_both_ways" in self.kinds:
                self._decision = message.value or self._decision
                other = NIL if message.value else self._decision
                return same, self._sign(replace(message, value=other, failed_edges=(), left_out=()))
        return same, None

    def _absurd(self, ready: Ready) -> Ready:
        match self.node.world.random.randrange(5):
            case 0:
                return replace(ready, norm=3e38, largest=3e38)
            case 1:
                return replace(ready, tokens=tuple((parts, 2**40) for parts, _ in ready.tokens))
            case 2:
                return replace(ready, ranges_done=(UnitRange(epoch=7, start=0, stop=900),))
            case 3:
                return replace(ready, norm=math.ulp(0.0), largest=3e38)
            case _:
                return replace(ready, tokens=((1, 64),))

    def _sign(self, message: Any) -> bytes:
        return wire.encode(wire.sign(self.node.keyring, self.node.peer, message))

    # ------------------------------------------------------------ in exchanges

    def payload(self, payload: Payload) -> Payload:
        """What it signs as root instead of the mean."""
        return replace(payload, mean=payload.mean * -3 + 1) if "fabricates" in self.kinds else payload

    def breaks_off(self) -> bool:
        """Whether a payload of its does not reach the other side whole."""
        kinds, chance = self.kinds, self.node.world.random.random()
        return ("selective" in kinds and chance < 0.5) or ("corrupts" in kinds and chance < 0.8)


def _sending(node: Node, to: PeerId, data: bytes) -> Callable[[], None]:
    return lambda: node.world.send(node.peer, to, data)


def without(victim: PeerId, rules: Rules) -> Callable[[Roster], Roster]:
    """The same roster, planned anew without one READY."""

    def change(roster: Roster) -> Roster:
        readys = tuple(ready for ready in roster.readys if ready.sender != victim)
        smaller = replace(roster, readys=readys, absent=0)
        contributing = contributing_of(smaller, rules)
        if contributing == 0 or roster.plan is None:
            return smaller
        plan = plan_for(smaller, contributing, rules)
        dealt = deal(roster.base.digest(), rules.part_count, plan)
        return replace(smaller, plan=plan, durations_s=level_durations(plan, contributing, dealt, rules))

    return change
