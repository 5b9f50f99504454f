"""Which engine a manifest names (design section 10).

What differs between them is how a roster is averaged. State, parts, snapshots, downloads and DOWN are `Engine`'s.
"""

from __future__ import annotations

from node.engine.engine import Engine
from node.engine.hivemind.engine import HivemindEngine

ENGINES: dict[str, type[Engine]] = {"atoll": Engine, "hivemind": HivemindEngine}


def engine_named(name: str) -> type[Engine]:
    """Raises `ValueError` for a name that is no engine of this software."""
    try:
        return ENGINES[name]
    except KeyError:
        known = ", ".join(sorted(ENGINES))
        raise ValueError(f"the manifest names the engine {name!r}, which this version does not have: {known}") from None
