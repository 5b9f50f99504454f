"""Logging of the daemon: structlog over the standard library.

Standard error gets everything at the chosen level; the supervisor keeps it in the home's log. Standard output gets the
story for the operator: our own events from `info` up, one plain line each; the supervisor shows it unless a terminal
has something better to show.
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO

import structlog

_QUIET = ("libp2p", "hypercorn", "multiaddr", "asyncio", "urllib3", "filelock", "httpx", "httpcore", "fsspec")
"""Libraries whose own stories are only of interest when something is being looked for."""
_OURS = ("node", "protocol")


def configure(level: str = "info", *, json: bool = False) -> None:
    """One line an event: time, level, text, key=value; or one JSON object. Safe to call again."""
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="%Y-%m-%dT%H:%M:%S.%f", utc=False),
        structlog.processors.StackInfoRenderer(),
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    story = _handler(sys.stdout, shared, json=json, brief=True)
    story.setLevel(logging.INFO)
    story.addFilter(lambda record: record.name.partition(".")[0] in _OURS)
    root = logging.getLogger()
    root.handlers = [_handler(sys.stderr, shared, json=json, brief=False), story]
    root.setLevel(level.upper())
    quiet = logging.DEBUG if level == "debug" else logging.ERROR
    for name in _QUIET:
        logging.getLogger(name).setLevel(quiet)


def _handler(
    stream: TextIO, shared: list[structlog.typing.Processor], *, json: bool, brief: bool
) -> logging.StreamHandler[TextIO]:
    renderer: list[structlog.typing.Processor]
    if json:
        renderer = [structlog.processors.dict_tracebacks, structlog.processors.JSONRenderer()]
    else:
        renderer = [
            structlog.dev.ConsoleRenderer(
                colors=False, exception_formatter=structlog.dev.plain_traceback, pad_event_to=0, pad_level=False
            )
        ]
        if brief:
            renderer.insert(0, _briefly)
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer],
        )
    )
    return handler


def _briefly(
    logger: structlog.typing.WrappedLogger, method: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """For people: the second is enough, and where in the code it was said is not of interest; nor is a traceback."""
    brief = {key: value for key, value in event.items() if key not in {"logger", "exc_info", "exception", "stack"}}
    brief["timestamp"] = str(brief.get("timestamp", ""))[11:19]
    if brief.get("level") == "info":
        del brief["level"]
    return brief
