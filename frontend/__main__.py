"""`python -m frontend` runs one process of the public service. Several may share a port."""

from __future__ import annotations

import gc

gc.disable()  # see `shared.process.run`

import os
import sys
from functools import partial

from frontend.event_loop import EventLoop
from frontend.metrics import RequestMetrics
from frontend.service import public_server, serve
from frontend.settings import FrontendSettings
from frontend.text.model_files import ModelFilesError
from frontend.text.tokenizer import import_auto_tokenizer
from shared.config import settings_or_exit
from shared.process.run import Ready, run_service


def main() -> int:
    settings = settings_or_exit(FrontendSettings, sys.argv[1:])
    _hide_torch()
    import_auto_tokenizer()  # imported once, in the parent process, for all forks
    metrics = RequestMetrics(settings.model)
    return run_service(
        "frontend",
        settings,
        partial(_serve, metrics),
        (ModelFilesError,),
        EventLoop,
        metrics=metrics,
        index=settings.index,
        alone=[settings.gateway_address] if settings.gateway_address else [],
        together=[f"{settings.host}:{settings.port}"],
    )


async def _serve(metrics: RequestMetrics, settings: FrontendSettings, ready: Ready) -> None:
    await serve(public_server(settings, ready, metrics), settings, metrics)


def _hide_torch() -> None:
    """Keeps transformers from importing torch, which takes seconds and which no tokenizer needs.

    None in `sys.modules` makes Python report that a module cannot be imported.
    """
    sys.modules["torch"] = None  # type: ignore[assignment]
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # it would warn that torch is missing


if __name__ == "__main__":
    sys.exit(main())
