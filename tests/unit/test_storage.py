"""What a disk that refuses bytes holds back, and what it does not."""

from __future__ import annotations

import trio
from chain_samples import make_reform, make_rules, peers

from node.daemon.observations import Observations
from node.daemon.storage import MAX_HELD_SENDS, HeldEffects, Storage
from protocol.chain import genesis
from protocol.events import Event, Misbehaved, NewLineage, Persist, Send, StorageAble

PEERS = peers(3)
LINEAGE = NewLineage(reformed=make_reform(genesis(make_rules(PEERS)), PEERS[:2]))
BEAT = Send(to=None, data=b"beat", replaces="Heartbeat")


def vote(number: int) -> Send:
    return Send(to=PEERS[1], data=number.to_bytes(2, "big"))


def test_heartbeats_and_complaints_do_not_wait() -> None:
    assert HeldEffects.may_pass(BEAT)
    assert HeldEffects.may_pass(Misbehaved(peer=PEERS[1], why="it lies"))
    assert not HeldEffects.may_pass(vote(1))
    assert not HeldEffects.may_pass(Send(to=None, data=b"ready", replaces="Ready"))
    assert not HeldEffects.may_pass(Persist(journal=b""))


def test_what_waits_for_any_journal_may_wait_for_the_newest() -> None:
    held = HeldEffects()
    for effect in (Persist(journal=b"1"), vote(1), Persist(journal=b"2"), vote(2)):
        held.add(effect)
    assert held.take() == [Persist(journal=b"2"), vote(1), vote(2)]
    assert not held


def test_a_journal_never_overtakes_the_birth_of_its_lineage() -> None:
    held = HeldEffects()
    for effect in (Persist(journal=b"1"), LINEAGE, Persist(journal=b"2"), vote(2), Persist(journal=b"3")):
        held.add(effect)
    assert held.take() == [Persist(journal=b"1"), LINEAGE, Persist(journal=b"3"), vote(2)]


def test_repetitions_are_held_once_and_messages_within_bounds() -> None:
    held = HeldEffects()
    held.add(Persist(journal=b"1"))
    for number in range(3 * MAX_HELD_SENDS):
        held.add(vote(number))
        held.add(Send(to=None, data=number.to_bytes(2, "big"), replaces="Ready"))
    effects = held.take()
    assert effects[0] == Persist(journal=b"1")
    assert len(effects) <= MAX_HELD_SENDS + 2
    assert [effect for effect in effects if isinstance(effect, Send) and effect.replaces] == [
        Send(to=None, data=(3 * MAX_HELD_SENDS - 1).to_bytes(2, "big"), replaces="Ready")
    ]
    assert vote(3 * MAX_HELD_SENDS - 1) in effects


async def _told_once() -> None:
    posted: list[Event] = []
    observations = Observations()
    storage = Storage(observations=observations, post=posted.append)
    for _ in range(3):
        storage.refused("the chain", "No space left on device")
    storage.refused("the vote journal", "No space left on device")
    assert not storage.able
    assert observations.storage is not None
    assert "the chain (No space left on device)" in observations.storage
    assert observations.problems["not stored: the chain"] == 1
    storage.works("the chain")
    assert not storage.able
    assert "the vote journal" in observations.storage
    storage.works("the vote journal")
    assert storage.able
    assert observations.storage is None
    assert [event.able for event in posted if isinstance(event, StorageAble)] == [False, False, False, True]
    storage.refused("the vote journal", "No space left on device")
    storage.forget("the vote journal")  # a new machine has not tried yet
    storage.forget("the chain")
    assert storage.able
    assert observations.storage is None


def test_trouble_is_told_once_and_its_end_too() -> None:
    trio.run(_told_once)
