"""structlog for every service: a console on a terminal, JSON lines otherwise."""

from __future__ import annotations

import logging
import sys

import structlog

from shared.config import ServiceSettings


def configure_logging(settings: ServiceSettings, service: str, **bound: object) -> None:
    """Sends log lines to stderr, each with `service` and `bound`.

    Request and step ids are bound by their owners through `structlog.contextvars`. Prompts and
    completions are never logged.
    """
    console = settings.log_format == "console" or (
        settings.log_format == "auto" and sys.stderr.isatty()
    )
    # Tracebacks without local variables: those hold prompts.
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
        if console
        else structlog.processors.JSONRenderer()
    )
    processors: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=not console),
    ]
    if not console:
        tracebacks = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        processors.append(structlog.processors.ExceptionRenderer(tracebacks))
    structlog.configure(
        processors=[*processors, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[settings.log_level.upper()]
        ),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service, **bound)
