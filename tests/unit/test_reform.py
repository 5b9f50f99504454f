"""REFORM between machines, message by message: all of E′ sign, and signing binds."""

from __future__ import annotations

from chain_samples import CheapKeyring, make_rules, peers

from protocol import chain, wire
from protocol.events import Effect, NewLineage, Persist, Received, Send, Tick
from protocol.journal import decode_journal
from protocol.messages import Heartbeat, Reform, Reformed, ReformVote
from protocol.names import PeerId
from protocol.peer import PeerMachine

THREE = peers(3)
RULES = make_rules(THREE)
STATE = chain.genesis(RULES)


def machine(me: PeerId, *, now_s: float = 0.0, journal: bytes | None = None) -> PeerMachine:
    return PeerMachine(
        rules=RULES,
        me=me,
        keyring=CheapKeyring(me),
        state=STATE,
        journal=journal,
        journal_lost=False,
        wants_membership=True,
        incarnation=bytes(16),
        now_s=now_s,
    )


def sent(effects: list[Effect], kind: type) -> list[object]:
    messages = [wire.decode(effect.data).message for effect in effects if isinstance(effect, Send)]
    return [message for message in messages if isinstance(message, kind)]


SILENT_S = RULES.heartbeat_timeout_s + RULES.fork_timeout_s
"""From the last heartbeats of the others to the REFORM."""


def run_alone(peer: PeerMachine, until_s: float) -> list[Effect]:
    """The others are heard once, at 0 s; then ticks at every wake-up until `until_s`."""
    effects = peer.handle(Tick(), 0.0)
    for other in THREE:
        if other != peer.me:
            beat = Heartbeat(base=STATE.base, attempt=0, able=True, incarnation=bytes(16))
            data = wire.encode(wire.sign(CheapKeyring(other), other, beat))
            effects += peer.handle(Received(data=data, from_peer=other), 0.0)
    while peer.next_wakeup_s <= until_s:
        effects += peer.handle(Tick(), peer.next_wakeup_s)
    return effects


def test_no_reform_while_a_quorum_is_heard_or_before_its_time() -> None:
    peer = machine(THREE[0])
    effects = run_alone(peer, SILENT_S - 0.5)
    assert sent(effects, ReformVote) == []
    beat = Heartbeat(base=STATE.base, attempt=0, able=True, incarnation=bytes(16))
    other = wire.encode(wire.sign(CheapKeyring(THREE[1]), THREE[1], beat))
    now_s = SILENT_S - 0.25
    while now_s < 3 * SILENT_S:
        effects += peer.handle(Received(data=other, from_peer=THREE[1]), now_s)
        now_s += RULES.heartbeat_s
    assert sent(effects, ReformVote) == []


def test_founders_that_have_not_met_yet_wait_for_each_other() -> None:
    peer = machine(THREE[0])
    effects = peer.handle(Tick(), 0.0)
    while peer.next_wakeup_s < 5 * SILENT_S:
        effects += peer.handle(Tick(), peer.next_wakeup_s)
    assert sent(effects, ReformVote) == []


def test_a_heartbeat_passed_on_by_another_does_not_count() -> None:
    peer = machine(THREE[0])
    beat = Heartbeat(base=STATE.base, attempt=0, able=True, incarnation=bytes(16))
    other = wire.encode(wire.sign(CheapKeyring(THREE[1]), THREE[1], beat))
    peer.handle(Received(data=other, from_peer=THREE[2]), 1.0)
    assert peer.live == {THREE[0]}
    peer.handle(Received(data=other, from_peer=THREE[1]), 1.0)
    assert peer.live == {THREE[0], THREE[1]}


def test_the_last_one_left_goes_on_alone_and_is_bound_by_it() -> None:
    peer = machine(THREE[0])
    effects = run_alone(peer, SILENT_S + 1.0)
    born = next(effect for effect in effects if isinstance(effect, NewLineage))
    assert born.reformed.reform.members == (THREE[0],)
    assert peer.state.base.lineage != STATE.base.lineage
    assert (peer.state.base.round, peer.state.electors) == (0, (THREE[0],))
    promise = decode_journal([effect for effect in effects if isinstance(effect, Persist)][-1].journal)
    assert STATE.base.lineage in promise.barred
    # The promise is on disk before the signature leaves, and the lineage is stored after both.
    kinds = [
        type(effect) if not isinstance(effect, Send) else type(wire.decode(effect.data).message) for effect in effects
    ]
    signature = max(
        index
        for index, effect in enumerate(effects)
        if isinstance(effect, Send)
        and isinstance(message := wire.decode(effect.data).message, ReformVote)
        and message.sign
    )
    assert kinds.index(Persist) < signature < kinds.index(NewLineage)
    # Back in the old lineage after a crash it neither votes nor claims to be able.
    again = machine(THREE[0], journal=promise.encode())
    assert not again.standing.voting
    (beat,) = sent(again.handle(Tick(), 0.0), Heartbeat)
    assert isinstance(beat, Heartbeat)
    assert not beat.able


def test_one_signature_short_is_no_lineage() -> None:
    peer = machine(THREE[0])
    run_alone(peer, SILENT_S - 0.5)
    # Another member calls and collects both; its own signature never comes.
    other = THREE[1]
    reform = Reform(base=STATE.base, k=0, members=(THREE[0], other))
    keyring = CheapKeyring(other)
    beat = wire.encode(wire.sign(keyring, other, Heartbeat(base=STATE.base, attempt=0, able=False, incarnation=b"")))
    willing = wire.encode(wire.sign(keyring, other, ReformVote(base=STATE.base, k=0, sign=False, reform=b"")))
    body = wire.encode(wire.sign(keyring, other, reform))
    effects: list[Effect] = []
    for data in (beat, body, willing):
        effects += peer.handle(Received(data=data, from_peer=other), SILENT_S - 0.4)
    effects += peer.handle(Tick(), SILENT_S + 0.1)
    signatures = [message for message in sent(effects, ReformVote) if isinstance(message, ReformVote) and message.sign]
    assert signatures
    assert not any(isinstance(effect, NewLineage) for effect in effects)
    assert peer.phase == "reforming"
    forged = Reformed(
        reform=reform,
        body=wire.encode_body(reform),
        signatures=((THREE[0], bytes(32)), (other, bytes(32))),
    )
    effects = peer.handle(
        Received(data=wire.encode(wire.sign(keyring, other, forged)), from_peer=other), SILENT_S + 0.2
    )
    assert not any(isinstance(effect, NewLineage) for effect in effects)
