"""Which lineage goes on where two meet, as a function of proven facts; and what it takes to prove one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from chain_samples import CheapKeyring, make_rules, peers

from protocol import chain, wire
from protocol.events import (
    CatchUp,
    Effect,
    LearnLineage,
    LineageLearned,
    LineageResumed,
    LineageUnproven,
    Persist,
    Received,
    Tick,
)
from protocol.lineages import Lineages, Place, Position, Side
from protocol.meeting import DEEP_ROUNDS
from protocol.messages import Heartbeat
from protocol.names import Base, PeerId, digest
from protocol.peer import PeerMachine
from protocol.rules import Quorum, Rules

OLD, RED, BLUE = b"old", b"red", b"blue"
ALL = ("A", "B", "C", "D", "E")


def place(lineage: bytes, round_: int, electors: str = "ABCDE", **tokens: int) -> Place:
    return Place(
        lineage=lineage, round=round_, electors=tuple(electors), members=frozenset(electors), tokens=dict(tokens)
    )


def tree(me: str, *courses: list[Place]) -> Lineages:
    lineages = Lineages(me)
    for course in courses:
        lineages.learn(course)
    return lineages


RED_COURSE = [place(OLD, 4), place(RED, 4, "AB"), place(RED, 5, "AB", A=10, B=10), place(RED, 6, "AB", A=10)]
BLUE_COURSE = [place(OLD, 4), place(BLUE, 4, "CD"), place(BLUE, 5, "CD", C=10, D=20, X=900)]
ON_COURSE = [place(OLD, 4), place(OLD, 5, "CDE", C=1), place(OLD, 6, "CDE", C=1)]


def at(**where: Position) -> dict[PeerId, list[Position]]:
    return {peer: [position] for peer, position in where.items()}


def test_the_child_with_more_live_electors_goes_on_whatever_its_work() -> None:
    heard = at(C=(OLD, 6), D=(OLD, 6), E=(OLD, 6), B=(RED, 6))
    lost = tree("A", RED_COURSE, ON_COURSE).choose((RED, 6), heard)
    assert lost is not None
    assert (lost.side, lost.lineage, lost.round, lost.peers) == (Side.LOSER, OLD, 6, ("C", "D", "E"))
    (branching,) = lost.branchings
    assert (branching.place, branching.winner, branching.winner_live, branching.other_live) == ((OLD, 4), OLD, 3, 2)
    heard = at(A=(RED, 6), B=(RED, 6), D=(OLD, 6), E=(OLD, 6))
    won = tree("C", RED_COURSE, ON_COURSE).choose((OLD, 6), heard)
    assert won is not None
    assert (won.side, won.lineage) == (Side.WINNER, OLD)
    assert not won.branchings[0].tied


def test_a_tie_goes_to_the_work_of_the_branchings_members_then_to_the_smaller_name() -> None:
    heard = at(B=(RED, 6), C=(BLUE, 5), D=(BLUE, 5))
    # RED has counted 30 tokens of A and B, BLUE 30 of C and D; X was no member at the branching.
    verdict = tree("A", RED_COURSE, BLUE_COURSE).choose((RED, 6), heard)
    assert verdict is not None
    assert verdict.branchings[0].tied
    assert verdict.lineage == min(RED, BLUE)
    more = [*BLUE_COURSE, place(BLUE, 6, "CD", D=1)]
    heard = at(B=(RED, 6), C=(BLUE, 6), D=(BLUE, 6))
    assert tree("A", RED_COURSE, more).choose((RED, 6), heard).lineage == BLUE  # type: ignore[union-attr]
    more = [*RED_COURSE, place(RED, 7, "AB", A=1)]
    heard = at(B=(RED, 7), C=(BLUE, 5), D=(BLUE, 5))
    assert tree("A", more, BLUE_COURSE).choose((RED, 7), heard).lineage == RED  # type: ignore[union-attr]


@pytest.mark.parametrize("me", ALL)
def test_all_come_to_the_same_verdict(me: str) -> None:
    where = {"A": (RED, 6), "B": (RED, 6), "C": (BLUE, 5), "D": (BLUE, 5), "E": (OLD, 6)}
    on = [place(OLD, 4), place(OLD, 5, "E", E=1), place(OLD, 6, "E", E=1)]
    heard = {peer: [position] for peer, position in where.items() if peer != me}
    verdict = tree(me, RED_COURSE, BLUE_COURSE, on).choose(where[me], heard)
    assert verdict is not None
    assert verdict.lineage == min(RED, BLUE)


def test_what_others_have_told_is_not_forgotten_for_a_place_that_is_known_without_its_commit() -> None:
    lineages = tree("A", RED_COURSE, BLUE_COURSE)
    heard = at(B=(RED, 6), C=(BLUE, 5), D=(BLUE, 5))
    before = lineages.choose((RED, 6), heard)
    lineages.learn([place(RED, 5, "AB"), place(RED, 6, "AB", A=10)])
    assert lineages.choose((RED, 6), heard) == before
    assert lineages._places[RED][5].tokens == {"A": 10, "B": 10}


@pytest.mark.parametrize("me", ["H0", "X"])
def test_in_a_closed_run_those_that_train_now_outweigh_who_was_the_sole_elector_once(me: str) -> None:
    """X made the run alone, was cut off at round 3 and comes back to fifty at round 999."""
    honest = tuple(f"H{number}" for number in range(50))
    run = [Place(lineage=OLD, round=1, electors=("X",), members=frozenset(("X", "H0")))]
    run += [Place(lineage=OLD, round=at, electors=honest, members=frozenset(honest)) for at in range(2, 1000)]
    alone = [run[0], *(Place(lineage=RED, round=at, electors=("X",), members=frozenset("X")) for at in (1, 2, 3))]
    heard = {peer: [(OLD, 999)] for peer in honest} | {"X": [(RED, 3)]}
    mine = heard.pop(me)[0]
    for closed, winner in ((True, OLD), (False, RED)):
        lineages = Lineages(me, closed=closed)
        lineages.learn(run)
        lineages.learn(alone)
        verdict = lineages.choose(mine, heard)
        assert verdict is not None
        assert verdict.lineage == winner


def test_in_a_closed_run_who_is_heard_on_two_children_counts_for_neither_and_both_sides_agree() -> None:
    where = {"A": (RED, 6), "B": (RED, 6), "C": (OLD, 6), "D": (OLD, 6), "E": (OLD, 6)}
    for me in ("A", "C"):
        lineages = Lineages(me, closed=True)
        lineages.learn(RED_COURSE)
        lineages.learn(ON_COURSE)
        heard = {peer: [position] for peer, position in where.items() if peer != me}
        verdict = lineages.choose(where[me], heard)
        assert verdict is not None
        assert verdict.lineage == OLD
        heard["E"] = [(OLD, 6), (RED, 6)]
        verdict = lineages.choose(where[me], heard)
        assert verdict is not None
        assert verdict.branchings[0].tied


def test_who_is_behind_the_branching_counts_for_no_child() -> None:
    """Three are where the lineages part, or before it: they are behind, whichever goes on."""
    heard = at(B=(OLD, 4), C=(OLD, 4), D=(OLD, 3))
    verdict = tree("A", RED_COURSE).choose((RED, 6), heard)
    assert verdict is not None
    assert (verdict.side, verdict.lineage, verdict.branchings) == (Side.WINNER, RED, ())
    behind = tree("B", RED_COURSE).choose((OLD, 4), at(A=(RED, 6), C=(OLD, 4)))
    assert behind is not None
    assert (behind.side, behind.lineage, behind.peers) == (Side.BEHIND, RED, ("A",))


def test_a_peer_heard_on_two_children_counts_for_neither() -> None:
    heard = at(B=(RED, 6), C=(OLD, 6), D=(OLD, 6))
    heard["E"] = [(OLD, 6), (RED, 6)]
    verdict = tree("A", RED_COURSE, ON_COURSE).choose((RED, 6), heard)
    assert verdict is not None
    assert (verdict.branchings[0].winner_live, verdict.branchings[0].other_live) == (2, 2)


def test_unproven_lineages_and_strangers_have_no_voice() -> None:
    lineages = tree("A", RED_COURSE)
    assert lineages.choose((RED, 6), at(B=(b"invented", 9), C=(b"invented", 9), D=(b"invented", 9))) is None
    # The old lineage is known, and that it went on behind the branching is not.
    assert not lineages.proven((OLD, 5))
    assert lineages.choose((RED, 6), at(C=(OLD, 5), D=(OLD, 5), E=(OLD, 5))) is None
    assert lineages.proven((OLD, 4))
    strangers = {f"S{number}": [(BLUE, 5)] for number in range(50)}
    verdict = tree("A", RED_COURSE, BLUE_COURSE).choose((RED, 6), {**strangers, **at(B=(RED, 6))})
    assert verdict is not None
    assert (verdict.side, verdict.branchings[0].other_live) == (Side.WINNER, 0)


def test_the_walk_goes_up_branching_by_branching() -> None:
    """Of three lineages two share a branch that a majority is on: its own branching decides between them."""
    green = b"green"
    green_course = [place(OLD, 4), place(RED, 4, "ABC"), place(RED, 5, "ABC"), place(green, 5, "C")]
    red = [place(OLD, 4), place(RED, 4, "ABC"), place(RED, 5, "ABC"), place(RED, 6, "AB", A=1)]
    heard = at(A=(RED, 6), B=(RED, 6), D=(OLD, 6), E=(OLD, 6))
    on = [place(OLD, 4), place(OLD, 5, "DE"), place(OLD, 6, "DE")]
    verdict = tree("C", green_course, red, on).choose((green, 5), heard)
    assert verdict is not None
    assert (verdict.side, verdict.lineage) == (Side.LOSER, RED)
    assert [(one.place, one.winner_live, one.other_live) for one in verdict.branchings] == [
        ((OLD, 4), 3, 2),
        ((RED, 5), 2, 1),
    ]


def test_the_tree_forgets_what_nobody_is_heard_on() -> None:
    lineages = tree("A", RED_COURSE, BLUE_COURSE)
    lineages.forget(RED, [RED, BLUE, b"invented"])
    assert lineages.proven((BLUE, 5))
    lineages.forget(RED, [RED])
    assert not lineages.proven((BLUE, 5))
    assert lineages.tip(RED) == 6


# ---------------------------------------------------------------- the machine

FIVE = peers(5)
RULES = make_rules(FIVE)
STATE = chain.genesis(RULES)


def machine(me: PeerId, rules: Rules = RULES, state: chain.ChainState = STATE) -> PeerMachine:
    return PeerMachine(
        rules=rules,
        me=me,
        keyring=CheapKeyring(me),
        state=state,
        journal=None,
        journal_lost=False,
        wants_membership=True,
        incarnation=bytes(16),
        now_s=0.0,
    )


def beat(
    peer: PeerMachine, sender: PeerId, lineage: bytes, round_: int, now_s: float, at: Base | None = None
) -> list[Effect]:
    base = at or Base(run=RULES.run, lineage=lineage, round=round_, prev=digest(b"p"), state_hash=digest(b"s"))
    message = Heartbeat(base=base, attempt=0, able=True, incarnation=bytes(16))
    data = wire.encode(wire.sign(CheapKeyring(sender), sender, message))
    return peer.handle(Received(data=data, from_peer=sender), now_s)


def inquiries(effects: list[Effect]) -> list[PeerId]:
    return [effect.peer for effect in effects if isinstance(effect, LearnLineage)]


def test_a_lineage_is_proven_before_it_counts_and_liars_are_asked_ever_more_seldom() -> None:
    peer = machine(FIVE[0])
    assert inquiries(beat(peer, FIVE[1], digest(b"invented"), 9, 0.0)) == [FIVE[1]]
    assert inquiries(beat(peer, FIVE[1], digest(b"another"), 9, 0.1)) == [], "one inquiry at a time"
    asked_s = []
    now_s = 0.2
    peer.handle(LineageUnproven(peer=FIVE[1]), now_s)
    while now_s < 600.0:
        now_s += 1.0
        if inquiries(beat(peer, FIVE[1], digest(str(now_s).encode()), 9, now_s)):
            asked_s.append(now_s)
            peer.handle(LineageUnproven(peer=FIVE[1]), now_s)
    assert 5 <= len(asked_s) <= 10
    assert asked_s[-1] - asked_s[-2] > 60.0


def test_who_shows_a_chain_that_is_not_the_one_it_names_is_asked_ever_more_seldom() -> None:
    peer = machine(FIVE[0])
    asked, now_s = 0, 0.0
    while now_s < 600.0:
        now_s += 1.0
        if inquiries(beat(peer, "Stranger", digest(b"invented"), 9, now_s)):
            asked += 1
            peer.handle(LineageLearned(peer="Stranger"), now_s)
    assert 5 <= asked <= 10


def test_strangers_do_not_use_up_the_inquiries_of_members() -> None:
    peer = machine(FIVE[0])
    effects = [effect for number in range(50) for effect in beat(peer, f"S{number}", digest(b"invented"), 9, 0.0)]
    assert len(inquiries(effects)) == 2
    assert inquiries(beat(peer, FIVE[1], digest(b"real"), 9, 0.1)) == [FIVE[1]]


def test_the_loser_follows_when_the_verdict_has_held_for_its_time() -> None:
    peer = machine(FIVE[0])
    other, base = digest(b"other"), STATE.base
    electors, members = STATE.electors, frozenset(FIVE)
    branching = Place(lineage=base.lineage, round=base.round, electors=electors, members=members)
    peer.meeting.grew(
        chain.ChainState(base=Base(**{**fields(base), "lineage": digest(b"mine")}), members=(), electors=FIVE[:1])
    )
    theirs = Place(lineage=other, round=base.round, electors=FIVE[1:4], members=frozenset(FIVE[1:4]))
    effects: list[Effect] = []
    now_s = 0.0
    while now_s < RULES.settle_s - 0.5:
        for elector in FIVE[1:4]:
            effects += beat(peer, elector, other, base.round, now_s)
        if now_s == 0.0:
            learned = LineageLearned(peer=FIVE[1], mine=(branching, peer.meeting._place), theirs=(branching, theirs))
            effects += peer.handle(learned, now_s)
        now_s += 0.5
    assert not any(isinstance(effect, CatchUp) for effect in effects)
    assert "has 3 live electors since round 0, mine has 1" in (peer.meeting.says or "")
    for elector in FIVE[1:4]:
        beat(peer, elector, other, base.round, now_s)
    effects = peer.handle(Tick(), RULES.settle_s + 0.1)
    (follow,) = [effect for effect in effects if isinstance(effect, CatchUp)]
    assert follow.lineage == other


@pytest.mark.parametrize("quorum", [Quorum.TWO_THIRDS, Quorum.MAJORITY])
@pytest.mark.parametrize("back", [DEEP_ROUNDS, DEEP_ROUNDS + 1])
def test_in_an_open_run_bought_keys_of_long_ago_take_nobody_away(quorum: Quorum, back: int) -> None:
    """Two that were the electors then go on from there; a quorum of today's is heard here."""
    rules, sold = replace(RULES, quorum=quorum), ("Sold0", "Sold1")
    state = replace(STATE, base=Base(**{**fields(STATE.base), "round": 200}))
    peer = machine(FIVE[0], rules, state)
    other, at = digest(b"other"), 200 - back
    branching = Place(lineage=state.base.lineage, round=at, electors=sold, members=frozenset(sold))
    mine = [replace(branching, round=number) for number in range(at, 200)] + [peer.meeting._place]
    theirs = (branching, replace(branching, lineage=other), replace(branching, lineage=other, round=at + 1))
    effects: list[Effect] = []
    now_s = 0.0
    while now_s < 4 * rules.settle_s:
        for one in FIVE[1:]:
            effects += beat(peer, one, state.base.lineage, 200, now_s, state.base)
        for one in sold:
            effects += beat(peer, one, other, at + 1, now_s)
        if now_s == 0.0:
            effects += peer.handle(LineageLearned(peer=sold[0], mine=tuple(mine), theirs=theirs), now_s)
        assert not peer.standing.comparing
        now_s += 0.5
    follows = any(isinstance(effect, CatchUp) for effect in effects)
    assert follows == (quorum is Quorum.TWO_THIRDS and back == DEEP_ROUNDS)
    if quorum is Quorum.TWO_THIRDS and back > DEEP_ROUNDS:
        assert f"since round {at}, {back} rounds back" in (peer.meeting.says or "")


def test_in_a_closed_run_a_lineage_that_has_moved_on_is_asked_for_again_at_leisure() -> None:
    peer = machine(FIVE[0])
    other, asked, now_s = digest(b"other"), 0, 0.0
    branching = peer.meeting._place
    grown = replace(branching, lineage=other)
    while now_s < 100.0:
        for elector in FIVE[1:4]:
            if inquiries(beat(peer, elector, other, int(now_s) + 3, now_s)):
                asked += 1
                tip = replace(grown, round=int(now_s) + 1)
                peer.handle(LineageLearned(peer=elector, mine=(branching,), theirs=(branching, grown, tip)), now_s)
        now_s += 1.0
    assert 100.0 / (2 * RULES.settle_s) - 2 <= asked <= 100.0 / (2 * RULES.settle_s) + 4


def test_a_winner_that_is_heard_and_commits_nothing_is_left_again() -> None:
    own = Base(**{**fields(STATE.base), "lineage": digest(b"mine")})
    peer = PeerMachine(
        rules=RULES,
        me=FIVE[0],
        keyring=CheapKeyring(FIVE[0]),
        state=chain.ChainState(
            base=STATE.base, members=tuple(one for one in STATE.members if one[0] != FIVE[0]), electors=FIVE[1:]
        ),
        journal=None,
        journal_lost=False,
        wants_membership=True,
        incarnation=bytes(16),
        now_s=0.0,
        left=own,
    )
    now_s, resumed_s = 0.0, None
    while resumed_s is None and now_s < 4 * 3600.0:
        now_s += 3.0
        for elector in FIVE[1:]:
            effects = beat(peer, elector, STATE.base.lineage, 0, now_s)
            if any(isinstance(effect, LineageResumed) for effect in effects):
                resumed_s = now_s
    assert resumed_s is not None
    assert RULES.fork_timeout_s < resumed_s < 3600.0


def test_who_lost_its_journal_votes_in_no_lineage_before_it_was_out_of_its_members() -> None:
    def life(state: chain.ChainState, journal: bytes | None, *, lost: bool) -> PeerMachine:
        return PeerMachine(
            rules=RULES,
            me=FIVE[0],
            keyring=CheapKeyring(FIVE[0]),
            state=state,
            journal=journal,
            journal_lost=lost,
            wants_membership=True,
            incarnation=bytes(16),
            now_s=0.0,
        )

    def written(peer: PeerMachine) -> bytes:
        return [effect.journal for effect in peer.handle(Tick(), 0.0) if isinstance(effect, Persist)][-1]

    elsewhere = replace(STATE, base=Base(**{**fields(STATE.base), "lineage": digest(b"elsewhere")}))
    out = replace(elsewhere, members=STATE.members[1:], electors=FIVE[1:])
    first = life(STATE, None, lost=True)
    there = life(elsewhere, written(first), lost=False)
    assert not first.standing.voting
    assert not there.standing.voting, "what was promised there may be forgotten as well"
    assert life(out, written(life(STATE, None, lost=True)), lost=False).standing.voting


def fields(base: Base) -> dict[str, object]:
    return {name: getattr(base, name) for name in ("run", "lineage", "round", "prev", "state_hash")}
