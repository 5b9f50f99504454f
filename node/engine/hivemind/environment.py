"""Where hivemind is: in this interpreter's environment (the extra `hivemind`), or in another's that the operator names.

Another one is for those whose other packages do not agree with hivemind's; it needs nothing of ours.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from node.engines import HIVEMIND
from node.errors import OperatorError

if TYPE_CHECKING:
    from node.manifest import Manifest

VERSION = "1.1.12"
"""Its all-reduce is entered below its matchmaking, which no other version promises to have in the same place."""
VARIABLE = "ATOLL_HIVEMIND_PYTHON"
PROGRAM = Path(__file__).parent / "averager" / "start.py"
ASK_S = 30.0

_ASK = "import importlib.metadata as m; print(m.version('hivemind'))"


def check_engine(manifest: Manifest, python: str) -> None:
    """Raises `OperatorError` when a run averages by hivemind and `python` (empty: this interpreter) has none."""
    if manifest.rounds.engine == HIVEMIND and (why := why_missing(python)):
        raise OperatorError(f"the run {manifest.name!r} averages by hivemind (rounds.engine), and {why}")


def command(python: str) -> tuple[str, ...]:
    """The averager's. `-I`: what this process finds by PYTHONPATH is not meant for another interpreter."""
    return (python or sys.executable, "-I", str(PROGRAM))


def why_missing(python: str) -> str | None:
    """One sentence for the operator when hivemind cannot be run by `python` (empty: this interpreter), else None."""
    try:
        found = importlib.metadata.version("hivemind") if not python else _version_in(python)
    except importlib.metadata.PackageNotFoundError:
        found = ""
    except (OSError, subprocess.SubprocessError) as error:
        return f"{python}, which {VARIABLE} names, cannot be asked for it ({error}): name an interpreter that has it"
    if found == VERSION:
        return None
    where = f"the environment of {python}" if python else "this environment"
    what = f"holds hivemind {found}" if found else "does not hold hivemind"
    return (
        f"{where} {what}: install version {VERSION} by `pip install 'atoll[hivemind]'`, "
        f"or name an interpreter that has it by {VARIABLE}"
    )


def _version_in(python: str) -> str:
    """Empty: it has none. Raises `OSError` or `SubprocessError` when it cannot be asked."""
    asked = subprocess.run([python, "-I", "-c", _ASK], capture_output=True, text=True, timeout=ASK_S, check=False)
    return asked.stdout.strip() if asked.returncode == 0 else ""
