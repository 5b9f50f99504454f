"""What a roster's plan means for one of its nodes: roles, slots, lengths and weights, part by part.

Shapes: `n` READYs, `p` parts. Nothing here changes during an exchange.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from protocol.codecs import codec
from protocol.messages import Roster
from protocol.plan import Plan
from protocol.planning import Tree, contributing_of, deal, trees
from protocol.rules import Rules
from protocol.weights import RosterWeights, TokenRuns


class Role(StrEnum):
    """What I do for one part."""

    ROOT = "root"
    """Sum, divide, encode once, sign, send DOWN."""
    INNER = "inner"
    """Sum, send the partial sum UP; forward DOWN."""
    LEAF = "leaf"
    """Send my codec bytes UP; forward DOWN to those without a slot, if the plan has them here."""
    RECEIVER = "receiver"
    """I do not contribute: receive DOWN, and forward it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeView:
    """What the machine needs to know of a roster and its run. Indices are bits of the roster."""

    my_index: int
    contributing: int
    """Bitmap of READYs with an UP slot."""
    plan: Plan
    """Checked (`protocol.planning.check_plan`)."""
    dealt: tuple[int, ...]
    """Shard of each part (`protocol.planning.deal`)."""
    tokens: tuple[TokenRuns, ...]
    weight_cap_ratio: float
    durations_s: tuple[float, ...]
    """One a level, lowest first, then DOWN's (`protocol.planning.level_durations`)."""
    progress_s: float
    slack_s: float
    elements: int
    part_elements: int
    codec: str
    sum_codec: str

    @classmethod
    def of(cls, roster: Roster, rules: Rules, my_index: int) -> ExchangeView:
        """View of a roster that has a plan."""
        if roster.plan is None:
            raise ValueError("a roster without parts has no exchange; apply its joins and leaves")
        return cls(
            my_index=my_index,
            contributing=contributing_of(roster, rules),
            plan=roster.plan,
            dealt=deal(roster.base.digest(), rules.part_count, roster.plan),
            tokens=tuple(signed.message.tokens for signed in roster.readys),
            weight_cap_ratio=rules.weight_cap_ratio,
            durations_s=roster.durations_s,
            progress_s=rules.progress_s,
            slack_s=rules.slack_s,
            elements=rules.elements,
            part_elements=rules.part_elements,
            codec=rules.codec,
            sum_codec=rules.sum_codec,
        )


class Station:
    """One node's place in a roster's trees."""

    def __init__(self, view: ExchangeView) -> None:
        self.view = view
        self._trees = trees(view.plan, view.contributing)
        self._weights = RosterWeights(view.tokens, view.contributing, view.weight_cap_ratio)
        self._codec, self._sum_codec = codec(view.codec), codec(view.sum_codec)

    def role(self, part: int) -> Role:
        tree, me = self._tree(part), self.view.my_index
        if tree.root == me:
            return Role.ROOT
        if not self.view.contributing >> me & 1:
            return Role.RECEIVER
        return Role.INNER if tree.slots[me] else Role.LEAF

    @property
    def leaf_parts(self) -> tuple[int, ...]:
        """Parts whose codec bytes I send UP, ascending: the order in which to send them."""
        return tuple(part for part in range(len(self.view.dealt)) if self.role(part) is Role.LEAF)

    @property
    def summing_parts(self) -> tuple[int, ...]:
        """Parts of which I am the root or an inner node, ascending."""
        return tuple(part for part in range(len(self.view.dealt)) if self.role(part) in (Role.ROOT, Role.INNER))

    def up_target(self, part: int) -> int | None:
        """To whom my contribution or partial sum goes; None when I am the root, or do not contribute."""
        return None if self.role(part) in (Role.ROOT, Role.RECEIVER) else self._tree(part).parents[self.view.my_index]

    def down_source(self, part: int) -> int | None:
        """From whom the part comes down to me; None when I am its root."""
        parent = self._tree(part).parents[self.view.my_index]
        return None if parent == -1 else parent

    def root(self, part: int) -> int:
        """Who signs the part's header."""
        return self._tree(part).root

    def slots(self, part: int) -> tuple[int, ...]:
        """From whom I await UP, ascending."""
        return self._tree(part).slots[self.view.my_index]

    def slots_of(self, node: int, part: int) -> tuple[int, ...]:
        """From whom another node awaits UP, ascending."""
        return self._tree(part).slots[node]

    def subtree(self, node: int, part: int) -> int:
        """Bitmap of the contributors at or below a node."""
        return self._tree(part).subtrees[node]

    def receivers(self, part: int) -> tuple[int, ...]:
        """To whom I send or forward DOWN, ascending."""
        return self._tree(part).children[self.view.my_index]

    def sends_partial(self, slot: int, part: int) -> bool:
        """Whether that peer's UP is a partial sum in the sum codec, not codec bytes."""
        return self._tree(part).heights[slot] > 0

    def part_range(self, part: int) -> tuple[int, int]:
        """First element of the vector and one past the last."""
        start = part * self.view.part_elements
        return start, min(start + self.view.part_elements, self.view.elements)

    def up_bytes(self, slot: int, part: int) -> int:
        """Length of that peer's UP payload."""
        start, stop = self.part_range(part)
        return (self._sum_codec if self.sends_partial(slot, part) else self._codec).encoded_bytes(stop - start)

    def down_bytes(self, part: int) -> int:
        """Length of the reduced part."""
        start, stop = self.part_range(part)
        return self._codec.encoded_bytes(stop - start)

    def weights(self, part: int) -> tuple[int, ...]:
        """Weights [READYs] of a part's contributions."""
        return self._weights.at(part)

    def _tree(self, part: int) -> Tree:
        return self._trees[self.view.dealt[part]]
