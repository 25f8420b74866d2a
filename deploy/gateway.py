"""The HTTP gateway of a stack, a process like the services', or of several stacks:
`python -m deploy.gateway`.

Shepherd Model Gateway (smg) speaks OpenAI's and Anthropic's protocols to clients, and vLLM's engine
protocol to the frontends, which it takes for workers.
"""

from __future__ import annotations

import gc

gc.disable()  # while importing, see `shared.process`

import asyncio
import os
import secrets
import sys
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator
from smg.router import Router
from smg.router_args import RouterArgs

from deploy.health import SERVING, http_health
from deploy.ports import free_port
from deploy.stack import dialled_address
from shared.channels import stays_on_host
from shared.config import Addresses, ServiceSettings, settings_or_exit, split_commas
from shared.metrics_endpoint import list_endpoint
from shared.process import Ready, run_service

_POLL_S = 0.05
_HEALTH_S = 5  # between the gateway's looks at a frontend
# Until a frontend is back, or a queue has room: some three seconds.
_RETRIES, _FIRST_RETRY_MS, _LAST_RETRY_MS = 8, 100, 2000
# One tenant's requests beyond what the frontends take of one.
_MAX_REQUESTS = 4096
# A request has a place among these before its body is there: the time for all of the body, and for
# its next bytes. The first ends no generation.
_BODY_S, _STALL_S = 30, 10


class GatewaySettings(ServiceSettings):
    """The stack's settings that the gateway reads."""

    program: ClassVar[str] = "python -m deploy.gateway"

    host: str = "127.0.0.1"
    http_port: int = Field(8000, gt=0, le=65535)
    engine_addresses: Addresses = Field((), description="of the frontends, of one stack or several")
    gateway_policy: Literal["round_robin", "cache_aware"] = Field(
        "round_robin", description="cache_aware: of several stacks, the one that has the prefix"
    )
    model: str = "models/demo"
    allow_public_plaintext: bool = False

    _split = field_validator("engine_addresses", mode="before")(split_commas)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.engine_addresses:
            raise ValueError("engine_addresses: there are none")
        own = ("host", f"{self.host}:{self.http_port}")
        for name, address in (own, *(("engine_addresses", each) for each in self.engine_addresses)):
            if not (stays_on_host(address) or self.allow_public_plaintext):
                raise ValueError(
                    f"{name}: {address} is not on loopback, and the gateway knows neither TLS nor "
                    "tokens: put a tunnel between (docs/http.md), or allow_public_plaintext "
                    "(NANO_ALLOW_PUBLIC_PLAINTEXT=1) if the network is private"
                )
        return self


def router_args(settings: GatewaySettings, metrics_port: int) -> RouterArgs:
    """The gateway's own settings; what is not set is at its defaults."""
    args = RouterArgs(
        worker_urls=[f"grpc://{address}" for address in settings.engine_addresses],
        host=settings.host.strip("[]"),
        port=settings.http_port,
        model_path=str(Path(settings.model).resolve()),
        # All frontends of a stack lead to the same engines: a request may take any of them.
        policy=settings.gateway_policy,
        worker_startup_check_interval=1,
        health_check_interval_secs=_HEALTH_S,
        # A frontend that dies is back in milliseconds: to wait for it beats to avoid it.
        disable_circuit_breaker=True,
        retry_max_retries=_RETRIES,
        retry_initial_backoff_ms=_FIRST_RETRY_MS,
        retry_max_backoff_ms=_LAST_RETRY_MS,
        max_payload_size=settings.max_message_bytes,
        max_concurrent_requests=_MAX_REQUESTS,
        request_timeout_secs=_BODY_S,
        stream_body_stall_timeout_secs=_STALL_S,
        # Callers could fill its memory, and have work done that nobody waits for.
        history_backend="none",
        max_background_responses=0,
        shutdown_grace_period_secs=max(round(settings.drain_timeout_s), 1),
        reasoning_parser="qwen3",
        tool_call_parser="qwen",
        # Nobody has it, so nobody can add a worker, load a module or start a profile over HTTP.
        control_plane_api_keys=[("launcher", "launcher", secrets.token_hex(32), "admin")],
        prometheus_host="127.0.0.1",
        prometheus_port=metrics_port,
        enable_trace=bool(settings.otlp_endpoint),
        otlp_traces_endpoint=settings.otlp_endpoint,
        log_level="info" if settings.otlp_endpoint else "warn",  # as its spans
        log_json=True,
    )
    # RouterArgs does not have it, but passes on what it is given. By default a gateway that is told
    # to stop first accepts connections for 5 s more: in case a load balancer still sends some.
    args.drain_settle_secs = 0
    return args


async def serve(settings: GatewaySettings, ready: Ready) -> None:
    """Runs the gateway until it is told to stop.

    Raises:
        RuntimeError: it cannot start.
    """
    # It has no settings of its own for this.
    os.environ["OTEL_TRACES_SAMPLER"] = "parentbased_traceidratio"
    os.environ["OTEL_TRACES_SAMPLER_ARG"] = str(settings.trace_sample_ratio)
    metrics_port = free_port()
    router = Router.from_args(router_args(settings, metrics_port))
    listing = None
    if settings.metrics_directory:
        file = Path(settings.metrics_directory, "gateway-0.json")
        listing = asyncio.create_task(list_endpoint(file, f"127.0.0.1:{metrics_port}"))
    running = asyncio.ensure_future(asyncio.to_thread(router.start))
    url = f"http://{dialled_address(settings.host, settings.http_port)}"
    while not (await asyncio.wait([running], timeout=_POLL_S))[0]:
        if await asyncio.to_thread(http_health, url) == SERVING:
            ready()
            break
    await running
    if listing:
        listing.cancel()


def main() -> int:
    settings = settings_or_exit(GatewaySettings, sys.argv[1:])
    return run_service("gateway", settings, serve, (RuntimeError, ValueError))


if __name__ == "__main__":
    sys.exit(main())
