"""Commands for RUNTIME=ray: up, scale, down, ps and logs on the Ray cluster of this host."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from deploy.errors import LaunchError
from deploy.first_tokens import PROMPT
from deploy.health import SERVING
from deploy.model import check_weights, model_name, resolve_model, resolve_speculation
from deploy.native.processes import is_running
from deploy.native.progress import report_lines
from deploy.native.startup import poll_until_serving
from deploy.native.status import ProcessStatus, format_status, status_json
from deploy.plan import (
    Environment,
    Layout,
    StackSettings,
    published_http_port,
    read_settings,
    stack_settings,
)
from deploy.ray.actors import ask
from deploy.ray.cluster import Cluster, connected
from deploy.ray.layout import RayStack
from deploy.stack import SERVICES, bracket_host, http_url, run_directory
from nano_vllm_grpc.channels import stays_on_host
from shared.config import KNOWN_NAMES, PREFIX

_POLL_S = 0.5
_FIRST_ANSWER_S = 600.0  # a large model on few cores can take minutes per token
_LAST_LOG_BYTES = 4 << 10
_RANK_CPUS = 0.5  # so that a small stack fits on two cores; NANO_THREADS overrides it
_FILES = (
    *("tls_cert", "tls_key", "tls_client_ca", "auth_tokens_file"),
    *("internal_tls_cert", "internal_tls_key", "internal_tls_ca"),
    *("config_file", "responses_directory"),
)
_CHOSEN = ("scheduler_address", "worker_addresses", "master_port")


def up(environment: Environment, layout: Layout) -> int:
    """Starts the stack's actors; returns 0 once one of its frontends has answered a request.

    Raises:
        SettingsError: a service would reject a value; the message names it.
        LaunchError: the stack cannot start; the message says why.
    """
    settings = read_settings(environment)
    if is_running(run_directory(settings.port)):
        raise LaunchError("PORT: a stack of RUNTIME=native runs on this port; make down stops it")
    with connected(settings.port) as cluster:
        if cluster.names():
            return _already_up(cluster.statuses(), settings.port)
        stack = plan(environment, settings, layout, cluster)
        try:
            for index in range(layout.engines):
                cluster.start_engine(stack, index)
            cluster.start_frontends(stack, layout.frontends)
            addresses = _wait_until_serving(cluster)
            _greet(cluster, settings, addresses)
        except BaseException:
            print("stopping the stack")
            cluster.stop_all()
            raise
    return 0


def scale(environment: Environment, engines: int) -> int:
    """Starts further engines, or stops those with the highest numbers once no stream needs them.

    Raises:
        LaunchError: no stack runs, or an engine cannot start.
    """
    port = read_settings(environment).port
    with connected(port) as cluster:
        present = cluster.engines()
        if not present:
            raise LaunchError(f"no stack runs on port {port}")
        stack = cluster.stack()
        for index in range(engines):
            if index not in present:
                cluster.start_engine(stack, index)
        for index in reversed(present):
            if index >= engines:
                cluster.stop_engine(stack, index)
        _wait_until_serving(cluster)
        print(f"{engines} engines serve" if engines > 1 else "1 engine serves")
    return 0


def down(environment: Environment) -> int:
    """Stops the stack: first the frontends, which finish their streams."""
    port = read_settings(environment).port
    with connected(port) as cluster:
        count = cluster.stop_all()
    print(f"stopped {count} processes" if count else f"nothing runs on port {port}")
    return 0


def ps(environment: Environment, as_json: bool = False) -> int:
    """Prints a line per process, or a list in JSON; returns 1 if no stack is running."""
    port = read_settings(environment).port
    with connected(port) as cluster:
        statuses = cluster.statuses()
    if as_json:
        print(status_json(statuses))
    else:
        print(format_status(statuses) if statuses else f"no stack runs on port {port}")
    return int(not statuses)


def logs(environment: Environment, service: str | None) -> int:
    """Follows the logs of `service`'s processes, or of all, wherever they run."""
    port = read_settings(environment).port
    with connected(port) as cluster, suppress(KeyboardInterrupt):
        offsets: dict[str, int] = {}
        shown = ""
        while names := cluster.names(service):
            for name in names:
                offset = offsets.get(name, -_LAST_LOG_BYTES)
                text, offsets[name] = ask([name], "read_log", offset).get(name, ("", offset))
                if text and shown != name:
                    shown = name
                    print(f"\n==> {shown} <==")
                print(text, end="", flush=True)
            time.sleep(_POLL_S)
        raise LaunchError(f"no {service or 'stack'} runs on port {port}")
    return 0


def plan(
    environment: Environment, settings: StackSettings, layout: Layout, cluster: Cluster
) -> RayStack:
    """Plans the settings of all processes, and checks them as each service will.

    Raises:
        SettingsError: a service would reject a value; the message names it.
        LaunchError: one of the launcher's variables, or MODEL, is invalid.
    """
    _check_variables(settings, layout)
    model = resolve_model(settings.model).resolve()
    check_weights(settings.model, model)
    known = {PREFIX + name.upper() for name in (*KNOWN_NAMES, "config_file")}
    shared = {name: value for name, value in environment.items() if name in known}
    for name in (PREFIX + each.upper() for each in _FILES):
        if shared.get(name):  # the path is the same on all nodes
            shared[name] = str(Path(shared[name]).expanduser().absolute())
    shared |= {
        f"{PREFIX}HOST": bracket_host(settings.host),
        f"{PREFIX}PORT": str(settings.port),
        f"{PREFIX}HTTP_PORT": str(published_http_port(settings)),
        f"{PREFIX}MODEL": str(model),
        f"{PREFIX}SERVED_MODEL_NAME": settings.served_model_name
        or model_name(settings.model, model),
        f"{PREFIX}EXIT_WITH_PARENT": "1",
    }
    if settings.speculation != "auto":
        shared[f"{PREFIX}SPECULATION"] = resolve_speculation(settings.speculation)
    settings = read_settings(shared)
    nodes = cluster.nodes()
    example = f"{bracket_host(min(nodes, key=lambda each: stays_on_host(f'{each}:1')))}:1"
    addresses = {
        f"{PREFIX}SCHEDULER_ADDRESS": example,
        f"{PREFIX}WORKER_ADDRESSES": ",".join([example] * settings.ranks_per_engine),
    }
    stack_settings(shared | addresses)
    return RayStack(settings, shared, _rank_resources(settings, cluster))


def _rank_resources(settings: StackSettings, cluster: Cluster) -> dict[str, float]:
    """Returns the resources that Ray is to reserve for a rank."""
    if settings.device == "cuda" or (settings.device == "auto" and cluster.gpus()):
        return {"GPU": 1, "CPU": _RANK_CPUS}
    return {"CPU": _RANK_CPUS if settings.threads == "auto" else settings.threads}


def _check_variables(settings: StackSettings, layout: Layout) -> None:
    if settings.port == 0:
        raise LaunchError("PORT: must not be 0, because it names the stack")
    if layout.services != SERVICES or layout.ranks is not None:
        raise LaunchError("SERVICES, RANKS: with RUNTIME=ray, Ray decides what runs where")
    for name in _CHOSEN:
        if getattr(settings, name):
            raise LaunchError(
                f"{PREFIX}{name.upper()}: with RUNTIME=ray, processes choose their addresses"
            )
    if settings.ui_port not in ("auto", 0):
        raise LaunchError("UI_PORT: RUNTIME=ray has no dashboard")
    if settings.spares:
        raise LaunchError("SPARES: RUNTIME=ray starts another process instead")


def _already_up(statuses: Sequence[ProcessStatus], port: int) -> int:
    if all(status.health == SERVING for status in statuses):
        print(f"the stack on port {port} is already up; make down RUNTIME=ray stops it")
        return 0
    raise LaunchError(
        f"PORT: the stack on port {port} is already running but does not serve; make ps and make "
        "logs show why, make down stops it, each with RUNTIME=ray"
    )


def _wait_until_serving(cluster: Cluster) -> list[str]:
    """Returns the frontends' addresses once all processes are SERVING. A node may take any time to
    join.

    Raises:
        LaunchError: a process cannot start.
    """

    def failed(status: ProcessStatus, what: str) -> LaunchError:
        name = status.process.name
        why = ask([name], "failure").get(name) or "its node is lost, too"
        return LaunchError(f"{name} {what} on {status.node}: {why}")

    statuses = poll_until_serving(cluster.statuses, report_lines(), failed)
    processes = [status.process for status in statuses]
    return [each.address for each in processes if each.service == "frontend"]


def _greet(cluster: Cluster, settings: StackSettings, addresses: Sequence[str]) -> None:
    """Shows a completion, which a frontend's actor requests, and the frontends' addresses."""
    answers = ask(cluster.names("frontend")[:1], "complete", timeout_s=_FIRST_ANSWER_S)
    if not answers:
        raise LaunchError("the first request failed; make logs RUNTIME=ray shows why")
    (text,) = answers.values()
    distinct = sorted(set(addresses))
    if port := published_http_port(settings):
        hosts = [each.rpartition(":")[0] for each in distinct]
        secure = settings.server_tls is not None
        distinct += [http_url(host, port, secure=secure) for host in hosts]
    print(f"""
{PROMPT}{text}

The stack serves on {", ".join(distinct)}. It has no dashboard.
make ps, make logs, make scale and make down, each with PORT={settings.port} RUNTIME=ray, show it,
change the number of engines, and stop it.""")
