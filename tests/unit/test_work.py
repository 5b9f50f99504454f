"""The account of a node's work: the sum holds at every moment, over every death, and what is counted is the chain's."""

from __future__ import annotations

import random
import weakref
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
from chain_samples import (
    KEYRING,
    make_commit,
    make_reform,
    make_rules,
    peers,
    sign_headers,
    sign_ready,
    sign_roster,
    step,
)

from node.daemon import work_book
from node.daemon.contribution import (
    BEHIND_THE_FREEZE,
    LINEAGE_LOST,
    NOT_FINITE,
    OVER_THE_LIMIT,
    STATE_REPLACED,
    WITH_THE_TRAINER,
    Account,
    Place,
    WorkLedger,
    claimable,
    counted_tokens,
    from_runs,
    run_lengths,
)
from node.daemon.store import Store
from node.daemon.work_book import read_chain
from node.daemon.work_file import WorkFile
from node.trainer.made import FILE, TokenCounter
from protocol import chain, wire
from protocol.chain import ChainState
from protocol.fields import MAX_RANGES
from protocol.messages import Commit, Ready

PARTS = 3
ME = "Peer001"


def place(number: int) -> Place:
    return Place(round=number, prev=bytes([number % 256]) * 32, lineage=b"")


def ledger(cap: int = 10**9) -> WorkLedger:
    return WorkLedger(Account(parts=PARTS, since_unix_s=0.0), token_cap=cap)


def balanced(book: WorkLedger) -> tuple[int, int, int, dict[str, int]]:
    """(produced, counted, carried, discarded by reason) in part-tokens; their sum holds."""
    exact = book.status().exact
    assert exact.missing == 0
    return exact.produced, exact.counted, exact.carried, exact.discarded


# ---------------------------------------------------------------- one thing at a time


def test_work_in_every_other_part_of_a_large_model_still_fits_a_ready() -> None:
    """16,384 parts are a manifest's limit; a READY of as many runs would be no message to anybody."""
    state = chain.genesis(make_rules(peers(1)))
    parts = 16_384
    carried = [900 if part % 2 else 100 + part for part in range(parts)]
    tokens = claimable(carried, MAX_RANGES)
    assert len(tokens) <= MAX_RANGES
    assert all(claim <= held for claim, held in zip(from_runs(tokens), carried, strict=True))
    ready = Ready(base=state.base, tokens=tokens)
    assert wire.decode(wire.encode(wire.sign(KEYRING, ME, ready))).message == ready
    few = [100] * 8000 + [200] * 8384
    assert claimable(few, MAX_RANGES) == ((8000, 100), (8384, 200)), "nothing is lost where there is no need"


def test_counted_parts_leave_once_and_the_others_ride_along() -> None:
    book = ledger()
    book.loaded(0, 0, WITH_THE_TRAINER)
    book.hand_over(100, 100)
    assert from_runs(book.freeze(b"base 0", b"bytes 0", runs_max=MAX_RANGES)) == [100] * PARTS
    book.settle(b"base 0", [100, 0, 100], place(1))
    assert balanced(book) == (300, 200, 100, {})
    book.hand_over(150, 50)
    assert from_runs(book.freeze(b"base 1", b"bytes 1", runs_max=MAX_RANGES)) == [50, 150, 50]
    book.settle(b"base 1", [50, 150, 50], place(2))
    assert balanced(book) == (450, 450, 0, {})


def test_a_trainer_that_was_killed_takes_exactly_what_it_had() -> None:
    book = ledger()
    book.hand_over(100, 100)
    book.freeze(b"base 0", b"bytes 0", runs_max=MAX_RANGES)
    book.settle(b"base 0", [100, 0, 0], place(1))
    book.report(140)
    # It made one more step than it told of; the next one finds it in the counter.
    book.loaded(150, 0, WITH_THE_TRAINER)
    assert balanced(book) == (450, 100, 0, {WITH_THE_TRAINER: 200 + 150})


def test_frozen_work_may_be_counted_when_no_model_holds_it_any_more() -> None:
    """The node was killed behind its READY, and its next trainer trains the same round."""
    book = ledger()
    book.hand_over(100, 100)
    claim = book.freeze(b"base 0", b"bytes 0", runs_max=MAX_RANGES)
    book.loaded(100, 0, WITH_THE_TRAINER)
    assert balanced(book) == (300, 0, 300, {})
    book.hand_over(130, 30)
    assert book.freeze(b"base 0", b"bytes 0", runs_max=MAX_RANGES) == claim, "the same bytes, the same claim"
    book.settle(b"base 0", [100, 100, 0], place(1))
    # Where it was counted, the model is the outer state: the second trainer's work is gone there.
    assert balanced(book) == (390, 200, 30, {BEHIND_THE_FREEZE: 60, WITH_THE_TRAINER: 100})


def test_a_daemon_that_died_is_told_the_contribution_again() -> None:
    book = ledger()
    book.hand_over(100, 100)
    book.loaded(100, 100, STATE_REPLACED)
    book.hand_over(100, 100)
    assert balanced(book) == (300, 0, 300, {})


def test_a_claim_is_capped_and_what_is_over_it_is_reported() -> None:
    book = ledger(cap=60)
    book.hand_over(100, 100)
    assert from_runs(book.freeze(b"base 0", b"bytes 0", runs_max=MAX_RANGES)) == [60] * PARTS
    book.settle(b"base 0", [60, 60, 0], place(1))
    assert balanced(book) == (300, 120, 100, {OVER_THE_LIMIT: 80})


def test_work_that_is_not_finite_is_reported() -> None:
    book = ledger()
    book.report(80)
    assert book.loaded(100, 0, NOT_FINITE) == 100
    book.hand_over(100, 0)
    assert balanced(book) == (300, 0, 0, {NOT_FINITE: 300})


def test_a_new_counter_is_noticed() -> None:
    """The trainer's folder was emptied: what was under way is lost with it, nothing is counted twice."""
    book = ledger()
    book.report(100)
    book.loaded(0, 0, WITH_THE_TRAINER)
    book.hand_over(40, 40)
    assert balanced(book) == (420, 0, 120, {WITH_THE_TRAINER: 300})


def test_a_commit_of_a_life_whose_account_was_lost_is_counted() -> None:
    book = ledger()
    book.settle(b"base 0", [100, 100, 100], place(1))
    assert balanced(book) == (300, 300, 0, {})


def test_a_roster_without_parts_counts_nothing() -> None:
    book = ledger()
    book.hand_over(100, 100)
    book.freeze(b"base 0", b"bytes 0", runs_max=MAX_RANGES)
    book.settle(b"base 0", [], place(1))
    assert balanced(book) == (300, 0, 300, {})


def test_a_new_lineage_offers_the_same_work_under_its_own_name() -> None:
    book = ledger()
    book.hand_over(100, 100)
    claim = book.freeze(b"base 0", b"bytes 0", runs_max=MAX_RANGES)
    assert book.freeze(b"base 0'", b"bytes 0", runs_max=MAX_RANGES) == claim
    book.settle(b"base 0'", [100] * PARTS, place(1))
    assert balanced(book) == (300, 300, 0, {})


# ---------------------------------------------------------------- any order of deaths


@dataclass
class World:
    """A node whose processes die at any moment, and what is true of its work whatever the account says."""

    random: random.Random
    made: int = 0
    chain_counted: int = 0
    round: int = 0
    saved: bytes = b""
    book: WorkLedger = field(default_factory=ledger)
    trainer: bool = False
    model: list[int] = field(default_factory=lambda: [0] * PARTS)
    """Of earlier rounds."""
    steps: int = 0
    handed: bool = False
    outbox: list[int] | None = None
    """What the frozen bytes of this round hold."""
    frozen_by: int = 0
    life: int = 0
    trainer_round: int = 0
    ready: list[int] | None = None
    pending: bool = False
    """This daemon holds the round's contribution."""
    commits: list[tuple[bytes, list[int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.keep()

    @property
    def base(self) -> bytes:
        return b"base %d" % self.round

    def keep(self) -> None:
        self.saved = msgspec.msgpack.encode(self.book.snapshot())

    def step(self) -> None:
        if self.trainer and not self.handed:
            self.steps += 7
            self.made += 7
            if self.random.random() < 0.5:
                self.book.report(self.made)

    def contribute(self) -> None:
        if self.trainer and not self.handed and self.steps:
            self.handed = True
            self.take_contribution()

    def take_contribution(self) -> None:
        self.pending = True
        self.book.hand_over(self.made, self.steps)
        if self.random.random() < 0.8:
            self.keep()
        if self.dies():
            return
        if self.outbox is None:
            self.outbox, self.frozen_by = [earlier + self.steps for earlier in self.model], self.life
        if self.dies():
            return
        runs = self.book.freeze(self.base, b"bytes of %s" % self.base, runs_max=MAX_RANGES)
        self.keep()
        if not self.dies():
            self.ready = from_runs(runs)

    def dies(self) -> bool:
        if self.random.random() < 0.1:
            self.kill_daemon()
            return True
        return False

    def commit(self) -> None:
        counted = [0] * PARTS
        if self.ready is not None and self.random.random() < 0.8:
            counted = [tokens if self.random.random() < 0.7 else 0 for tokens in self.ready]
        self.commits.append((self.base, counted))
        self.chain_counted += sum(counted)
        self.round += 1
        self.outbox = self.ready = None
        if self.random.random() < 0.2:
            self.kill_daemon()
            return
        self.book.settle(self.commits[-1][0], counted, place(self.round))
        if self.random.random() < 0.8:
            self.keep()
        follows = self.trainer and self.handed and self.pending
        self.pending = False
        if follows and self.frozen_by == self.life:
            self.model = [0 if tokens else mine + self.steps for mine, tokens in zip(self.model, counted, strict=True)]
            self.steps, self.handed = 0, False
            self.loaded("commit")
        elif self.trainer:
            self.reset()

    def reset(self) -> None:
        self.model, self.steps, self.handed = [0] * PARTS, 0, False
        self.loaded("reset")

    def loaded(self, cause: str) -> None:
        if any(self.model):
            self.book.report(self.made)
        else:
            self.book.loaded(self.made, self.steps, WITH_THE_TRAINER if cause == "start" else STATE_REPLACED)
        if self.random.random() < 0.8:
            self.keep()

    def kill_trainer(self) -> None:
        self.trainer = False
        self.model, self.steps, self.handed = [0] * PARTS, 0, False

    def start_trainer(self) -> None:
        if not self.trainer and not self.pending:
            self.life += 1
            self.trainer = True
            self.loaded("start")

    def kill_daemon(self) -> None:
        """And start it: it reads the chain, and its trainer attaches again."""
        self.book = WorkLedger(msgspec.msgpack.decode(self.saved, type=Account), token_cap=10**9)
        self.pending = False
        through = self.book.account.through
        for number in range(through.round if through else 0, len(self.commits)):
            base, counted = self.commits[number]
            self.book.settle(base, counted, place(number + 1))
        self.keep()
        if not self.trainer:
            return
        if self.trainer_round != self.round:
            self.reset()
        else:
            self.loaded("reconnect")
            if self.handed:
                self.take_contribution()

    def check(self) -> None:
        produced, counted, carried, discarded = balanced(self.book)
        assert counted == self.chain_counted
        assert min(produced, carried, *discarded.values(), 0) == 0
        assert produced <= self.made * PARTS
        if self.trainer:
            self.book.report(self.made)
            in_model = sum(self.model) + self.steps * PARTS
            on_its_way = sum(self.outbox or ()) if self.frozen_by != self.life else 0
            assert in_model <= self.book.carried <= in_model + on_its_way
            assert balanced(self.book)[0] == self.made * PARTS


@pytest.mark.parametrize("seed", range(60))
def test_the_sum_holds_whoever_dies_and_whenever(seed: int) -> None:
    world = World(random=random.Random(seed))
    actions = [world.step] * 6 + [world.contribute] * 3 + [world.commit] * 2
    actions += [world.kill_trainer, world.start_trainer, world.start_trainer, world.kill_daemon]
    for _ in range(400):
        world.random.choice(actions)()
        if world.trainer:
            world.trainer_round = world.round
        world.check()
    world.kill_trainer()
    if world.pending:
        world.commit()
    world.start_trainer()
    world.check()
    assert world.book.carried == sum(world.outbox or ()), "a fresh model holds nothing"


# ---------------------------------------------------------------- the chain's word

PEERS = peers(3)
RULES = make_rules(PEERS, parts=PARTS)


def a_commit(state: ChainState, *, tokens: int, without: dict[int, int] | None = None) -> Commit:
    readys = [sign_ready(state, RULES, peer, tokens=tokens) for peer in PEERS]
    roster = sign_roster(state, RULES, readys)
    return make_commit(state, RULES, roster, sign_headers(RULES, roster, without=without))


def append(store: Store, commit: Commit) -> ChainState:
    state = step(store.state, RULES, commit)
    store.append_commit(commit, state.base.prev)
    store.mark_applied(state.base.round, state.base.state_hash)
    return store.state


def test_a_commit_counts_what_its_bitmaps_name() -> None:
    state = chain.genesis(RULES)
    commit = a_commit(state, tokens=400, without={1: 0b010})
    assert counted_tokens(commit, ME) == [400, 0, 400]
    assert counted_tokens(commit, PEERS[0]) == [400, 400, 400]
    assert counted_tokens(commit, "nobody") == [0, 0, 0]


def test_the_chain_is_read_from_where_the_account_stands(tmp_path: Path) -> None:
    store = Store(tmp_path, RULES, KEYRING)
    store.open()
    try:
        first = read_chain(store, ME, None)
        assert (first.from_start, first.total, first.rounds) == (True, 0, ())
        after = [first.tip]
        for number, without in enumerate(({}, {0: 0b010}, {2: 0b111 & 0b010})):
            append(store, a_commit(store.state, tokens=100 * (number + 1), without=without))
            after.append(read_chain(store, ME, None).tip)
        whole = read_chain(store, ME, None)
        assert whole.total == 300 + 400 + 600
        rest = read_chain(store, ME, after[1])
        assert not rest.from_start
        assert [one.tokens for one in rest.rounds] == [[0, 200, 200], [300, 300, 0]]
        assert [one.through for one in rest.rounds] == after[2:]
        elsewhere = read_chain(store, ME, Place(round=2, prev=bytes(32), lineage=after[1].lineage))
        assert (elsewhere.from_start, elsewhere.total) == (True, whole.total)
        # A new lineage of the same round goes on from the same account.
        store.append_reform(make_reform(store.state, PEERS[:2]))
        assert read_chain(store, ME, after[3]).rounds == ()
    finally:
        store.close()


def test_a_long_chain_is_summed_and_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many commits lie behind the account, one is held at a time, and two sums come back."""
    held: list[weakref.ref[HeldCommit]] = []
    most = 0

    class HeldCommit:
        """What is read of a commit, where a weak reference can tell whether it is still held."""

        def __init__(self, commit: Commit) -> None:
            self.roster, self.headers = commit.roster, commit.headers

    def decode(body: bytes) -> HeldCommit:
        nonlocal most
        commit = HeldCommit(wire.decode_commit(body))
        held.append(weakref.ref(commit))
        most = max(most, sum(reference() is not None for reference in held))
        return commit

    monkeypatch.setattr(work_book, "decode_commit", decode)
    store = Store(tmp_path, RULES, KEYRING)
    store.open()
    try:
        start = read_chain(store, ME, None).tip
        for number in range(7):
            append(store, a_commit(store.state, tokens=100 + number))
        reading = read_chain(store, ME, start)
        assert [one.tokens for one in reading.rounds] == [[100] * 3, [sum(range(101, 107))] * 3]
        assert [one.through.round for one in reading.rounds] == [1, 7]
        assert reading.total == 3 * sum(range(100, 107))
        assert most <= 2  # the one in hand, and the one before until it is replaced
    finally:
        store.close()


def test_what_another_lineage_had_counted_is_discarded_with_it() -> None:
    book = ledger()
    book.hand_over(100, 100)
    book.freeze(b"base 0", b"bytes 0", runs_max=MAX_RANGES)
    book.settle(b"base 0", [100, 100, 100], place(1))
    book.hand_over(150, 50)
    assert book.recount(0, place(9)) == 100
    book.discard(STATE_REPLACED)
    assert balanced(book) == (450, 0, 0, {LINEAGE_LOST: 300, STATE_REPLACED: 150})


def test_what_the_other_lineage_counts_is_not_lost_with_this_one() -> None:
    """A READY of the old lineage was committed there after all."""
    book = ledger()
    book.hand_over(100, 100)
    book.freeze(b"base 0", b"bytes 0", runs_max=MAX_RANGES)
    assert book.recount(300, place(1)) == 0
    book.discard(STATE_REPLACED)
    assert balanced(book) == (300, 300, 0, {})


def test_back_on_a_lineage_that_was_left_its_work_counts_again_and_once() -> None:
    """What was frozen there stays frozen; the rest of what was carried went with the model."""
    book = ledger()
    book.hand_over(100, 100)
    book.freeze(b"base 0", b"bytes 0", runs_max=MAX_RANGES)
    book.settle(b"base 0", [100, 100, 100], place(1))
    book.hand_over(150, 50)
    book.freeze(b"base 1", b"bytes 1", runs_max=MAX_RANGES)
    assert book.recount(0, place(9)) == 100
    assert book.discard(STATE_REPLACED, frozen_stays=True) == 0
    assert balanced(book) == (450, 0, 150, {LINEAGE_LOST: 300})
    assert book.recount(300, place(1)) == 0
    book.discard(STATE_REPLACED, frozen_stays=True)
    assert balanced(book) == (450, 300, 150, {LINEAGE_LOST: 0})
    book.discard(STATE_REPLACED)
    assert balanced(book) == (450, 300, 0, {LINEAGE_LOST: 0, STATE_REPLACED: 150})


def test_what_is_frozen_for_the_lineage_that_is_resumed_may_be_counted_yet() -> None:
    book = ledger()
    book.hand_over(50, 50)
    claim = book.freeze(b"base 1", b"bytes 1", runs_max=MAX_RANGES)
    book.discard(STATE_REPLACED, frozen_stays=True)
    assert book.recount(0, place(1)) == 0
    book.loaded(50, 0, STATE_REPLACED)
    book.hand_over(90, 40)
    assert book.freeze(b"base 1", b"bytes 1", runs_max=MAX_RANGES) == claim, "a base is frozen once"
    book.settle(b"base 1", [50, 50, 50], place(2))
    assert balanced(book)[:2] == (270, 150)


# ---------------------------------------------------------------- files


def test_a_torn_account_is_set_aside_and_a_new_one_begins(tmp_path: Path) -> None:
    file = WorkFile(tmp_path / "work")
    book = WorkLedger(file.load(PARTS), token_cap=10)
    book.hand_over(100, 100)
    assert file.save(book.snapshot(), durable=True)
    assert WorkLedger(file.load(PARTS), token_cap=10).carried == 300
    data = (tmp_path / "work").read_bytes()
    (tmp_path / "work").write_bytes(data[:-1])
    assert file.load(PARTS).produced == 0
    assert (tmp_path / "work.unusable").read_bytes() == data[:-1]


def test_an_account_that_the_disk_refuses_does_not_end_the_node(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert not WorkFile(tmp_path / "file" / "work").save(Account(parts=1, since_unix_s=0.0))


def test_the_counter_outlives_its_program(tmp_path: Path) -> None:
    first = TokenCounter(tmp_path / "trainer")
    first.tokens += 12345
    assert TokenCounter(tmp_path / "trainer").tokens == 12345
    (tmp_path / "trainer" / FILE).write_bytes(b"garbage of another program")
    assert TokenCounter(tmp_path / "trainer").tokens == 0


def test_a_counter_without_a_place_counts_in_memory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    counter = TokenCounter(tmp_path / "file")
    counter.tokens += 5
    assert counter.tokens == 5


def test_runs_are_the_values() -> None:
    assert from_runs(run_lengths([3, 3, 0, 5])) == [3, 3, 0, 5]
