"""Configures structlog for every service: a console on a terminal, JSON lines otherwise."""

from __future__ import annotations

import logging
import sys

import structlog

from shared.config import ServiceSettings
from shared.telemetry.log_output import shield_stderr


def configure_logging(settings: ServiceSettings, service: str, **bound: object) -> None:
    """Sends log lines to stderr, each with `service` and `bound`.

    Lines that cannot be written are dropped, because a log line must not delay a token. A later
    line says how many were dropped. Callers bind request and step ids with
    `structlog.contextvars`. Prompts and completions are never logged.
    """
    console = sys.stderr is not None and sys.stderr.isatty()
    # Tracebacks omit local variables, because they may hold prompts.
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
        if console
        else structlog.processors.JSONRenderer()
    )
    fields = {"service": service, **bound}

    def add_fields(
        _logger: object, _method: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        return {**fields, **event}  # in every thread, unlike what is bound to a context

    processors: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        add_fields,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=not console),
    ]
    if not console:
        tracebacks = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        processors.append(structlog.processors.ExceptionRenderer(tracebacks))
    processors.append(renderer)
    # The notice must not get the context of the line that follows it.
    notices = structlog.wrap_logger(structlog.ReturnLogger(), processors[1:], structlog.BoundLogger)
    shield_stderr(lambda count: str(notices.warning("log lines were dropped", count=count)))
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[settings.log_level.upper()]
        ),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
