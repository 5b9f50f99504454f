"""A machine on its own: its promises across restarts, its answers, its manners towards strangers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from chain_samples import CheapKeyring, make_rules, peers, plain_commit, sign_ready, sign_roster, step

from protocol import chain, wire
from protocol.chain import ChainState
from protocol.events import (
    Alarm,
    Applied,
    Apply,
    CatchUp,
    Effect,
    Event,
    ExchangeEnded,
    FetchParts,
    Finished,
    Freeze,
    Frozen,
    HeaderDraft,
    HeaderSigned,
    LeaveRequested,
    Misbehaved,
    PartHeld,
    PartsFetched,
    Persist,
    Received,
    Send,
    StartExchange,
    StateCorrupt,
    Tick,
    TrainerProgress,
)
from protocol.journal import UNKNOWN_PAST, decode_journal
from protocol.messages import Commit, Fetch, Have, Heartbeat, Join, Leave, PartHeader, Ready, Roster, Signed, Vote
from protocol.names import Base, PeerId, digest
from protocol.peer import PeerMachine
from protocol.rules import Rules
from protocol.votes import ATTEMPTS_KEPT

PARTS = 1
PARTS_ROOT = digest(b"parts")
SOLO = peers(1)
THREE = peers(3)


def machine(
    me: PeerId,
    rules: Rules,
    *,
    state: ChainState | None = None,
    journal: bytes | None = None,
    lost: bool = False,
) -> PeerMachine:
    return PeerMachine(
        rules=rules,
        me=me,
        keyring=CheapKeyring(me),
        state=chain.genesis(rules) if state is None else state,
        journal=journal,
        journal_lost=lost,
        wants_membership=True,
        incarnation=bytes(16),
        now_s=0.0,
    )


def of_kind(effects: list[Effect], kind: type) -> list[object]:
    """Effects of a kind, or the messages sent of a kind."""
    found: list[object] = [effect for effect in effects if isinstance(effect, kind)]
    for effect in effects:
        if isinstance(effect, Send) and isinstance(message := wire.decode(effect.data).message, kind):
            found.append(message)
    return found


class Solo:
    """A driver for a peer alone, which remembers its effects and stops where a test wants it to die."""

    def __init__(self, rules: Rules, **more: object) -> None:
        self.rules = rules
        self.machine = machine(SOLO[0], rules, **more)  # type: ignore[arg-type]
        self.effects: list[Effect] = []
        self.journal: bytes | None = None
        self.now_s = 0.0

    def feed(self, event: Event, *, until: type | None = None) -> bool:
        """Performs effects until one of kind `until` would be; whether that came."""
        queue = self.machine.handle(event, self.now_s)
        while queue:
            effect = queue.pop(0)
            self.effects.append(effect)
            if until is not None and isinstance(effect, until):
                return True
            follow: list[Effect] = []
            match effect:
                case Persist():
                    self.journal = effect.journal
                case StartExchange():
                    header = PartHeader(
                        roster_id=effect.roster_id,
                        part=0,
                        bitmap=1,
                        hash=digest(b"payload"),
                        length=512 + 8,
                    )
                    follow = self.machine.handle(HeaderDraft(header=header), self.now_s)
                case HeaderSigned():
                    if effect.signed is not None:
                        follow = self.machine.handle(PartHeld(header=effect.signed), self.now_s)
                        follow += self.machine.handle(ExchangeEnded(roster_id=effect.header.roster_id), self.now_s)
                case FetchParts():
                    for signed in effect.headers:
                        follow += self.machine.handle(PartHeld(header=signed), self.now_s)
                    follow += self.machine.handle(PartsFetched(roster_id=effect.roster_id), self.now_s)
                case Apply():
                    done = Applied(
                        round=self.machine.state.base.round + 1, state_hash=digest(b"next", effect.commit_hash)
                    )
                    follow = self.machine.handle(done, self.now_s)
            queue = follow + queue
        return False

    def frozen(self) -> Frozen:
        return Frozen(
            base=self.machine.state.base,
            tokens=((PARTS, 100),),
            parts_root=PARTS_ROOT,
            norm=1.0,
            largest=0.1,
            ranges_done=(),
            units_wanted=2,
        )


RULES = make_rules(SOLO, parts=PARTS)


def test_alone_a_round_needs_no_network_and_no_time() -> None:
    solo = Solo(RULES)
    solo.feed(TrainerProgress(remaining_s=0.0))
    (freeze,) = of_kind(solo.effects, Freeze)
    assert isinstance(freeze, Freeze)
    assert freeze.within_s == RULES.ready_max_s
    solo.feed(solo.frozen())
    assert solo.machine.state.base.round == 1
    assert solo.machine.phase == "training"


@pytest.mark.parametrize("dies_at", [Persist, StartExchange, HeaderSigned, Apply])
def test_alone_a_crash_anywhere_costs_at_most_an_attempt(dies_at: type) -> None:
    """A new life repeats what the journal holds, signs nothing that an earlier one may have signed, and goes on."""
    solo = Solo(RULES)
    assert solo.feed(solo.frozen(), until=dies_at)
    again = Solo(RULES, journal=solo.journal)
    again.feed(Tick())
    for _ in range(50):
        if again.machine.state.base.round == 1:
            break
        if again.machine.round.my_ready is None:
            again.feed(again.frozen())
        again.now_s = max(again.now_s, again.machine.next_wakeup_s)
        again.feed(Tick())
    assert again.machine.state.base.round == 1
    assert again.now_s < 60.0


def test_a_late_commit_has_only_those_votes_verified_that_can_show_something(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has verified its certificate, and two signatures are looked at for each vote that is compared."""
    solo = Solo(RULES)
    solo.feed(solo.frozen())
    previous = solo.machine.receiver.previous
    assert previous is not None
    assert previous.commit is not None
    compared: list[Signed[Any]] = []
    monkeypatch.setattr(solo.machine.docket, "compare", lambda first, second: compared.append(second))

    def late(commit: Commit, sender: PeerId) -> int:
        compared.clear()
        previous.late(wire.sign(CheapKeyring(sender), sender, commit))
        return sum(isinstance(signed.message, Vote) for signed in compared)

    (vote,) = previous.commit.certificate.votes
    other = replace(vote, message=replace(vote.message, value=digest(b"forged")), body=b"forged")
    forged = replace(previous.commit, certificate=replace(previous.commit.certificate, votes=(other,)))
    assert late(previous.commit, SOLO[0]) == 0, "the same value excludes nothing"
    assert late(forged, SOLO[0]) == 1
    assert late(forged, "Stranger") == 0


def test_votes_are_on_disk_before_they_are_sent() -> None:
    solo = Solo(RULES)
    solo.feed(solo.frozen())
    written: set[bytes] = set()
    votes = 0
    for effect in solo.effects:
        if isinstance(effect, Persist):
            written |= {own.envelope for own in decode_journal(effect.journal).votes}
        elif isinstance(effect, Send) and isinstance(wire.decode(effect.data).message, Vote):
            votes += 1
            assert effect.data in written
    assert votes == 2


def test_only_one_header_is_signed_for_a_part() -> None:
    solo = Solo(RULES)
    solo.feed(solo.frozen(), until=StartExchange)
    start = solo.effects[-1]
    assert isinstance(start, StartExchange)
    first = PartHeader(roster_id=start.roster_id, part=0, bitmap=1, hash=digest(b"one"), length=520)
    other = PartHeader(roster_id=start.roster_id, part=0, bitmap=1, hash=digest(b"two"), length=520)
    signed = []
    for header in (first, other, first):
        (answer,) = of_kind(solo.machine.handle(HeaderDraft(header=header), 0.0), HeaderSigned)
        assert isinstance(answer, HeaderSigned)
        signed.append(answer.signed)
    assert signed[0] is not None
    assert signed[1] is None
    assert signed[2] == signed[0]


def test_a_lost_journal_means_no_vote() -> None:
    for journal, lost in ((None, True), (b"torn", False)):
        peer = machine(SOLO[0], RULES, journal=journal, lost=lost)
        assert not peer.standing.voting
        effects = peer.handle(
            Frozen(base=peer.state.base, tokens=((1, 5),), norm=1.0, largest=0.1, ranges_done=(), units_wanted=1), 0.0
        )
        assert of_kind(effects, Ready) == []
        (beat,) = of_kind(effects, Heartbeat)
        assert isinstance(beat, Heartbeat)
        assert not beat.able
        assert peer.phase == "joining"


def test_a_lost_journal_is_written_down_before_anything_else() -> None:
    """A later life would take the missing file for a beginning, and sign again what this one cannot know of."""
    peer = machine(SOLO[0], RULES, lost=True)
    first = peer.handle(Tick(), 0.0)[0]
    assert isinstance(first, Persist)
    again = machine(SOLO[0], RULES, journal=first.journal)
    assert not again.standing.voting
    assert again.round.fence == again.round.touched == UNKNOWN_PAST


def test_a_vote_is_remembered_as_long_as_a_later_life_may_look_back() -> None:
    """That life starts in the attempt that it last voted in, which may be long before the one that this one is in."""
    solo = Solo(RULES)
    solo.feed(solo.frozen(), until=Apply)
    round_ = solo.machine.round
    votes = set(round_.my_votes)
    assert votes == {(0, 1), (0, 2)}
    round_.attempt = 2 * ATTEMPTS_KEPT
    kept = {(vote.attempt, vote.phase) for vote in round_.journal().votes}
    assert kept == votes


def test_a_newcomer_asks_to_join_and_says_why_it_waits() -> None:
    newcomer = machine("Newcomer", RULES)
    (join,) = of_kind(newcomer.handle(Tick(), 0.0), Join)
    assert isinstance(join, Join)
    assert join.units_wanted == RULES.lease_cap_units
    assert newcomer.phase == "joining"
    assert "JOIN" in newcomer.reason
    listed = make_rules(SOLO, parts=PARTS, allowed_peers=SOLO)
    assert of_kind(machine("Newcomer", listed).handle(Tick(), 0.0), Join) == []


def test_nobody_talks_a_newcomer_out_of_joining_by_a_later_round() -> None:
    """Whether there is one is for the driver to prove; a JOIN that is not near the tip is nobody's."""
    for teller in ("Stranger", SOLO[0]):
        newcomer = machine("Newcomer", RULES)
        base = newcomer.state.base
        later = Base(run=base.run, lineage=base.lineage, round=3, prev=digest(b"p"), state_hash=digest(b"s"))
        assert len(of_kind(newcomer.handle(beat(teller, later), 0.0), Join)) == 1


def test_a_join_that_the_tip_has_overtaken_once_is_taken() -> None:
    """Over slow links it always is: whoever holds the tip holds it later than those who made it."""
    solo = Solo(RULES)
    places: list[Base] = []

    def next_round() -> None:
        places.append(solo.machine.state.base)
        solo.feed(solo.frozen())

    for _ in range(3):
        next_round()
    for rounds_behind, taken in ((2, False), (1, True)):
        join = Join(base=places[-rounds_behind], units_wanted=1)
        data = wire.encode(wire.sign(CheapKeyring("Newcomer"), "Newcomer", join))
        solo.feed(Received(data=data, from_peer="Newcomer"))
        next_round()
        assert ("Newcomer" in dict(solo.machine.state.members)) is taken


def test_a_commit_is_served_by_the_base_that_it_extends() -> None:
    solo = Solo(RULES)
    before = solo.machine.state.base
    solo.feed(solo.frozen())
    ask = wire.encode(wire.sign(CheapKeyring("Newcomer"), "Newcomer", Fetch(hash=before.digest())))
    effects = solo.machine.handle(Received(data=ask, from_peer="Newcomer"), 0.0)
    (commit,) = of_kind(effects, Commit)
    follower = machine("Newcomer", RULES)
    assert isinstance(commit, Commit)
    data = next(effect.data for effect in effects if isinstance(effect, Send))
    follower.handle(Received(data=data, from_peer=SOLO[0]), 0.0)
    assert follower.round.commit is not None
    assert follower.round.commit.roster == commit.roster


def test_a_second_decision_of_a_round_stops_the_node() -> None:
    """Two signed commits of one round: a sole elector that forgot its votes can make them."""
    data: list[bytes] = []
    for tokens in (100, 200):
        solo = Solo(RULES)
        before = solo.machine.state.base
        frozen = solo.frozen()
        solo.feed(
            Frozen(
                base=before,
                tokens=((PARTS, tokens),),
                parts_root=PARTS_ROOT,
                norm=1.0,
                largest=0.1,
                ranges_done=(),
                units_wanted=frozen.units_wanted,
            )
        )
        ask = wire.encode(wire.sign(CheapKeyring("Newcomer"), "Newcomer", Fetch(hash=before.digest())))
        effects = solo.machine.handle(Received(data=ask, from_peer="Newcomer"), 0.0)
        data.append(next(effect.data for effect in effects if isinstance(effect, Send)))
    follower = machine("Newcomer", RULES)
    assert of_kind(follower.handle(Received(data=data[0], from_peer=SOLO[0]), 0.0), Alarm) == []
    assert len(of_kind(follower.handle(Received(data=data[1], from_peer=SOLO[0]), 0.0), Alarm)) == 1
    assert follower.handle(Tick(), 99.0) == []


def beat(sender: PeerId, base: Base) -> Received:
    message = Heartbeat(base=base, attempt=0, able=True, incarnation=bytes(16))
    return Received(data=wire.encode(wire.sign(CheapKeyring(sender), sender, message)), from_peer=sender)


def test_a_peer_that_is_behind_asks_first_and_then_catches_up() -> None:
    rules = make_rules(THREE, parts=PARTS)
    peer = machine(THREE[0], rules)
    base = peer.state.base
    later = Base(run=base.run, lineage=base.lineage, round=2, prev=digest(b"p"), state_hash=digest(b"s"))
    effects = peer.handle(beat(THREE[1], later), 0.0)
    (fetch,) = of_kind(effects, Fetch)
    assert isinstance(fetch, Fetch)
    assert fetch.hash == base.digest()
    now_s, caught = 0.0, []
    while now_s < 10.0 and not caught:
        now_s += 1.0
        caught = of_kind(peer.handle(beat(THREE[1], later), now_s), CatchUp)
    (catch_up,) = caught
    assert isinstance(catch_up, CatchUp)
    assert (catch_up.peer, catch_up.round) == (THREE[1], 2)
    assert now_s >= 3 * rules.resend_s


def test_far_behind_there_is_nothing_to_ask() -> None:
    peer = machine(THREE[0], make_rules(THREE, parts=PARTS))
    base = peer.state.base
    far = Base(run=base.run, lineage=base.lineage, round=1000, prev=digest(b"p"), state_hash=digest(b"s"))
    assert len(of_kind(peer.handle(beat(THREE[1], far), 0.0), CatchUp)) == 1
    assert of_kind(peer.handle(beat(THREE[1], far), 0.1), CatchUp) == []


def named_by(peer: PeerMachine, sender: PeerId, other: Base) -> list[object]:
    """What comes of `sender`'s READY on the base `other`."""
    ready = Ready(base=other, tokens=((PARTS, 10),), parts_root=PARTS_ROOT, norm=1.0)
    data = wire.encode(wire.sign(CheapKeyring(sender), sender, ready))
    return of_kind(peer.handle(Received(data=data, from_peer=sender), 0.0), StateCorrupt)


def test_a_quorum_that_names_another_state_says_that_mine_is_corrupt() -> None:
    rules = make_rules(THREE, parts=PARTS)
    first = chain.genesis(rules)
    peer = machine(THREE[0], rules, state=step(first, rules, plain_commit(first, rules)))
    base = peer.state.base
    other = replace(base, state_hash=digest(b"theirs"))
    assert named_by(peer, THREE[1], other) == []
    assert named_by(peer, THREE[1], other) == [], "one elector is no quorum, however often it says so"
    (corrupt,) = named_by(peer, THREE[2], other)
    assert corrupt == StateCorrupt(base=base, agreed=other.state_hash, electors=2)
    assert peer.handle(Tick(), 1.0) == [], "a new machine is built on the state that is fetched"


def test_an_elector_that_names_ever_other_states_takes_no_more_room() -> None:
    rules = make_rules(THREE, parts=PARTS)
    first = chain.genesis(rules)
    peer = machine(THREE[0], rules, state=step(first, rules, plain_commit(first, rules)))
    base = peer.state.base
    for number in range(100):
        assert named_by(peer, THREE[1], replace(base, state_hash=digest(bytes([number])))) == []
    assert len(peer.receiver.foreign_states) == 1
    assert named_by(peer, THREE[2], replace(base, state_hash=digest(bytes([0])))) == [], "nor does it count twice"
    assert len(named_by(peer, THREE[2], replace(base, state_hash=digest(bytes([99]))))) == 1


def test_nobody_talks_a_node_out_of_the_first_state() -> None:
    peer = machine(THREE[0], make_rules(THREE, parts=PARTS))
    other = replace(peer.state.base, state_hash=digest(b"theirs"))
    assert [named_by(peer, sender, other) for sender in THREE[1:]] == [[], []]


def test_leaving_is_said_and_repeated() -> None:
    peer = machine(THREE[0], make_rules(THREE, parts=PARTS))
    assert len(of_kind(peer.handle(LeaveRequested(), 0.0), Leave)) == 1
    assert peer.phase == "leaving"
    assert of_kind(peer.handle(Tick(), 0.1), Leave) == []
    assert len(of_kind(peer.handle(Tick(), 2.5), Leave)) == 1


def test_a_run_that_is_over_is_over_at_once_for_one_alone() -> None:
    peer = machine(SOLO[0], make_rules(SOLO, parts=PARTS, final_round=0))
    assert len(of_kind(peer.handle(Tick(), 0.0), Finished)) == 1
    assert of_kind(peer.handle(Tick(), 5.0), Finished) == []
    assert peer.phase == "finished"


@pytest.mark.parametrize("data", [b"", b"\0" * 10, b"\xff" * 200, b"POST / HTTP/1.1\r\n\r\n"])
def test_noise_is_named_and_nothing_else(data: bytes) -> None:
    peer = machine(SOLO[0], RULES)
    peer.handle(Tick(), 0.0)
    effects = peer.handle(Received(data=data, from_peer="Noisy"), 0.0)
    assert [type(effect) for effect in effects] == [Misbehaved]


def test_a_message_signed_by_somebody_else_is_laid_to_its_carrier() -> None:
    peer = machine(SOLO[0], RULES)
    peer.handle(Tick(), 0.0)
    forged = wire.sign(CheapKeyring("Mallory"), "Newcomer", Join(base=peer.state.base, units_wanted=1))
    effects = peer.handle(Received(data=wire.encode(forged), from_peer="Mallory"), 0.0)
    (named,) = of_kind(effects, Misbehaved)
    assert isinstance(named, Misbehaved)
    assert named.peer == "Mallory"
    assert not peer.round.assembly.joins


def test_a_damaged_copy_of_a_roster_does_not_take_its_place() -> None:
    """A roster is named by its body alone: a copy with another signature is refused, and the good one is not."""
    rules = make_rules(THREE)
    state = chain.genesis(rules)
    roster = sign_roster(state, rules, [sign_ready(state, rules, peer) for peer in THREE])
    follower = machine("Newcomer", rules)
    follower.round.want_roster(wire.roster_id(roster), THREE[0])

    def answer(content: Signed[Roster]) -> list[Effect]:
        have = Have(hash=wire.roster_id(roster), content=wire.encode(content))
        data = wire.encode(wire.sign(CheapKeyring(THREE[1]), THREE[1], have))
        return follower.handle(Received(data=data, from_peer=THREE[1]), 0.0)

    (named,) = of_kind(answer(replace(roster, signature=bytes(32))), Misbehaved)
    assert isinstance(named, Misbehaved)
    assert named.peer == THREE[1]
    assert follower.round.candidates == {}
    assert of_kind(answer(roster), Misbehaved) == []
    assert follower.round.candidates[wire.roster_id(roster)].problem is None


def test_the_reason_is_never_empty() -> None:
    solo = Solo(RULES)
    assert solo.machine.reason
    for remaining_s in (None, 20.0, 0.0):
        solo.feed(TrainerProgress(remaining_s=remaining_s))
        assert solo.machine.reason
    assert "trainer is asked" in solo.machine.reason
