"""Plans a stack from variables: one environment for all processes, checked before any starts."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from deploy.certificates import check_certificates, check_roles, pinned
from deploy.engines import check_engines, extra_master_ports
from deploy.errors import LaunchError
from deploy.model import check_weights, model_name, resolve_model, resolve_speculation
from deploy.ports import choose_port, free_port, is_free
from deploy.stack import ENGINE_SERVICES, SERVICES, Stack, bracket_host
from frontend.callers.tenants import Tokens
from frontend.settings import FrontendSettings, PublicSettings
from nano_vllm_grpc.tls import ClientTls, FileError
from scheduler_svc.settings import SchedulerSettings
from shared.config import PREFIX, Addresses, AutoInt, ServiceSettings, load_settings
from worker_svc.settings import WorkerSettings

Environment = dict[str, str]

_USUAL_PORT, _USUAL_HTTP_PORT, _USUAL_UI_PORT = 50051, 8000, 8080

HttpPort = Literal["auto"] | Annotated[int, Field(ge=0, le=65535)]


class StackSettings(PublicSettings):
    """The services' settings that the launcher reads or sets."""

    model: str = "models/demo"
    speculation: str = "auto"
    served_model_name: str = ""
    tp: int = Field(1, gt=0)
    pp: int = Field(1, gt=0)
    device: str = "auto"
    threads: AutoInt = "auto"
    scheduler_address: str = ""
    scheduler_addresses: Addresses = ()
    worker_addresses: Addresses = ()
    http_port: HttpPort = Field(
        "auto", description="port of HTTP (auto: 8000 or a free port; 0: no HTTP)"
    )
    responses_directory: str = ""
    ui_port: HttpPort = Field(
        "auto",
        description="loopback port of the dashboard (auto: 8080 or a free port; 0: no dashboard)",
    )
    master_port: int = 0

    client_cert: str = Field(
        "", description="PEM file of the launcher's certificate, if clients must have one"
    )
    client_key: str = Field("", description="PEM file of the key of client_cert")

    @property
    def ranks_per_engine(self) -> int:
        return self.tp * self.pp


@dataclass(frozen=True)
class Layout:
    """The processes to run on this host, from the variables that no service reads.

    `ranks` is `2` or `0-3`, or None for all.
    """

    frontends: int = 1
    services: tuple[str, ...] = SERVICES
    ranks: str | None = None
    metrics: bool = True
    engines: int = 1


def read_settings(environment: Environment) -> StackSettings:
    """Reads the settings of the stack as a whole from `environment`.

    Raises:
        SettingsError: a NANO_ variable is unknown or invalid.
    """
    return load_settings(StackSettings, [], environment)


def plan_stack(
    environment: Environment, layout: Layout, directory: Path, port: int
) -> tuple[Stack, Environment]:
    """Plans the processes of a stack, and where they listen.

    Args:
        environment: of this process, with the command's options as NANO_<NAME>.
        port: the public port; `environment` may have 0 instead.

    Returns:
        The stack, and the environment that all its processes share.

    Raises:
        SettingsError: a service would reject a value; the message names it.
        LaunchError: one of the launcher's variables, or MODEL, is invalid.
    """
    settings = read_settings(environment)
    if unknown := set(layout.services) - set(SERVICES):
        raise LaunchError(f"SERVICES: {min(unknown)} is not one of {', '.join(SERVICES)}")
    if settings.metrics_address:
        raise LaunchError("NANO_METRICS_ADDRESS: must be empty: each process has its own")
    stack = _plan_processes(settings, layout, directory, port)
    check_engines(stack)
    _check_internal_tls(settings, stack)
    variables = _shared_variables(settings, layout, stack)
    if settings.ranks_per_engine > 1:
        if not settings.master_port and stack.num_ranks < settings.ranks_per_engine:
            raise LaunchError("NANO_MASTER_PORT: must be set to the same port on all ranks' hosts")
        master_port = settings.master_port or free_port()
        variables["MASTER_PORT"] = str(master_port)
        ports = extra_master_ports(stack, stack.engines, taken=master_port)
        stack = replace(stack, master_ports=ports)
    shared = environment | {PREFIX + name: value for name, value in variables.items()}
    worker = stack_settings(shared, first_rank=stack.first_rank)["workers"]
    assert isinstance(worker, WorkerSettings)
    if "worker" in stack.services and worker.num_ranks > 1 and stack.first_rank == 0:
        # Otherwise, ranks would wait until the port is free.
        host, port = worker.master_addr, worker.master_port
        if port in (stack.port, stack.http_port, stack.ui_port) or not is_free(host, port):
            raise LaunchError(f"NANO_MASTER_PORT: {port} is in use on {host}, where ranks meet")
    return stack, shared


def _plan_processes(settings: StackSettings, layout: Layout, directory: Path, port: int) -> Stack:
    """Returns the stack, with an address for each process."""
    services = set(layout.services)
    ranks = _parse_ranks(layout.ranks, settings)
    sockets = f"unix:{directory}"
    http_port = ui_port = 0
    if "frontend" in services:
        wanted, usual = settings.http_port, _USUAL_HTTP_PORT
        http_port = choose_port("HTTP_PORT", wanted, settings.host, port, usual)
    if {"frontend", "dashboard"} <= services:
        wanted, usual = settings.ui_port, _USUAL_UI_PORT
        ui_port = choose_port("UI_PORT", wanted, "127.0.0.1", port, usual, taken=http_port)
    model = resolve_model(settings.model) if services & {"worker", "frontend"} else None
    if model and "worker" in services:
        check_weights(settings.model, model)
    has_frontend = "frontend" in services
    return Stack(
        directory=directory,
        host=settings.host,
        port=port,
        services=layout.services,
        first_rank=ranks.start,
        num_ranks=len(ranks),
        frontends=layout.frontends,
        scheduler_address=settings.scheduler_address or f"{sockets}/scheduler.sock",
        worker_addresses=settings.worker_addresses
        or tuple(f"{sockets}/worker-{rank}.sock" for rank in range(settings.ranks_per_engine)),
        drain_timeout_s=settings.drain_timeout_s,
        public_tls=public_tls(settings) if has_frontend else None,
        internal_tls=settings.dialer.tls,
        auth_tokens_file=_tokens_file(settings) if has_frontend else "",
        model=settings.served_model_name or (model_name(settings.model, model) if model else ""),
        http_port=http_port,
        ui_port=ui_port,
        engines=layout.engines,
        model_path=os.path.abspath(model) if model else "",
    )


def _shared_variables(settings: StackSettings, layout: Layout, stack: Stack) -> dict[str, str]:
    """Returns the environment variables that all processes of the stack share."""
    variables = {
        "HOST": bracket_host(stack.host),
        "PORT": str(stack.port),
        "SCHEDULER_ADDRESS": stack.scheduler_address,
        "WORKER_ADDRESSES": ",".join(stack.worker_addresses),
        "HTTP_PORT": str(stack.http_port),
    }
    if {"scheduler", "frontend"} <= set(stack.services) and not settings.scheduler_addresses:
        variables["SCHEDULER_ADDRESSES"] = f"file:{stack.engines_file}"
    if stack.http_port and "responses_directory" not in settings.model_fields_set:
        variables["RESPONSES_DIRECTORY"] = str(stack.responses_directory)
    if stack.ui_port:
        variables["UI_PORT"] = str(stack.ui_port)
    if stack.model_path:
        variables |= {"MODEL": stack.model_path, "SERVED_MODEL_NAME": stack.model}
    if layout.metrics:
        variables["METRICS_DIRECTORY"] = str(stack.metrics_directory)
    if "worker" in stack.services and settings.speculation != "auto":
        variables["SPECULATION"] = resolve_speculation(settings.speculation)
    return variables


def stack_settings(environment: Environment, first_rank: int = 0) -> dict[str, ServiceSettings]:
    """Reads the settings as each service will, so that a bad value fails before anything starts.

    Raises:
        SettingsError: a service would reject a value; the message names it.
    """
    rank = ["--rank", str(first_rank)]
    return {
        "frontends": load_settings(FrontendSettings, [], environment),
        "scheduler": load_settings(SchedulerSettings, [], environment),
        "workers": load_settings(WorkerSettings, rank, environment),
        "launcher": load_settings(StackSettings, [], environment),
    }


def published_http_port(settings: StackSettings) -> int:
    """Returns the port of HTTP of a stack that may have several hosts or networks, 0 for none. It
    does not depend on which ports are free, so a second `up` does not change it."""
    if settings.http_port == "auto":
        return _USUAL_HTTP_PORT if settings.port == _USUAL_PORT else 0
    return settings.http_port


def public_tls(settings: StackSettings) -> ClientTls | None:
    """Returns the TLS settings with which the launcher connects to the frontends."""
    server = settings.server_tls
    if server is None:
        return None
    if not server.client_ca:
        return pinned(server, "", "")
    given = settings.client_cert or settings.client_key
    own = (settings.client_cert, settings.client_key) if given else (server.cert, server.key)
    try:
        return pinned(server, *own)
    except LaunchError as error:
        raise LaunchError(
            f"{error}. The first request needs a certificate that tls_client_ca signed; "
            "set NANO_CLIENT_CERT and NANO_CLIENT_KEY"
        ) from error


def _tokens_file(settings: StackSettings) -> str:
    try:
        if settings.auth_tokens_file:
            Tokens(settings.auth_tokens_file)
    except FileError as error:
        raise LaunchError(str(error)) from error
    return settings.auth_tokens_file


def _check_internal_tls(settings: StackSettings, stack: Stack) -> None:
    """Checks that the services will trust the names and roles in each other's certificates."""
    server = settings.internal_tls
    if server is not None and stack.internal_tls is not None:
        inner = (each for each in stack.processes() if each.service in ("worker", "scheduler"))
        check_certificates(server, stack.internal_tls, (each.address for each in inner))
        required = settings.internal_tls_roles == "required"
        services = [each for each in stack.services if each in ENGINE_SERVICES]
        check_roles(server, stack.internal_tls, services, required)


def _parse_ranks(text: str | None, settings: StackSettings) -> range:
    count = settings.ranks_per_engine
    if text is None:
        return range(count)
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if not match:
        raise LaunchError(f"RANKS: {text!r} is neither a rank nor FIRST-LAST")
    first, last = int(match[1]), int(match[2] or match[1])
    if not first <= last < count:
        stages = f" PP={settings.pp}" if settings.pp > 1 else ""
        raise LaunchError(
            f"RANKS: {text!r} is not within 0-{count - 1}, the ranks of TP={settings.tp}{stages}"
        )
    return range(first, last + 1)
