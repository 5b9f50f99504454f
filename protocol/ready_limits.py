"""How large a READY may be: so that the ROSTER of all members, and what names its parts, fit into one frame.

The more members, the less each may say. A frame of 8 MiB (`node.daemon.streams`) has to hold the commit of 16,384
parts: 3.5 MB of headers, 2 KiB a READY for the bit that it has in each, and the ROSTER. Both ends derive the limits
from the number of members at READY's base: 62 KiB up to 64 members, 18 KiB at 200, 2 KiB at 1,024. A READY without a
history of parts that were not counted takes some 200 bytes, and 330 in a ROSTER.
"""

from __future__ import annotations

from typing import Final

from protocol.fields import MAX_RANGES, MAX_READYS

READYS_BYTES: Final = 4 * 1024 * 1024
"""READYs of a roster, together with their bits in 16,384 headers."""
BITS_BYTES: Final = 2 * 1024
FEWEST_MEMBERS: Final = 64
"""Fewer have no more room each."""

OTHER_BYTES: Final = 1024
"""All that stands in a READY beside its runs and ranges, `EDGES_MAX` failed edges among it."""
EDGES_MAX: Final = 8
RUN_BYTES: Final = 13
RANGE_BYTES: Final = 23


def ready_limit_bytes(members: int) -> int:
    """The longest body of a READY among so many members."""
    return READYS_BYTES // min(max(members, FEWEST_MEMBERS), MAX_READYS) - BITS_BYTES


def runs_limit(members: int) -> int:
    """Runs of tokens that surely fit, beside `ranges_limit` unit ranges."""
    return min(MAX_RANGES, 3 * _free_bytes(members) // 4 // RUN_BYTES)


def ranges_limit(members: int) -> int:
    """Unit ranges that surely fit. What a READY does not name stays leased."""
    return min(MAX_RANGES, _free_bytes(members) // 4 // RANGE_BYTES)


def _free_bytes(members: int) -> int:
    return ready_limit_bytes(members) - OTHER_BYTES
