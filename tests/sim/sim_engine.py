"""A simulated engine: flat exchanges of integers, with slots that close when they are filled or late."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from sim_model import PARTS, Payload, payload_bytes, value_hash

from protocol.commitment import proves
from protocol.events import ExchangeEnded, HeaderDraft, HeaderSigned, StartExchange
from protocol.messages import PartHeader, Signed
from protocol.names import Digest, PeerId
from protocol.planning import contributing_of, deal
from protocol.weights import RosterWeights, bits, enough

if TYPE_CHECKING:
    from sim_node import Node


@dataclass(slots=True)
class Exchange:
    effect: StartExchange
    peers: tuple[PeerId, ...]
    contributing: int
    roots: tuple[int, ...]
    """Index of the root of each part."""
    weights: RosterWeights
    slots: dict[int, dict[PeerId, int]] = field(default_factory=dict)
    """Parts of which I am the root → what came so far."""
    closed: set[int] = field(default_factory=set)
    got: set[int] = field(default_factory=set)
    ended: bool = False


class Engine:
    """Lives as long as its node's process."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.running: dict[Digest, Exchange] = {}
        self._early: dict[Digest, list[tuple[int, PeerId, int, bytes]]] = {}

    def start(self, effect: StartExchange) -> None:
        roster = effect.roster.message
        assert roster.plan is not None
        rules = self.node.world.rules
        contributing = contributing_of(roster, rules)
        roots = [shard.root for shard in roster.plan.shards]
        exchange = Exchange(
            effect=effect,
            peers=tuple(signed.sender for signed in roster.readys),
            contributing=contributing,
            roots=tuple(roots[shard] for shard in deal(roster.base.digest(), rules.part_count, roster.plan)),
            weights=RosterWeights(
                [signed.message.tokens for signed in roster.readys], contributing, rules.weight_cap_ratio
            ),
        )
        self.running[effect.roster_id] = exchange
        outbox = self.node.outbox.get(roster.base.digest())
        mine = effect.my_index is not None and contributing >> effect.my_index & 1
        for part in range(PARTS):
            root = exchange.peers[exchange.roots[part]]
            if root == self.node.peer:
                exchange.slots[part] = {}
            if mine and outbox is not None:
                self._up(effect.roster_id, root, part, outbox.values[part], outbox.commitment.proof(part))
        for part, sender, value, proof in self._early.pop(effect.roster_id, []):
            self._take(exchange, part, sender, value, proof)
        first_s, *_, last_s = (*roster.durations_s, 0.0)[:1] + roster.durations_s[-1:]
        self.node.later(first_s, partial(self._close_all, exchange))
        self.node.later(last_s + rules.slack_s, partial(self._end, exchange))
        self._maybe_end(exchange)
        self.node.world.faults.step(self.node)

    def _up(self, roster_id: Digest, root: PeerId, part: int, value: int, proof: bytes) -> None:
        target, sender = self.node.world.nodes[root], self.node.peer

        def arrive() -> None:
            if target.engine is not None:
                target.engine.arrived(roster_id, part, sender, value, proof)

        if root == sender:
            self.node.later(0.0, arrive)
        elif self.node.mischief is None or not self.node.mischief.breaks_off():
            self.node.world.transfer(sender, root, arrive, lost=lambda: None)
            if self.node.world.switches.resend_parts:
                self.node.later(0.3, lambda: self.node.world.transfer(sender, root, arrive, lost=lambda: None))

    def arrived(self, roster_id: Digest, part: int, sender: PeerId, value: int, proof: bytes) -> None:
        exchange = self.running.get(roster_id)
        if exchange is None:
            self._early.setdefault(roster_id, []).append((part, sender, value, proof))
        else:
            self._take(exchange, part, sender, value, proof)

    def _take(self, exchange: Exchange, part: int, sender: PeerId, value: int, proof: bytes) -> None:
        if part in exchange.closed or part not in exchange.slots:
            return
        ready = exchange.effect.roster.message.readys[exchange.peers.index(sender)].message
        bound = proves(ready.parts_root, part, PARTS, value_hash(value), proof)
        if not bound and not self.node.world.switches.freeze_twice:
            self.node.world.note(self.node.peer, f"  drops part {part} of {sender}: not what its READY binds")
            return
        if self.node.world.switches.resend_parts:
            value += exchange.slots[part].get(sender, 0)
        exchange.slots[part][sender] = value
        self.node.world.faults.step(self.node)
        if len(exchange.slots[part]) == exchange.contributing.bit_count():
            self._close(exchange, part)

    def _close_all(self, exchange: Exchange) -> None:
        for part in exchange.slots:
            self._close(exchange, part)

    def _close(self, exchange: Exchange, part: int) -> None:
        if part in exchange.closed or exchange.ended:
            return
        exchange.closed.add(part)
        weights = exchange.weights.at(part)
        values = exchange.slots[part]
        bitmap = sum(1 << index for index, peer in enumerate(exchange.peers) if peer in values)
        if not enough(weights, bitmap):
            return
        payload = Payload.of(part, {exchange.peers[i]: (weights[i], values[exchange.peers[i]]) for i in bits(bitmap)})
        if self.node.mischief is not None:
            payload = self.node.mischief.payload(payload)
        if self.node.world.switches.wrong_bitmap:
            bitmap = exchange.contributing
        self.node.world.oracle.payloads[payload.hash] = payload
        header = PartHeader(
            roster_id=exchange.effect.roster_id, part=part, bitmap=bitmap, hash=payload.hash, length=payload_bytes()
        )
        self.node.later(0.0, lambda: self.node.feed(HeaderDraft(header=header)))
        self.node.world.faults.step(self.node)

    def signed(self, effect: HeaderSigned) -> None:
        exchange = self.running.get(effect.header.roster_id)
        if effect.signed is None or exchange is None or exchange.ended:
            return
        signed = effect.signed
        self.node.later(0.0, lambda: self.down(signed))
        self.node.world.faults.step(self.node)
        for peer in exchange.peers:
            if peer != self.node.peer and (self.node.mischief is None or not self.node.mischief.breaks_off()):
                target = self.node.world.nodes[peer]
                self.node.world.transfer(self.node.peer, peer, partial(_pass_down, target, signed), lost=lambda: None)

    def down(self, signed: Signed[PartHeader]) -> None:
        exchange = self.running.get(signed.message.roster_id)
        if exchange is None or exchange.ended:
            return
        exchange.got.add(signed.message.part)
        life = self.node.life
        self.node.hold(signed)
        if self.node.life == life:
            self.node.world.faults.step(self.node)
            self._maybe_end(exchange)

    def _maybe_end(self, exchange: Exchange) -> None:
        if len(exchange.got) == PARTS:
            self._end(exchange)

    def _end(self, exchange: Exchange) -> None:
        if not exchange.ended:
            exchange.ended = True
            roster_id = exchange.effect.roster_id
            missed = tuple(
                exchange.peers[index]
                for index in bits(exchange.contributing)
                if exchange.slots and all(exchange.peers[index] not in values for values in exchange.slots.values())
            )
            self.node.later(0.0, lambda: self.node.feed(ExchangeEnded(roster_id=roster_id, missed=missed)))

    def stop(self, roster_id: Digest) -> None:
        exchange = self.running.get(roster_id)
        if exchange is not None:
            exchange.ended = True


def _pass_down(target: Node, signed: Signed[PartHeader]) -> None:
    if target.engine is not None:
        target.engine.down(signed)
