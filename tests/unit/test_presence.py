"""Who is heard, and where: the view by places is the view by peers, whatever comes in which order."""

from __future__ import annotations

import random
from dataclasses import replace

from chain_samples import make_rules, peers

from protocol import chain
from protocol.messages import Heartbeat
from protocol.names import Base, PeerId, digest
from protocol.presence import Heard, Presence

BASE = chain.genesis(make_rules(peers(1))).base
PLACES = [replace(BASE, round=number, lineage=digest(bytes([number % 2]))) for number in range(4)]


def by_place(fresh: dict[PeerId, Heard]) -> dict[Base, dict[PeerId, Heard]]:
    found: dict[Base, dict[PeerId, Heard]] = {}
    for peer, heard in fresh.items():
        found.setdefault(heard.base, {})[peer] = heard
    return found


def test_peers_are_found_at_their_places() -> None:
    draw = random.Random(5)
    presence = Presence(me="me", timeout_s=6.0)
    now_s, moved = 0.0, 0
    for step in range(4000):
        now_s += draw.expovariate(3.0)
        peer = draw.choice(peers(12))
        kind = draw.random()
        if kind < 0.05:
            presence.forget(peer)
        elif kind < 0.4:
            presence.repeated(peer, b"said %d" % draw.randrange(3), now_s)
        else:
            beat = Heartbeat(base=draw.choice(PLACES), attempt=0, able=True, incarnation=b"")
            moved += presence.note(peer, beat, now_s, b"said %d" % draw.randrange(3))
        fresh = dict(presence.fresh(now_s))
        assert {base: dict(there) for base, there in presence.places.items()} == by_place(fresh), f"step {step}"
    assert moved > 1000
    assert dict(presence.fresh(now_s + 7.0)) == {}
    assert presence.places == {}
