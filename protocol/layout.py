"""Where each tensor lies in the flat vector (design section 5).

The vector has two segments: trained floating-point parameters, then persistent float buffers, which are averaged
without momentum. Each tensor starts on a 256-element boundary, so codec blocks and parts never mix two tensors' values
in one block. The gaps are zero in every state and every contribution.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from protocol.names import Digest, digest, encode_integer

ALIGNMENT = 256
"""Elements. A multiple of every codec's block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One tensor's place: elements `[offset, offset + elements)` of the flat vector, in C order."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        """One past the tensor's last element; the gap up to the next tensor belongs to nobody."""
        return self.offset + self.elements


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    parameters: tuple[Entry, ...]
    """In the model's canonical order, a tied weight once."""
    buffers: tuple[Entry, ...]
    elements: int
    """Length of the flat vector, both segments; a multiple of `ALIGNMENT`."""
    buffer_elements: int
    """Length of the second segment, the vector's tail; a multiple of `ALIGNMENT`."""

    @property
    def parameter_elements(self) -> int:
        """Length of the first segment, which is also the length of the momentum."""
        return self.elements - self.buffer_elements

    def digest(self) -> Digest:
        """Two models with equal digests have the same names, shapes and places."""
        return digest(
            b"atoll/layout",
            encode_integer(self.elements),
            encode_integer(self.buffer_elements),
            encode_integer(len(self.parameters)),
            *(_encode_entry(entry) for entry in self.parameters + self.buffers),
        )


def build_layout(
    parameters: Sequence[tuple[str, tuple[int, ...]]], buffers: Sequence[tuple[str, tuple[int, ...]]] = ()
) -> Layout:
    """Place `(name, shape)` pairs in the given order.

    Raises ValueError for a name that occurs twice, a negative dimension, or a model without trained elements.
    """
    seen: set[str] = set()
    for name, shape in (*parameters, *buffers):
        if name in seen:
            raise ValueError(f"tensor {name!r} occurs twice; give each tensor of the model its own name")
        if any(dimension < 0 for dimension in shape):
            raise ValueError(f"tensor {name!r} has shape {shape}; dimensions must not be negative")
        seen.add(name)
    parameter_entries, parameter_elements = _place(parameters, 0)
    buffer_entries, elements = _place(buffers, parameter_elements)
    if parameter_elements == 0:
        raise ValueError("the model has no trained floating-point parameters; set requires_grad on at least one")
    return Layout(
        parameters=parameter_entries,
        buffers=buffer_entries,
        elements=elements,
        buffer_elements=elements - parameter_elements,
    )


def align(elements: int) -> int:
    """The smallest multiple of `ALIGNMENT` that is not below `elements`."""
    return -(-elements // ALIGNMENT) * ALIGNMENT


def _place(tensors: Sequence[tuple[str, tuple[int, ...]]], offset: int) -> tuple[tuple[Entry, ...], int]:
    entries = []
    for name, shape in tensors:
        entry = Entry(name=name, shape=tuple(shape), offset=offset)
        entries.append(entry)
        offset = align(entry.stop)
    return tuple(entries), offset


def _encode_entry(entry: Entry) -> bytes:
    return digest(entry.name.encode(), encode_integer(entry.offset), *(encode_integer(size) for size in entry.shape))
