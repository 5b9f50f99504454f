"""Audits and convictions of a simulated swarm (protocol section 7): what an engine would recompute.

An honest peer is never convicted, in any schedule: `World.hostile` names those that may be.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim_model import Payload
from sim_oracle import Violation

from protocol.events import Convicted, PartRecomputed, RecomputePart, Verdict
from protocol.planning import contributing_of
from protocol.weights import RosterWeights, bits

if TYPE_CHECKING:
    from sim_node import Node


def convicted(node: Node, effect: Convicted) -> None:
    world, evidence = node.world, effect.evidence
    world.note(node.peer, f"convicts {evidence.culprit} of {evidence.offence}")
    world.convictions.append((node.peer, evidence))
    if evidence.culprit not in world.hostile and world.switches.accuse:
        raise Violation(f"{node.peer} convicts the honest {evidence.culprit} of {evidence.offence}")


def recompute(node: Node, effect: RecomputePart) -> None:
    base = effect.commit.roster.message.base.digest()

    def answer() -> None:
        node.feed(PartRecomputed(base=base, part=effect.part, verdict=verdict(node, effect)))

    node.later(2 * node.world.delay_s(), answer)


def verdict(node: Node, effect: RecomputePart) -> Verdict:
    """From the contributions as their leaves keep them; UNKNOWN when one of them cannot be asked."""
    world, roster = node.world, effect.commit.roster.message
    header = effect.commit.headers[effect.part]
    assert header is not None
    weights = RosterWeights(
        [ready.message.tokens for ready in roster.readys],
        contributing_of(roster, world.rules),
        world.rules.weight_cap_ratio,
    ).at(effect.part)
    contributions = {}
    for index in bits(header.message.bitmap):
        peer = roster.readys[index].sender
        leaf = world.nodes[peer]
        outbox = leaf.outbox.get(roster.base.digest())
        there = leaf is node or (
            leaf.machine is not None and world.connected(peer, node.peer) and world.connected(node.peer, peer)
        )
        if outbox is None or not there or outbox.commitment.root != roster.readys[index].message.parts_root:
            return Verdict.UNKNOWN
        contributions[peer] = (weights[index], outbox.values[effect.part])
    right = Payload.of(effect.part, contributions).hash == header.message.hash
    return Verdict.RIGHT if right else Verdict.WRONG
