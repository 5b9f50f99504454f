"""The trainer's lies, in the difference that it hands over: `delta-nan`, `delta-inf`, `delta-huge` (× 10⁴).

The trainer's own check does not see them: it is as if memory went bad behind it.
"""

from __future__ import annotations

from node.trainer.vector import ModelVector, SharedVectors
from tests.chaos.bent import bends


def bend() -> None:
    write_difference = ModelVector.write_difference

    def bent_write_difference(self: ModelVector, vectors: SharedVectors | None) -> bool:
        finite = write_difference(self, vectors)
        lies = bends.active()
        if vectors is not None:
            if "delta-nan" in lies:
                vectors.delta[7] = float("nan")
            if "delta-inf" in lies:
                vectors.delta[7] = float("inf")
            if "delta-huge" in lies:
                vectors.delta.mul_(1e4)
        return finite

    ModelVector.write_difference = bent_write_difference  # type: ignore[method-assign]
