"""What one peer makes of offences: whom it convicts, what it asks to have recomputed, whom it believes no more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from chain_samples import CheapKeyring, make_commit, make_rules, peers, sign_ready, sign_roster, step

from protocol import chain, wire
from protocol.chain import ChainState
from protocol.docket import CLAIMS_KEPT, CLAIMS_PER_ACCUSER, CONCERNS_ROUNDS, TELLING_DOUBLINGS, TRIES, Docket, is_flat
from protocol.events import Convicted, Effect, Misbehaved, PartRecomputed, RecomputePart, Send, Verdict
from protocol.evidence import evidence_of, wrong_mean
from protocol.following import COMMITS_KEPT
from protocol.messages import Commit, Evidence, Heartbeat, Message, Offence, Roster, Signed, Vote
from protocol.names import Digest, PeerId, digest
from protocol.outbox import Outbox
from protocol.plan import Plan, Shard
from protocol.presence import Presence

PEERS = peers(5)
ME = PEERS[0]
RULES = make_rules(PEERS)
BEFORE = chain.genesis(RULES)
ROSTER = sign_roster(BEFORE, RULES, [sign_ready(BEFORE, RULES, peer) for peer in PEERS])
COMMIT = make_commit(BEFORE, RULES, ROSTER)
STATE = step(BEFORE, RULES, COMMIT)
HEADERS = [header for header in COMMIT.headers if header is not None and header.sender != ME]
HEADER = HEADERS[0]
CULPRIT = HEADER.sender
CLAIM = wrong_mean(BEFORE.base, HEADER)
GRACE_S = RULES.grace_s


class Bench:
    """A docket with the newest commit at hand, and what it has had done."""

    def __init__(self, state: ChainState = STATE) -> None:
        keyring = CheapKeyring(ME)
        self.outbox = Outbox(me=ME, keyring=keyring)
        self.docket = Docket(
            me=ME, rules=RULES, outbox=self.outbox, presence=Presence(me=ME, timeout_s=RULES.heartbeat_timeout_s)
        )
        self.docket.commit_of = self._commit_of
        self.docket.begin(state)
        self.effects()

    def _commit_of(self, base: Digest) -> Signed[Commit] | None:
        return signed(COMMIT, ME) if base == BEFORE.base.digest() else None

    def effects(self) -> list[Effect]:
        return self.outbox.take()

    def asked(self) -> list[RecomputePart]:
        self.docket.advance()
        return [effect for effect in self.effects() if isinstance(effect, RecomputePart)]

    def told(self, evidence: Evidence, accuser: PeerId) -> str | None:
        return self.docket.told(signed(evidence, accuser))

    def answer(self, verdict: Verdict, part: int = HEADER.message.part) -> str | None:
        return self.docket.recomputed(PartRecomputed(base=BEFORE.base.digest(), part=part, verdict=verdict))

    def convicted(self) -> list[Evidence]:
        return [effect.evidence for effect in self.effects() if isinstance(effect, Convicted)]


def signed(message: Message, peer: PeerId) -> Signed[Any]:
    return wire.sign(CheapKeyring(peer), peer, message)


def accuser() -> PeerId:
    return next(peer for peer in PEERS if peer not in (ME, CULPRIT))


def two_votes(peer: PeerId) -> tuple[Signed[Any], Signed[Any]]:
    vote = Vote(base=STATE.base, attempt=0, phase=1, value=digest(b"one"))
    return signed(vote, peer), signed(replace(vote, value=digest(b"other")), peer)


# ---------------------------------------------------------------- two things signed


def test_two_votes_convict_at_once_and_are_told_once() -> None:
    bench = Bench()
    first, second = two_votes(CULPRIT)
    bench.docket.compare(first, second)
    effects = bench.effects()
    assert [type(effect) for effect in effects] == [Convicted, Send]
    assert CULPRIT in bench.docket
    bench.docket.compare(first, second)
    assert bench.effects() == []
    (evidence,) = bench.docket.for_roster()
    assert evidence.offence is Offence.TWO_VOTES
    bench.docket.begin(STATE)
    (again,) = bench.effects()
    assert isinstance(again, Send), "said again at the next round's start, while the culprit is a member"
    bench.docket.begin(replace(STATE, banned=(CULPRIT,)))
    assert bench.effects() == []
    assert bench.docket.for_roster() == ()
    assert CULPRIT in bench.docket, "by the chain now"


def test_what_is_forged_or_about_a_stranger_convicts_nobody() -> None:
    bench = Bench()
    first, second = two_votes(CULPRIT)
    bench.docket.compare(first, replace(second, signature=b"forged"))
    bench.docket.compare(*two_votes("Stranger"))
    evidence = evidence_of(*two_votes("Stranger"))
    assert evidence is not None
    assert bench.told(evidence, accuser()) is None
    own = evidence_of(first, second)
    assert own is not None
    assert "none" in (bench.told(replace(own, culprit=accuser()), accuser()) or "")
    assert bench.effects() == []


def test_evidence_against_me_is_an_alarm_and_nothing_that_i_spread() -> None:
    bench = Bench()
    evidence = evidence_of(*two_votes(ME))
    assert evidence is not None
    assert bench.told(evidence, accuser()) is None
    assert [type(effect) for effect in bench.effects()] == [Convicted]
    assert ME not in bench.docket
    assert bench.docket.for_roster() == ()


# ---------------------------------------------------------------- wrong means


def test_a_claim_is_recomputed_before_it_is_believed() -> None:
    bench = Bench()
    assert bench.told(CLAIM, accuser()) is None
    assert CULPRIT not in bench.docket
    (asked,) = bench.asked()
    assert (asked.part, asked.audit, asked.sources) == (HEADER.message.part, False, (accuser(),))
    assert bench.asked() == [], "one at a time"
    bench.answer(Verdict.WRONG)
    assert [evidence.offence for evidence in bench.convicted()] == [Offence.WRONG_MEAN]
    assert bench.docket.for_roster() == (), "others need time to recompute it, too"
    bench.outbox.now_s = 2 * GRACE_S
    assert bench.docket.for_roster() == (CLAIM,)
    assert bench.docket.for_roster(carried=[CLAIM]) == (), "an attempt with it failed already"
    bench.docket.commit_of = lambda _: None
    assert bench.docket.for_roster() == (), "nobody remembers that round any more"


def test_who_accuses_falsely_is_named_and_not_believed_again() -> None:
    bench = Bench()
    bench.told(CLAIM, accuser())
    bench.asked()
    bench.answer(Verdict.RIGHT)
    (named,) = [effect for effect in bench.effects() if isinstance(effect, Misbehaved)]
    assert named.peer == accuser()
    assert "not believed again" in named.why
    assert CULPRIT not in bench.docket
    assert "recomputed it, and it was" in (bench.docket.refuted(with_evidence(CLAIM)) or "")
    other = next(header for header in HEADERS if header.message.part != HEADER.message.part)
    bench.told(wrong_mean(BEFORE.base, other), accuser())
    assert bench.asked() == []
    elsewhere = next(peer for peer in PEERS if peer not in (ME, CULPRIT, accuser()))
    bench.told(wrong_mean(BEFORE.base, other), elsewhere)
    assert len(bench.asked()) == 1, "another's word is as good as before"


def test_bytes_that_cannot_be_had_are_asked_for_a_few_times() -> None:
    bench = Bench()
    bench.told(CLAIM, accuser())
    for number in range(TRIES):
        assert len(bench.asked()) == 1, number
        bench.answer(Verdict.UNKNOWN)
        assert bench.asked() == []
        bench.outbox.now_s += 2 * GRACE_S
    assert bench.asked() == []
    assert CULPRIT not in bench.docket


@pytest.mark.parametrize("why", ["another round", "another header", "a stranger's word"])
def test_claims_that_cannot_be_looked_into_cost_nothing(why: str) -> None:
    bench = Bench()
    claim, who = CLAIM, accuser()
    if why == "another round":
        claim = wrong_mean(STATE.base, HEADER)
    elif why == "another header":
        claim = wrong_mean(BEFORE.base, signed(replace(HEADER.message, bitmap=1), CULPRIT))
    else:
        who = "Stranger"
    bench.told(claim, who)
    assert bench.asked() == []


def test_claims_are_bounded() -> None:
    bench = Bench()
    for number in range(2 * CLAIMS_KEPT):
        header = signed(replace(HEADER.message, bitmap=number + 1), CULPRIT)
        bench.told(wrong_mean(BEFORE.base, header), accuser())
    assert len(bench.docket._claims) <= CLAIMS_PER_ACCUSER <= CLAIMS_KEPT


def test_a_liar_that_accuses_all_the_others_first_does_not_silence_the_truth() -> None:
    """Claims of the liar itself take two places, the first that is refuted empties them, and the true one is asked."""
    auditor, liar = accuser(), CULPRIT
    bench = Bench()
    right = [header for header in HEADERS if header.sender != liar]
    for header in right:
        bench.told(wrong_mean(BEFORE.base, header), liar)
    bench.told(CLAIM, auditor)
    assert len(bench.docket._claims) == CLAIMS_PER_ACCUSER + 1
    (first,) = bench.asked()
    bench.answer(Verdict.RIGHT, first.part)
    (true,) = bench.asked()
    assert (true.part, true.sources) == (HEADER.message.part, (auditor,)), "the liar's other claim is dropped"
    bench.answer(Verdict.WRONG)
    assert bench.convicted() == [CLAIM]
    assert not bench.docket._claims


def test_claims_of_a_convicted_accuser_are_dropped() -> None:
    bench = Bench()
    elsewhere = next(header for header in HEADERS if header.sender != CULPRIT)
    bench.told(wrong_mean(BEFORE.base, elsewhere), CULPRIT)
    bench.docket.compare(*two_votes(CULPRIT))
    assert bench.asked() == []


def test_another_accuser_brings_an_exhausted_claim_up_again() -> None:
    """Whoever has found a mean wrong keeps the bytes: another word is another source."""
    bench = Bench()
    bench.told(CLAIM, accuser())
    for _ in range(TRIES):
        bench.asked()
        bench.answer(Verdict.UNKNOWN)
        bench.outbox.now_s += 2 * GRACE_S
    bench.told(CLAIM, accuser())
    assert bench.asked() == []
    other = next(peer for peer in PEERS if peer not in (ME, CULPRIT, accuser()))
    bench.told(CLAIM, other)
    assert [effect.sources for effect in bench.asked()] == [(other,)]


def with_evidence(*evidence: Evidence) -> Roster:
    return replace(ROSTER.message, evidence=evidence)


def test_a_voter_asks_for_what_a_roster_claims_and_says_so() -> None:
    bench = Bench()
    assert bench.docket.unproven(with_evidence(), accuser()) is None
    why = bench.docket.unproven(with_evidence(CLAIM), accuser())
    assert "has not been able to recompute" in (why or "")
    assert len(bench.asked()) == 1
    bench.answer(Verdict.WRONG)
    assert bench.docket.unproven(with_evidence(CLAIM), accuser()) is None
    assert bench.docket.refuted(with_evidence(CLAIM)) is None


# ---------------------------------------------------------------- who has not heard


def sends(bench: Bench) -> list[PeerId | None]:
    return [effect.to for effect in bench.effects() if isinstance(effect, Send)]


def test_who_comes_anew_or_is_elsewhere_is_told_ever_more_seldom() -> None:
    bench = Bench()
    bench.docket.tell(accuser(), anew=True)
    assert sends(bench) == [], "of nobody"
    bench.docket.compare(*two_votes(CULPRIT))
    bench.docket.begin(replace(STATE, members=tuple(one for one in STATE.members if one[0] != CULPRIT)))
    bench.effects()
    told = []
    for second in range(1000):
        bench.outbox.now_s = float(second)
        bench.docket.tell(accuser(), anew=False)
        told += sends(bench)
    assert set(told) == {accuser()}
    assert 4 <= len(told) <= 1000 / (RULES.resend_s * 2**TELLING_DOUBLINGS) + TELLING_DOUBLINGS + 2
    bench.docket.tell(CULPRIT, anew=True)
    assert sends(bench) == []


def later(rounds: int) -> ChainState:
    return replace(STATE, base=replace(STATE.base, round=BEFORE.base.round + rounds))


def test_what_concerns_anyone_is_what_commits_are_remembered_for() -> None:
    assert CONCERNS_ROUNDS == COMMITS_KEPT


def test_what_a_commit_shows_by_itself_is_known_to_all_who_applied_it() -> None:
    """A wrong mean in it is not: whoever could not recompute it has only the quorum's word."""
    evidence = evidence_of(*two_votes(CULPRIT))
    assert evidence is not None
    bench = Bench(replace(STATE, banned=(CULPRIT,)))
    bench.docket.learn(replace(COMMIT, roster=signed(with_evidence(CLAIM), ME)))
    assert CULPRIT in bench.docket
    assert not bench.docket.unheard(CULPRIT)
    bench.docket.learn(replace(COMMIT, roster=signed(with_evidence(evidence), ME)))
    assert bench.docket.unheard(CULPRIT)
    assert bench.effects() == []


def test_a_wrong_mean_that_nobody_can_recompute_any_more_expires() -> None:
    bench = Bench()
    bench.told(CLAIM, accuser())
    bench.asked()
    bench.answer(Verdict.WRONG)
    bench.effects()
    bench.docket.begin(later(CONCERNS_ROUNDS))
    assert len(sends(bench)) == 1
    bench.docket.advance()
    assert CULPRIT in bench.docket
    bench.docket.begin(later(CONCERNS_ROUNDS + 1))
    assert sends(bench) == []
    bench.docket.advance()
    assert CULPRIT not in bench.docket


def test_whom_a_reform_has_left_out_stays_out_while_nobody_goes_on_with_it() -> None:
    bench = Bench()
    bench.told(CLAIM, accuser())
    bench.asked()
    bench.answer(Verdict.WRONG)
    old = later(CONCERNS_ROUNDS + 1)
    bench.docket.begin(replace(old, members=tuple(one for one in old.members if one[0] != CULPRIT)))
    bench.docket.advance()
    assert CULPRIT in bench.docket
    elsewhere = replace(old.base, lineage=digest(b"another"))
    beat = Heartbeat(base=elsewhere, attempt=0, able=True, incarnation=b"i" * 16)
    bench.docket.presence.note(accuser(), beat, 0.0)
    bench.docket.advance()
    assert CULPRIT not in bench.docket


def test_what_was_verified_outlives_a_restart() -> None:
    bench = Bench()
    bench.told(CLAIM, accuser())
    bench.asked()
    bench.answer(Verdict.WRONG)
    assert bench.docket.unsaved
    saved = bench.docket.saved()
    assert not bench.docket.unsaved
    other = Bench()
    other.docket.commit_of = lambda _: None
    other.docket.restore(saved)
    assert CULPRIT in other.docket
    assert other.docket.unproven(with_evidence(CLAIM), accuser()) is None


# ---------------------------------------------------------------- audits


def test_an_elector_audits_one_part_of_others_and_convicts_by_itself() -> None:
    bench = Bench()
    bench.docket.audit(BEFORE, COMMIT, STATE.base.prev)
    (asked,) = [effect for effect in bench.effects() if isinstance(effect, RecomputePart)]
    header = COMMIT.headers[asked.part]
    assert asked.audit
    assert header is not None
    assert header.sender != ME
    assert bench.answer(Verdict.WRONG, asked.part) is None
    (evidence,) = bench.convicted()
    assert evidence == wrong_mean(BEFORE.base, header)


def test_no_elector_no_audit_and_no_answer_no_conviction() -> None:
    bench = Bench()
    bench.docket.audit(replace(BEFORE, electors=PEERS[1:]), COMMIT, STATE.base.prev)
    assert bench.effects() == []
    bench.answer(Verdict.WRONG)
    assert bench.effects() == [], "nobody has asked for this"


def test_in_a_deeper_tree_nobody_is_convicted() -> None:
    """An honest root adds what an inner node sends it."""
    deep = Plan(shards=(Shard(share=1, parents=(-1, 0, 1, 0, 0)),))
    roster = replace(ROSTER.message, plan=deep)
    assert not is_flat(roster, RULES, 0)
    assert is_flat(ROSTER.message, RULES, 0)
    bench = Bench()
    commit = replace(COMMIT, roster=signed(roster, ROSTER.sender))
    bench.docket.audit(BEFORE, commit, STATE.base.prev)
    (asked,) = [effect for effect in bench.effects() if isinstance(effect, RecomputePart)]
    why = bench.answer(Verdict.WRONG, asked.part)
    assert "whichever node of its tree" in (why or "")
    assert bench.effects() == []
