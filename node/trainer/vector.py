"""A training model as the flat vector sees it: differences out, states in (design section 5, protocol section 8).

N: elements of the flat vector, fp32, on the CPU. n: elements of one tensor. The model's tensors may live on any device,
and be sharded (`DTensor`, FSDP2); everything goes tensor by tensor, so that no second flat vector is ever made.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from node.trainer.errors import LayoutMismatch
from node.trainer.link import Memory
from node.trainer.models import layout_of
from node.trainer.ranks import Ranks
from protocol.layout import Entry, Layout


@dataclass(frozen=True, slots=True)
class Stretch:
    """Elements `[start, stop)` that are taken over in one way."""

    start: int
    stop: int
    counted: bool
    """True: θ_local = θ. False: θ_local += delta."""


def stretches(counted: Sequence[bool], part_elements: int, elements: int) -> list[Stretch]:
    """Neighbouring parts of the same kind, joined. Raises ValueError when `counted` does not cover the vector."""
    if part_elements < 1 or len(counted) != -(-elements // part_elements):
        raise ValueError(f"{len(counted)} parts of {part_elements} elements do not cover a vector of {elements}")
    joined, start = [], 0
    for kind, group in itertools.groupby(counted):
        stop = start + sum(1 for _ in group) * part_elements
        joined.append(Stretch(start, min(stop, elements), kind))
        start = stop
    return joined


class SharedVectors:
    """`Memory` as tensors: theta [N] is only read."""

    def __init__(self, memory: Memory) -> None:
        with warnings.catch_warnings():
            # The kernel refuses writes to this mapping; PyTorch knows no read-only tensor and warns.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            self.theta = torch.from_numpy(memory.theta)
        self.delta = torch.from_numpy(memory.delta)


class ModelVector:
    """Binds a model to the run's layout. Every method is collective over `ranks`; only rank 0 passes vectors.

    Raises `LayoutMismatch`, which names the first tensor that differs.
    """

    def __init__(self, model: torch.nn.Module, layout: Layout, ranks: Ranks) -> None:
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            model = model.module
        found = layout_of(model)
        if found.digest() != layout.digest():
            raise LayoutMismatch(_first_difference(layout, found))
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        tensors = {name.replace("_orig_mod.", ""): tensor for name, tensor in tensors.items()}
        self.layout = layout
        self._ranks = ranks
        self._places: list[tuple[Entry, torch.Tensor]] = [
            (entry, tensors[entry.name].detach()) for entry in (*layout.parameters, *layout.buffers)
        ]
        self._everything = [Stretch(0, layout.elements, True)]

    @torch.no_grad()
    def load(self, vectors: SharedVectors | None) -> None:
        """θ_local = θ."""
        self.take_over(vectors, self._everything)

    @torch.no_grad()
    def take_over(self, vectors: SharedVectors | None, kinds: Sequence[Stretch]) -> None:
        """Per stretch: θ_local = θ, or θ_local += delta, exactly, in fp32."""
        for entry, tensor in self._places:
            local_n = _whole(tensor)
            if vectors is not None:
                for kind in kinds:
                    start, stop = max(kind.start, entry.offset), min(kind.stop, entry.stop)
                    if start >= stop:
                        continue
                    target = local_n[start - entry.offset : stop - entry.offset]
                    if kind.counted:
                        target.copy_(vectors.theta[start:stop])
                    else:
                        target.add_(vectors.delta[start:stop].to(target.device))
            self._ranks.share_tensor(local_n)
            _put_back(tensor, local_n)

    @torch.no_grad()
    def write_difference(self, vectors: SharedVectors | None) -> bool:
        """delta = θ − θ_local, zero between tensors. Rank 0 learns whether all of it is finite; the others get True."""
        finite, stop = True, 0
        for entry, tensor in self._places:
            local_n = _whole(tensor)
            if vectors is None:
                continue
            vectors.delta[stop : entry.offset].zero_()
            stop = entry.stop
            delta_n = vectors.delta[entry.offset : stop]
            torch.sub(vectors.theta[entry.offset : stop], local_n.to("cpu", torch.float32), out=delta_n)
            if delta_n.numel():
                # One pass, and NaN propagates; `isfinite().all()` is twenty times slower.
                smallest, largest = torch.aminmax(delta_n)
                finite = finite and math.isfinite(smallest) and math.isfinite(largest)
        if vectors is not None:
            vectors.delta[stop:].zero_()
        return finite

    @contextlib.contextmanager
    def global_state(self, vectors: SharedVectors | None) -> Iterator[None]:
        """Within, the model holds θ; afterwards what it held before. Costs a copy of the model on its device."""
        kept = [tensor.clone() for _, tensor in self._places]
        self.load(vectors)
        try:
            yield
        finally:
            with torch.no_grad():
                for (_, tensor), values in zip(self._places, kept, strict=True):
                    tensor.copy_(values)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """All elements [n] of a tensor: a view where it lies in one piece here, else a copy."""
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.reshape(-1)


def _put_back(tensor: torch.Tensor, values_n: torch.Tensor) -> None:
    if isinstance(tensor, DTensor):
        values = values_n.view(tensor.shape)
        tensor.copy_(distribute_tensor(values, tensor.device_mesh, tensor.placements))
    elif values_n.data_ptr() != tensor.data_ptr():
        tensor.copy_(values_n.view(tensor.shape))


def _first_difference(expected: Layout, found: Layout) -> str:
    advice = "build the model from `swarm.manifest.model`"
    pairs = itertools.zip_longest((*expected.parameters, *expected.buffers), (*found.parameters, *found.buffers))
    for theirs, ours in pairs:
        if ours is None:
            return f"the run's model has a tensor {theirs.name!r} {list(theirs.shape)} that yours lacks: {advice}"
        if theirs is None:
            return f"your model has a tensor {ours.name!r} {list(ours.shape)} that the run's lacks: {advice}"
        if (theirs.name, theirs.shape) != (ours.name, ours.shape):
            return (
                f"the run's model has {theirs.name!r} {list(theirs.shape)} where yours has {ours.name!r} "
                f"{list(ours.shape)}: {advice}"
            )
    return f"the run's vector has {expected.elements} elements and yours {found.elements}: {advice}"
