"""What hivemind does for the pieces that this node reduces, with our weights and our checks.

`TensorPartReducer` adds a sender's piece as soon as it is its turn and divides when all senders that it has not given
up have given theirs. It believes the weight that stands in a message, and any value and shape; here the weight comes
from the roster, and what is not finite, beyond its declared bound, or of another size costs its sender the rest of the
round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from hivemind.averaging.partition import AllreduceException, TensorPartReducer

from .job import Job, Piece, Weights

ROUNDING = 1.01
"""Of hivemind's codecs, over a declared bound."""

Deliver = Callable[[Piece, int], None]
"""A piece of the sender at a position is added."""
Finish = Callable[[Piece, torch.Tensor, "tuple[int, ...] | None"], None]
"""A piece's mean, and whose values are in it; None: it cannot be said."""
Refuse = Callable[[int, str], None]
"""What the sender at a position has sent is not added."""


class Unwelcome(AllreduceException):  # type: ignore[misc]
    """One sentence: what is wrong with a piece."""


class PieceReducer(TensorPartReducer):  # type: ignore[misc]
    def __init__(self, job: Job, pieces: Sequence[Piece], deliver: Deliver, finish: Finish, refuse: Refuse) -> None:
        """`pieces`: mine, in order."""
        self._job = job
        self._pieces = pieces
        self._weights = Weights(job)
        self._deliver = deliver
        self._finish = finish
        self._refuse = refuse
        self._added: set[int] = set()
        """Positions whose values are in the current piece."""
        super().__init__([torch.Size((piece.stop - piece.start,)) for piece in pieces], len(job.names))

    async def accumulate_part(
        self, sender_index: int, part_index: int, tensor_part: torch.Tensor, weight: float = 1.0
    ) -> torch.Tensor:
        """`weight` is what the sender claims; it counts for nothing. Raises `Unwelcome`."""
        piece = self._pieces[part_index]
        if why := self._why_unwelcome(piece, sender_index, tensor_part):
            self._refuse(sender_index, why)  # before hivemind bans it for the exception, whatever that says
            raise Unwelcome(why)
        if part_index == self.current_part_index:  # as a rule: a sender gives the next when this one is a mean
            self._added.add(sender_index)
        self._deliver(piece, sender_index)
        weight = self._weights.of(piece.part, sender_index)
        mean: torch.Tensor = await super().accumulate_part(sender_index, part_index, tensor_part, weight=weight)
        return mean

    def check_current_part_finished(self) -> None:
        if self.current_part_accumulated_from != self.num_current_senders:
            return
        piece, future = self._pieces[self.current_part_index], self.current_part_future
        whole = len(self._added) == self.current_part_accumulated_from > 0
        senders = tuple(sorted(self._added)) if whole else None
        self._added.clear()
        super().check_current_part_finished()
        self._finish(piece, future.result(), senders)

    def _why_unwelcome(self, piece: Piece, sender: int, values: torch.Tensor) -> str:
        if values.shape != (piece.stop - piece.start,) or values.dtype != torch.float32:
            return "UP by hivemind of the wrong size or type"
        largest = float(values.abs().max())
        if not largest <= self._job.largest[sender] * ROUNDING:  # so that NaN fails
            return "UP by hivemind whose values are not finite or beyond the declared bound"
        return ""
