"""The program, run by its path with the interpreter that has hivemind: its folder becomes the package `atoll_averager`.

Nothing else of ours can be imported there, and nothing there hides a library of that interpreter.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

NAME = "atoll_averager"


def main() -> None:
    folder = Path(__file__).parent
    spec = importlib.util.spec_from_file_location(
        NAME, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = package
    spec.loader.exec_module(package)
    importlib.import_module(f"{NAME}.process").main()


if __name__ == "__main__":
    main()
