"""Runs the HTTP gateway of a stack, or of several: `python -m deploy.gateway`.

Shepherd Model Gateway (smg) speaks OpenAI's and Anthropic's protocols to clients, and vLLM's engine
protocol to the frontends, which it calls workers.
"""

from __future__ import annotations

import gc

gc.disable()  # while importing, see `shared.process.run`

import asyncio
import json
import os
import secrets
import signal
import ssl
import sys
import tempfile
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Self

import structlog
from pydantic import Field, field_validator, model_validator
from smg.router import Router
from smg.router_args import RouterArgs

from deploy.health import SERVING, http_health
from deploy.ports import free_port
from deploy.stack import gateway_url
from frontend.callers.tenants import Tenant, read_clients
from frontend.settings import PublicSettings
from nano_vllm_grpc.channels import stays_on_host
from nano_vllm_grpc.tls import ClientTls, load_files
from shared.config import Addresses, settings_or_exit, split_commas
from shared.process.run import Ready, run_service
from shared.telemetry.metrics_endpoint import list_endpoint
from worker_svc.errors import ModelError
from worker_svc.models.chat_formats import choose_parsers

log = structlog.get_logger(__name__)


_FIRST = asyncio.FIRST_COMPLETED
_POLL_S = 0.05
_FILES_S = 1.0  # between checks of the token and certificate files
_OPEN = ("01", "03", "08")  # ESTABLISHED, SYN_RECV, CLOSE_WAIT
_UNLIMITED = (1 << 32) - 1  # the maximum per minute that smg accepts
_RESTART = 1  # exit status that makes the parent process fork again
_HEALTH_S = 5  # between the gateway's health checks of a frontend
# Retries last about three seconds, until a frontend is back or a queue has room.
_RETRIES, _FIRST_RETRY_MS, _LAST_RETRY_MS = 8, 100, 2000
# More than the frontends accept from one tenant.
_MAX_REQUESTS = 4096
# A request counts as one of these before its body is there. These limit the time for the whole body
# and for its next bytes. The first does not end a generation.
_BODY_S, _STALL_S = 30, 10


class GatewaySettings(PublicSettings):
    """The stack's settings that the gateway reads."""

    program: ClassVar[str] = "python -m deploy.gateway"

    http_port: int = Field(8000, gt=0, le=65535)
    gateway_addresses: Addresses = Field(
        (), description="host:port of all frontends, of one stack or several"
    )
    gateway_policy: Literal["round_robin", "cache_aware"] = Field(
        "round_robin", description="cache_aware: prefer the stack that has the prompt's prefix"
    )
    model: str = "models/demo"

    _split = field_validator("gateway_addresses", mode="before")(split_commas)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.gateway_addresses:
            raise ValueError("gateway_addresses: must not be empty")
        for address in self.gateway_addresses:
            if not (stays_on_host(address) or self.allow_public_plaintext):
                raise ValueError(
                    f"gateway_addresses: {address} is not on loopback, and the gateway calls "
                    "frontends without TLS; use a tunnel (docs/use/http.md), or set "
                    "allow_public_plaintext (NANO_ALLOW_PUBLIC_PLAINTEXT=1) if the network is "
                    "private"
                )
        if self.tls_client_ca:
            raise ValueError("tls_client_ca: the gateway cannot ask callers for certificates")
        return self


class Admission(NamedTuple):
    """The contents of the token and certificate files, as read at one moment.

    Args:
        clients: by token; None: no token is needed.
        certificate: the texts of the certificate and its key; None: no TLS.
    """

    clients: dict[str, Tenant] | None
    certificate: tuple[str, str] | None

    @classmethod
    def read(cls, settings: GatewaySettings) -> Self:
        """
        Raises:
            OSError, UnicodeDecodeError: a file cannot be used.
        """
        path, tls = settings.auth_tokens_file, settings.server_tls
        if tls:
            load_files("tls", ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), tls.cert, tls.key, "")
        return cls(
            read_clients(path) if path else None,
            (Path(tls.cert).read_text(), Path(tls.key).read_text()) if tls else None,
        )

    @property
    def keys(self) -> list[tuple[str, str]]:
        """The names of tenants with their keys. A random key is always among them, because smg
        accepts all callers if there are no keys."""
        if self.clients is None:
            return []
        known = [(client.name, token) for token, client in self.clients.items()]
        return [*known, ("nobody", secrets.token_hex(32))]

    @property
    def budgets(self) -> dict[str, Any]:
        """smg's limits of tenants. smg adds up the tokens of a prompt and its answer."""
        unlimited = {"tokens_per_minute": _UNLIMITED, "requests_per_minute": _UNLIMITED}
        limits = {
            client.name: client.input_tokens_per_minute + client.output_tokens_per_minute
            for client in (self.clients or {}).values()
            if client.input_tokens_per_minute and client.output_tokens_per_minute
        }
        tenants = [
            unlimited | {"tenant_key": f"auth:{name}", "tokens_per_minute": min(limit, _UNLIMITED)}
            for name, limit in limits.items()
        ]
        return {"default_policy": unlimited, "tenants": tenants}


def router_args(
    settings: GatewaySettings, metrics_address: str, admission: Admission, budgets: Path
) -> RouterArgs:
    """Returns smg's settings; all others have smg's defaults.

    Args:
        budgets: a file for tenants' limits, which smg reads.

    Raises:
        ModelError: the model is of no family that is served, or a file cannot be read.
    """
    parsers = choose_parsers(Path(settings.model))
    metrics_host, _, metrics_port = metrics_address.rpartition(":")
    budgets.write_text(json.dumps(admission.budgets))  # JSON is YAML, too
    return RouterArgs(
        worker_urls=[f"grpc://{address}" for address in settings.gateway_addresses],
        host=settings.host.strip("[]"),
        port=settings.http_port,
        model_path=str(Path(settings.model).resolve()),
        # All frontends of a stack use the same engines, so any of them may serve a request.
        policy=settings.gateway_policy,
        worker_startup_check_interval=1,
        health_check_interval_secs=_HEALTH_S,
        # A frontend that dies is back in milliseconds, so the gateway waits for it.
        disable_circuit_breaker=True,
        retry_max_retries=_RETRIES,
        retry_initial_backoff_ms=_FIRST_RETRY_MS,
        retry_max_backoff_ms=_LAST_RETRY_MS,
        max_payload_size=settings.max_message_bytes,
        max_concurrent_requests=_MAX_REQUESTS,
        request_timeout_secs=_BODY_S,
        stream_body_stall_timeout_secs=_STALL_S,
        # With these, callers could fill the memory, and start work that nobody waits for.
        history_backend="none",
        max_background_responses=0,
        shutdown_grace_period_secs=max(round(settings.drain_timeout_s), 1),
        reasoning_parser=parsers.reasoning,
        tool_call_parser=parsers.tool_call,
        tenant_api_keys=admission.keys,
        tenant_rate_limit_enabled=bool(admission.clients),
        tenant_rate_limit_config=str(budgets),
        server_cert_path=settings.tls_cert or None,
        server_key_path=settings.tls_key or None,
        # Nobody knows this key, so nobody can add a worker, load a module or profile over HTTP.
        control_plane_api_keys=[("launcher", "launcher", secrets.token_hex(32), "admin")],
        prometheus_host=metrics_host.strip("[]"),
        prometheus_port=int(metrics_port),
        enable_trace=bool(settings.otlp_endpoint),
        otlp_traces_endpoint=settings.otlp_endpoint,
        log_level="info" if settings.otlp_endpoint else "warn",  # the level of spans
        log_json=True,
    )


async def serve(settings: GatewaySettings, ready: Ready) -> None:
    """Runs the gateway until a signal stops it or its files change. On a change it drains, and its
    parent process forks again.

    Raises:
        RuntimeError, ModelError: the gateway cannot start.
        OSError: a token or certificate file cannot be used.
    """
    # smg has no settings for this.
    os.environ["OTEL_TRACES_SAMPLER"] = "parentbased_traceidratio"
    os.environ["OTEL_TRACES_SAMPLER_ARG"] = str(settings.trace_sample_ratio)
    metrics_address = settings.metrics_address or f"127.0.0.1:{free_port()}"
    admission = Admission.read(settings)
    stopping = asyncio.Event()
    # Before smg installs its own handler, which then calls this one, too.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    with tempfile.TemporaryDirectory() as directory:
        args = router_args(settings, metrics_address, admission, Path(directory, "budgets"))
        router = Router.from_args(args)
        listing = None
        if settings.metrics_directory:
            file = Path(settings.metrics_directory, "gateway-0.json")
            listing = asyncio.create_task(list_endpoint(file, metrics_address))
        running = asyncio.ensure_future(asyncio.to_thread(router.start))
        drained = asyncio.create_task(_drained(settings.http_port, stopping))
        # With tracing, smg must end by itself, because it sends spans as it ends.
        ends = [running] if settings.otlp_endpoint else [running, drained]
        url = gateway_url(settings.host, settings.http_port, secure=bool(settings.tls_cert))
        tls = ClientTls(settings.tls_cert)
        while not (await asyncio.wait(ends, timeout=_POLL_S, return_when=_FIRST))[0]:
            if await asyncio.to_thread(http_health, url, tls=tls) == SERVING:
                ready()
                break
        changed = asyncio.create_task(_change(settings, admission))
        await asyncio.wait([*ends, changed], return_when=_FIRST)
        if changed.done():
            os.kill(os.getpid(), signal.SIGTERM)  # which makes smg drain
        await asyncio.wait(ends, return_when=_FIRST)
        if listing:
            listing.cancel()
    status = _RESTART if changed.done() else 0
    if not running.done():
        os._exit(status)  # without waiting for smg
    await running
    if status:
        sys.exit(status)
    changed.cancel()
    drained.cancel()


async def _drained(port: int, stopping: asyncio.Event) -> None:
    """Returns once `stopping` is set and the gateway has no connections. smg by itself would listen
    for 5 s more, in case a load balancer still sends callers."""
    await stopping.wait()
    while True:
        await asyncio.sleep(_POLL_S)
        if not _is_connected(port):
            return


def _is_connected(port: int) -> bool:
    """Whether a TCP connection to this port of the host is open, or about to be (proc_net_tcp)."""
    for table in Path("/proc/self/net").glob("tcp*"):
        for line in table.read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            if local.endswith(f":{port:04X}") and state in _OPEN:
                return True
    return False


async def _change(settings: GatewaySettings, admission: Admission) -> None:
    """Returns once the files differ from `admission`, and can be used."""
    complaint = ""
    while True:
        await asyncio.sleep(_FILES_S)
        try:
            read = Admission.read(settings)
        except (OSError, UnicodeDecodeError) as error:
            if str(error) != complaint:
                complaint = str(error)
                log.warning("cannot read new tokens or certificates; keeping old", reason=complaint)
            continue
        complaint = ""
        if read != admission:
            log.info("tokens or certificates changed; draining and restarting")
            return


def main() -> int:
    settings = settings_or_exit(GatewaySettings, sys.argv[1:])
    return run_service("gateway", settings, serve, (RuntimeError, ValueError, ModelError))


if __name__ == "__main__":
    sys.exit(main())
