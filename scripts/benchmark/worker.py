"""A process on one host that runs another engine: it is told phases, one JSON line each, and answers with their times.

    → {"op": "open", …}                  ← {"ok": true, …}
    → {"op": "load", "round": 3, …}      ← {"ok": true, "start_s": …, "end_s": …}
    anything that fails                  ← {"ok": false, "why": "one sentence"}

Times are of CLOCK_MONOTONIC, which all processes of the machine share. This module needs nothing but NumPy: it also
runs in environments that are not ours.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Phase = Callable[[dict[str, Any]], dict[str, Any] | None]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where this process stands, from its first argument."""

    index: int
    hosts: int
    address: str
    first_address: str
    """Of host 0."""
    elements: int
    codec: str
    input_fd: int
    result_fd: int
    patience_s: float
    """For anything that waits for others."""

    @classmethod
    def from_arguments(cls) -> Place:
        return cls(**json.loads(sys.argv[1]))

    def input(self) -> npt.NDArray[np.float32]:
        return self._vector(self.input_fd, "r")

    def result(self) -> npt.NDArray[np.float32]:
        return self._vector(self.result_fd, "r+")

    def _vector(self, fd: int, mode: Any) -> npt.NDArray[np.float32]:
        return np.memmap(f"/proc/self/fd/{fd}", np.float32, mode, shape=(self.elements,))


def serve(phases: dict[str, Phase]) -> None:
    """Until standard input ends. What libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        asked = json.loads(line)
        start_s = time.monotonic()
        try:
            more = phases[asked.pop("op")](asked) or {}
        except Exception as error:  # noqa: BLE001 - whatever an engine raises is its answer
            print(json.dumps({"ok": False, "why": f"{type(error).__name__}: {error}"}), file=answers)
            continue
        answer = {"ok": True, "start_s": start_s, "end_s": time.monotonic()} | more
        print(json.dumps(answer), file=answers)
