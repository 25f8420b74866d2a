"""`python -m frontend` runs one process of the public service. Several may share a port."""

from __future__ import annotations

import gc

gc.disable()  # see `shared.process.run`

import os
import sys

from frontend.event_loop import EventLoop
from frontend.metrics import RequestMetrics
from frontend.service import Frontend
from frontend.settings import FrontendSettings
from frontend.text.model_files import ModelFilesError
from frontend.text.tokenizer import import_auto_tokenizer
from shared.config import settings_or_exit
from shared.process.ports import SharedListener
from shared.process.run import Ready, run_service


def main() -> int:
    settings = settings_or_exit(FrontendSettings, sys.argv[1:])
    _hide_torch()
    import_auto_tokenizer()  # imported once, in the parent process, for all forks
    metrics = RequestMetrics(settings.model)
    listener = None
    if settings.http_port:
        listener = SharedListener(f"{settings.host}:{settings.http_port}")

    async def serve(settings: FrontendSettings, ready: Ready) -> None:
        await Frontend(settings, ready, metrics).serve(listener)

    return run_service(
        "frontend",
        settings,
        serve,
        (ModelFilesError,),
        EventLoop,
        metrics=metrics,
        index=settings.index,
        together=[f"{settings.host}:{settings.port}"],
        listener=listener,
    )


def _hide_torch() -> None:
    """Keeps transformers from importing torch, which takes seconds and which no tokenizer needs.

    None in `sys.modules` makes Python report that a module cannot be imported.
    """
    sys.modules["torch"] = None  # type: ignore[assignment]
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # it would warn that torch is missing


if __name__ == "__main__":
    sys.exit(main())
