"""Who is judged before what it sent is read: the largest message costs its listener only what its sender may cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from chain_samples import CheapKeyring, make_rules, peers, sign_ready, sign_roster
from test_peer import machine

from protocol import chain, wire
from protocol.events import Misbehaved, Received, Tick
from protocol.messages import Certificate, Commit, Ready, Roster, Signed
from protocol.names import PeerId, digest
from protocol.peer import PeerMachine
from protocol.receiving import EARLY_ROSTERS

PEERS = peers(4)
RULES = make_rules(PEERS)
STATE = chain.genesis(RULES)
LEADER = chain.coordinator(STATE, 0)
ME, OTHER = [peer for peer in PEERS if peer != LEADER][:2]


class Reading:
    """A machine, and the kinds of the bodies that it turns into values."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.machine: PeerMachine = machine(ME, RULES)
        self.machine.handle(Tick(), 0.0)
        self.read: list[type[Any]] = []
        opened = wire.open_sealed

        def note(sealed: wire.Sealed) -> Signed[Any]:
            self.read.append(sealed.kind)
            return opened(sealed)

        monkeypatch.setattr(wire, "open_sealed", note)

    def blamed(self, signed: Signed[Any], link: PeerId | None = None) -> list[PeerId]:
        event = Received(data=wire.encode(signed), from_peer=signed.sender if link is None else link)
        return [effect.peer for effect in self.machine.handle(event, 0.0) if isinstance(effect, Misbehaved)]


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> Reading:
    return Reading(monkeypatch)


def roster(number: int = 0, *, attempt: int = 0) -> Signed[Roster]:
    """A leader's, which differs from its others by what a member wants."""
    ready = Ready(base=STATE.base, units_wanted=number + 1)
    readys = [sign_ready(STATE, RULES, peer) for peer in PEERS[1:]]
    own = wire.sign(CheapKeyring(PEERS[0]), PEERS[0], ready)
    return sign_roster(STATE, RULES, [own, *readys], attempt=attempt)


def signed_by(sender: PeerId, message: Any) -> Signed[Any]:
    return wire.sign(CheapKeyring(sender), sender, message)


def test_a_roster_of_whom_the_attempt_is_not_led_by_is_not_read(reading: Reading) -> None:
    for sender in (OTHER, "Stranger"):
        assert reading.blamed(signed_by(sender, roster().message)) == [sender]
    assert reading.read == []
    assert reading.blamed(roster()) == []
    assert reading.read == [Roster]


def test_a_roster_is_read_once_and_of_a_leader_that_made_many_two(reading: Reading) -> None:
    for _ in range(3):
        reading.blamed(roster())
    assert reading.read == [Roster]
    for number in range(1, 6):
        assert LEADER in reading.blamed(roster(number)) or LEADER in reading.machine.docket
    assert reading.read == [Roster, Roster]


def test_what_its_sender_did_not_sign_is_not_read(reading: Reading) -> None:
    commit = signed_by(OTHER, Commit(roster=roster(), headers=(), certificate=Certificate(votes=())))
    for forged in (replace(roster(), signature=bytes(32)), replace(commit, signature=bytes(32))):
        assert reading.blamed(forged, "Mallory") == ["Mallory"]
    assert reading.read == []


def test_a_roster_that_its_leader_signed_and_nobody_can_read_is_tried_once(reading: Reading) -> None:
    good = roster()
    bad = signed_by(LEADER, replace(good.message, readys=good.message.readys[::-1], absent=1 << 9))
    assert reading.blamed(bad) == [LEADER]
    for _ in range(3):
        reading.blamed(bad)
    assert reading.read == [Roster]


def test_a_link_has_few_rosters_of_other_places_read_in_a_round(reading: Reading) -> None:
    for number in range(3 * EARLY_ROSTERS):
        ahead = replace(STATE.base, round=1, prev=digest(b"prev", bytes([number])))
        reading.blamed(signed_by("Stranger", replace(roster().message, base=ahead)))
    assert len(reading.read) == EARLY_ROSTERS
    far = signed_by("Stranger", replace(roster().message, base=replace(STATE.base, round=7)))
    reading.blamed(far, "Another")
    assert len(reading.read) == EARLY_ROSTERS
