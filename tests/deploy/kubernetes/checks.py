"""Compares manifests with the services' own settings: what containers are started with must load,
and whatever names a port, a file or another process must name what the settings make of it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import PurePosixPath

from deploy.gateway import GatewaySettings
from nano_vllm_grpc.tls import ClientTls
from shared.config import PREFIX
from tests.deploy.kubernetes.network import wrong_network
from tests.deploy.kubernetes.pods import Impossible, Process, named, processes
from tests.deploy.kubernetes.rendering import Manifest

# What deploy.health reads.
_PROBE_NAMES = ("tls_ca", "tls_server_name", "client_cert", "client_key")
_FILES = ("model", "tls_cert", "tls_key", "auth_tokens_file", "internal_tls_cert")
_PROBE = ["python", "-m", "deploy.health"]


def complaints(manifests: list[Manifest]) -> list[str]:
    """What is wrong with the manifests; nothing, if they fit the settings."""
    found = processes(manifests)
    try:
        return [
            *(wrong for each in found for wrong in _wrong_process(each)),
            *_wrong_maps(manifests, found),
            *_wrong_drains(found),
            *wrong_network(manifests, found),
        ]
    except Impossible as error:
        return [str(error)]


def _known(process: Process) -> set[str]:
    """The variables that a service and its probe read."""
    names = (*process.service.model_fields, *_PROBE_NAMES)
    return {PREFIX + name.upper() for name in names}


def _wrong_process(process: Process) -> Iterator[str]:
    own = {each["name"] for each in process.container.get("env", ())}
    unknown = {name for name in own if name.startswith(PREFIX)} - _known(process)
    if unknown:
        yield f"{process}: not settings of {process.image}: {', '.join(sorted(unknown))}"
    yield from _wrong_files(process)
    ports = {each["containerPort"] for each in process.container.get("ports", ())}
    if ports != (heard := set(process.ports)):
        yield f"{process}: its ports are {sorted(ports)}, but it listens on {sorted(heard)}"
    yield from _wrong_probe(process)


def _wrong_files(process: Process) -> Iterator[str]:
    """Files that no volume holds."""
    paths = {name: getattr(process.settings, name, "") for name in _FILES}
    if tls := ClientTls.from_environment(process.environment):
        paths |= {"tls_ca": tls.ca, "client_cert": tls.cert, "client_key": tls.key}
    for name, path in paths.items():
        if path and not any(PurePosixPath(path).is_relative_to(at) for at in process.mounts):
            yield f"{process}: {name}: no volume has {path}"


def _wrong_probe(process: Process) -> Iterator[str]:
    container = process.container
    if "livenessProbe" in container or "startupProbe" in container:
        yield f"{process}: would be killed for waiting for others"
    probe = container.get("readinessProbe", {})
    if process.service is GatewaySettings:
        names = {each["name"]: each["containerPort"] for each in container["ports"]}
        get = probe.get("httpGet", {})
        expected = ("HTTPS" if process.tls else "HTTP", "/readiness")
        if (get.get("scheme"), get.get("path")) != expected or get.get("port") not in names:
            yield f"{process}: is not asked for its readiness: {probe}"
        return
    command = probe.get("exec", {}).get("command", [])
    if command[:-1] != _PROBE or not importlib.util.find_spec(_PROBE[-1]):
        yield f"{process}: is not asked for its health: {probe}"
        return
    address = process.served[0]
    local = address.replace("0.0.0.0", "localhost"), address.replace("0.0.0.0", "127.0.0.1")
    if command[-1] not in local:
        yield f"{process}: health is asked at {command[-1]}, but served at {local[0]}"
    server, client = process.tls, ClientTls.from_environment(process.environment)
    if client and not server:
        yield f"{process}: the probe uses TLS, and the service does not"
    elif server and not (client and client.ca):
        yield f"{process}: the probe trusts no certificate"
    elif server and client and server.client_ca and not client.cert:
        yield f"{process}: the probe shows no certificate"


def _wrong_maps(manifests: list[Manifest], found: list[Process]) -> Iterator[str]:
    """Settings in maps that no service reads which gets them."""
    for name, manifest in named(manifests, "ConfigMap").items():
        readers = [
            process
            for process in found
            if {"configMapRef": {"name": name}} in process.container.get("envFrom", ())
        ]
        known = set[str]().union(*(_known(process) for process in readers))
        if unknown := manifest["data"].keys() - known:
            yield f"{name}: nobody reads {', '.join(sorted(unknown))}"


def _wrong_drains(found: list[Process]) -> Iterator[str]:
    """Pods that are killed before their containers, then their sidecars, have drained."""
    for pod in {each.pod.name: each.pod for each in found}.values():
        containers, sidecars = [0.0], [0.0]
        for process in found:
            if process.pod.name == pod.name:
                stage = sidecars if "restartPolicy" in process.container else containers
                stage.append(_end_s(process))
        needed = max(containers) + max(sidecars)
        if (grace := pod.spec["terminationGracePeriodSeconds"]) <= needed:
            yield f"{pod.name}: has {grace} s to end, and needs more than {needed:g} s"


def _end_s(process: Process) -> float:
    """How long a container may take to end, from when it is told to."""
    hook = process.container.get("lifecycle", {}).get("preStop", {})
    pause = hook.get("sleep", {}).get("seconds", 0)
    return float(pause + process.settings.drain_timeout_s + 1)
