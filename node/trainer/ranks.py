"""The processes of one island: rank 0 talks to the daemon, the others follow it (design section 11).

Without `torch.distributed` everything here is a no-op. What rank 0 decides travels as msgpack bytes in a tensor over a
gloo group: `broadcast_object_list` would unpickle.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist


class Ranks:
    """Made by all ranks together, like any collective of `torch.distributed`."""

    def __init__(self) -> None:
        distributed = dist.is_available() and dist.is_initialized()
        self.world: int = dist.get_world_size() if distributed else 1
        self.rank: int = dist.get_rank() if distributed else 0
        # Decisions are small and frequent: on the CPU they do not wait for the device's queue.
        self._group: Any = dist.new_group(backend="gloo") if self.world > 1 else None

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def share_flag(self, value: bool) -> bool:
        """Rank 0's `value`, at every rank."""
        if self.world == 1:
            return value
        flag = torch.tensor([value], dtype=torch.uint8)
        dist.broadcast(flag, 0, group=self._group)
        return bool(flag.item())

    def share(self, message: bytes | None) -> bytes:
        """Rank 0's `message`, at every rank; the others pass None."""
        if self.world == 1:
            assert message is not None
            return message
        length = torch.tensor([len(message) if message is not None else 0])
        dist.broadcast(length, 0, group=self._group)
        body = torch.empty(int(length.item()), dtype=torch.uint8)
        if message is not None:
            body.copy_(torch.from_numpy(np.frombuffer(message, dtype=np.uint8).copy()))
        dist.broadcast(body, 0, group=self._group)
        return body.numpy().tobytes()

    def share_tensor(self, tensor: torch.Tensor) -> None:
        """Rank 0's values into every rank's `tensor`, on its own device."""
        if self.world > 1:
            dist.broadcast(tensor, 0)

    def sum(self, *values: float) -> tuple[float, ...]:
        """The sums over all ranks, at every rank."""
        if self.world == 1:
            return values
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total, group=self._group)
        return tuple(total.tolist())
