"""Holds cert-manager's Certificates against who shows them, to whom, and under which names."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatch
from typing import Any

from shared.roles import ROLE
from tests.deploy.kubernetes.addresses import frontend_of, scheduler_of, tls_of, worker_of
from tests.deploy.kubernetes.pods import Process, named
from tests.deploy.kubernetes.rendering import Manifest


def wrong_certificates(manifests: list[Manifest], found: list[Process]) -> Iterator[str]:
    """Names and roles that certificates lack, if the manifests have certificates at all."""
    issued = {
        each["spec"]["secretName"]: each["spec"]
        for each in named(manifests, "Certificate").values()
    }
    if not issued:
        return
    issuers = named(manifests, "Issuer")
    for secret, spec in issued.items():
        if spec["issuerRef"]["name"] not in issuers:
            yield f"{secret}: nobody issues it"
    for process in found:
        for name, path in _shown(process).items():
            secret = _secret(process, path)
            if secret not in issued:
                yield f"{process}: no Certificate is for {secret}, its {name}"
    for address, host, server in _dialled(found):
        tls = tls_of(server)
        assert tls
        secret = _secret(server, tls.cert)
        names = issued.get(secret, {}).get("dnsNames", ())
        if not any(_covers(name, host) for name in names):
            yield f"{server}: {secret} is not for {host}, at which it is called ({address})"
    for process in found:
        if process.service and (role := _role(process)):
            secret = _secret(process, process.settings.internal_tls_cert)
            if f"{ROLE}{role}" not in issued.get(secret, {}).get("uris", ()):
                yield f"{process}: {secret} does not make it a {role}"


def _shown(process: Process) -> dict[str, str]:
    """The certificates of a process."""
    shown = {}
    if tls := tls_of(process):
        shown["certificate"] = tls.cert
    if process.service and process.settings.internal_tls_cert:
        shown["internal_tls_cert"] = process.settings.internal_tls_cert
    return shown


def _secret(process: Process, path: str) -> str:
    """The secret that the file at `path` is from."""
    volumes: dict[str, Any] = {each["name"]: each for each in process.pod.spec["volumes"]}
    volume = volumes[process.mounts[path.rpartition("/")[0]]]
    return str(volume["secret"]["secretName"])


def _role(process: Process) -> str:
    """As which service a process calls others."""
    if frontend_of(process):
        return "frontend"
    return "scheduler" if scheduler_of(process) else ""


def _dialled(found: list[Process]) -> Iterator[tuple[str, str, Process]]:
    """Who is called under which name: the setting's address, its host, the server."""
    schedulers = [each for each in found if scheduler_of(each)]
    workers = {each.settings.rank: each for each in found if worker_of(each)}
    for process in found:
        if frontend_of(process):
            for address in process.settings.scheduler_addresses:
                host = address.removeprefix("dns:").rpartition(":")[0]
                yield from ((address, host, each) for each in schedulers)
        elif scheduler_of(process):
            for rank, address in enumerate(process.settings.worker_addresses):
                unix = address.startswith("unix:")
                host = "localhost" if unix else address.rpartition(":")[0]
                yield address, host, workers[rank]
        probe = process.container["readinessProbe"].get("exec")
        if probe and tls_of(process):
            address = probe["command"][-1]
            host = "localhost" if address.startswith("unix:") else address.rpartition(":")[0]
            yield address, process.environment.get("NANO_TLS_SERVER_NAME") or host, process


def _covers(name: str, host: str) -> bool:
    """Whether a name in a certificate is for `host`; a star stands for one label."""
    return fnmatch(host, name) and host.count(".") == name.count(".")
