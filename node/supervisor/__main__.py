"""`python -m node.supervisor`: what `atoll daemon` becomes once the settings are valid and the run is known."""

from __future__ import annotations

import os
import sys

from node.errors import OperatorError
from node.home import Home, default_home
from node.supervisor import lock
from node.supervisor.keeper import EXIT_OPERATOR_ERROR, Supervisor
from node.supervisor.roles import default_commands

END_WITH_VARIABLE = "ATOLL_END_WITH"
"""Process id of whoever started this node for its own use (a local swarm): the node must not outlive it."""


def main() -> int:
    home = Home(default_home())
    try:
        inherited = os.environ.pop(lock.LOCK_VARIABLE, None)
        if inherited is not None:
            os.set_inheritable(int(inherited), False)
        else:
            lock.acquire(home)
        lock.prepare_socket_directory(home)
    except OperatorError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_OPERATOR_ERROR
    lock.remove_live_files(home)  # of a supervisor that was killed
    lock.prepare_socket_directory(home)
    owner = os.environ.pop(END_WITH_VARIABLE, "")
    return Supervisor(home, default_commands(), end_with=int(owner) if owner.isdigit() else None).run()


if __name__ == "__main__":
    sys.exit(main())
