"""Runs a frontend, which serves the public service over gRPC and HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from frontend.api.servicer import SERVICE_NAME, InferenceServicer
from frontend.callers.admission import Admission
from frontend.callers.audit import Audit, Usage
from frontend.callers.auth import ClientInterceptor
from frontend.callers.tenants import Tokens
from frontend.engines.pool import Engines
from frontend.generations import Generations
from frontend.http.app import App
from frontend.http.server import HttpServer
from frontend.metrics import RequestMetrics
from frontend.settings import FrontendSettings
from frontend.text.model_files import ModelFacts, ModelFilesError, read_model_facts
from frontend.text.tokenizer import Tokenizer
from nano_vllm_grpc.pb.frontend_pb2_grpc import add_InferenceServiceServicer_to_server
from shared.process.ports import SharedListener
from shared.rpc.server import Server
from shared.sampling_params import Pooling
from shared.telemetry.tracing import open_tracing

_TOKENIZER_THREADS = 2
_MIN_TOKENS = 100  # transformers makes a tokenizer of no files, too, with special tokens alone


class Frontend:
    """A frontend, whose public port others may share.

    Args:
        ready: called when a request would succeed for the first time.
        metrics: counts the calls.

    Raises:
        FileError: a file of certificates or tokens cannot be used.
    """

    def __init__(
        self,
        settings: FrontendSettings,
        ready: Callable[[], object] | None = None,
        metrics: RequestMetrics | None = None,
    ) -> None:
        self._settings = settings
        self._metrics = metrics
        path = settings.auth_tokens_file
        tracing = open_tracing(
            settings.otlp_endpoint, "frontend", settings.index, settings.trace_sample_ratio
        )
        self._admission = Admission(
            Tokens(path) if path else None,
            settings.max_requests_per_client,
            Audit(metrics.usage if metrics else Usage()),
            tracing,
        )
        self.server = Server(
            settings,
            SERVICE_NAME,
            interceptors=[ClientInterceptor(self._admission)],
            reuse_port=True,
            ready=ready,
        )

    async def serve(self, listener: SharedListener | None = None) -> None:
        """Serves until a signal.

        Args:
            listener: of HTTP; None: no HTTP.

        Raises:
            ModelFilesError: the model directory cannot be used.
            OSError: an address cannot be bound.
        """
        settings, server = self._settings, self.server
        facts, tokenizer = _read_model(Path(settings.model), settings.served_model_name)
        if settings.pooling != "auto":
            facts = replace(facts, pooling=Pooling[settings.pooling.upper()])
        was_ready = asyncio.Event()

        async def set_serving(serving: bool) -> None:
            await server.set_serving(serving)
            if serving:
                was_ready.set()

        engines = Engines(
            settings.scheduler_addresses or (settings.scheduler_address,),
            set_serving,
            settings.dialer,
            self._metrics,
            settings.check_scheduler,
        )
        generations = Generations(facts, tokenizer, engines)
        add_InferenceServiceServicer_to_server(InferenceServicer(generations), server.grpc)
        await server.start(f"{settings.host}:{settings.port}")
        http = None
        if listener:
            app = App(settings, generations, self._admission, server.calls)
            http = HttpServer(settings, app)
            server.on_stopping(http.drain)
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(engines.run())]
            if listener and http:
                running.append(tasks.create_task(http.run(listener.sockets, was_ready)))
            await server.wait()
            for task in running:
                task.cancel()
        if http:
            await http.close()
        tokenizer.close()


def _read_model(directory: Path, name: str) -> tuple[ModelFacts, Tokenizer]:
    """Raises ModelFilesError if a file cannot be used, or is missing."""
    facts, tokenizer = read_model_facts(directory, name), Tokenizer(directory, _TOKENIZER_THREADS)
    if (count := len(tokenizer.vocabulary.tokens)) < _MIN_TOKENS and 2 * count < facts.vocab_size:
        raise ModelFilesError(
            f"{directory}: the tokenizer has {count} tokens, but the model has {facts.vocab_size}; "
            "copy or download its files again"
        )
    return facts.ending_with(tokenizer.eos_token_ids), tokenizer
