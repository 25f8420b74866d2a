"""`python -m frontend`: one process of the public service; several may share a port."""

from __future__ import annotations

import asyncio
import os
import sys

import structlog

from frontend.model_files import ModelFilesError
from frontend.server import SERVICE_NAME, serve
from shared.config import FrontendSettings, settings_or_exit
from shared.event_loop import EventLoop
from shared.logging import configure_logging
from shared.server import Server, exit_with_parent

log = structlog.get_logger(__name__)


def main() -> None:
    settings = settings_or_exit(FrontendSettings, sys.argv[1:])
    configure_logging(settings, "frontend")
    if settings.exit_with_parent:
        exit_with_parent()
    _hide_torch()
    try:
        with asyncio.Runner(loop_factory=EventLoop) as runner:
            runner.run(_serve(settings))
    except (ModelFilesError, OSError) as error:
        log.error("cannot start", reason=str(error))
        raise SystemExit(2) from None


async def _serve(settings: FrontendSettings) -> None:
    await serve(Server(settings, SERVICE_NAME, reuse_port=True), settings)


def _hide_torch() -> None:
    """Keeps transformers from importing torch, which takes seconds that a tokenizer has no use for.

    None in `sys.modules` is Python's own way to say that a module cannot be imported.
    """
    sys.modules["torch"] = None  # type: ignore[assignment]
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # it would say that torch is missing


if __name__ == "__main__":
    main()
