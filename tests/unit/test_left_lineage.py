"""A lineage that is left for the one that won: kept, resumed to the byte or given up, wherever a crash strikes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from chain_samples import KEYRING, make_reform, make_rules, peers, plain_commit, step

from node.daemon import chain_log
from node.daemon.chain_log import ChainLog, FrameKind
from node.daemon.left_lineage import LeftLineage
from node.daemon.store import Store
from protocol import chain
from protocol.chain import ChainState
from protocol.names import Base

PEERS = peers(3)
RULES = make_rules(PEERS, parts=2)

pytestmark = pytest.mark.slow


class Killed(BaseException):
    """The process died here."""


@dataclass
class Node:
    directory: Path
    store: Store

    @classmethod
    def open(cls, directory: Path) -> Node:
        store = Store(directory, RULES, KEYRING)
        store.open()
        (directory / "snapshots").mkdir(exist_ok=True)
        return cls(directory, store)

    @property
    def snapshots(self) -> Path:
        return self.directory / "snapshots"

    def crash(self) -> Node:
        """As SIGKILL leaves it, and the next life."""
        if self.store._log is not None:
            self.store._log.close()
            self.store._log = None
        return Node.open(self.directory)

    def grow(self, rounds: int) -> ChainState:
        for _ in range(rounds):
            state = self.store.state
            commit = plain_commit(state, RULES)
            self.store.append_commit(commit, chain.commit_hash(state, RULES, commit))
            after = step(state, RULES, commit).base
            self.store.mark_applied(after.round, after.state_hash)
        return self.store.state

    def take_over(self, winner: Node, place: Base) -> None:
        answer = winner.store.records_after(
            round_number=place.round, prev=place.prev, lineage=place.lineage, limit_bytes=10**9
        )
        assert answer is not None
        self.store.switch(place, answer[0], winner.store.state.base.state_hash)

    def snapshot(self) -> Path:
        base = self.store.state.base
        folder = self.snapshots / f"{base.round}-{base.state_hash.hex()}"
        folder.mkdir()
        (folder / "data").write_bytes(b"theta")
        (folder / "chunks").write_bytes(b"hashes")
        self.store.left_files.keep_state(folder)
        return folder


@pytest.fixture
def sides(tmp_path: Path) -> Iterator[tuple[Node, Node, Base]]:
    """A loser with a lineage of its own, six rounds on; a winner, three rounds on; and where they part."""
    loser, winner = Node.open(tmp_path / "loser"), Node.open(tmp_path / "winner")
    place = loser.grow(2).base
    winner.grow(2)
    loser.store.append_reform(make_reform(loser.store.state, PEERS[:1]))
    loser.grow(6)
    winner.grow(3)
    yield loser, winner, place
    winner.store.close()


def test_back_to_the_byte_with_its_state(sides: tuple[Node, Node, Base]) -> None:
    loser, winner, place = sides
    own, records = loser.store.state, [record.body for record in loser.store.records()]
    folder = loser.snapshot()
    loser.take_over(winner, place)
    assert loser.store.state == winner.store.state
    assert loser.store.left is not None
    assert (loser.store.left.tip, loser.store.left.place.round) == (own.base, 2)
    # The engine prunes its snapshot meanwhile.
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    loser = loser.crash()
    loser.store.resume_left(loser.snapshots)
    assert loser.store.state == own
    assert [record.body for record in loser.store.records()] == records
    assert loser.store.state_hash_at(own.base.round) == own.base.state_hash
    assert loser.store.left is None
    assert (folder / "data").read_bytes() == b"theta"
    loser.grow(2)
    again = loser.crash()
    assert again.store.state.base.round == own.base.round + 2
    assert again.store.left is None
    again.store.close()


def test_given_up_it_says_what_is_lost_and_is_not_resumed(sides: tuple[Node, Node, Base]) -> None:
    loser, winner, place = sides
    own = loser.store.state
    loser.snapshot()
    loser.take_over(winner, place)
    loser = loser.crash()
    lost = loser.store.give_up_left(PEERS[0])
    assert lost is not None
    assert (lost.since_round, lost.rounds, lost.lineage) == (2, 6, own.base.lineage.hex())
    assert lost.followed == winner.store.state.base.lineage.hex()
    assert lost.tokens >= lost.own_tokens > 0
    assert loser.store.give_up_left(PEERS[0]) is None
    assert not (loser.directory / "left-state").exists()
    again = loser.crash()
    assert again.store.left is None
    assert again.store.state.base.prev == winner.store.state.base.prev
    again.store.close()


def strike(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, after: int) -> None:
    """The process dies instead of the call number `after` of `owner.name`."""
    original: Callable[..., object] = getattr(owner, name)
    calls = 0

    def mortal(*args: object, **kwargs: object) -> object:
        nonlocal calls
        if calls == after:
            raise Killed
        calls += 1
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, mortal)


@pytest.mark.parametrize(
    ("owner", "name", "after"),
    [
        (ChainLog, "copy", 0),
        (LeftLineage, "save", 0),
        (ChainLog, "truncate", 0),
        (ChainLog, "append", 0),
        (ChainLog, "append", 2),
    ],
)
def test_a_crash_while_leaving_leaves_one_of_the_two(
    sides: tuple[Node, Node, Base], monkeypatch: pytest.MonkeyPatch, owner: type, name: str, after: int
) -> None:
    loser, winner, place = sides
    own = loser.store.state
    with monkeypatch.context() as patch:
        strike(patch, owner, name, after)
        with pytest.raises(Killed):
            loser.take_over(winner, place)
    loser = loser.crash()
    if loser.store.left is None:
        assert loser.store.state == own, "nothing was left yet"
    else:
        assert loser.store.left.tip == own.base
        assert loser.store.state.base.round >= place.round
        loser.store.resume_left(loser.snapshots)
        assert loser.store.state == own
    loser.store.close()


def test_nothing_is_given_up_for_a_winner_that_was_not_followed_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The winner was born of this node's own lineage; the power fails between the cut and the first new record."""
    loser, winner = Node.open(tmp_path / "loser"), Node.open(tmp_path / "winner")
    place = loser.grow(3).base
    winner.grow(3)
    winner.store.append_reform(make_reform(winner.store.state, PEERS[:1]))
    winner.grow(2)
    own = loser.grow(4)
    with monkeypatch.context() as patch:
        strike(patch, ChainLog, "append", 0)
        with pytest.raises(Killed):
            loser.take_over(winner, place)
    loser = loser.crash()
    assert loser.store.state.base.round == place.round
    assert loser.store.left is not None
    assert loser.store.left.resuming, "before a machine starts at the branching and takes it for the lineage followed"
    loser.store.resume_left(loser.snapshots)
    assert loser.store.state == own
    loser.store.close()
    winner.store.close()


@pytest.mark.parametrize(
    ("owner", "name", "after"),
    [
        (LeftLineage, "save", 0),
        (ChainLog, "truncate", 0),
        (ChainLog, "append", 0),
        (ChainLog, "append", 4),
        (LeftLineage, "give_state_back", 0),
        (LeftLineage, "forget", 0),
    ],
)
def test_a_crash_on_the_way_back_is_made_up_for(
    sides: tuple[Node, Node, Base], monkeypatch: pytest.MonkeyPatch, owner: type, name: str, after: int
) -> None:
    loser, winner, place = sides
    own = loser.store.state
    loser.take_over(winner, place)
    followed = loser.store.state
    with monkeypatch.context() as patch:
        strike(patch, owner, name, after)
        with pytest.raises(Killed):
            loser.store.resume_left(loser.snapshots)
    loser = loser.crash()
    left = loser.store.left
    assert left is not None
    if not left.resuming:
        assert loser.store.state.base.prev == followed.base.prev
    loser.store.resume_left(loser.snapshots)
    assert loser.store.state == own
    loser = loser.crash()
    assert loser.store.left is None
    assert loser.store.state == own
    loser.store.close()


@pytest.mark.parametrize("earlier", [True, False])
def test_a_second_winner_does_not_hide_the_lineage_that_is_this_nodes_own(
    sides: tuple[Node, Node, Base], tmp_path: Path, earlier: bool
) -> None:
    """The first winner is left for a third lineage, which parts before or behind the place where the first did."""
    loser, winner, place = sides
    own = loser.store.state
    loser.take_over(winner, place)
    third = Node.open(tmp_path / "third")
    third.grow(1 if earlier else 4)
    parted = third.store.state.base
    third.store.append_reform(make_reform(third.store.state, PEERS[1:2]))
    third.grow(2)
    loser.take_over(third, parted)
    assert loser.store.state.base == third.store.state.base
    loser = loser.crash()
    loser.store.resume_left(loser.snapshots)
    assert loser.store.state == own
    loser.store.close()
    third.store.close()


def test_what_comes_back_by_another_way_is_not_left_any_more(sides: tuple[Node, Node, Base], tmp_path: Path) -> None:
    """The lineage that is followed in the end is this node's own, with a round more."""
    loser, winner, place = sides
    twin = Node.open(tmp_path / "twin")
    twin.grow(2)
    twin.store.append_reform(make_reform(twin.store.state, PEERS[:1]))
    twin.grow(7)
    loser.take_over(winner, place)
    loser.take_over(twin, place)
    assert loser.store.left is None
    assert loser.store.state.base.prev == twin.store.state.base.prev
    loser.store.close()
    twin.store.close()


def test_a_damaged_marker_is_told_and_changes_nothing(sides: tuple[Node, Node, Base]) -> None:
    loser, winner, place = sides
    loser.take_over(winner, place)
    marker = loser.directory / "chain.left"
    marker.write_bytes(marker.read_bytes()[:-1] + b"\0")
    loser = loser.crash()
    assert loser.store.left is None
    assert loser.store.state.base.prev == winner.store.state.base.prev
    loser.store.close()


def test_a_way_back_whose_beginning_is_gone_is_not_taken_for_ever(
    sides: tuple[Node, Node, Base], monkeypatch: pytest.MonkeyPatch
) -> None:
    loser, winner, place = sides
    loser.take_over(winner, place)
    with monkeypatch.context() as patch:
        strike(patch, ChainLog, "truncate", 0)
        with pytest.raises(Killed):
            loser.store.resume_left(loser.snapshots)
    first = loser.store._index.entries[0].offset
    (loser.directory / "chain.checkpoint").unlink(missing_ok=True)
    with (loser.directory / "chain.log").open("r+b") as file:
        file.truncate(first)
    loser = loser.crash()
    assert loser.store.state.base.round == 0
    assert loser.store.left is None
    loser.store.close()


def test_a_copied_piece_of_the_log_reads_like_the_log(tmp_path: Path) -> None:
    log = ChainLog(tmp_path / "chain.log", RULES.run)
    offsets = [log.append(FrameKind.APPLIED, bytes([number]) * 32) for number in range(4)]
    older = log.copy(offsets[2], log.end, "left")
    both = log.copy(offsets[1], offsets[2], "left", behind=older)
    payloads = [frame.payload[0] for frame in chain_log.frames_of(both)]
    assert payloads == [1, 2, 3]
    log.close()
