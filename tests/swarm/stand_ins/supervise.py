"""Runs the real supervisor over stand-in children: `supervise.py HOME {"daemon": [...], ...} {"leave_s": ...}`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from node.home import Home
from node.supervisor import lock
from node.supervisor.keeper import Supervisor
from node.supervisor.roles import Commands, Patience

home = Home(Path(sys.argv[1]))
os.environ["ATOLL_HOME"] = str(home.path)
commands = Commands(**{role: tuple(command) for role, command in json.loads(sys.argv[2]).items()})
lock.acquire(home)
lock.prepare_socket_directory(home)
sys.exit(Supervisor(home, commands, patience=Patience(**json.loads(sys.argv[3]))).run())
