"""Who was caught at what, as this peer has verified it, and what waits to be recomputed (protocol section 7).

Two signed things that exclude each other are verified on the spot. A mean that is said to be none is recomputed from
the bytes that READYs bind (`RecomputePart`), by whoever audits and by each who is told. What is verified here is told
to everyone once, again at the start of each round until the chain has left the culprit out, and carried in the ROSTERs
that this peer makes. A culprit's messages are not listened to any more, as if it were dead: that is always safe, and
where the other electors are too few without it, the REFORM of section 10 follows by its ordinary rule.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Final

from protocol import chain, planning, wire
from protocol.chain import ChainState
from protocol.events import Convicted, Misbehaved, PartRecomputed, RecomputePart, Verdict
from protocol.evidence import check_evidence, evidence_of, wrong_mean
from protocol.fields import MAX_EVIDENCE
from protocol.messages import Commit, Evidence, Offence, PartHeader, Roster, Signed
from protocol.names import Digest, PeerId, digest
from protocol.outbox import Outbox
from protocol.presence import Presence
from protocol.rules import Rules

CULPRITS_KEPT: Final = 64
CONVICTIONS_SAVED: Final = 8
"""In the journal; the newest."""
CONCERNS_ROUNDS: Final = 8
"""For so many rounds after its own a wrong mean can be recomputed by others and carried in a ROSTER: as long as
commits are remembered (`following.COMMITS_KEPT`)."""
TOLD_KEPT: Final = 1024
TELLING_DOUBLINGS: Final = 6
"""A peer that stays elsewhere is told again after 1, 2, … at most 2^6 repetition periods."""
CLAIMS_KEPT: Final = 16
"""Of wrong means that others told of; each costs a part's bytes to check."""
CLAIMS_PER_ACCUSER: Final = 2
"""Open at a time: who accuses everybody before the truth is told must not take the truth's place."""
SETTLED_KEPT: Final = 64
AUDITS_KEPT: Final = 4
"""Of which the answer is awaited."""
TRIES: Final = 3
"""Times that a claim whose bytes were not to be had is looked into."""

CommitOf = Callable[[Digest], Signed[Commit] | None]
"""The commit that extends the base with this digest, if it is remembered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Conviction:
    evidence: Evidence
    since_s: float


@dataclass(slots=True, kw_only=True)
class _Claim:
    """A wrong mean that somebody told of."""

    evidence: Evidence
    accusers: set[PeerId]
    asked: bool = False
    tries: int = 0
    next_s: float = 0.0

    @property
    def key(self) -> tuple[Digest, int]:
        return _key(self.evidence)


class Docket:
    """Args:
    commit_of: see `CommitOf`; set by the machine that keeps the commits.
    """

    def __init__(self, *, me: PeerId, rules: Rules, outbox: Outbox, presence: Presence) -> None:
        self.me = me
        self.rules = rules
        self.outbox = outbox
        self.presence = presence
        self.commit_of: CommitOf = lambda _: None
        self.state: ChainState
        self._convicted: dict[PeerId, _Conviction] = {}
        self._told: dict[PeerId, tuple[int, float]] = {}
        """Who was told of them one by one: how often, and when again at the earliest."""
        self.unsaved = False
        """A conviction is not in the journal yet."""
        self._claims: dict[tuple[Digest, int], _Claim] = {}
        self._audits: dict[tuple[Digest, int], Commit] = {}
        """Parts that I recompute by lot."""
        self._false_accusers: set[PeerId] = set()
        """Whose claims are not looked into any more, as long as this process lives."""
        self._refuted: dict[tuple[Digest, int], None] = {}
        """Parts that I have recomputed, and they were right."""
        self._exhausted: dict[tuple[Digest, int], set[PeerId]] = {}
        """Of claims whose bytes were not to be had: whose word is not enough to try again."""

    # ------------------------------------------------------------ whom

    def __contains__(self, peer: object) -> bool:
        """Whether `peer` was caught: by what I verified, or by the chain."""
        return peer != self.me and (peer in self._convicted or peer in self.state.banned)

    def unheard(self, peer: PeerId) -> bool:
        """Whether I do not even count `peer` as live. A ban of the chain alone takes its voice, not its presence:
        lineages are compared by who is live, with others in whose chain there is no such ban.
        """
        return peer != self.me and peer in self._convicted

    def for_roster(self, *, carried: Collection[Evidence] = ()) -> tuple[Evidence, ...]:
        """What a ROSTER of mine carries.

        A wrong mean only after others had the time to recompute it, too; no longer than they remember the commit that
        it is in; and not again in the same round when an attempt with it failed: whoever has restarted since cannot
        recompute it, and that must not cost every attempt.

        Args:
            carried: evidence in the rosters of this round's earlier attempts.
        """
        ready = [
            conviction.evidence
            for peer, conviction in sorted(self._convicted.items())
            if peer != self.me and self._may_carry(conviction, carried)
        ]
        return tuple(ready[:MAX_EVIDENCE])

    def _may_carry(self, conviction: _Conviction, carried: Collection[Evidence]) -> bool:
        evidence = conviction.evidence
        if evidence.offence is not Offence.WRONG_MEAN:
            return self._concerns(evidence)
        return (
            self._concerns(evidence)
            and evidence not in carried
            and self._committed(evidence) is not None
            and self.outbox.due(conviction.since_s + 2 * self.rules.grace_s)
        )

    # ------------------------------------------------------------ two things signed

    def compare(self, first: Signed[Any] | None, second: Signed[Any]) -> None:
        """Two messages of one peer: if they exclude each other, it is caught."""
        if first is None or first.sender == self.me or first.body == second.body or second.sender in self:
            return
        evidence = evidence_of(first, second)
        if evidence is not None and check_evidence(self.rules, evidence, self.outbox.keyring) is None:
            self._convict(evidence)

    # ------------------------------------------------------------ told by others

    def told(self, signed: Signed[Evidence]) -> str | None:
        """Evidence from a peer; why it is misbehaviour to send this, or None."""
        return self._consider(signed.message, signed.sender)

    def _consider(self, evidence: Evidence, accuser: PeerId) -> str | None:
        if evidence.culprit in self or not self._concerns(evidence):
            return None
        why = check_evidence(self.rules, evidence, self.outbox.keyring)
        if why is not None:
            return f"sent evidence that is none: {why}"
        if evidence.offence is not Offence.WRONG_MEAN:
            self._convict(evidence)
        elif evidence.culprit != self.me:
            self._claim(evidence, accuser)
        return None

    def _claim(self, evidence: Evidence, accuser: PeerId) -> None:
        key = _key(evidence)
        if accuser in self._false_accusers or key in self._refuted or accuser in self._exhausted.get(key, ()):
            return
        if chain.member(self.state, accuser) is None:
            return
        claim = self._claims.get(key)
        if claim is not None:
            claim.accusers.add(accuser)
            return
        accused = sum(accuser in claim.accusers for claim in self._claims.values())
        if len(self._claims) >= CLAIMS_KEPT or accused >= CLAIMS_PER_ACCUSER:
            return
        if self._committed(evidence) is not None:
            self._claims[key] = _Claim(evidence=evidence, accusers={accuser})

    def _believe_no_more(self, accuser: PeerId) -> None:
        """Its claims are dropped, but where another makes them, too, or the answer is on its way."""
        for key, claim in list(self._claims.items()):
            claim.accusers.discard(accuser)
            if not claim.accusers and not claim.asked:
                del self._claims[key]

    def _settle(self, claim: _Claim, verdict: Verdict) -> None:
        """A claim was looked into: one that is settled makes room at once."""
        claim.asked = False
        if verdict is Verdict.UNKNOWN and claim.tries < TRIES and claim.accusers:
            return
        del self._claims[claim.key]
        if verdict is Verdict.WRONG:
            self._convict(claim.evidence)
        elif verdict is Verdict.UNKNOWN:
            _bound(self._exhausted)
            self._exhausted[claim.key] = self._exhausted.get(claim.key, set()) | claim.accusers
        else:
            _bound(self._refuted)
            self._refuted[claim.key] = None
            part = claim.key[1]
            for accuser in sorted(claim.accusers):
                self._false_accusers.add(accuser)
                why = f"said that part {part} of {claim.evidence.culprit} was no mean; it was: it is not believed again"
                self.outbox.emit(Misbehaved(peer=accuser, why=why))
                self._believe_no_more(accuser)

    def _committed(self, evidence: Evidence) -> Commit | None:
        """The commit that holds this very header, with a plan in which its root alone answers for the mean."""
        assert evidence.base is not None
        found = self.commit_of(evidence.base.digest())
        header = evidence.headers[0]
        part = header.message.part
        if found is None or part >= len(found.message.headers):
            return None
        there = found.message.headers[part]
        flat = there is not None and is_flat(found.message.roster.message, self.rules, part)
        return found.message if flat and there is not None and there.body == header.body else None

    def unproven(self, roster: Roster, accuser: PeerId) -> str | None:
        """Why I cannot stand by this roster's evidence yet, or None; asks for what it takes."""
        for evidence in roster.evidence:
            if evidence.offence is not Offence.WRONG_MEAN or evidence.culprit in self:
                continue
            self._consider(evidence, accuser)
            return (
                f"the roster says that part {evidence.headers[0].message.part} of {evidence.culprit} was no mean, "
                "which this node has not been able to recompute"
            )
        return None

    def refuted(self, roster: Roster) -> str | None:
        """Evidence in this roster that I have found to be false."""
        for evidence in roster.evidence:
            if evidence.offence is Offence.WRONG_MEAN and _key(evidence) in self._refuted:
                return (
                    f"the roster says that part {evidence.headers[0].message.part} of {evidence.culprit} was no mean; "
                    "this node has recomputed it, and it was"
                )
        return None

    # ------------------------------------------------------------ recomputing

    def learn(self, commit: Commit) -> None:
        """What a commit's evidence shows by itself I know from now on, too, for those in whose lineage it is not."""
        for evidence in commit.roster.message.evidence:
            if evidence.offence is not Offence.WRONG_MEAN and evidence.culprit not in self._convicted:
                self._know(evidence)

    def _know(self, evidence: Evidence) -> None:
        while len(self._convicted) >= CULPRITS_KEPT:
            self._convicted.pop(next(iter(self._convicted)))
        self._convicted[evidence.culprit] = _Conviction(evidence=evidence, since_s=self.outbox.now_s)
        self._told.clear()
        self.unsaved = True
        if evidence.culprit != self.me:
            self.presence.forget(evidence.culprit)

    def audit(self, before: ChainState, commit: Commit, commit_hash: Digest) -> None:
        """After my commit: recompute one part of others', drawn by `H(commit, me)`, if I was an elector. Where only one
        votes, the other members audit it.
        """
        while len(self._audits) >= AUDITS_KEPT:
            self._audits.pop(next(iter(self._audits)))
        parts = [header for header in commit.headers if header is not None and header.sender != self.me]
        audits = before.electors if len(before.electors) > 1 else tuple(peer for peer, _ in before.members)
        if self.me not in audits or not parts:
            return
        lot = int.from_bytes(digest(b"atoll/audit", commit_hash, self.me.encode())[:8], "little")
        part = parts[lot % len(parts)].message.part
        self._audits[before.base.digest(), part] = commit
        self.outbox.emit(RecomputePart(commit=commit, part=part, audit=True))

    def recomputed(self, event: PartRecomputed) -> str | None:
        """The answer to `RecomputePart`: (for the log) what is wrong although nobody can be convicted of it."""
        key = (event.base, event.part)
        commit, claim = self._audits.pop(key, None), self._claims.get(key)
        if claim is not None:
            self._settle(claim, event.verdict)
        if commit is None or event.verdict is not Verdict.WRONG:
            return None
        header, roster = commit.headers[event.part], commit.roster.message
        assert header is not None
        if not is_flat(roster, self.rules, event.part):
            return f"part {event.part} of round {roster.base.round} is not the mean, by whichever node of its tree"
        self._convict(wrong_mean(roster.base, header))
        return None

    def advance(self) -> None:
        """Ask for the next claim's recomputation, one at a time."""
        if self._convicted:
            self._expire()
        if any(claim.asked for claim in self._claims.values()):
            return
        for claim in self._claims.values():
            if claim.evidence.culprit in self:
                continue
            commit = self._committed(claim.evidence)
            if commit is not None and self.outbox.due(claim.next_s):
                claim.asked, claim.tries = True, claim.tries + 1
                claim.next_s = self.outbox.now_s + self.rules.grace_s
                sources = tuple(sorted(claim.accusers))
                self.outbox.emit(RecomputePart(commit=commit, part=claim.key[1], audit=False, sources=sources))
                return

    # ------------------------------------------------------------ rounds

    def begin(self, state: ChainState) -> None:
        """A round begins on `state`: forget what it settled, say again what it did not."""
        self.state = state
        self._claims = {
            key: claim
            for key, claim in self._claims.items()
            if claim.evidence.culprit not in state.banned and self._committed(claim.evidence) is not None
        }
        for peer, known in self._convicted.items():
            if peer != self.me and self._concerns(known.evidence):
                self.outbox.broadcast(self.outbox.sign(known.evidence))

    def _concerns(self, evidence: Evidence) -> bool:
        """Whether the run can leave this culprit out: a member, or one that a commit has counted on as a root."""
        if evidence.culprit in self.state.banned:
            return False
        if evidence.offence is Offence.WRONG_MEAN:
            return not self._too_old(evidence)
        return chain.member(self.state, evidence.culprit) is not None

    def _too_old(self, evidence: Evidence) -> bool:
        """A wrong mean that nobody can recompute or carry any more."""
        return evidence.base is not None and self.state.base.round > evidence.base.round + CONCERNS_ROUNDS

    def _expire(self) -> None:
        """Listen again to whoever only I could convict: others never will, and two views of who lives must not last.

        It is still a member here, or somebody goes on with it in another lineage. Where nobody does, it stays out.
        """
        old = [peer for peer, known in self._convicted.items() if self._too_old(known.evidence)]
        if not old:
            return
        mine = self.state.base.lineage
        others = self.presence.fresh(self.outbox.now_s).items()
        apart = any(heard.base.lineage != mine and peer not in self for peer, heard in others)
        for peer in old:
            if apart or chain.member(self.state, peer) is not None:
                del self._convicted[peer]
                self.unsaved = True

    def tell(self, peer: PeerId, *, anew: bool) -> None:
        """`peer` comes anew, or is in another lineage than I: it may never have heard of those whom I do not hear.

        Who lives is what lineages are compared by, so it must know. Seldom, and ever more so.
        """
        if not self._convicted or peer in self:
            return
        times, next_s = (0, 0.0) if anew else self._told.get(peer, (0, 0.0))
        if self.outbox.now_s < next_s:
            return
        pause_s = self.rules.resend_s * 2 ** min(times, TELLING_DOUBLINGS)
        self._told.pop(peer, None)
        while len(self._told) >= TOLD_KEPT:
            self._told.pop(next(iter(self._told)))
        self._told[peer] = (times + 1, self.outbox.now_s + pause_s)
        known = [one.evidence for culprit, one in self._convicted.items() if culprit not in (self.me, peer)]
        for evidence in [one for one in known if not self._too_old(one)][-MAX_EVIDENCE:]:
            self.outbox.send(peer, self.outbox.sign(evidence))

    # ------------------------------------------------------------ across a restart

    def saved(self) -> tuple[bytes, ...]:
        """For the journal."""
        self.unsaved = False
        known = [one.evidence for culprit, one in self._convicted.items() if culprit != self.me]
        return tuple(wire.encode(self.outbox.sign(evidence)) for evidence in known[-CONVICTIONS_SAVED:])

    def restore(self, saved: Collection[bytes]) -> None:
        """What an earlier life has verified; raises `wire.WireError` where it was written in another form."""
        for envelope in saved:
            signed: Signed[Any] = wire.decode(envelope)
            if isinstance(signed.message, Evidence) and signed.sender == self.me:
                evidence = signed.message
                self._convicted[evidence.culprit] = _Conviction(evidence=evidence, since_s=self.outbox.now_s)

    def _convict(self, evidence: Evidence) -> None:
        """Verified here. Told to everyone once; the culprit is not listened to from now on."""
        culprit = evidence.culprit
        if culprit in self or culprit in self._convicted or not self._concerns(evidence):
            return
        self._know(evidence)
        self.outbox.emit(Convicted(evidence=evidence))
        if culprit != self.me:
            self._believe_no_more(culprit)
            self.outbox.broadcast(self.outbox.sign(evidence))


def is_flat(roster: Roster, rules: Rules, part: int) -> bool:
    """Whether the part's contributions all went straight to its root: else an inner node's sum may be what is wrong."""
    assert roster.plan is not None
    shard = planning.deal(roster.base.digest(), rules.part_count, roster.plan)[part]
    tree = planning.Tree(roster.plan.shards[shard].parents, planning.contributing_of(roster, rules))
    return not any(tree.heights[slot] for slot in tree.slots[tree.root])


def _key(evidence: Evidence) -> tuple[Digest, int]:
    """Of a wrong mean: the base of its round, and its part."""
    assert evidence.base is not None
    header: Signed[PartHeader] = evidence.headers[0]
    return evidence.base.digest(), header.message.part


def _bound(settled: dict[tuple[Digest, int], Any]) -> None:
    """Makes room for one more, at the cost of the oldest."""
    while len(settled) >= SETTLED_KEPT:
        settled.pop(next(iter(settled)))
