"""Permutations of an epoch's units, keyed by (run, epoch), in O(1) memory (design section 4, "Data is assigned").

A Feistel network over the smallest even number of bits that holds `units`, walked along its cycle until it lands inside
(Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). The network's domain is below `4 × units`, so a walk
takes fewer than four steps on average. Rounds are keyed BLAKE3: the same everywhere, independent of any library's
random numbers.
"""

from __future__ import annotations

from blake3 import blake3

from protocol.names import Digest, PeerId, digest, encode_integer

_ROUNDS = 4
"""Feistel rounds; four give a pseudo-random permutation (Luby and Rackoff, 1988)."""


class Permutation:
    """A bijection of `range(units)`. `units` = 0: data without a known length, where a unit is its own place."""

    __slots__ = ("_half_bits", "_key", "units")

    def __init__(self, *, run: Digest, epoch: int, units: int) -> None:
        if units < 0 or epoch < 0:
            raise ValueError(f"a permutation needs units and epoch of at least 0, not {units} and {epoch}")
        self.units = units
        self._key = digest(b"atoll/permutation", run, encode_integer(epoch))
        self._half_bits = max(1, ((max(units, 1) - 1).bit_length() + 1) // 2)

    def __len__(self) -> int:
        return self.units

    def __getitem__(self, position: int) -> int:
        """The unit at `position` of the epoch. Raises `IndexError` outside `range(units)`."""
        if self.units == 0 and position >= 0:
            return position
        if not 0 <= position < self.units:
            raise IndexError(f"position {position} is not one of the epoch's {self.units}")
        unit = self._network(position)
        while unit >= self.units:
            unit = self._network(unit)
        return unit

    def _network(self, value: int) -> int:
        bits = self._half_bits
        mask = (1 << bits) - 1
        left, right = value >> bits, value & mask
        for step in range(_ROUNDS):
            mixed = blake3(step.to_bytes(1, "little") + right.to_bytes(8, "little"), key=self._key).digest(length=8)
            left, right = right, left ^ (int.from_bytes(mixed, "little") & mask)
        return left << bits | right


def extra_unit(run: Digest, peer: PeerId, n: int, units: int) -> int:
    """The `n`-th unit that `peer` trains on beyond its lease: `H(run, peer, n)`, marked extra (protocol section 2).

    Drawn with replacement. Raises `ValueError` for data without a known length, which has no units to draw from.
    """
    if units <= 0:
        raise ValueError(f"an extra unit is drawn from at least 1 unit, not {units}")
    return int.from_bytes(digest(b"atoll/extra", run, peer.encode(), encode_integer(n))[:16], "little") % units
