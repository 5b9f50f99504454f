"""`python -m node.daemon`: started by the supervisor, ended with it."""

from __future__ import annotations

import contextlib
import sys

import structlog
import trio

from node.daemon.app import run_node
from node.daemon.outcomes import Fallen
from node.daemon.supervisor_client import SupervisorGone
from node.errors import OperatorError
from node.log import configure
from node.settings import from_environment

log = structlog.get_logger()

EXIT_OPERATOR = 2
EXIT_FALLEN = 3
"""An alarm of the protocol: the supervisor ends too, and keeps the home for a report."""
EXIT_ALONE = 1


def main() -> int:
    settings = from_environment()
    configure(settings.log_level, json=settings.log_json)
    return_code = 0
    try:
        trio.run(run_node, settings, strict_exception_groups=True)
    except* SupervisorGone as group:  # may also be what the others' end has cut short: they decide
        with contextlib.suppress(OSError):  # it reads what is said here, if it still does
            log.error("the daemon ends with its supervisor", why="; ".join(str(error) for error in _leaves(group)))
        return_code = EXIT_ALONE
    except* Fallen as group:
        for error in _leaves(group):
            log.critical("the node stops", why=str(error))
        return_code = EXIT_FALLEN
    except* OperatorError as group:
        for error in _leaves(group):
            print(error, file=sys.stderr)  # noqa: T201
        return_code = EXIT_OPERATOR
    return return_code


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    leaves: list[BaseException] = []
    for error in group.exceptions:
        leaves += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return leaves


if __name__ == "__main__":
    sys.exit(main())
