"""What the nodes' logs hold: warnings and errors by their words, and what no fault of ours excuses."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from node.home import Home

LOUD = re.compile(r"^(?P<role>\w+): [\d\-]+T[\d:.]+ \[(?P<level>warning|error|critical)\] (?P<words>.*?) \[[\w.]+\]")
TRACEBACK = re.compile(r"^(?P<role>\w+): .*Traceback \(most recent call last\)")
ENDED = re.compile(r"^supervisor: [\d\-]+T[\d:.]+ (?P<role>\w+) ended: (?P<how>.*)$")
GOOD_ENDS = frozenset({"exit status 0", "exit status 143", "signal SIGKILL", "signal SIGTERM"})
"""It was told to, or we killed it; a kill by the kernel for want of memory looks the same here."""
MAX_BROKEN = 50
"""Sentences of one home that are kept."""


@dataclass(kw_only=True)
class Said:
    """Of all nodes together, and of all lives of them."""

    loud: Counter[str] = field(default_factory=Counter)
    """`level: words` → times."""
    broken: list[str] = field(default_factory=list)
    """Tracebacks, and processes that ended as nobody made them end."""

    def read(self, home: Home, name: str) -> None:
        """Of a node that has ended; once a home. What cannot be read says nothing."""
        for path in (home.log_file.with_name(home.log_file.name + ".1"), home.log_file):
            with contextlib.suppress(FileNotFoundError):
                self._read(path, name)

    def _read(self, path: Path, name: str) -> None:
        before, kept = "", 0
        with path.open(errors="replace") as log:
            for text in log:
                line = text.rstrip("\n")
                found: str | None = None
                if loud := LOUD.match(line):
                    self.loud[f"{loud['level']}: {loud['words']}"] += 1
                    if loud["level"] == "critical":
                        found = line
                elif TRACEBACK.match(line):
                    found = f"traceback after: {before}"
                elif (ended := ENDED.match(line)) and ended["how"] not in GOOD_ENDS:
                    found = line
                if found is not None and kept < MAX_BROKEN:
                    kept += 1
                    self.broken.append(f"{name}: {found[:300]}")
                before = line
