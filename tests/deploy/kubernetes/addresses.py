"""Where the processes of the manifests listen, according to their own settings."""

from __future__ import annotations

from deploy.gateway import GatewaySettings
from frontend.settings import FrontendSettings
from nano_vllm_grpc.channels import stays_on_host
from scheduler_svc.settings import SchedulerSettings
from shared.tls import ServerTls
from tests.deploy.kubernetes.pods import Process
from worker_svc.settings import WorkerSettings


def listens(process: Process) -> list[int]:
    """The ports on which a process listens for other pods: of its service first, then of its
    metrics."""
    addresses = [*served(process), _metrics(process)]
    return [int(each.rpartition(":")[2]) for each in addresses if not stays_on_host(each)]


def served(process: Process) -> list[str]:
    """A process's addresses but that of its metrics, the one of its health first."""
    match settings := process.settings:
        case GatewaySettings():
            return [f"{settings.host}:{settings.http_port}"]
        case FrontendSettings():
            engine = [settings.engine_address] if settings.engine_address else []
            return [f"{settings.host}:{settings.port}", *engine]
        case SchedulerSettings():
            return [settings.scheduler_address]
        case WorkerSettings():
            return [settings.worker_addresses[settings.rank]]
    raise TypeError(settings)


def _metrics(process: Process) -> str:
    return f"{process.settings.metrics_host}:{process.settings.metrics_port}"


def probed_addresses(process: Process) -> tuple[str, ...]:
    """The ways to write the address at which a probe within the pod reaches a service."""
    address = served(process)[0]
    if address.startswith("unix:"):
        return (address,)
    port = address.rpartition(":")[2]
    return (f"localhost:{port}", f"127.0.0.1:{port}")


def tls_of(process: Process) -> ServerTls | None:
    """The TLS that a process serves with."""
    tls: ServerTls | None = process.settings.server_tls
    return tls


def scheduler_of(process: Process) -> bool:
    return process.service is SchedulerSettings


def worker_of(process: Process) -> bool:
    return process.service is WorkerSettings


def frontend_of(process: Process) -> bool:
    return process.service is FrontendSettings


def gateway_of(process: Process) -> bool:
    return process.service is GatewaySettings
