"""Which lies a node tells at the moment: `bends.json` in its home, a list of names, read anew at each occasion."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec


def bends_file(home: Path) -> Path:
    return home / "bends.json"


def active() -> frozenset[str]:
    """Names in the home of this process."""
    try:
        return frozenset(msgspec.json.decode(bends_file(Path(os.environ["ATOLL_HOME"])).read_bytes(), type=list[str]))
    except FileNotFoundError:
        return frozenset()
