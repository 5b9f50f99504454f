"""Logging of every process: structlog over the standard library, to standard error, which the supervisor keeps."""

from __future__ import annotations

import logging
import sys

import structlog

_QUIET = ("libp2p", "hypercorn", "multiaddr", "asyncio", "urllib3", "filelock", "httpx", "httpcore", "fsspec")
"""Libraries whose own stories are only of interest when something is being looked for."""


def configure(level: str = "info", *, json: bool = False) -> None:
    """One line an event: time, level, text, key=value; or one JSON object. Safe to call again."""
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=False),
        structlog.processors.StackInfoRenderer(),
    ]
    renderer: list[structlog.typing.Processor]
    if json:
        renderer = [structlog.processors.dict_tracebacks, structlog.processors.JSONRenderer()]
    else:
        renderer = [
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback, pad_event_to=0
            )
        ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    quiet = logging.DEBUG if level == "debug" else logging.ERROR
    for name in _QUIET:
        logging.getLogger(name).setLevel(quiet)
