"""What a peer's chain proves of the lineage that it names; and peers that prove nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
from chain_samples import KEYRING, make_reform, make_rules, peers, plain_commit, step

from node.daemon import rpc
from node.daemon.answers import Answers
from node.daemon.lineage_probe import learn_lineage
from node.daemon.network import Network
from node.daemon.store import Store
from protocol import chain
from protocol.chain import genesis
from protocol.events import LineageLearned, LineageUnproven
from protocol.lineages import Lineages, Place, Side
from protocol.names import PeerId

pytestmark = pytest.mark.slow

RULES = make_rules(peers(3), parts=2)


class OnePeer:
    """A network of one peer that answers from `store`."""

    def __init__(self, store: Store) -> None:
        self.answers = Answers(store)
        self.requests = 0

    async def request(self, peer: PeerId, method: str, payload: bytes, *, timeout_s: float) -> bytes:
        self.requests += 1
        return await self.answers._chain("me", payload)


class Liar(OnePeer):
    """Knows every place, and has records of no chain behind it."""

    async def request(self, peer: PeerId, method: str, payload: bytes, *, timeout_s: float) -> bytes:
        self.requests += 1
        return rpc.encode(rpc.ChainPage(known=True, records=(b"\x01nonsense",), more=True))


class Denier(OnePeer):
    """Denies all but the run's beginning, and has nothing behind that."""

    async def request(self, peer: PeerId, method: str, payload: bytes, *, timeout_s: float) -> bytes:
        self.requests += 1
        asked = rpc.decode(payload, rpc.ChainRequest)
        return rpc.encode(rpc.ChainPage(known=asked.round == 0))


class Mute(OnePeer):
    async def request(self, peer: PeerId, method: str, payload: bytes, *, timeout_s: float) -> bytes:
        await trio.sleep_forever()
        raise AssertionError


def grow(store: Store, rounds: int) -> None:
    for _ in range(rounds):
        state = store.state
        commit = plain_commit(state, RULES)
        store.append_commit(commit, chain.commit_hash(state, RULES, commit))
        store.mark_applied(state.base.round + 1, step(state, RULES, commit).base.state_hash)


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[tuple[Store, Store]]:
    """Both of four rounds; mine goes on as a lineage of one, theirs as it was."""
    mine, theirs = Store(tmp_path / "mine", RULES, KEYRING), Store(tmp_path / "theirs", RULES, KEYRING)
    for store in (mine, theirs):
        store.open()
        grow(store, 4)
    mine.append_reform(make_reform(mine.state, peers(1)))
    grow(mine, 5)
    grow(theirs, 3)
    yield mine, theirs
    mine.close()
    theirs.close()


async def _learn(store: Store, network: OnePeer) -> LineageLearned | LineageUnproven:
    with trio.fail_after(60):
        return await learn_lineage(cast(Network, network), store, "peer")


def test_both_courses_begin_where_the_chains_part(stores: tuple[Store, Store]) -> None:
    mine, theirs = stores
    for ours, others, network in ((mine, theirs, OnePeer(theirs)), (theirs, mine, OnePeer(mine))):
        learned = trio.run(partial(_learn, ours, network))
        assert isinstance(learned, LineageLearned)
        first = genesis(RULES).base.lineage
        assert learned.mine[0] == learned.theirs[0]
        assert learned.mine[0].position == (first, 4)
        for course, store in ((learned.mine, ours), (learned.theirs, others)):
            assert course[-1].position == (store.state.base.lineage, store.state.base.round)
            before = ours.state_at(ours.places()[-1])
            assert before.base.round == 0
        assert sum(sum(place.tokens.values()) for place in learned.theirs) > 0
        assert network.requests <= 8


def test_a_peer_at_the_branching_shows_that_it_is_only_behind(stores: tuple[Store, Store], tmp_path: Path) -> None:
    mine, _ = stores
    behind = Store(tmp_path / "behind", RULES, KEYRING)
    behind.open()
    grow(behind, 2)
    learned = trio.run(partial(_learn, mine, OnePeer(behind)))
    behind.close()
    assert isinstance(learned, LineageLearned)
    assert learned.theirs == learned.mine == ()
    first = genesis(RULES).base.lineage
    assert learned.births == ((mine.state.base.lineage, (first, 4)),)
    lineages = Lineages("me")
    lineages.learn([Place.of(mine.state, RULES)])
    assert not lineages.proven((first, 2))
    for lineage, place in learned.births:
        lineages.born(lineage, place)
    assert lineages.proven((first, 2))
    assert not lineages.proven((first, 5)), "that it went on there is not shown"
    verdict = lineages.choose((mine.state.base.lineage, 9), {"behind": [(first, 2)]})
    assert verdict is not None
    assert (verdict.side, verdict.branchings) == (Side.WINNER, ())


def test_nonsense_and_silence_prove_nothing(stores: tuple[Store, Store], monkeypatch: pytest.MonkeyPatch) -> None:
    mine, theirs = stores
    tip = mine.state
    assert isinstance(trio.run(partial(_learn, mine, Liar(theirs))), LineageUnproven)
    monkeypatch.setattr("node.daemon.lineage_probe.PROBE_TIMEOUT_S", 0.05)
    assert isinstance(trio.run(partial(_learn, mine, Mute(theirs))), LineageUnproven)
    assert mine.state == tip


def test_a_stranger_that_shows_nothing_has_nothing_of_this_chain_decoded(
    stores: tuple[Store, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, theirs = stores

    def refuse(*_: object) -> object:
        raise AssertionError("a record of this chain is decoded for a peer that has shown none")

    monkeypatch.setattr(mine, "_body", refuse)
    denier = Denier(theirs)
    learned = trio.run(partial(_learn, mine, denier))
    assert isinstance(learned, LineageLearned)
    assert learned.theirs == ()
    assert denier.requests < 12
    liar = Liar(theirs)
    liar.answers = denier.answers
    monkeypatch.undo()
    monkeypatch.setattr(mine, "course", refuse)
    assert isinstance(trio.run(partial(_learn, mine, liar)), LineageUnproven)


def test_nothing_is_decoded_under_the_lock(stores: tuple[Store, Store], monkeypatch: pytest.MonkeyPatch) -> None:
    mine, theirs = stores
    original = mine._records.followed

    def followed(*arguments: Any) -> chain.ChainState:
        taken = threading.Thread(target=lambda: mine.state_hash_at(3), daemon=True)
        taken.start()
        taken.join(5.0)
        assert not taken.is_alive(), "a record is decoded while nobody else may use the chain"
        return original(*arguments)

    follower = SimpleNamespace(
        followed=followed, after_commit=mine._records.after_commit, verified=mine._records.verified
    )
    monkeypatch.setattr(mine, "_records", follower)
    monkeypatch.setattr(mine._index, "states", {})
    assert isinstance(trio.run(partial(_learn, mine, OnePeer(theirs))), LineageLearned)


@pytest.mark.parametrize("branch", [0, 1, 9, 24, 37, 40])
def test_the_branching_is_found_in_few_questions_however_deep(tmp_path: Path, branch: int) -> None:
    mine, theirs = Store(tmp_path / "mine", RULES, KEYRING), Store(tmp_path / "theirs", RULES, KEYRING)
    for store in (mine, theirs):
        store.open()
        grow(store, branch)
    theirs.append_reform(make_reform(theirs.state, peers(1)))
    grow(theirs, 3)
    grow(mine, 40 - branch)
    for store, other in ((mine, theirs), (theirs, mine)):
        network = OnePeer(other)
        learned = trio.run(partial(_learn, store, network))
        assert isinstance(learned, LineageLearned)
        if branch < 40:
            assert learned.mine[0] == learned.theirs[0]
            assert learned.mine[0].round == branch
        assert network.requests <= 20
    for store in (mine, theirs):
        store.close()


def test_who_branches_too_far_back_proves_nothing(stores: tuple[Store, Store], monkeypatch: pytest.MonkeyPatch) -> None:
    mine, theirs = stores
    monkeypatch.setattr("node.daemon.lineage_probe.MAX_PLACES", 2)
    monkeypatch.setattr("node.daemon.lineage_probe.SHARED_RECORDS", 2)
    assert isinstance(trio.run(partial(_learn, mine, OnePeer(theirs))), LineageUnproven)
