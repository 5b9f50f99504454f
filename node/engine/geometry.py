"""Sizes of the flat vector and of its parts, from `Open` (the manifest's layout and rounds)."""

from __future__ import annotations

from dataclasses import dataclass

from node.engine.api import Open
from protocol.codecs import Codec, codec

ELEMENT_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    elements: int
    """Both segments."""
    buffer_elements: int
    """The tail that is averaged without momentum."""
    part_elements: int
    codec: Codec
    sum_codec: Codec
    momentum: float

    @classmethod
    def of(cls, request: Open) -> Geometry:
        """Raises `ValueError` for sizes or codecs that make no sense."""
        if request.elements < 1 or not 0 <= request.buffer_elements <= request.elements:
            raise ValueError(
                f"{request.elements} elements with {request.buffer_elements} buffer elements are no vector"
            )
        if request.part_elements < 1:
            raise ValueError(f"parts of {request.part_elements} elements are not possible; use a multiple of 256")
        return cls(
            elements=request.elements,
            buffer_elements=request.buffer_elements,
            part_elements=request.part_elements,
            codec=codec(request.codec),
            sum_codec=codec(request.sum_codec),
            momentum=request.momentum,
        )

    @property
    def momentum_elements(self) -> int:
        return self.elements - self.buffer_elements

    @property
    def part_count(self) -> int:
        return -(-self.elements // self.part_elements)

    def part_range(self, part: int) -> tuple[int, int]:
        """First element and one past the last."""
        start = part * self.part_elements
        return start, min(start + self.part_elements, self.elements)

    def part_size(self, part: int) -> int:
        """Elements."""
        start, stop = self.part_range(part)
        return stop - start

    def part_bytes(self, part: int) -> int:
        """Of a contribution or result, encoded."""
        return self.codec.encoded_bytes(self.part_size(part))

    @property
    def slot_bytes(self) -> int:
        """Of the largest encoded part: parts stand at multiples of it in files."""
        return self.codec.encoded_bytes(min(self.part_elements, self.elements))
