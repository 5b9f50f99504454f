"""Peers that lie where only an audit or a comparison shows it (protocol section 7), for `test_audit.py`.

Each function turns one running node against the others; it keeps to the protocol otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from sim_engine import Engine, Exchange
from sim_model import Payload
from sim_node import Node

from protocol import wire
from protocol.chain import ChainState
from protocol.events import Effect, HeaderSigned, Send
from protocol.evidence import wrong_mean
from protocol.messages import NIL, Evidence, Message, Proposal, Ready, Roster, Signed, Vote
from protocol.names import Digest, PeerId, digest

Change = Callable[[Any], Message | None]
"""What to say to half of the peers instead; None: the same."""


def _other_ready(ready: Ready) -> Message | None:
    return replace(ready, norm=ready.norm * 1.5) if ready.contributes else None


def _other_vote(vote: Vote) -> Message | None:
    if vote.value != NIL:
        return replace(vote, value=NIL)
    return replace(vote, value=digest(b"anything"), failed_edges=(), left_out=())


def _other_roster(roster: Roster) -> Message | None:
    return replace(roster, durations_s=tuple(duration + 1.0 for duration in roster.durations_s))


def _other_proposal(proposal: Proposal) -> Message | None:
    if not any(proposal.headers):
        return None
    first = next(part for part, header in enumerate(proposal.headers) if header is not None)
    return replace(proposal, headers=(*proposal.headers[:first], None, *proposal.headers[first + 1 :]))


CHANGES: dict[type[Message], Change] = {
    Ready: _other_ready,
    Vote: _other_vote,
    Roster: _other_roster,
    Proposal: _other_proposal,
}


def two_faced(node: Node, kind: type[Message]) -> None:
    """Of every message of `kind` that it sends, every other peer gets another one, as validly signed."""
    node.world.hostile.add(node.peer)
    original = node._perform

    def perform(effect: Effect, before: ChainState) -> None:
        if not isinstance(effect, Send):
            original(effect, before)
            return
        signed = wire.decode(effect.data)
        other = CHANGES[kind](signed.message) if signed.sender == node.peer and type(signed.message) is kind else None
        if other is None:
            original(effect, before)
            return
        data = wire.encode(wire.sign(node.keyring, node.peer, other))
        for number, peer in enumerate(sorted(node.world.nodes)):
            if peer != node.peer and effect.to in (None, peer):
                node.world.send(node.peer, peer, data if number % 2 else effect.data)

    node._perform = perform  # type: ignore[method-assign]


def _each_engine(node: Node, bend: Callable[[Engine], None]) -> None:
    """Now, and whenever its process starts again."""
    node.world.hostile.add(node.peer)
    boot = node._boot

    def booted() -> None:
        boot()
        if node.engine is not None:
            bend(node.engine)

    node._boot = booted  # type: ignore[method-assign]
    if node.engine is not None:
        bend(node.engine)


def fabricates_means(node: Node) -> None:
    """As a root it signs a mean that is none; its bytes are in order otherwise, and a quorum certifies them."""
    oracle = node.world.oracle
    oracle.liars.add(node.peer)

    def close(engine: Engine, exchange: Exchange, part: int) -> None:
        honest = Payload.of

        def fabricated(part: int, contributions: dict[PeerId, tuple[int, int]]) -> Payload:
            right = honest(part, contributions)
            return Payload(part, right.contributions, right.mean + 1000)

        Payload.of = staticmethod(fabricated)  # type: ignore[assignment]
        try:
            Engine._close(engine, exchange, part)
        finally:
            Payload.of = staticmethod(honest)  # type: ignore[method-assign]

    _each_engine(node, lambda engine: setattr(engine, "_close", partial(close, engine)))


def signs_two_results(node: Node) -> None:
    """As a root it sends half of the peers a second header for the same part, over other bytes."""

    def signed(engine: Engine, effect: HeaderSigned) -> None:
        Engine.signed(engine, effect)
        exchange = engine.running.get(effect.header.roster_id)
        if effect.signed is None or exchange is None:
            return
        world = node.world
        known = world.oracle.payloads[effect.header.hash]
        twin = Payload(known.part, known.contributions, known.mean + 1)
        world.oracle.payloads[twin.hash] = twin
        header = wire.sign(node.keyring, node.peer, replace(effect.header, hash=twin.hash))
        for peer in exchange.peers[::2]:
            if peer != node.peer:
                world.transfer(node.peer, peer, partial(_hold, world.nodes[peer], header), lost=lambda: None)

    node.world.oracle.liars.add(node.peer)
    _each_engine(node, lambda engine: setattr(engine, "signed", partial(signed, engine)))


def _hold(target: Node, header: Signed[Any]) -> None:
    target.hold(header)


def accuses_falsely(node: Node) -> None:
    """After each commit it says of a result that is right that it is none, to all, and in the ROSTERs that it makes."""
    world = node.world
    world.hostile.add(node.peer)
    original = node._perform

    def newest_claim() -> Evidence | None:
        if not node.committed:
            return None
        commit = node.committed[-1]
        others = [header for header in commit.headers if header is not None and header.sender != node.peer]
        return wrong_mean(commit.roster.message.base, others[0]) if others else None

    def perform(effect: Effect, before: ChainState) -> None:
        claim = newest_claim()
        signed = wire.decode(effect.data) if isinstance(effect, Send) else None
        if claim is None or not isinstance(effect, Send) or signed is None or signed.sender != node.peer:
            original(effect, before)
        elif isinstance(signed.message, Ready):
            world.send(node.peer, None, wire.encode(wire.sign(node.keyring, node.peer, claim)))
            original(effect, before)
        elif isinstance(signed.message, Roster):
            lying = replace(signed.message, evidence=(claim,))
            original(Send(to=effect.to, data=wire.encode(wire.sign(node.keyring, node.peer, lying))), before)
        else:
            original(effect, before)

    node._perform = perform  # type: ignore[method-assign]


def sends_other_bytes(node: Node) -> None:
    """As a leaf it sends bytes that its READY does not bind."""

    def up(engine: Engine, roster_id: Digest, root: PeerId, part: int, value: int, proof: bytes) -> None:
        Engine._up(engine, roster_id, root, part, value + (root != node.peer), proof)

    _each_engine(node, lambda engine: setattr(engine, "_up", partial(up, engine)))
