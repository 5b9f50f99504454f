"""REFORM: when too few electors are left, all of a willing group sign a new lineage (protocol section 10).

Signing is a promise, durable before it is sent: a signer never votes in the old lineage again until it has joined it
anew, and follows only the REFORM with the highest `k` that it signed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from protocol import chain, commits, wire
from protocol.chain import ChainState
from protocol.journal import SignedReform
from protocol.messages import Reform, Reformed, ReformVote, Signed
from protocol.names import PeerId, digest, encode_integer, initial_lineage
from protocol.rules import Quorum
from protocol.standing import Derived, Standing

CALLS_AHEAD = 8
"""A call for a `k` further ahead than this is not followed: nobody can run my counter up at will."""
NO_JOINS: Mapping[PeerId, object] = {}
MUTE_ATTEMPTS = 4
"""An elector that votes for nothing in so many attempts of maximal length counts as not heard."""
BODIES_KEPT = 256
"""REFORMs, and bodies with signatures, remembered; one a sender and `k`."""


class Reforming:
    """The REFORM of one base.

    Args:
        signed: what I have signed at this base in an earlier life.
        joins: who asks to join at this base, as it changes: they hold its state, and in closed runs may be in E′.
    """

    def __init__(
        self,
        *,
        standing: Standing,
        state: ChainState,
        signed: SignedReform | None,
        joins: Mapping[PeerId, object] = NO_JOINS,
    ) -> None:
        self.standing = standing
        self.rules = standing.rules
        self.outbox = standing.outbox
        self.me = standing.me
        self.state = state
        self.quorum = chain.quorum(state, self.rules)
        self.member = chain.member(state, self.me) is not None
        self._joins = joins
        self.mute: dict[PeerId, int] = {}
        """Elector → attempts of maximal length in which it voted for nothing that I voted for."""
        self.lost_since_s: float | None = None
        """Since when fewer than a quorum of electors are heard, on my lineage and able."""
        self.active = False
        self.k = 0
        self.wants_in = False
        """Without being a member I ask to join here."""
        self.started_s = 0.0
        self.call_s = -math.inf
        self.willing: dict[int, set[PeerId]] = {}
        self.bodies: dict[bytes, Signed[Reform]] = {}
        self.signatures: dict[bytes, dict[PeerId, bytes]] = {}
        self.mine: Signed[ReformVote] | None = None
        self._heard: Derived[set[PeerId]] = Derived()
        if signed is not None:
            self.mine = wire.decode(signed.envelope)
            self.k = signed.k
            self._note_signature(self.mine)

    def journal(self) -> SignedReform | None:
        if self.mine is None:
            return None
        return SignedReform(k=self.mine.message.k, envelope=wire.encode(self.mine))

    # ------------------------------------------------------------ facts

    def on_vote(self, signed: Signed[ReformVote]) -> None:
        vote = signed.message
        if not self._may_sign(signed.sender) or vote.k > self.k + CALLS_AHEAD:
            return
        if vote.sign:
            self._note_signature(signed)
            return
        self.willing.setdefault(vote.k, set()).add(signed.sender)
        for old in [k for k in self.willing if k < self.k]:
            del self.willing[old]
        if self.active and vote.k > self.k:
            self._call(vote.k)

    def _note_signature(self, signed: Signed[ReformVote]) -> None:
        if signed.message.reform in self.signatures or len(self.signatures) < BODIES_KEPT:
            self.signatures.setdefault(signed.message.reform, {})[signed.sender] = signed.signature

    def on_reform(self, signed: Signed[Reform]) -> None:
        reform = signed.message
        members_known = all(self._may_sign(peer) for peer in reform.members)
        if not members_known or signed.sender not in reform.members or reform.k > self.k + CALLS_AHEAD:
            return
        if len(reform.members) < max(1, self.rules.min_peers) or tuple(sorted(set(reform.members))) != reform.members:
            return
        known = any((body.sender, body.message.k) == (signed.sender, reform.k) for body in self.bodies.values())
        if not known and len(self.bodies) < BODIES_KEPT:
            self.bodies.setdefault(signed.body, signed)

    def left_attempt(self, silent: Collection[PeerId], voted: Collection[PeerId]) -> None:
        """An attempt of maximal length is over, in which I voted for a proposal: who else did, and who did not."""
        for peer in silent:
            self.mute[peer] = self.mute.get(peer, 0) + 1
        for peer in voted:
            self.mute.pop(peer, None)
        self._heard = Derived()

    def _may_sign(self, peer: PeerId) -> bool:
        if chain.member(self.state, peer) is not None:
            return True
        # In an open run keys cost nothing (`protocol.commits.verify_reform`).
        closed = self.rules.quorum is not Quorum.TWO_THIRDS
        allowed = self.rules.allowed_peers is None or peer in self.rules.allowed_peers
        return closed and allowed and (peer == self.me or peer in self._joins)

    def _is_mute(self, peer: PeerId) -> bool:
        return self.mute.get(peer, 0) >= MUTE_ATTEMPTS

    # ------------------------------------------------------------ what follows

    def heard(self) -> set[PeerId]:
        """Electors that can decide here now: heard on this lineage, able and not leaving; me if I vote."""
        standing = self.standing
        found = self._heard.get((standing.presence.version, standing.voting, standing.able), self.state)
        if found is None:
            lineage = self.state.base.lineage
            found = standing.presence.able_on(lineage, self.state.electors, self.outbox.now_s)
            if self.me in self.state.electors and standing.voting and standing.able:
                found.add(self.me)
            if self.mute:
                found = {peer for peer in found if not self._is_mute(peer)}
            self._heard.put(found)
        return found

    def advance(self) -> Reformed | None:
        """The new lineage once all of its members have signed it."""
        heard = self.heard()
        if len(heard) >= self.quorum:
            self.standing.quorum_was_heard = True
        takes_part = self.member or (self.wants_in and self._may_sign(self.me) and self._members_heard())
        if len(heard) >= self.quorum or not takes_part or self.standing.leaving or self.standing.left is not None:
            self.lost_since_s, self.active = None, False
            return self._born()
        if self.lost_since_s is None:
            self.lost_since_s = self.outbox.now_s
        if self.waits_for_the_beginning():
            return self._born()
        if self.too_few():
            # Nobody is called who could not come to anything: `k` would run away from those who come back.
            self.active = False
            return self._born()
        if not self._hopeless(heard) and not self.outbox.due(self.lost_since_s + self.rules.fork_timeout_s):
            return self._born()
        if not self.active:
            self.active = True
            self._call(max([self.k, *self.willing]) if self.mine is None else max([self.k + 1, *self.willing]))
        if self.outbox.due(self.started_s + 2 * self.rules.reform_collect_s):
            self._call(self.k + 1)
        if self.outbox.due(self.call_s + self.rules.resend_s):
            self.call_s = self.outbox.now_s
            self.outbox.due(self.call_s + self.rules.resend_s)
            self.outbox.broadcast(self.outbox.sign(ReformVote(base=self.state.base, k=self.k, sign=False, reform=b"")))
            for body in self.bodies.values():
                if body.sender == self.me and body.message.k == self.k:
                    self.outbox.broadcast(body)
            if self.mine is not None and self.mine.message.k == self.k:
                self.outbox.broadcast(self.mine)
        self._collect()
        self._sign()
        return self._born()

    def waits_for_the_beginning(self) -> bool:
        """Founders who start at different times have not lost each other: a run begins when a quorum of them is there.

        Without this, the first of four to start would go on alone after `T_fork`, and three more lineages follow.
        """
        base = self.state.base
        founding = base.round == 0 and base.lineage == initial_lineage(base.run)
        # Without its journal a founder cannot know: a founder alone would wait for itself for ever.
        return founding and self.standing.voting and not self.standing.quorum_was_heard

    def too_few(self) -> bool:
        """Whether fewer members are heard than a new lineage needs (`min_peers`): this side pauses."""
        return len(self._candidates()) < self.rules.min_peers

    def missing(self) -> list[PeerId]:
        """Electors that cannot decide here now: silent, elsewhere, unable or leaving."""
        heard = self.heard()
        return [peer for peer in self.state.electors if peer not in heard]

    def _hopeless(self, heard: set[PeerId]) -> bool:
        """LEAVEs alone make a quorum impossible, and those who leave are gone: nothing is gained by waiting."""
        leaves = self.standing.presence.leaves
        staying = [peer for peer in self.state.electors if peer not in leaves]
        return len(staying) < self.quorum and not any(
            peer in self.standing.fresh for peer in self.state.electors if peer in leaves
        )

    def _call(self, k: int) -> None:
        self.k = k
        self.started_s = self.outbox.now_s
        self.call_s = -math.inf
        self.willing.setdefault(k, set()).add(self.me)

    def _candidates(self) -> set[PeerId]:
        """Who may sign and is heard on this base, me included; also those who gave up voting in this lineage."""
        fresh, leaves = self.standing.fresh, self.standing.presence.leaves
        joining = [peer for peer in self._joins if self._may_sign(peer)]
        return {self.me} | {
            peer
            for peer in (*(peer for peer, _ in self.state.members), *joining)
            if peer in fresh and fresh[peer].base == self.state.base and peer not in leaves and not self._is_mute(peer)
        }

    def _members_heard(self) -> bool:
        """Whether a member other than me is there: a lineage without one of those before it is none."""
        return any(chain.member(self.state, peer) is not None for peer in self._candidates() - {self.me})

    def collector(self) -> PeerId:
        """The first heard elector by `H(prev, k, peer)`; without one the first heard member."""
        candidates = self._candidates()
        members = {peer for peer in candidates if chain.member(self.state, peer) is not None}
        among = candidates.intersection(self.state.electors) or members or candidates
        prev, number = self.state.base.prev, encode_integer(self.k)
        return min(among, key=lambda peer: digest(b"atoll/collector", prev, number, peer.encode()))

    def _collect(self) -> None:
        if self.collector() != self.me or any(
            body.sender == self.me and body.message.k == self.k for body in self.bodies.values()
        ):
            return
        willing = {peer for peer in self.willing.get(self.k, set()) if not self._is_mute(peer)} | {self.me}
        waiting = not self._candidates() <= willing
        if waiting and not self.outbox.due(self.started_s + self.rules.reform_collect_s):
            return
        if len(willing) < max(1, self.rules.min_peers):
            return
        signed = self.outbox.sign(Reform(base=self.state.base, k=self.k, members=tuple(sorted(willing))))
        self.bodies[signed.body] = signed
        self.outbox.broadcast(signed)

    def _sign(self) -> None:
        newest = -1 if self.mine is None else self.mine.message.k
        for body, signed in self.bodies.items():
            if signed.message.k == self.k > newest and self.me in signed.message.members:
                self.mine = self.outbox.sign(ReformVote(base=self.state.base, k=self.k, sign=True, reform=body))
                self._note_signature(self.mine)
                self.standing.voting = False
                self.standing.persist()
                self.outbox.broadcast(self.mine)
                return

    def _born(self) -> Reformed | None:
        """Only what I signed last can bear me along."""
        if self.mine is None:
            return None
        body = self.mine.message.reform
        given, proposed = self.signatures.get(body, {}), self.bodies.get(body)
        if proposed is None or not set(proposed.message.members) <= set(given):
            return None
        signatures = tuple((peer, given[peer]) for peer in proposed.message.members)
        return self.accepts(Reformed(reform=proposed.message, body=body, signatures=signatures))

    def accepts(self, reformed: Reformed) -> Reformed | None:
        """`reformed` if it is complete and is the last one that I signed."""
        if self.mine is None or self.mine.message.reform != reformed.body:
            return None
        try:
            commits.verify_reform(self.state, self.rules, reformed, self.outbox.keyring)
        except commits.InvalidCommit:
            return None
        return reformed
