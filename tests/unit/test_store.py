"""The chain on disk: what was appended is there after any crash, and nothing that was torn is believed."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from chain_samples import (
    KEYRING,
    make_commit,
    make_reform,
    make_rules,
    next_hash,
    peers,
    plain_commit,
    sign_headers,
    sign_ready,
    sign_roster,
    step,
)

from node.daemon import chain_index, chain_log, chain_records, store
from node.daemon.chain_log import FrameKind, StoreError
from node.daemon.store import CHECKPOINT_EVERY_RECORDS, JournalState, StateMismatch, Store, load_manifest, save_manifest
from node.engine import disk
from node.errors import StrangerError
from node.manifest import SignedManifest
from protocol import chain
from protocol.chain import ChainState
from protocol.commits import InvalidCommit
from protocol.messages import Commit, Reformed
from protocol.names import ZERO_DIGEST, digest
from protocol.wire import encode_commit

PEERS = peers(3)
RULES = make_rules(PEERS, parts=2)

Opener = Callable[..., Store]


@pytest.fixture
def opener(tmp_path: Path) -> Iterator[Opener]:
    """Opens the store in a folder of the test's own, again and again; all are closed at the end."""
    opened: list[Store] = []

    def open_store(name: str = "run", *, run: bytes | None = None) -> Store:
        rules = RULES if run is None else replace(RULES, run=run)
        made = Store(tmp_path / name, rules, KEYRING)
        made.open()
        opened.append(made)
        return made

    yield open_store
    for each in opened:
        each.close()


def grow(into: Store, rounds: int, state: ChainState | None = None) -> list[ChainState]:
    """Appends and applies `rounds` plain commits; returns the states, oldest first, the starting one included."""
    states = [into.state if state is None else state]
    for _ in range(rounds):
        commit = plain_commit(states[-1], RULES)
        into.append_commit(commit, chain.commit_hash(states[-1], RULES, commit))
        states.append(step(states[-1], RULES, commit))
        into.mark_applied(states[-1].base.round, states[-1].base.state_hash)
    return states


def crash(of: Store) -> None:
    """As SIGKILL leaves it: descriptors gone, no checkpoint written."""
    assert of._log is not None
    of._log.close()
    of._log = None


# ---------------------------------------------------------------- appending and reading back


def test_an_empty_store_is_at_genesis(opener: Opener) -> None:
    made = opener()
    assert made.state == chain.genesis(RULES)
    assert made.state_hash_at(0) == RULES.initial_state_hash
    assert made.state_hash_at(1) is None
    assert list(made.records()) == []
    assert made.replay() == made.state
    assert made.set_aside is None


@pytest.mark.parametrize("clean", [True, False])
def test_the_chain_is_there_after_a_restart(opener: Opener, clean: bool) -> None:
    first = opener()
    states = grow(first, 5)
    assert first.state == states[-1]
    if clean:
        first.close()
    else:
        crash(first)
    again = opener()
    assert again.state == states[-1]
    assert again.set_aside is None
    for number, state in enumerate(states):
        assert again.state_hash_at(number) == state.base.state_hash
    for number in range(5):
        assert again.commit_at(number) == plain_commit(states[number], RULES)
    assert again.replay() == states[-1]
    # And it goes on.
    assert grow(again, 2)[-1] == again.state


def test_records_from_a_round_on(opener: Opener) -> None:
    made = opener()
    states = grow(made, 4)
    records = list(made.records(2))
    assert [(record.kind, record.round) for record in records] == [(FrameKind.COMMIT, 2), (FrameKind.COMMIT, 3)]
    assert records[0].body == encode_commit(plain_commit(states[2], RULES))


def test_rounds_that_are_not_there(opener: Opener) -> None:
    made = opener()
    grow(made, 2)
    for number in (-1, 2, 9):
        with pytest.raises(StoreError, match="no commit of round"):
            made.commit_at(number)
    assert made.state_hash_at(-1) is None
    assert made.state_hash_at(3) is None
    with pytest.raises(StoreError, match="has no round 3"):
        made.verify_state(3, digest(b"x"))


def test_a_commit_twice_is_one(opener: Opener) -> None:
    """A crash between append and apply: the machine asks for the same commit again."""
    made = opener()
    commit = plain_commit(made.state, RULES)
    name = chain.commit_hash(made.state, RULES, commit)
    made.append_commit(commit, name)
    made.append_commit(commit, name)
    assert len(list(made.records())) == 1


def test_what_does_not_follow_is_refused(opener: Opener) -> None:
    made = opener()
    states = grow(made, 2)
    with pytest.raises(StoreError, match="does not follow"):
        made.append_commit(plain_commit(states[1], RULES, leaves=PEERS[:1]), digest(b"name"))
    with pytest.raises(StoreError, match="hashes to"):
        made.append_commit(plain_commit(states[2], RULES), digest(b"another name"))
    with pytest.raises(StoreError, match="catch up first"):
        made.mark_applied(1, states[1].base.state_hash)
    assert made.state == states[-1]
    assert len(list(made.records())) == 2


def test_the_chain_of_an_earlier_version_is_refused_in_one_sentence(opener: Opener, tmp_path: Path) -> None:
    opener().close()
    (path,) = tmp_path.rglob("chain.log")
    data = bytearray(path.read_bytes())
    data[: len(b"ATOLLC1\0")] = b"ATOLLC1\0"
    path.write_bytes(data)
    with pytest.raises(StoreError, match="earlier version of Atoll"):
        opener()
    assert path.read_bytes() == data, "nothing of it is touched"


def test_another_run_is_refused(opener: Opener) -> None:
    opener().close()
    with pytest.raises(StoreError, match="is the chain of run"):
        opener(run=digest(b"another run"))


# ---------------------------------------------------------------- the state's hash


def test_a_commit_is_on_disk_before_it_is_applied(opener: Opener) -> None:
    made = opener()
    states = grow(made, 1)
    commit = plain_commit(states[-1], RULES)
    made.append_commit(commit, chain.commit_hash(states[-1], RULES, commit))
    crash(made)
    again = opener()
    assert again.state.base.round == 2
    assert again.state.base.state_hash == ZERO_DIGEST
    assert again.state_hash_at(2) is None
    again.verify_state(2, digest(b"computed"))
    assert again.state_hash_at(2) == again.state.base.state_hash == digest(b"computed")
    crash(again)
    assert opener().state.base.state_hash == digest(b"computed")


def test_a_checkpoint_keeps_an_open_hash_open(opener: Opener) -> None:
    made = opener()
    commit = plain_commit(made.state, RULES)
    made.append_commit(commit, chain.commit_hash(made.state, RULES, commit))
    made.close()
    again = opener()
    assert again.state_hash_at(1) is None
    again.mark_applied(1, digest(b"computed"))
    assert again.state_hash_at(1) == digest(b"computed")


def test_a_wrong_state_is_found(opener: Opener) -> None:
    made = opener()
    states = grow(made, 3)
    made.verify_state(2, states[2].base.state_hash)
    with pytest.raises(StateMismatch, match="state of round 2 is"):
        made.verify_state(2, digest(b"corrupt"))


def test_the_electors_word_replaces_a_corrupt_state(opener: Opener) -> None:
    store = opener()
    grow(store, 3)
    base, agreed = store.state.base, digest(b"what the others hold")
    store.correct_state(replace(base, round=base.round - 1), digest(b"of another place"))
    assert store.state_hash_at(3) == base.state_hash
    store.correct_state(base, agreed)
    assert store.state_hash_at(3) == agreed
    store.close()
    assert opener().state_hash_at(3) == agreed


def test_a_roster_without_parts_leaves_the_state(opener: Opener) -> None:
    made = opener()
    idle = [sign_ready(made.state, RULES, peer, tokens=0) for peer in PEERS]
    commit = make_commit(made.state, RULES, sign_roster(made.state, RULES, idle, joins=("J",), parts=False))
    made.append_commit(commit, chain.commit_hash(made.state, RULES, commit))
    assert made.state_hash_at(1) == RULES.initial_state_hash


# ---------------------------------------------------------------- reforms


def test_reforms_are_kept(opener: Opener) -> None:
    made = opener()
    states = grow(made, 2)
    reformed = make_reform(states[-1], PEERS[:1])
    made.append_reform(reformed)
    made.append_reform(reformed)
    expected = chain.reform_state(states[-1], RULES, reformed)
    assert made.state == expected
    grow(made, 2)
    kinds = [(record.kind, record.round) for record in made.records()]
    assert kinds == [
        (FrameKind.COMMIT, 0),
        (FrameKind.COMMIT, 1),
        (FrameKind.REFORM, 2),
        (FrameKind.COMMIT, 2),
        (FrameKind.COMMIT, 3),
    ]
    tip = made.state
    crash(made)
    again = opener()
    assert again.state == tip
    assert again.replay() == tip
    assert again.state_hash_at(2) == states[2].base.state_hash


def test_a_reform_of_another_place_is_refused(opener: Opener) -> None:
    made = opener()
    states = grow(made, 2)
    with pytest.raises(StoreError, match="does not follow"):
        made.append_reform(make_reform(states[1], PEERS[:1]))


# ---------------------------------------------------------------- serving and catching up


def fetch_all(source: Store, into: Store, limit_bytes: int) -> int:
    """What a joiner does; returns the pages it took."""
    pages = 0
    while True:
        base = into.state.base
        answer = source.records_after(
            round_number=base.round, prev=base.prev, lineage=base.lineage, limit_bytes=limit_bytes
        )
        assert answer is not None
        records, more = answer
        pages += 1
        into.extend(records, source.state.base.state_hash)
        if not more:
            return pages


@pytest.mark.parametrize(("limit_bytes", "pages"), [(10**9, 1), (1, 6)])
def test_a_joiner_takes_the_chain_from_a_peer(opener: Opener, limit_bytes: int, pages: int) -> None:
    source, into = opener("source"), opener("into")
    states = grow(source, 3)
    source.append_reform(make_reform(states[-1], PEERS[:1]))
    grow(source, 2)
    assert fetch_all(source, into, limit_bytes) == pages
    assert into.state == source.state
    for number in range(5):
        assert into.state_hash_at(number) == source.state_hash_at(number)
    # What the peer claims for its newest round is not certain yet, and not kept.
    assert into.state_hash_at(5) is None
    for end in (crash, Store.close):
        end(into)
        into = opener("into")
        assert into.state.base.state_hash == ZERO_DIGEST
        assert into.state.base.round == 5
        base = into.state.base
        into.extend([], digest(b"claim"))
        assert into.state.base == replace(base, state_hash=digest(b"claim"))
    again = into
    # The next commit makes it certain.
    grow(source, 1)
    fetch_all(source, again, 10**9)
    assert again.state_hash_at(5) == source.state_hash_at(5) is not None


def test_a_wrong_claim_is_replaced(opener: Opener) -> None:
    source, into = opener("source"), opener("into")
    grow(source, 1)
    base = into.state.base
    answer = source.records_after(round_number=0, prev=base.prev, lineage=base.lineage, limit_bytes=10**9)
    assert answer is not None
    into.extend(answer[0], digest(b"a lie"))
    assert into.state.base.state_hash == digest(b"a lie")
    into.verify_state(1, source.state.base.state_hash)
    assert into.state == source.state


def test_the_run_outvotes_my_own_state(opener: Opener) -> None:
    """My outer state went wrong unnoticed; a quorum builds on another: mine is the corrupt one (section 8)."""
    source, into = opener("source"), opener("into")
    grow(source, 2)
    commit = source.commit_at(0)
    into.append_commit(commit, chain.commit_hash(into.state, RULES, commit))
    into.mark_applied(1, digest(b"corrupt"))
    fetch_all(source, into, 10**9)
    assert into.state_hash_at(1) == source.state_hash_at(1)
    with pytest.raises(StateMismatch):
        into.verify_state(1, digest(b"corrupt"))


def test_strangers_records_are_verified(opener: Opener) -> None:
    source, into = opener("source"), opener("into")
    states = grow(source, 2)
    base = into.state.base
    answer = source.records_after(round_number=0, prev=base.prev, lineage=base.lineage, limit_bytes=10**9)
    assert answer is not None
    first, second = answer[0]
    for junk in (b"", b"\x09" + first[1:], first[:-5], b"\x01", b"\x02" + first[1:], b"\x03" + bytes(32)):
        with pytest.raises(StrangerError):
            into.extend([junk], digest(b"claim"))
    with pytest.raises(InvalidCommit):
        into.extend([second], digest(b"claim"))
    unsigned = replace(source.commit_at(0), certificate=replace(source.commit_at(0).certificate, votes=()))
    with pytest.raises(InvalidCommit):
        into.extend([b"\x01" + encode_commit(unsigned)], digest(b"claim"))
    wrong = replace(RULES, initial_state_hash=digest(b"another S_0"))
    other = plain_commit(chain.genesis(wrong), wrong)
    with pytest.raises(InvalidCommit):
        into.extend([b"\x01" + encode_commit(other)], digest(b"claim"))
    assert into.state == chain.genesis(RULES)
    # The good ones in front of a bad one stay.
    with pytest.raises(StrangerError):
        into.extend([first, b""], digest(b"claim"))
    assert into.state.base.prev == states[1].base.prev


def test_a_place_that_is_not_on_this_chain(opener: Opener) -> None:
    made = opener()
    states = grow(made, 2)
    base = states[1].base
    known = {"round_number": base.round, "prev": base.prev, "lineage": base.lineage, "limit_bytes": 10**9}
    assert made.records_after(**known) is not None  # type: ignore[arg-type]
    for change in ({"round_number": 2}, {"round_number": 7}, {"prev": digest(b"x")}, {"lineage": digest(b"x")}):
        assert made.records_after(**{**known, **change}) is None  # type: ignore[arg-type]


def test_a_peer_from_before_the_reform_is_served(opener: Opener) -> None:
    source, left = opener("source"), opener("left")
    states = grow(source, 2)
    grow(left, 2)
    reformed: Reformed = make_reform(states[-1], PEERS[:1])
    source.append_reform(reformed)
    fetch_all(source, left, 10**9)
    assert left.state == source.state


def test_the_loser_of_a_split_follows_the_winner(opener: Opener, tmp_path: Path) -> None:
    winner, loser = opener("winner"), opener("loser")
    common = grow(winner, 2)
    grow(loser, 2)
    winner.append_reform(make_reform(common[-1], PEERS[:1]))
    grow(winner, 3)
    left = grow(loser, 12)[-1]
    places = loser.places()
    assert places[0] == left.base
    assert places[-1] == chain.genesis(RULES).base
    assert len(places) < 13
    for place in places:
        answer = winner.records_after(
            round_number=place.round, prev=place.prev, lineage=place.lineage, limit_bytes=10**9
        )
        if answer is not None:
            break
    assert answer is not None
    assert place.round <= 2
    # A record that does not verify leaves everything as it was.
    with pytest.raises(InvalidCommit):
        loser.switch(place, answer[0][1:], digest(b"claim"))
    with pytest.raises(StoreError, match="not on the chain"):
        loser.switch(replace(place, prev=digest(b"x")), answer[0], digest(b"claim"))
    assert loser.state == left
    loser.switch(place, answer[0], winner.state.base.state_hash)
    assert loser.state == winner.state
    assert [path.name for path in (tmp_path / "loser").glob("chain.log.left-*")]
    tip = grow(winner, 1)[-1]
    fetch_all(winner, loser, 10**9)
    loser.mark_applied(tip.base.round, tip.base.state_hash)
    crash(loser)
    again = opener("loser")
    assert again.state == winner.state
    assert again.replay() == winner.state


# ---------------------------------------------------------------- crashes


@pytest.mark.slow
def test_every_torn_tail_is_set_aside(opener: Opener, tmp_path: Path) -> None:
    """The file cut at any length opens, to the newest state whose record is whole."""
    made = opener()
    grow(made, 2)
    crash(made)
    whole = (tmp_path / "run" / "chain.log").read_bytes()
    (tmp_path / "run" / "chain.checkpoint").unlink(missing_ok=True)
    rounds = set()
    for length in [*range(0, 200, 7), *range(len(whole) - 700, len(whole) + 1, 13), len(whole)]:
        folder = tmp_path / f"cut-{length}"
        folder.mkdir(exist_ok=True)
        (folder / "chain.log").write_bytes(whole[:length])
        cut = opener(f"cut-{length}")
        rounds.add(cut.state.base.round)
        assert cut.replay() == cut.state
        kept = (folder / "chain.log").read_bytes()
        aside = b"" if cut.set_aside is None else cut.set_aside.read_bytes()
        if length >= chain_log.HEADER_BYTES:
            assert kept + aside == whole[:length]
        else:
            assert aside == whole[:length]
        grow(cut, 1)
        cut.close()
    assert rounds == {0, 1, 2}


@pytest.mark.parametrize("seed", range(30))
def test_a_damaged_byte_is_never_believed(opener: Opener, tmp_path: Path, seed: int) -> None:
    made = opener()
    states = grow(made, 3)
    crash(made)
    path = tmp_path / "run" / "chain.log"
    data = bytearray(path.read_bytes())
    at = random.Random(seed).randrange(chain_log.HEADER_BYTES, len(data))
    data[at] ^= 0x10
    path.write_bytes(data)
    again = opener()
    assert again.set_aside is not None
    held = again.state
    # A damaged APPLIED frame leaves the hash of that round open; all else is as it was.
    expected = states[held.base.round]
    assert replace(held, base=replace(held.base, state_hash=expected.base.state_hash)) == expected
    assert again.replay() == held


@pytest.mark.slow
def test_a_checkpoint_shortens_the_opening(opener: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = opener()
    grow(made, CHECKPOINT_EVERY_RECORDS + 3)
    tip = made.state
    crash(made)
    assert (tmp_path / "run" / "chain.checkpoint").exists()
    replayed: list[Commit] = []
    original = chain_records.next_state

    def counting(state: ChainState, rules: object, commit: Commit, state_hash: bytes) -> ChainState:
        replayed.append(commit)
        return original(state, rules, commit, state_hash)  # type: ignore[arg-type]

    monkeypatch.setattr(chain_records, "next_state", counting)
    again = opener()
    assert again.state == tip
    assert len(replayed) == 3
    assert again.commit_at(5) is not None
    assert again.replay() == tip


def test_going_back_after_a_restart_decodes_few_records(opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_index, "MARK_EVERY_RECORDS", 8)
    made = opener()
    states = grow(made, 40)
    made.close()
    again = opener()
    decoded: list[int] = []
    real = store.decode_commit

    def counting(body: bytes) -> Commit:
        decoded.append(len(body))
        return real(body)

    monkeypatch.setattr(store, "decode_commit", counting)
    for position in (5, 33, 38, 40):
        decoded.clear()
        assert again.state_at(states[position].base) == states[position]
        assert len(decoded) < 8


def test_a_foreign_or_damaged_checkpoint_is_ignored(opener: Opener, tmp_path: Path) -> None:
    made = opener()
    grow(made, 4)
    tip = made.state
    made.close()
    path = tmp_path / "run" / "chain.checkpoint"
    good = path.read_bytes()
    for bad in (b"", good[:-1], good[:50] + b"?" + good[51:]):
        path.write_bytes(bad)
        again = opener()
        assert again.state == tip
        crash(again)
    # A log that is shorter than its checkpoint: somebody restored an old copy.
    path.write_bytes(good)
    log = tmp_path / "run" / "chain.log"
    log.write_bytes(log.read_bytes()[: log.stat().st_size // 2])
    assert opener().state.base.round < 4


def test_a_full_disk_leaves_the_chain_as_it_was(
    opener: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = opener()
    states = grow(made, 1)
    size = (tmp_path / "run" / "chain.log").stat().st_size

    def half(fd: int, data: bytes, offset: int) -> None:
        os.pwrite(fd, data[: len(data) // 2], offset)
        raise OSError(28, "No space left on device")

    commit = plain_commit(made.state, RULES)
    name = chain.commit_hash(made.state, RULES, commit)
    with monkeypatch.context() as patch:
        patch.setattr(chain_log, "write_at", half)
        with pytest.raises(OSError, match="No space"):
            made.append_commit(commit, name)
    assert made.state == states[-1]
    assert (tmp_path / "run" / "chain.log").stat().st_size == size
    made.append_commit(commit, name)
    crash(made)
    assert opener().state.base.round == 2


def test_a_record_that_went_bad_is_named(opener: Opener, tmp_path: Path) -> None:
    made = opener()
    grow(made, 2)
    path = tmp_path / "run" / "chain.log"
    data = bytearray(path.read_bytes())
    data[chain_log.HEADER_BYTES + 100] ^= 1
    path.write_bytes(data)
    with pytest.raises(StoreError, match="went bad on disk"):
        made.commit_at(0)


@pytest.mark.parametrize("place", [3, 20], ids=["magic", "run id"])
def test_a_spoilt_header_before_good_records_is_mended(opener: Opener, tmp_path: Path, place: int) -> None:
    made = opener()
    grow(made, 3)
    tip = made.state
    made.close()
    path = tmp_path / "run" / "chain.log"
    good = path.read_bytes()
    path.write_bytes(good[:place] + bytes([good[place] ^ 0x80]) + good[place + 1 :])
    assert opener().state == tip
    assert path.read_bytes() == good


def test_a_damaged_end_waits_for_room_to_be_set_aside(
    opener: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = opener()
    states = grow(made, 3)
    crash(made)
    (tmp_path / "run" / "chain.checkpoint").unlink(missing_ok=True)
    path = tmp_path / "run" / "chain.log"
    path.write_bytes(path.read_bytes()[:-10])
    full = Store(tmp_path / "run", RULES, KEYRING)
    with monkeypatch.context() as patch:

        def no_room(chain: chain_log.ChainLog, offset: int, name: str = "torn") -> None:
            raise OSError(28, "No space left on device")

        patch.setattr(chain_log.ChainLog, "cut", no_room)
        for _ in range(2):
            with pytest.raises(OSError, match="No space left"):
                full.open()
    full.open()
    assert full.state.base.prev == states[-1].base.prev
    assert len(list(full.records())) == 3, "each record once, however often it was tried"
    full.close()


def records_of(of: Store, place: int) -> list[bytes]:
    base = of.before(place)
    page = of.records_after(round_number=base.round, prev=base.prev, lineage=base.lineage, limit_bytes=1)
    assert page is not None
    return page[0]


@pytest.mark.parametrize("place", [0, 3, 5], ids=["first", "middle", "last"])
def test_a_record_that_went_bad_is_mended_by_a_peers(opener: Opener, tmp_path: Path, place: int) -> None:
    mine, theirs = opener(), opener("peer")
    grow(theirs, 6)
    grow(mine, 6)
    tip = mine.state
    path = tmp_path / "run" / "chain.log"
    offset = mine._index.entries[place].offset
    mine.close()
    data = bytearray(path.read_bytes())
    data[offset + 60] ^= 1
    if place != 5:  # the checkpoint, which holds what the records led to, stands only on the last one
        path.write_bytes(data)
        again = opener()
    else:
        again = opener()
        path.write_bytes(data)
    assert again.state == tip
    assert again.damaged() == [place]
    wrong = records_of(theirs, (place + 1) % 6)
    with pytest.raises((StrangerError, InvalidCommit)):
        again.mend(place, wrong[0])
    assert again.damaged() == [place]
    again.mend(place, records_of(theirs, place)[0])
    assert again.damaged() == []
    again.mend(place, b"")  # once more changes nothing
    assert again.replay().base.prev == tip.base.prev
    crash(again)
    assert opener().state.base.prev == tip.base.prev
    grown = opener()
    assert grown.damaged() == []
    grow(grown, 1, grown.state)


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    made = Store(tmp_path / "run", RULES, KEYRING)
    with pytest.raises(StoreError, match="call open"):
        made.append_reform(make_reform(made.state, PEERS[:1]))


# ---------------------------------------------------------------- journal and manifest


def test_the_journal(opener: Opener, tmp_path: Path) -> None:
    made = opener()
    path = tmp_path / "run" / "journal"
    assert made.read_journal() == (None, JournalState.MISSING)
    for journal in (b"first", b"", bytes(range(256)) * 100):
        made.write_journal(journal)
        assert made.read_journal() == (journal, JournalState.OK)
    whole = path.read_bytes()
    for length in (0, 5, 39, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert made.read_journal() == (None, JournalState.TORN)
    path.write_bytes(whole[:100] + b"?" + whole[101:])
    assert made.read_journal() == (None, JournalState.TORN)


def test_a_crash_while_writing_keeps_the_journal_before(
    opener: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write did not return, so nothing was sent for it: the older journal is the newest promise."""
    made = opener()
    made.write_journal(b"promised")

    def torn(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(disk.os, "replace", torn)
    with pytest.raises(OSError, match="Input/output"):
        made.write_journal(b"never promised")
    assert made.read_journal() == (b"promised", JournalState.OK)


def test_the_manifest(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "ab" / "manifest.msgpack"
    assert load_manifest(path) is None
    signed = SignedManifest(body=b"{}", signature=b"s" * 64)
    save_manifest(path, signed)
    assert load_manifest(path) == signed
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(StoreError, match="is damaged"):
        load_manifest(path)


# ---------------------------------------------------------------- cost


@pytest.mark.slow
def test_appending_is_cheap(opener: Opener) -> None:
    """Twenty peers, 500 parts: encode, hash, write and sync; the device's own latency apart, a few milliseconds."""
    names = peers(20)
    rules = make_rules(names, parts=500)
    made = Store(opener()._directory.parent / "large", rules, KEYRING)
    made.open()
    seconds = []
    for _ in range(5):
        state = made.state
        roster = sign_roster(state, rules, [sign_ready(state, rules, peer) for peer in names])
        commit = make_commit(state, rules, roster, sign_headers(rules, roster))
        name = chain.commit_hash(state, rules, commit)
        started = time.perf_counter()
        made.append_commit(commit, name)
        seconds.append(time.perf_counter() - started)
        made.mark_applied(state.base.round + 1, next_hash(state))
    made.close()
    assert min(seconds) < 0.1
