"""`atoll`, unchanged but for named places where a test may strike, and named ways in which it may misbehave.

    program.py daemon --home HOME …     what `atoll daemon …` is
    program.py node.supervisor          what it becomes, with children that are this program too
    program.py node.engine | node.daemon | node.trainer

Everything runs as it is installed. Around a few functions lies a wrapper that looks into the home: `strike.json` says
at which passing of which place which process is to get which signal (`strikes`), `bends.json` says how the node lies
at the moment (`bends`). Without these files nothing differs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

THIS = str(Path(__file__).resolve())
CHILDREN = ("node.engine", "node.daemon", "node.trainer")


def program(module: str) -> tuple[str, ...]:
    """The command line ends with the module's name, by which processes are told apart."""
    return sys.executable, "-P", THIS, module


def run_command() -> int:
    from node.cli import launch, main

    launch.python = program
    main.main()
    return 0


def run_supervisor() -> int:
    from node.supervisor import __main__ as supervisor
    from node.supervisor.roles import Commands

    def commands() -> Commands:
        engine, daemon, trainer = (program(module) for module in CHILDREN)
        return Commands(engine=engine, daemon=daemon, trainer=trainer)

    supervisor.default_commands = commands
    return supervisor.main()


def run_child(module: str) -> int:
    role = module.removeprefix("node.")
    import_module(f"tests.chaos.bent.{role}").bend()
    main: Callable[[], int] = import_module(f"{module}.__main__").main
    return main()


def main() -> int:
    first = sys.argv[1]
    if first == "node.supervisor":
        return run_supervisor()
    if first in CHILDREN:
        return run_child(first)
    return run_command()


if __name__ == "__main__":
    sys.exit(main())
