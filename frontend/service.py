"""Runs a frontend, which serves the public service, and vLLM's engine protocol for a gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from frontend.api.generations import Generations
from frontend.api.servicer import SERVICE_NAME, InferenceServicer
from frontend.callers.audit import Audit, Usage
from frontend.callers.auth import ClientInterceptor
from frontend.callers.gateway import GatewayAddress
from frontend.callers.tenants import Tokens
from frontend.engines.pool import Engines
from frontend.metrics import RequestMetrics
from frontend.settings import FrontendSettings
from frontend.text.model_files import ModelFacts, ModelFilesError, read_model_facts
from frontend.text.tokenizer import Tokenizer
from nano_vllm_grpc.pb import frontend_pb2 as pb
from nano_vllm_grpc.pb.frontend_pb2_grpc import add_InferenceServiceServicer_to_server
from shared.rpc.server import Server
from shared.telemetry.tracing import open_tracing

_TOKENIZER_THREADS = 2


def public_server(
    settings: FrontendSettings,
    ready: Callable[[], object] | None = None,
    metrics: RequestMetrics | None = None,
) -> Server:
    """A server that admits callers with a token, each with a limited number of calls at a time.
    Frontends may share its port.

    Args:
        ready: as for `Server`.
        metrics: counts the calls.

    Raises:
        FileError: a file of certificates or tokens cannot be used.
    """
    path = settings.auth_tokens_file
    services = [pb.DESCRIPTOR.services_by_name["InferenceService"]]
    tokens = Tokens(path) if path else None
    gateway: GatewayAddress | None = None
    if settings.gateway_address:
        # Imported here, because its packages are installed only for gateways.
        from frontend.api.vllm_engine import servicer as engine

        services.append(engine.PROTOCOL)
        if settings.serves_gateway:
            methods = {f"/{engine.SERVICE_NAME}/{name}" for name in engine.PROTOCOL.methods_by_name}
            find = tokens.named if tokens else None
            gateway = GatewayAddress(settings.gateway_address, methods, find)
    paths = {
        f"/{service.full_name}/{name}": name
        for service in services
        for name in service.methods_by_name
    }
    usage = metrics.usage if metrics else Usage()
    tracing = open_tracing(
        settings.otlp_endpoint, "frontend", settings.index, settings.trace_sample_ratio
    )
    return Server(
        settings,
        SERVICE_NAME,
        interceptors=[
            ClientInterceptor(
                tokens,
                settings.max_requests_per_client,
                Audit(usage),
                paths,
                tracing,
                gateway,
            )
        ],
        reuse_port=True,
        ready=ready,
    )


async def serve(
    server: Server, settings: FrontendSettings, metrics: RequestMetrics | None = None
) -> None:
    """Runs the service on `server` until it stops.

    Raises:
        ModelFilesError: the model directory cannot be used.
        OSError: the address cannot be bound.
    """
    directory = Path(settings.model)
    facts, tokenizer = _read_model(directory, settings.served_model_name)
    engine_server: Server | None = None
    opened = False

    async def set_serving(serving: bool) -> None:
        nonlocal opened
        if engine_server:
            if serving and not opened:
                # Not before, because gateways ask for the model once, when they can connect.
                opened = True
                await engine_server.start(settings.gateway_address)
            await engine_server.set_serving(serving)
        await server.set_serving(serving)

    engines = Engines(
        settings.scheduler_addresses or (settings.scheduler_address,),
        set_serving,
        settings.dialer,
        metrics,
        settings.check_scheduler,
    )
    generations = Generations(facts, tokenizer, engines)
    add_InferenceServiceServicer_to_server(InferenceServicer(generations), server.grpc)
    if settings.gateway_address:
        from frontend.api.vllm_engine import servicer as engine

        engine_server = Server(
            settings,
            engine.SERVICE_NAME,
            reuse_port=True,
            beside=server,
            plaintext=settings.serves_gateway,
        )
        servicer = engine.VllmEngineServicer(
            generations,
            directory,
            report_cached_tokens=settings.report_cached_tokens,
            sends_events=settings.serves_gateway,
        )
        engine.add_to_server(servicer, engine_server.grpc)  # type: ignore[no-untyped-call]
    await server.start(f"{settings.host}:{settings.port}")
    try:
        async with asyncio.TaskGroup() as tasks:
            connection = tasks.create_task(engines.run())
            await asyncio.gather(*(each.wait() for each in (server, engine_server) if each))
            connection.cancel()
    except* OSError as errors:
        raise errors.exceptions[0] from None  # the engine protocol's address
    tokenizer.close()


def _read_model(directory: Path, name: str) -> tuple[ModelFacts, Tokenizer]:
    """
    Raises:
        ModelFilesError: a file cannot be used, or is missing.
    """
    facts, tokenizer = read_model_facts(directory, name), Tokenizer(directory, _TOKENIZER_THREADS)
    if 2 * len(tokenizer.vocabulary.tokens) < facts.vocab_size:
        # transformers makes a tokenizer of no files, too.
        raise ModelFilesError(
            f"{directory}: the tokenizer has {len(tokenizer.vocabulary.tokens)} tokens, but the "
            f"model has {facts.vocab_size}; copy or download its files again"
        )
    return facts.ending_with(tokenizer.eos_token_ids), tokenizer
