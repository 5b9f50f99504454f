"""The observer of a simulated swarm: it sees everything and checks the invariants of protocol section 12.

I1  one decision per lineage and round, and identical states; nobody signs two versions of one thing.
I2  each part is the weighted mean of what its bitmap names, as it was frozen, once; a quorum's disks hold it.
I3  per peer and part: produced = counted + carried + discarded.
I4  a lineage is born of a REFORM that all signed, and who signed it votes in the old one no more.
I5  while a quorum of honest, able electors is connected, rounds commit within `BOUND_S`; in fair weather all end on one
    lineage and go on, and nobody is dropped. Nobody honest is ever accused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sim_model import PARTS, Account, Outbox, Payload

from protocol import chain, wire
from protocol.chain import ChainState
from protocol.lineages import Place, Position
from protocol.messages import Commit, PartHeader, Proposal, Ready, ReformVote, Roster, Signed, Vote
from protocol.names import Digest, PeerId
from protocol.planning import contributing_of
from protocol.rules import Rules
from protocol.weights import RosterWeights

if TYPE_CHECKING:
    from sim_node import Node
    from sim_world import World

BOUND_S = 150.0
"""Of I5, in the worst weather of the profiles."""


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
        """Decisions."""
        self.liars: set[PeerId] = set()
        """Roots that a test has made fabricate means: what they sign says nothing of I2."""
        self.fabricated = 0
        """Committed parts that a hostile root made up."""
        self._signed: dict[tuple[object, ...], bytes] = {}
        """(signer, what it may sign once) → its body."""
        self._left: dict[tuple[PeerId, Digest], Digest] = {}
        """(peer, lineage) → the base at which it signed a REFORM away from it."""

    def check_state(self, peer: PeerId, state: ChainState) -> None:
        """I1 (all who hold commit r hold identical state) and I4 (lineages come from REFORM alone)."""
        key = (state.base.lineage, state.base.round)
        known = self.states.setdefault(key, state)
        if known is not state and known != state:
            raise Violation(f"I1: {peer} holds another state of round {key[1]} than others do")
        if self.births and state.base.lineage not in self.births:
            raise Violation(f"I4: {peer} is on a lineage that nobody reformed")
        if len(state.electors) == 2:
            raise Violation(f"I5: {state.electors} are electors, and either can block the other")

    def check_sent(self, signed: Signed[Any]) -> None:
        """I1, I4: what an honest peer signs binds it."""
        message, sender = signed.message, signed.sender
        key: tuple[object, ...]
        match message:
            case Vote():
                key = (sender, "vote", message.base, message.attempt, message.phase)
                if self._left.get((sender, message.base.lineage)) == message.base.digest():
                    known = self._signed.get(key)
                    if known is None:
                        raise Violation(f"I4: {sender} votes in a lineage that it has signed itself away from")
                value = message.value
            case Ready():
                if not message.contributes:
                    return
                key, value = (sender, "ready", message.base), signed.body
            case Roster():
                key, value = (sender, "roster", message.base, message.attempt), signed.body
            case Proposal():
                key, value = (sender, "proposal", message.base, message.attempt), signed.body
            case PartHeader():
                key, value = (sender, "header", message.roster_id, message.part), signed.body
            case ReformVote():
                if message.sign:
                    self._left[sender, message.base.lineage] = message.base.digest()
                return
            case _:
                return
        if self._signed.setdefault(key, value) != value:
            raise Violation(f"I1: {sender} signs two versions of its {key[1]} of {key[2:]}")

    def check_commit(
        self, peer: PeerId, state: ChainState, commit: Commit, rules: Rules, nodes: dict[PeerId, Node]
    ) -> None:
        """I1 (one decision a round) and I2 (each part is the mean over its bitmap of what was frozen once)."""
        base = state.base.digest()
        decision = chain.decision(base, wire.roster_id(commit.roster), commit.headers)
        known = self.decisions.get((state.base.lineage, state.base.round))
        if known == decision:
            return
        if known is not None:
            raise Violation(f"I1: {peer} found a second decision of round {state.base.round}")
        self.decisions[state.base.lineage, state.base.round] = decision
        self.commits += 1
        readys = commit.roster.message.readys
        contributing = contributing_of(commit.roster.message, rules)
        weights = RosterWeights([ready.message.tokens for ready in readys], contributing, rules.weight_cap_ratio)
        for header in commit.headers:
            if header is None or header.sender in self.liars:
                continue
            part, bitmap = header.message.part, header.message.bitmap
            named = {
                signed.sender: (weights.at(part)[bit], self.frozen[signed.sender, base].values[part])
                for bit, signed in enumerate(readys)
                if bitmap >> bit & 1
            }
            if self.payloads[header.message.hash] != Payload.of(part, named):
                if nodes[header.sender].mischief is None:
                    raise Violation(f"I2: part {part} is not the mean of what its bitmap names: {sorted(named)}")
                self.fabricated += 1
            self._check_disks(state, rules, nodes, header)

    def _check_disks(
        self, state: ChainState, rules: Rules, nodes: dict[PeerId, Node], header: Signed[PartHeader]
    ) -> None:
        voters = [nodes[elector] for elector in state.electors]
        holding = sum(header.message.hash in node.held or node.mischief is not None for node in voters)
        if holding < rules.quorum.of(len(voters)):
            raise Violation(f"I2: part {header.message.part} was decided while {holding} electors held it")

    def check_account(self, peer: PeerId, account: Account) -> None:
        """I3: produced = counted + carried + discarded, and what is carried was made and not counted."""
        if not account.balanced() or min(account.carried) < 0:
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


class QuorumWatch:
    """I5 in any weather: for how long a quorum could have committed and has not."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.longest_s = 0.0
        self._since: dict[Digest, tuple[object, float]] = {}

    def look(self) -> None:
        """Called every few seconds."""
        world = self.world
        by_lineage: dict[Digest, list[Node]] = {}
        for node in world.nodes.values():
            if node.can_commit():
                by_lineage.setdefault(node.state.base.lineage, []).append(node)
        since = {}
        for lineage, nodes in by_lineage.items():
            tip = max(nodes, key=lambda node: node.state.base.round).state
            final = world.rules.final_round
            if final is not None and tip.base.round >= final:
                continue
            here = [node for node in nodes if node.state.base.round >= tip.base.round - 1]
            group = self._connected_quorum(tip, here)
            if not group:
                continue
            # Whoever dies, comes back or moves on starts the clock anew.
            key = (tip.base.round, tuple((node.peer, node.life) for node in group))
            before = self._since.get(lineage)
            at_s = before[1] if before is not None and before[0] == key else world.now_s
            since[lineage] = (key, at_s)
            self.longest_s = max(self.longest_s, world.now_s - at_s)
            if world.now_s - at_s > BOUND_S:
                machine = group[0].machine
                assert machine is not None
                raise Violation(
                    f"I5: {len(group)} connected electors have not committed round {tip.base.round} for "
                    f"{world.now_s - at_s:.0f} s; {group[0].peer} says: {machine.reason}"
                )
        self._since = since

    def _connected_quorum(self, tip: ChainState, here: Iterable[Node]) -> list[Node]:
        world, rules = self.world, self.world.rules
        needed = rules.quorum.of(len(tip.electors))
        members = [node for node in here if chain.member(tip, node.peer) is not None]
        electors = [node for node in members if node.peer in tip.electors]
        for first in electors[: len(electors) - needed + 1]:

            def close(node: Node, first: Node = first) -> bool:
                there, back = (first.peer, node.peer), (node.peer, first.peer)
                return there not in world.cut and back not in world.cut

            group = [node for node in electors if close(node)]
            if len(group) >= needed and sum(close(node) for node in members) >= rules.min_peers:
                return group
        return []
