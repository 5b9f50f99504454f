"""Follows a daemon's status: `atoll status --watch`, and the view that `atoll daemon` shows on a terminal."""

from __future__ import annotations

import signal
import sys
import time
from types import FrameType
from typing import NoReturn

from rich.console import Console
from rich.live import Live

from node.cli.control import Control
from node.cli.show import line, status_view
from node.errors import OperatorError
from node.home import Home, default_home

PERIOD_S = 1.0


def watch(control: Control, *, as_json: bool = False) -> None:
    """Until the daemon has gone. Raises `OperatorError` when there was none to begin with."""
    console = Console()
    if as_json or not console.is_terminal:
        _follow_in_lines(control, as_json=as_json)
        return
    with Live(status_view(control.status()), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(PERIOD_S)
            try:
                live.update(status_view(control.status()), refresh=True)
            except OperatorError:
                return


def _follow_in_lines(control: Control, *, as_json: bool) -> None:
    last = ""
    first = True
    while True:
        try:
            text = control.request("GET", "/status").decode() if as_json else line(control.status())
        except OperatorError:
            if first:
                raise
            return
        first = False
        if text != last:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()
            last = text
        time.sleep(PERIOD_S)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(0)


def main() -> None:
    """The supervisor's viewer: it draws on the terminal until it is told to stop."""
    signal.signal(signal.SIGTERM, _end)
    try:
        watch(Control(Home(default_home())))
    except OperatorError as error:
        sys.stderr.write(f"{error}\n")


if __name__ == "__main__":
    main()
