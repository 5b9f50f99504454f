"""What hivemind 1.1.12 needs before it may face the internet and current libraries.

- Its 8-bit codecs read the codebook's size by `int()` of an array that holds one value. NumPy 1.25 deprecated that
  and 2.4 refuses it (TypeError: only 0-dimensional arrays can be converted to Python scalars). `Quantization.extract`
  is the only reader of every 8-bit message, so no peer can read what another sent. The reducer counts the failure as
  the sender's, bans it, and logs it at level DEBUG; the sender takes the refusal for a dead reducer and keeps its own
  values for that share. What is left is the share that each peer reduces itself: a quarter among four; and `step`
  reports success.
- Its encoder is `torch.quantize_per_tensor`, which PyTorch 2.13 announces to remove. The same numbers come from plain
  arithmetic.
- A message is as long as its sender says in eight bytes, and is buffered whole.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import torch
from hivemind.compression.quantization import Quantization, Uniform8BitQuantization, average_buckets
from hivemind.p2p import P2P

SIZE_BYTES = 8
"""Of the codebook's length, which begins an 8-bit message."""


class Traffic:
    """Bytes of messages in both directions, since the start."""

    sent = 0
    received = 0


def extract(self: Any, message: Any) -> torch.Tensor:
    """The values of an 8-bit message: codebook's length, codebook, one byte a value. Raises `ValueError`."""
    buffer = message.buffer
    if len(buffer) < SIZE_BYTES:
        raise ValueError(f"an 8-bit message of {len(buffer)} bytes has no codebook")
    entries = int.from_bytes(buffer[:SIZE_BYTES], "little")
    elements = math.prod(message.size)
    if entries != self.n_bins or len(buffer) != SIZE_BYTES + 4 * entries + elements:
        raise ValueError(f"an 8-bit message of {len(buffer)} bytes does not hold {elements} values")
    codebook = np.frombuffer(buffer, "<f4", entries, SIZE_BYTES).astype(np.float32)
    codes = np.frombuffer(buffer, np.uint8, elements, SIZE_BYTES + 4 * entries)
    return torch.from_numpy(codebook[codes]).reshape(tuple(message.size))


def quantize(self: Any, tensor: torch.Tensor, allow_inplace: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """What `Uniform8BitQuantization.quantize` computes: (codes, the mean of each code's values)."""
    values = tensor.detach().to(torch.float32)
    centered = values - values.mean()
    deviation = centered.norm() / math.sqrt(max(1, centered.numel() - 1))
    scale = self.RANGE_IN_SIGMAS * deviation / self.n_bins
    if scale > 0:
        codes = torch.round(centered / scale).add_(self.n_bins // 2).clamp_(0, self.n_bins - 1).to(torch.uint8)
    else:  # all alike, or so close that their spread is no number
        codes = torch.full_like(centered, self.n_bins // 2, dtype=torch.uint8)
    lookup = average_buckets(values, codes, self.n_bins)
    return codes.numpy(), lookup.numpy().astype(np.float32)


def install(largest_message_bytes: int) -> type[Traffic]:
    """Once a process, before anything is sent. Returns the account of bytes."""
    Quantization.extract = extract
    Uniform8BitQuantization.quantize = quantize

    async def receive_raw_data(reader: asyncio.StreamReader) -> bytes:
        size = int.from_bytes(await reader.readexactly(P2P.HEADER_LEN), P2P.BYTEORDER)
        if size > largest_message_bytes:
            raise ValueError(f"a message of {size} bytes is over the limit of {largest_message_bytes}")
        data = await reader.readexactly(size)
        Traffic.received += P2P.HEADER_LEN + size
        return data

    send = P2P.send_raw_data

    async def send_raw_data(data: bytes, writer: asyncio.StreamWriter, **settings: Any) -> None:
        await send(data, writer, **settings)
        Traffic.sent += P2P.HEADER_LEN + len(data)

    P2P.receive_raw_data = staticmethod(receive_raw_data)
    P2P.send_raw_data = staticmethod(send_raw_data)
    return Traffic
