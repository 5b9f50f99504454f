"""This node's work in one round: from the trainer's steps to a frozen contribution, and back from a commit.

It keeps invariant 3 (design section 5): every token the trainer produced is counted by a commit, carried in the local
model, or reported as discarded. The pseudo-gradient of a part that was not counted stays in the local model, so its
tokens ride in the weight of the next contribution (protocol section 8).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from node.status import WorkStatus


def run_lengths(values: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """(count, value) runs of `values`, the form in which READY carries tokens per part."""
    runs: list[tuple[int, int]] = []
    for value in values:
        if runs and runs[-1][1] == value:
            runs[-1] = (runs[-1][0] + 1, value)
        else:
            runs.append((1, value))
    return tuple(runs)


@dataclass(slots=True)
class WorkLedger:
    """Tokens per part that are in the local model and in no commit; totals are means over the parts.

    A round may count some parts of a contribution and not others, so totals are kept in part-tokens and divided by the
    number of parts only when shown.
    """

    parts: int
    token_cap: int
    """The most tokens that a READY may claim for a part (lease and extra cap, `protocol.validity`)."""
    _carried: list[int] = field(init=False)
    _frozen: list[int] | None = field(init=False, default=None)
    _produced: int = field(init=False, default=0)
    _counted: int = field(init=False, default=0)
    _discarded: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._carried = [0] * self.parts

    def freeze(self, tokens: int) -> tuple[tuple[int, int], ...]:
        """The round's `tokens` join what is carried; returns the runs for READY, within the cap."""
        self._produced += tokens * self.parts
        self._carried = [carried + tokens for carried in self._carried]
        self._frozen = list(self._carried)
        return self.frozen()

    def frozen(self) -> tuple[tuple[int, int], ...]:
        """The runs of what is frozen at the moment, within the cap."""
        return run_lengths([min(value, self.token_cap) for value in self._frozen or []])

    def settle(self, counted: Sequence[bool]) -> None:
        """A commit: counted parts leave the local model once, the others stay."""
        for part, is_counted in enumerate(counted):
            if is_counted and self._frozen is not None:
                self._counted += self._frozen[part]
                self._carried[part] -= self._frozen[part]
        self._frozen = None

    def discard(self, unreported_tokens: int = 0) -> int:
        """A hard reset: all that is carried is lost, and said so. Returns the tokens lost.

        `unreported_tokens` were trained since the last freeze and die with the same model.
        """
        lost = sum(self._carried) + unreported_tokens * self.parts
        self._produced += unreported_tokens * self.parts
        self._discarded += lost
        self._carried = [0] * self.parts
        self._frozen = None
        return lost // self.parts

    def status(self) -> WorkStatus:
        return WorkStatus(
            produced_tokens=self._produced // self.parts,
            counted_tokens=self._counted // self.parts,
            carried_tokens=sum(self._carried) // self.parts,
            discarded_tokens=self._discarded // self.parts,
        )
