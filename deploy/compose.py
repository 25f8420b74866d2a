"""Commands for RUNTIME=docker, which run `docker compose` or podman-compose on
docker/compose.yaml."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from deploy.errors import LaunchError
from deploy.first_tokens import curl_example, show_completion
from deploy.health import SERVING, frontend_health
from deploy.model import check_weights, model_name, resolve_model
from deploy.plan import (
    Environment,
    Layout,
    StackSettings,
    public_tls,
    published_http_port,
    read_settings,
    stack_settings,
)
from deploy.stack import (
    bracket_host,
    dialled_address,
    first_token,
    http_url,
    make_directory,
    open_file,
    replace_file,
    run_directory,
)
from shared.config import PREFIX
from worker_svc.settings import NO_DRAFT_MODEL

DOCKER = Path(__file__).parents[1] / "docker"
FILES = ("compose.yaml", "http.yaml", "worker.yaml")
# A setting without a fixed value in a compose file.
_PASSED = re.compile(rf"^ +{PREFIX}(\w+):(?: \$.*| +#.*)?$", re.MULTILINE)
# Settings that `up` itself applies, or that containers have anyway.
_APPLIED = {"MODEL", "HOST", "PORT", "HTTP_PORT", "ALLOW_PLAINTEXT", "ALLOW_PUBLIC_PLAINTEXT"}
_POLL_S = 1.0


def up(environment: Environment, layout: Layout) -> int:
    """Builds the images and starts the containers; returns 0 once they have answered a request.

    Raises:
        SettingsError: a service would reject a value; the message names it.
        LaunchError: the stack cannot start; the message says why.
    """
    settings = read_settings(environment)
    if settings.speculation not in NO_DRAFT_MODEL:
        raise LaunchError("SPECULATION: RUNTIME=docker has no draft model; use ngram or none")
    if ignored := ignored_settings(environment, layout):
        raise LaunchError(f"{', '.join(ignored)}: RUNTIME=docker has no such setting")
    variables = compose_variables(settings, layout) | file_variables(settings)
    # HOST is checked by now; the network inside is private to the stack.
    inside = {f"{PREFIX}ALLOW_PLAINTEXT": "1", f"{PREFIX}HTTP_PORT": "8000"}
    stack_settings(environment | variables | inside)
    device = environment.get(PREFIX + "DEVICE")
    profile = "gpu" if device == "cuda" else "cpu"
    port = published_http_port(settings)
    has_docker = bool(shutil.which("docker"))
    if layout.frontends > 1 and not has_docker:
        raise LaunchError("FRONTENDS: must be 1 with podman, which cannot give each replica a port")
    ranks = rank_services(settings.ranks_per_engine, layout.engines, profile)
    make_directory(run_directory(settings.port))
    replace_file(_ranks_file(settings.port), json.dumps({"services": ranks}, indent=1))
    # podman can wait for healthy containers only where systemd runs their health checks.
    wait = ["--wait"] * has_docker
    words = ["--profile", profile, "up", "--build", "--detach", *wait]
    _compose(settings.port, words, environment | variables, ["http.yaml"] * bool(port))
    address = dialled_address(settings.host, settings.port)
    tls = public_tls(settings)
    url = http_url(settings.host, port, secure=tls is not None)
    while frontend_health(address, url, tls) != SERVING:
        time.sleep(_POLL_S)
    token = first_token(settings.auth_tokens_file)
    show_completion(address, tls, token)
    print(f"The stack serves on {address}; make chat PORT={settings.port} talks to it.")
    if port:
        name = variables[f"{PREFIX}SERVED_MODEL_NAME"]
        print(f"It serves HTTP on {url}:\n\n{curl_example(url, name, tls, bool(token))}")
    return 0


def down(environment: Environment) -> int:
    """Stops and removes the containers."""
    profiles = ["--profile", "cpu", "--profile", "gpu"]
    port = read_settings(environment).port
    _compose(port, [*profiles, "down", "--remove-orphans"], environment)
    return 0


def scale(environment: Environment, engines: int) -> int:
    """
    Raises:
        LaunchError: containers cannot be added while a stack runs.
    """
    raise LaunchError("ENGINES: RUNTIME=docker cannot scale; run make down, then make up")


def ps(environment: Environment, as_json: bool = False) -> int:
    """Prints a line per container, or JSON."""
    words = ["ps", "--format", "json"] if as_json else ["ps"]
    _compose(read_settings(environment).port, words, environment)
    return 0


def logs(environment: Environment, service: str | None) -> int:
    """Follows the logs of `service`'s containers, or of all.

    Raises:
        LaunchError: `service` is `worker`, which has several names in the compose file.
    """
    if service == "worker":
        raise LaunchError("SERVICE=worker: with RUNTIME=docker, read the logs of all services")
    words = ["logs", "--follow", *([service] if service else [])]
    _compose(read_settings(environment).port, words, environment)
    return 0


def compose_variables(settings: StackSettings, layout: Layout) -> dict[str, str]:
    """Returns the variables that docker/compose.yaml reads besides the services' settings."""
    model = resolve_model(settings.model)
    check_weights(settings.model, model)
    variables = {
        "MODEL_DIRECTORY": str(_without_links(model)),
        "HOST": bracket_host(settings.host),
        "PORTS": _port_range(settings.port, layout.frontends),
        "FRONTENDS": str(layout.frontends),
        f"{PREFIX}SERVED_MODEL_NAME": settings.served_model_name
        or model_name(settings.model, model),
        f"{PREFIX}WORKER_ADDRESSES": _worker_addresses(0, settings.ranks_per_engine),
    }
    if port := published_http_port(settings):
        variables["HTTP_PORTS"] = _port_range(port, layout.frontends)
    if layout.engines > 1:
        schedulers = map(_scheduler_address, range(layout.engines))
        variables[f"{PREFIX}SCHEDULER_ADDRESSES"] = ",".join(schedulers)
        variables[f"{PREFIX}ENGINES_ON_HOST"] = str(layout.engines)
    return variables


def ignored_settings(environment: Mapping[str, str], layout: Layout) -> list[str]:
    """Returns the names of settings that are given but would have no effect on containers."""
    files = [(DOCKER / name).read_text("utf-8") for name in FILES]
    passed = {name for file in files for name in _PASSED.findall(file)}
    given = {name.removeprefix(PREFIX) for name in environment if name.startswith(PREFIX)}
    if environment.get(PREFIX + "UI_PORT") in ("0", "auto"):
        given.remove("UI_PORT")  # there is no dashboard
    for name in ("services", "ranks", "metrics"):
        if getattr(layout, name) != getattr(Layout(), name):
            given.add(name.upper())
    return sorted(given - passed - _APPLIED)


def _port_range(first: int, count: int) -> str:
    return f"{first}-{first + count - 1}" if count > 1 else str(first)


def _without_links(model: Path) -> Path:
    """Returns the absolute path of a model; all its files must be in this directory."""
    directory = model.resolve()
    for path in directory.iterdir():
        if not path.resolve().is_relative_to(directory):
            raise LaunchError(
                f"RUNTIME=docker: MODEL: {path} is a link out of its directory, which containers "
                f"do not see; make a copy without links, cp -rL {model} COPY, and use MODEL=COPY"
            )
    return directory


def rank_services(num_ranks: int, engines: int, profile: str) -> dict[str, object]:
    """Returns the services that compose.yaml lacks: all ranks but the first, and the schedulers of
    further engines. Ranks are numbered over all engines."""
    services: dict[str, object] = {}
    for index in range(1, engines * num_ranks):
        engine, rank = divmod(index, num_ranks)
        flags = {"rank": rank, "index": index, "master-addr": f"worker-{engine * num_ranks}"}
        extended = _extend("worker.yaml", profile, num_ranks, engine, flags)
        services[f"worker-{index}"] = extended | {"profiles": [profile]}
    for engine in range(1, engines):
        flags = {"scheduler-address": _scheduler_address(engine)}
        services[f"scheduler-{engine}"] = _extend(
            "compose.yaml", "scheduler", num_ranks, engine, flags
        )
    return services


def _extend(
    file: str, service: str, num_ranks: int, engine: int, flags: Mapping[str, object]
) -> dict[str, object]:
    flags = {
        "engine-name": engine,
        "worker-addresses": _worker_addresses(engine, num_ranks),
        **flags,
    }
    return {
        "extends": {"file": str(DOCKER / file), "service": service},
        "command": [word for name, value in flags.items() for word in (f"--{name}", str(value))],
    }


def file_variables(settings: StackSettings) -> dict[str, str]:
    """Returns the variables that mount the token and certificate files into containers."""
    tls = public_tls(settings)
    variables = {"TLS_SERVER_NAME": tls.server_name} if tls else {}
    for name in ("auth_tokens_file", "tls_cert", "tls_key", "tls_client_ca"):
        if path := getattr(settings, name):
            variables[f"{PREFIX}{name.upper()}"] = str(Path(path).resolve())
            variables[f"{name.upper()}_INSIDE"] = f"/etc/nano/{name}"
    return variables


def _scheduler_address(engine: int) -> str:
    return f"scheduler-{engine}:50052" if engine else "scheduler:50052"


def _worker_addresses(engine: int, num_ranks: int) -> str:
    return ",".join(
        f"worker-{index}:50053" for index in range(engine * num_ranks, (engine + 1) * num_ranks)
    )


def _ranks_file(port: int) -> Path:
    return run_directory(port) / "compose.ranks.json"


def _compose(
    port: int, arguments: list[str], environment: Mapping[str, str], further: Sequence[str] = ()
) -> None:
    if docker := shutil.which("docker"):
        program = [docker, "compose"]
    elif podman := shutil.which("podman-compose"):
        program = [podman]
    else:
        raise LaunchError(
            "RUNTIME=docker needs the docker command, with its compose plugin, or podman-compose"
        )
    files = [word for each in ("compose.yaml", *further) for word in ("--file", str(DOCKER / each))]
    with suppress(FileNotFoundError):
        os.close(open_file(_ranks_file(port)))  # checks that only this user may write to it
        files += ["--file", str(_ranks_file(port))]
    command = [*program, "--project-name", f"nano-vllm-{port}", *files, *arguments]
    status = subprocess.run(command, env=dict(environment), check=False).returncode
    if status:
        raise LaunchError(f"{' '.join(program + arguments)} ended with status {status}")
