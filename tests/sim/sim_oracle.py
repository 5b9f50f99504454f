"""The observer of a simulated swarm: it sees everything and checks the invariants of protocol section 12."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sim_model import PARTS, Account, Outbox, Payload

from protocol import chain, wire
from protocol.chain import ChainState
from protocol.lineages import Place, Position
from protocol.messages import Commit
from protocol.names import Digest, PeerId


class Violation(AssertionError):
    """An invariant does not hold."""


class Oracle:
    def __init__(self) -> None:
        self.states: dict[tuple[Digest, int], ChainState] = {}
        """(lineage, round) → what everyone there must hold."""
        self.decisions: dict[tuple[Digest, int], Digest] = {}
        self.payloads: dict[Digest, Payload] = {}
        self.frozen: dict[tuple[PeerId, Digest], Outbox] = {}
        """(peer, base) → the first contribution that it froze there; there must be no second."""
        self.births: set[Digest] = set()
        """Lineages that a REFORM, signed by all, has made."""
        self.commits = 0
        self.liars: set[PeerId] = set()
        """Roots that a test has made fabricate means: what they sign says nothing of I2."""

    def check_state(self, peer: PeerId, state: ChainState) -> None:
        """I1 (all who hold commit r hold identical state) and I4 (lineages come from REFORM alone)."""
        key = (state.base.lineage, state.base.round)
        known = self.states.setdefault(key, state)
        if known != state:
            raise Violation(f"I1: {peer} holds another state of round {key[1]} than others do")
        if self.births and state.base.lineage not in self.births:
            raise Violation(f"I4: {peer} is on a lineage that nobody reformed")

    def check_commit(self, peer: PeerId, state: ChainState, commit: Commit) -> None:
        """I1 (one decision a round) and I2 (each part is the mean over its bitmap of what was frozen once)."""
        base = state.base.digest()
        decision = chain.decision(base, wire.roster_id(commit.roster), commit.headers)
        known = self.decisions.setdefault((state.base.lineage, state.base.round), decision)
        if known != decision:
            raise Violation(f"I1: {peer} found a second decision of round {state.base.round}")
        self.commits += 1
        readys = commit.roster.message.readys
        for header in commit.headers:
            if header is None or header.sender in self.liars:
                continue
            payload = self.payloads[header.message.hash]
            peers = [signed.sender for bit, signed in enumerate(readys) if header.message.bitmap >> bit & 1]
            if peers != [entry[0] for entry in payload.contributions]:
                raise Violation(f"I2: part {payload.part} holds others' work than its bitmap says")
            recomputed = Payload.of(
                payload.part, {who: (weight, value) for who, weight, value in payload.contributions}
            )
            if recomputed.mean != payload.mean:
                raise Violation(f"I2: part {payload.part} is not the weighted mean of its contributions")
            for who, _, value in payload.contributions:
                if self.frozen[who, base].values[payload.part] != value:
                    raise Violation(f"I2: part {payload.part} holds work of {who} that it froze a second time")

    def check_account(self, peer: PeerId, account: Account) -> None:
        """I3: produced = counted + carried + discarded."""
        if not account.balanced():
            raise Violation(f"I3: the account of {peer} does not balance: {account}")

    def check_counted(
        self, peer: PeerId, account: Account, counted_at: Mapping[Position, Sequence[int]], course: Sequence[Place]
    ) -> None:
        """I3 over lineages: what a peer holds for counted was counted on the chain that it is on, once."""
        places = {place.position for place in course}
        strays = [position for position in counted_at if position not in places]
        sums = [sum(values[part] for values in counted_at.values()) for part in range(PARTS)]
        if strays or sums != account.counted:
            raise Violation(f"I3: {peer} counts {account.counted}, its chain {sums}, {len(strays)} places of others")
