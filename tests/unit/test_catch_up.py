"""Catching up with a peer's chain: interrupted anywhere, and with peers that only claim to be ahead."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import cast

import msgspec
import pytest
import trio
import trio.testing
from chain_samples import KEYRING, make_reform, make_rules, peers, plain_commit, step
from run_samples import VALID

from node.daemon import rpc
from node.daemon.answers import Answers
from node.daemon.catch_up import CatchUp, HeldState, WinnerGone
from node.daemon.chain_download import is_ahead
from node.daemon.engine_client import EngineClient, EngineFailed, EngineGone
from node.daemon.network import Network
from node.daemon.observations import Observations
from node.daemon.store import Store
from node.daemon.streams import RequestFailed
from node.daemon.tips import ask_tips
from node.engine import api
from node.errors import AtollError
from protocol import chain
from protocol.chain import ChainState, genesis
from protocol.names import PeerId, digest, encode_integer
from protocol.rules import Rules

pytestmark = pytest.mark.slow

RULES = make_rules(peers(3), parts=2)
ROUNDS = 4


def states() -> list[ChainState]:
    found = [genesis(RULES)]
    for _ in range(ROUNDS):
        found.append(step(found[-1], RULES, plain_commit(found[-1], RULES)))
    return found


STATES = states()


def next_hash_of(round_number: int) -> bytes:
    """As `chain_samples.next_hash`: samples' states are named after their round."""
    return digest(b"state", encode_integer(round_number))


@dataclass
class Engine:
    """An outer state of which only the round is kept; the parts of `missing` are to be had at the second asking."""

    missing: set[int] = field(default_factory=set)
    round: int | None = None
    seconds: float = 0.0
    """That an apply takes."""
    applied: list[int] = field(default_factory=list)
    aside: list[tuple[int, bytes]] = field(default_factory=list)

    async def inventory(self) -> api.Inventoried:
        return api.Inventoried(
            id=1,
            snapshots=(),
            part_rounds=(),
            disk_bytes=0,
            resident_bytes=0,
            connections=0,
            bytes_sent=0,
            bytes_received=0,
            dropped={},
        )

    async def load_initial(self, *, hash: bytes) -> api.StateLoaded:
        self.round = 0
        return api.StateLoaded(id=1, state_hash=bytes.fromhex(VALID.initial_state_hash))

    async def set_aside(self, *, round: int, state_hash: bytes, reason: str) -> api.Done:
        assert reason
        self.aside.append((round, state_hash))
        self.round = None
        return api.Done(id=1)

    async def fetch_parts(
        self, *, headers: tuple[api.PartRef, ...], sources: tuple[str, ...], timeout_s: float
    ) -> api.PartsFetched:
        assert self.round is not None
        if self.round in self.missing:
            self.missing.discard(self.round)
            return api.PartsFetched(id=1, missing=(0,))
        return api.PartsFetched(id=1, missing=())

    async def keep_commits(self, *, round: int, hashes: tuple[bytes, ...]) -> api.Done:
        return api.Done(id=1)

    async def apply(self, request: api.Apply) -> api.Applied:
        await trio.sleep(self.seconds)
        if self.round is None or request.new_round != self.round + 1:
            raise EngineFailed(f"round {request.new_round} does not follow the state of round {self.round}")
        self.round += 1
        self.applied.append(self.round)
        return api.Applied(id=1, state_hash=next_hash_of(self.round), counted=(False, False))


class OnePeer:
    """A network of one peer that answers from `store`; `denies`: it says that it knows no place but the beginning."""

    def __init__(self, store: Store, *, denies: bool = False, claims: int = 0, lineage: bytes | None = None) -> None:
        self.answers = Answers(store)
        self.peers = {"peer": None}
        self._denies, self._claims, self._lineage = denies, claims, lineage

    async def request(self, peer: PeerId, method: str, payload: bytes, *, timeout_s: float) -> bytes:
        if method == rpc.TIP:
            tip = rpc.decode(await self.answers._tip("me", payload), rpc.Tip)
            return rpc.encode(
                msgspec.structs.replace(tip, round=tip.round + self._claims, lineage=self._lineage or tip.lineage)
            )
        asked = rpc.decode(payload, rpc.ChainRequest)
        if self._denies and asked.round > 0:
            return rpc.encode(rpc.ChainPage(known=False))
        return await self.answers._chain("me", payload)


@pytest.fixture
def stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Store, Store]]:
    """Mine, at the beginning, and the peer's, `ROUNDS` further."""
    monkeypatch.setattr("node.daemon.catch_up.RETRY_S", 0.01)  # in real time, for the disks' threads
    mine, theirs = Store(tmp_path / "mine", RULES, KEYRING), Store(tmp_path / "theirs", RULES, KEYRING)
    mine.open()
    theirs.open()
    grow(theirs, ROUNDS)
    yield mine, theirs
    mine.close()
    theirs.close()


def grow(store: Store, rounds: int) -> None:
    for before, after in pairwise(STATES[: rounds + 1]):
        commit = plain_commit(before, RULES)
        store.append_commit(commit, chain.commit_hash(before, RULES, commit))
        store.mark_applied(after.base.round, after.base.state_hash)


async def catch_up(
    store: Store,
    network: OnePeer,
    engine: Engine,
    engine_round: int | None,
    lineage: bytes | None = None,
    state_hash: bytes | None = None,
    observations: Observations | None = None,
    rules: Rules = RULES,
) -> ChainState:
    catching = CatchUp(
        rules=rules,
        manifest=VALID,
        keyring=KEYRING,
        network=cast(Network, network),
        engine=cast(EngineClient, engine),
        store=store,
        observations=observations or Observations(),
    )
    with trio.fail_after(60):
        held = None
        if engine_round is not None:
            held = HeldState(round=engine_round, state_hash=state_hash or store.state.base.state_hash)
        return await catching.run(held, lineage)


async def _a_part_is_away_for_a_while(stores: tuple[Store, Store]) -> None:
    mine, theirs = stores
    engine = Engine(missing={2})
    state = await catch_up(mine, OnePeer(theirs), engine, None)
    assert state.base == STATES[ROUNDS].base
    assert engine.applied == [1, 2, 3, 4], "each round once, in order"


def test_a_replay_goes_on_from_where_it_stopped(stores: tuple[Store, Store]) -> None:
    trio.run(partial(_a_part_is_away_for_a_while, stores))


async def _claims(stores: tuple[Store, Store]) -> None:
    mine, theirs = stores
    assert await is_ahead(cast(Network, OnePeer(theirs)), mine, "peer")
    grow(mine, ROUNDS)
    assert not await is_ahead(cast(Network, OnePeer(theirs, claims=9)), mine, "peer")
    assert not await is_ahead(cast(Network, OnePeer(theirs, denies=True)), mine, "peer")


def test_who_is_ahead_shows_a_record_that_follows(stores: tuple[Store, Store]) -> None:
    trio.run(partial(_claims, stores))


async def _the_winner_is_behind(stores: tuple[Store, Store]) -> None:
    """This node went on alone and is far ahead; the others, of whom more are heard, took the other branch."""
    mine, theirs = stores
    grow(mine, 2)
    mine.append_reform(make_reform(mine.state, peers(1)))
    state = mine.state
    for _ in range(6):
        commit = plain_commit(state, RULES)
        mine.append_commit(commit, chain.commit_hash(state, RULES, commit))
        state = step(state, RULES, commit)
        mine.mark_applied(state.base.round, state.base.state_hash)
    assert mine.state.base.round > theirs.state.base.round
    engine = Engine(round=mine.state.base.round)
    state = await catch_up(mine, OnePeer(theirs), engine, engine.round, theirs.state.base.lineage)
    assert state.base == STATES[ROUNDS].base
    assert engine.applied == [1, 2, 3, 4], "from a state that both share"


def test_the_lineage_that_won_is_followed_also_from_further_ahead(stores: tuple[Store, Store]) -> None:
    trio.run(partial(_the_winner_is_behind, stores))


async def _a_shorter_chain_by_another_name(stores: tuple[Store, Store]) -> None:
    theirs, mine = stores
    grow(theirs, 2)
    liar = OnePeer(theirs, lineage=bytes([7]) * 32)
    await catch_up(mine, liar, Engine(round=ROUNDS), ROUNDS, bytes([7]) * 32)
    assert mine.state.base == STATES[ROUNDS].base, "nothing of the chain was left"


def test_a_shorter_chain_is_no_other_lineage(stores: tuple[Store, Store]) -> None:
    trio.run(partial(_a_shorter_chain_by_another_name, stores))


async def _denial(stores: tuple[Store, Store]) -> None:
    mine, theirs = stores
    grow(mine, ROUNDS)
    engine = Engine(round=ROUNDS)
    state = await catch_up(mine, OnePeer(theirs, denies=True, claims=9), engine, ROUNDS, mine.state.base.lineage)
    assert state.base == STATES[ROUNDS].base
    assert engine.applied == []
    assert [record.round for record in mine.records()] == list(range(ROUNDS)), "nothing of the chain was left"


def test_nobody_talks_a_node_out_of_rounds_of_its_own_lineage(stores: tuple[Store, Store]) -> None:
    trio.run(partial(_denial, stores))


async def _others_went_on_from_another_state(stores: tuple[Store, Store]) -> None:
    """The state here is noted as applied; the commit that follows was made on another one."""
    mine, theirs = stores
    before, after = STATES[0], STATES[1]
    commit = plain_commit(before, RULES)
    mine.append_commit(commit, chain.commit_hash(before, RULES, commit))
    wrong = bytes([9]) * 32
    mine.mark_applied(1, wrong)
    engine = Engine(round=1)
    state = await catch_up(mine, OnePeer(theirs), engine, 1, state_hash=wrong)
    assert state.base == STATES[ROUNDS].base
    assert engine.aside == [(1, wrong)]
    assert engine.applied == [1, 2, 3, 4], "not one round on top of the wrong state"
    assert mine.state_hash_at(1) == after.base.state_hash


def test_a_state_that_the_run_did_not_agree_on_is_set_aside(stores: tuple[Store, Store]) -> None:
    trio.run(partial(_others_went_on_from_another_state, stores))


async def _a_slow_joiner(stores: tuple[Store, Store]) -> None:
    """The run makes fifty rounds a second for a while, this node twenty; then the run stands still."""
    mine, theirs = stores
    observations, said = Observations(), set[str]()

    async def run_goes_on() -> None:
        for _ in range(40):
            before = theirs.state
            commit = plain_commit(before, RULES)
            theirs.append_commit(commit, chain.commit_hash(before, RULES, commit))
            after = step(before, RULES, commit)
            theirs.mark_applied(after.base.round, after.base.state_hash)
            said.add(observations.starting or "")
            await trio.sleep(0.02)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_goes_on)
        engine = Engine(seconds=0.05)
        state = await catch_up(mine, OnePeer(theirs), engine, None, observations=observations)
    assert state.base.round >= ROUNDS + 30
    assert engine.applied == sorted(set(engine.applied)), "it goes on where it was"
    slow = [reason for reason in said if "rounds/min while the run makes" in reason]
    assert slow, said
    assert "rounds.steps" in slow[0]
    assert observations.problems["slower than the run's rounds"] >= 1


def test_a_joiner_slower_than_the_run_says_so_and_gets_in_when_it_can(
    stores: tuple[Store, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.daemon.pace.JUDGED_AFTER_S", 0.2)
    monkeypatch.setattr("node.daemon.catch_up.PACE_EVERY_S", 0.1)
    trio.run(partial(_a_slow_joiner, stores))


def leave_for(theirs: Store, mine: Store) -> bytes:
    """Mine has followed the lineage of `theirs` from the second round on, and has nothing of its state."""
    for store in (theirs, mine):
        assert store.state.base.round == 2
    theirs.append_reform(make_reform(theirs.state, peers(1)[:1]))
    mine.append_reform(make_reform(mine.state, peers(2)[1:2]))
    for store in (theirs, mine):
        commit = plain_commit(store.state, RULES)
        store.append_commit(commit, chain.commit_hash(store.state, RULES, commit))
        store.mark_applied(3, step(store.state, RULES, commit).base.state_hash)
    place = STATES[2].base
    found = theirs.records_after(round_number=2, prev=place.prev, lineage=place.lineage, limit_bytes=10**9)
    assert found is not None
    mine.switch(place, found[0], theirs.state.base.state_hash)
    assert mine.left is not None
    return theirs.state.base.lineage


class Withheld(Engine):
    """No part is ever to be had."""

    async def fetch_parts(
        self, *, headers: tuple[api.PartRef, ...], sources: tuple[str, ...], timeout_s: float
    ) -> api.PartsFetched:
        return api.PartsFetched(id=1, missing=(0,))


@pytest.mark.parametrize("who", ["another loser", "a winner that gives nothing"])
def test_a_winner_whose_state_cannot_be_had_is_left_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    mine, theirs = Store(tmp_path / "mine", RULES, KEYRING), Store(tmp_path / "theirs", RULES, KEYRING)
    for store in (mine, theirs):
        store.open()
        grow(store, 2)
    lineage = leave_for(theirs, mine)
    network = OnePeer(theirs)
    network.answers.catching_up = who == "another loser"
    stuck_s = 60.0 if who == "another loser" else 0.5
    monkeypatch.setattr("node.daemon.catch_up.STUCK_S", stuck_s)
    monkeypatch.setattr("node.daemon.catch_up.RETRY_S", 0.01)  # in real time, for the disks' threads
    why = "nobody who has the state" if who == "another loser" else "has given its state for"
    with pytest.raises(WinnerGone, match=why):
        trio.run(partial(catch_up, mine, network, Withheld(), None, lineage, rules=replace(RULES, fork_timeout_s=0.3)))
    for store in (mine, theirs):
        store.close()


class SlowPeers:
    """Peers that say where they are after so many seconds; None: never (cut off, or frozen)."""

    def __init__(
        self, store: Store, answers_after_s: dict[PeerId, float | None], lineages: dict[PeerId, bytes]
    ) -> None:
        self.peers = answers_after_s
        self._answers = Answers(store)
        self._lineages = lineages

    async def request(self, peer: PeerId, method: str, payload: bytes, *, timeout_s: float) -> bytes:
        after_s = self.peers[peer]
        await trio.sleep(timeout_s if after_s is None else after_s)
        if after_s is None:
            raise RequestFailed(f"no answer within {timeout_s} s")
        tip = rpc.decode(await self._answers._tip("me", payload), rpc.Tip)
        return rpc.encode(msgspec.structs.replace(tip, lineage=self._lineages.get(peer, tip.lineage)))


@pytest.mark.parametrize(
    ("answers_after_s", "lineages", "lineage", "heard", "took_s"),
    [
        pytest.param({"a": 0.01, "b": 0.02, "c": None}, {}, None, "ab", 0.52, id="one of three is cut off"),
        pytest.param({"a": 0.01, "b": 0.02, "c": 0.4}, {}, None, "abc", 0.4, id="all in time"),
        pytest.param({"a": 1.0, "b": 1.5, "c": 2.8}, {}, None, "abc", 2.8, id="all are far away"),
        pytest.param({"a": None}, {}, None, "", 5.0, id="nobody"),
        pytest.param({}, {}, None, "", 0.0, id="nobody is there"),
        pytest.param(
            {"a": 0.01, "b": 0.02, "c": 3.0, "d": None}, {"c": b"w" * 32}, b"w" * 32, "abc", 5.0, id="the winner is far"
        ),
    ],
)
def test_who_does_not_answer_holds_up_nobody(
    stores: tuple[Store, Store],
    answers_after_s: dict[PeerId, float | None],
    lineages: dict[PeerId, bytes],
    lineage: bytes | None,
    heard: str,
    took_s: float,
) -> None:
    network = SlowPeers(stores[1], answers_after_s, lineages)

    async def ask() -> None:
        began_s = trio.current_time()
        tips = await ask_tips(cast(Network, network), lineage)
        assert sorted(tip.peer for tip in tips) == sorted(heard)
        assert trio.current_time() - began_s == pytest.approx(took_s, abs=0.02)

    trio.run(ask, clock=trio.testing.MockClock(autojump_threshold=0))


async def _the_engine_has_just_ended(stores: tuple[Store, Store]) -> None:
    class Gone:
        async def accept_token(self, *, peer_id: str, token: bytes, expires_s: float) -> api.Done:
            raise EngineGone("the engine's process ended")

    answers = Answers(stores[0])
    for engine in (None, cast(EngineClient, Gone())):
        answers.engine = engine
        with pytest.raises(AtollError, match="try again in a moment"):
            await answers._token("peer", b"")


def test_no_token_while_the_engine_is_away_is_said_in_one_sentence(stores: tuple[Store, Store]) -> None:
    trio.run(partial(_the_engine_has_just_ended, stores))
