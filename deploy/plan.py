"""Plans a stack from variables: one environment for all processes, checked before any starts."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from deploy.certificates import check_certificates, check_roles, pinned
from deploy.engines import check_engines, extra_master_ports
from deploy.errors import LaunchError
from deploy.model import model_name, resolve_model
from deploy.ports import choose_port, free_port, is_free
from deploy.stack import ENGINE_SERVICES, SERVICES, Stack, bracket_host
from frontend.callers.tenants import Tokens
from frontend.settings import FrontendSettings, PublicSettings
from nano_vllm_grpc.tls import ClientTls, FileError
from scheduler_svc.settings import SchedulerSettings
from shared.config import PREFIX, Addresses, AutoInt, ServiceSettings, load_settings, split_commas
from worker_svc.settings import WorkerSettings

Environment = dict[str, str]

_USUAL_HTTP_PORT, _USUAL_UI_PORT = 8000, 8080

HttpPort = Literal["auto"] | Annotated[int, Field(ge=0, le=65535)]


class StackSettings(PublicSettings):
    """The services' settings that the launcher acts on or fills in."""

    model: str = "models/demo"
    served_model_name: str = ""
    tp: int = Field(1, gt=0)
    device: str = "auto"
    threads: AutoInt = "auto"
    scheduler_address: str = ""
    scheduler_addresses: Addresses = ()
    worker_addresses: Addresses = ()
    engine_addresses: Addresses = ()
    profile_directory: str = ""
    http_port: HttpPort = Field("auto", description="the HTTP gateway's port; 0: none")
    ui_port: HttpPort = Field("auto", description="the page's port, on loopback; 0: none")
    master_port: int = 0

    # For the launcher's own requests, if clients must have a certificate.
    client_cert: str = ""
    client_key: str = ""

    _split = field_validator(
        "scheduler_addresses", "worker_addresses", "engine_addresses", mode="before"
    )(lambda v: split_commas(v))


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
        SettingsError: a NANO_ variable is unknown or impossible.
    """
    return load_settings(StackSettings, [], environment)


def plan_stack(
    environment: Environment, layout: Layout, directory: Path, port: int
) -> tuple[Stack, Environment]:
    """Decides where everything listens.

    Args:
        environment: this process's, with the variables given to it as NANO_<NAME>.
        port: the public port; `environment` may have just 0 for it.

    Returns:
        The stack, and the environment that all its processes share.

    Raises:
        SettingsError: a service would refuse a value; the message names it.
        LaunchError: one of the launcher's variables, or MODEL, is impossible.
    """
    settings = read_settings(environment)
    if unknown := set(layout.services) - set(SERVICES):
        raise LaunchError(f"SERVICES: {', '.join(sorted(unknown))}; known: {' '.join(SERVICES)}")
    ranks = _parse_ranks(layout.ranks, settings.tp)
    sockets = f"unix:{directory}"
    serves_http = {"frontend", "gateway"} <= set(layout.services)
    http_port = _http_port(settings, port) if serves_http else 0
    ui_port = 0
    if {"frontend", "page"} <= set(layout.services):
        wanted, usual = settings.ui_port, _USUAL_UI_PORT
        ui_port = choose_port("UI_PORT", wanted, "127.0.0.1", port, usual, taken=http_port)
    reads_model = bool({"worker", "frontend"} & set(layout.services))
    model = resolve_model(settings.model) if reads_model else None
    name = settings.served_model_name
    if model and not name:
        name = model_name(settings.model, model)
    stack = Stack(
        directory=directory,
        host=settings.host,
        port=port,
        services=layout.services,
        first_rank=ranks.start,
        num_ranks=len(ranks),
        frontends=layout.frontends,
        scheduler_address=settings.scheduler_address or f"{sockets}/scheduler.sock",
        worker_addresses=settings.worker_addresses
        or tuple(f"{sockets}/worker-{rank}.sock" for rank in range(settings.tp)),
        drain_timeout_s=settings.drain_timeout_s,
        public_tls=public_tls(settings) if "frontend" in layout.services else None,
        internal_tls=settings.dialer.tls,
        auth_tokens_file=_tokens_file(settings) if "frontend" in layout.services else "",
        model=name,
        http_port=http_port,
        ui_port=ui_port,
        engines=layout.engines,
        model_path=os.path.abspath(model) if model else "",
    )
    check_engines(stack)
    _check_internal_tls(settings, stack)
    ours = {
        "HOST": bracket_host(settings.host),
        "PORT": str(port),
        "SCHEDULER_ADDRESS": stack.scheduler_address,
        "WORKER_ADDRESSES": ",".join(stack.worker_addresses),
        "EXIT_WITH_PARENT": "1",
    }
    if {"scheduler", "frontend"} <= set(layout.services) and not settings.scheduler_addresses:
        ours["SCHEDULER_ADDRESSES"] = f"file:{stack.engines_file}"
    if stack.http_port:
        ours["HTTP_PORT"] = str(stack.http_port)
        ours["ENGINE_ADDRESSES"] = ",".join(
            settings.engine_addresses
            or (f"127.0.0.1:{free_port()}" for _ in range(layout.frontends))
        )
    if stack.ui_port:
        ours["UI_PORT"] = str(stack.ui_port)
    if model:
        ours |= {"MODEL": str(model), "SERVED_MODEL_NAME": name}
    if settings.metrics_port:
        raise LaunchError("NANO_METRICS_PORT: is one process's; a stack's have free ports")
    if layout.metrics:
        ours["METRICS_DIRECTORY"] = str(stack.metrics_directory)
    if "worker" in layout.services:
        ours["PROFILE_DIRECTORY"] = settings.profile_directory or str(directory / "profiles")
    if settings.tp > 1:
        if not settings.master_port and len(ranks) < settings.tp:
            raise LaunchError("NANO_MASTER_PORT: must be set, as on the hosts of the other ranks")
        master_port = settings.master_port or free_port()
        ours["MASTER_PORT"] = str(master_port)
        ports = extra_master_ports(stack, stack.engines, taken=master_port)
        stack = replace(stack, master_ports=ports)
    shared = environment | {PREFIX + name: value for name, value in ours.items()}
    worker = stack_settings(shared, first_rank=ranks.start)["workers"]
    assert isinstance(worker, WorkerSettings)
    if "worker" in layout.services and worker.tp > 1 and ranks.start == 0:
        # Ranks would otherwise wait until it is free.
        host, port = worker.master_addr, worker.master_port
        if port in (stack.port, stack.http_port, stack.ui_port) or not is_free(host, port):
            raise LaunchError(f"NANO_MASTER_PORT: {port} is in use on {host}, where ranks meet")
    return stack, shared


def stack_settings(environment: Environment, first_rank: int = 0) -> dict[str, ServiceSettings]:
    """Reads the settings as each service will, so that a bad value fails before anything starts.

    Raises:
        SettingsError: a service would refuse a value; the message names it.
    """
    rank = ["--rank", str(first_rank)]
    return {
        "frontends": load_settings(FrontendSettings, [], environment),
        "scheduler": load_settings(SchedulerSettings, [], environment),
        "workers": load_settings(WorkerSettings, rank, environment),
        "launcher": load_settings(StackSettings, [], environment),
    }


def public_tls(settings: StackSettings) -> ClientTls | None:
    """The TLS with which the launcher connects to the frontends."""
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
            f"{error}. The first request needs a certificate that tls_client_ca signed: "
            "NANO_CLIENT_CERT and NANO_CLIENT_KEY"
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


def _http_port(settings: StackSettings, port: int) -> int:
    """The gateway's port, 0 for none."""
    if settings.http_port and settings.tls_client_ca:
        if settings.http_port == "auto":
            return 0
        raise LaunchError(
            "HTTP_PORT: tls_client_ca is set, and the gateway asks callers for no certificate; "
            "leave it out, or give 0"
        )
    return choose_port("HTTP_PORT", settings.http_port, settings.host, port, _USUAL_HTTP_PORT)


def _parse_ranks(text: str | None, tp: int) -> range:
    if text is None:
        return range(tp)
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if not match:
        raise LaunchError(f"RANKS: {text!r} is neither a rank nor FIRST-LAST")
    first, last = int(match[1]), int(match[2] or match[1])
    if not first <= last < tp:
        raise LaunchError(f"RANKS: {text!r} is not within 0-{tp - 1}, the ranks of TP={tp}")
    return range(first, last + 1)
