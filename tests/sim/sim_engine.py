"""A simulated engine: exchanges of integers over a plan's trees, with slots that close when they are filled or late.

A partial sum is what it is made of: the integers in it, by whom.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from sim_model import PARTS, Payload, payload_bytes, value_hash

from protocol import planning
from protocol.commitment import proves
from protocol.events import ExchangeEnded, HeaderDraft, HeaderSigned, StartExchange
from protocol.messages import PartHeader, Signed
from protocol.names import Digest, PeerId
from protocol.planning import Tree, contributing_of
from protocol.weights import RosterWeights, bits, enough

if TYPE_CHECKING:
    from sim_node import Node


@dataclass(slots=True)
class Exchange:
    effect: StartExchange
    peers: tuple[PeerId, ...]
    index: dict[PeerId, int]
    """Of each of `peers`."""
    me: int
    contributing: int
    trees: tuple[Tree, ...]
    """Of each part."""
    weights: RosterWeights
    slots: dict[int, dict[PeerId, dict[PeerId, int]]] = field(default_factory=dict)
    """Parts that I sum → child, or myself → what it brought."""
    closed: set[int] = field(default_factory=set)
    got: set[int] = field(default_factory=set)
    ended: bool = False

    def reached(self, part: int) -> dict[PeerId, int]:
        """The contributions to a part that I sum, as far as they are here."""
        return {peer: value for brought in self.slots[part].values() for peer, value in brought.items()}


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
        shards = planning.trees(roster.plan, contributing)
        peers = tuple(signed.sender for signed in roster.readys)
        assert effect.my_index is not None
        exchange = Exchange(
            effect=effect,
            peers=peers,
            index={peer: index for index, peer in enumerate(peers)},
            me=effect.my_index,
            contributing=contributing,
            trees=tuple(shards[shard] for shard in planning.deal(roster.base.digest(), rules.part_count, roster.plan)),
            weights=RosterWeights(
                [signed.message.tokens for signed in roster.readys], contributing, rules.weight_cap_ratio
            ),
        )
        self.running[effect.roster_id] = exchange
        outbox = self.node.outbox.get(roster.base.digest())
        mine = contributing >> exchange.me & 1
        for part, tree in enumerate(exchange.trees):
            target = tree.parents[exchange.me]
            if tree.root == exchange.me or tree.slots[exchange.me]:
                exchange.slots[part] = {}
                target = exchange.me
            if mine and outbox is not None:
                self._up(effect.roster_id, peers[target], part, outbox.values[part], outbox.commitment.proof(part))
        for part, sender, brought, proof in self._early.pop(effect.roster_id, []):
            self._take(exchange, part, sender, brought, proof)
        *levels_s, last_s = roster.durations_s
        for level, duration_s in enumerate(levels_s or (last_s,), start=1):
            self.node.later(duration_s, partial(self._close_level, exchange, level))
        self.node.later(last_s + rules.slack_s, partial(self._end, exchange))
        self._maybe_end(exchange)
        self.node.world.faults.step(self.node)

    def _up(self, roster_id: Digest, to: PeerId, part: int, value: int, proof: bytes) -> None:
        """My own contribution, to whoever sums it."""
        self._send_up(roster_id, to, part, {self.node.peer: value}, proof)

    def _send_up(self, roster_id: Digest, to: PeerId, part: int, brought: dict[PeerId, int], proof: bytes) -> None:
        target, sender = self.node.world.nodes[to], self.node.peer

        def arrive() -> None:
            if target.engine is not None:
                target.engine.arrived(roster_id, part, sender, brought, proof)

        if to == sender:
            self.node.later(0.0, arrive)
        elif self.node.mischief is None or not self.node.mischief.breaks_off():
            self.node.world.transfer(sender, to, arrive, lost=lambda: None)
            if self.node.world.switches.resend_parts:
                self.node.later(0.3, lambda: self.node.world.transfer(sender, to, arrive, lost=lambda: None))

    def arrived(self, roster_id: Digest, part: int, sender: PeerId, brought: dict[PeerId, int], proof: bytes) -> None:
        exchange = self.running.get(roster_id)
        if exchange is None:
            self._early.setdefault(roster_id, []).append((part, sender, brought, proof))
        else:
            self._take(exchange, part, sender, brought, proof)

    def _take(self, exchange: Exchange, part: int, sender: PeerId, brought: dict[PeerId, int], proof: bytes) -> None:
        if part in exchange.closed or part not in exchange.slots:
            return
        tree, child = exchange.trees[part], exchange.index[sender]
        if child not in (exchange.me, *tree.slots[exchange.me]):
            return
        if child == exchange.me or not tree.heights[child]:
            ready = exchange.effect.roster.message.readys[child].message
            bound = proves(ready.parts_root, part, PARTS, value_hash(brought[sender]), proof)
            if not bound and not self.node.world.switches.freeze_twice:
                self.node.world.note(self.node.peer, f"  drops part {part} of {sender}: not what its READY binds")
                return
        if self.node.world.switches.resend_parts:
            before = exchange.slots[part].get(sender, {})
            brought = {peer: value + before.get(peer, 0) for peer, value in brought.items()}
        exchange.slots[part][sender] = brought
        self.node.world.faults.step(self.node)
        if len(exchange.slots[part]) == 1 + len(tree.slots[exchange.me]):
            self._close(exchange, part)

    def _close_level(self, exchange: Exchange, level: int) -> None:
        for part in exchange.slots:
            if max(1, exchange.trees[part].heights[exchange.me]) == level:
                self._close(exchange, part)

    def _close(self, exchange: Exchange, part: int) -> None:
        if part in exchange.closed or exchange.ended:
            return
        exchange.closed.add(part)
        values = exchange.reached(part)
        tree = exchange.trees[part]
        if tree.root != exchange.me:
            if values:
                parent = exchange.peers[tree.parents[exchange.me]]
                self._send_up(exchange.effect.roster_id, parent, part, values, b"")
                self.node.world.faults.step(self.node)
            return
        weights = exchange.weights.at(part)
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
        self._pass_on(exchange, signed)

    def _pass_on(self, exchange: Exchange, signed: Signed[PartHeader]) -> None:
        for child in exchange.trees[signed.message.part].children[exchange.me]:
            if self.node.mischief is None or not self.node.mischief.breaks_off():
                peer = exchange.peers[child]
                target = self.node.world.nodes[peer]
                self.node.world.transfer(self.node.peer, peer, partial(_pass_down, target, signed), lost=lambda: None)

    def down(self, signed: Signed[PartHeader]) -> None:
        exchange = self.running.get(signed.message.roster_id)
        if exchange is None or exchange.ended:
            return
        again = signed.message.part in exchange.got
        exchange.got.add(signed.message.part)
        life = self.node.life
        self.node.hold(signed)
        if self.node.life == life:
            self.node.world.faults.step(self.node)
            if not again and exchange.trees[signed.message.part].root != exchange.me:
                self._pass_on(exchange, signed)
            self._maybe_end(exchange)

    def _maybe_end(self, exchange: Exchange) -> None:
        if len(exchange.got) == PARTS:
            self._end(exchange)

    def _end(self, exchange: Exchange) -> None:
        if not exchange.ended:
            exchange.ended = True
            roster_id = exchange.effect.roster_id
            expected = reached = 0
            for part in exchange.slots:
                expected |= exchange.trees[part].subtrees[exchange.me]
                reached |= sum(1 << exchange.index[peer] for peer in exchange.reached(part))
            missed = tuple(exchange.peers[index] for index in bits(expected & ~reached))
            self.node.later(0.0, lambda: self.node.feed(ExchangeEnded(roster_id=roster_id, missed=missed)))

    def stop(self, roster_id: Digest) -> None:
        exchange = self.running.get(roster_id)
        if exchange is not None:
            exchange.ended = True


def _pass_down(target: Node, signed: Signed[PartHeader]) -> None:
    if target.engine is not None:
        target.engine.down(signed)
