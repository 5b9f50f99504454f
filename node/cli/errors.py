"""How an operator's mistake looks: one sentence on standard error, exit status 2, no traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from node.errors import OperatorError

EXIT_OPERATOR_ERROR = 2

P = ParamSpec("P")
R = TypeVar("R")


def one_sentence(command: Callable[P, R]) -> Callable[P, R]:
    """For every command: turns `OperatorError` into its sentence, and a closed pipe into a quiet end."""

    @wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except OperatorError as error:
            sys.stderr.write(f"{error}\n")
            sys.exit(EXIT_OPERATOR_ERROR)
        except BrokenPipeError:
            # The reader (`| head`) has what it wanted; the interpreter must not complain at exit either.
            sys.stdout = None
            sys.exit(0)
        except KeyboardInterrupt:
            sys.exit(130)

    return wrapped
