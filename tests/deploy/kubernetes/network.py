"""Compares what connects pods with where processes listen: Services, policies, annotations, the
addresses by which services call each other, and the names in their certificates."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatch
from typing import Any

from frontend.settings import FrontendSettings
from nano_vllm_grpc.channels import stays_on_host
from nano_vllm_grpc.tls import ClientTls
from scheduler_svc.settings import SchedulerSettings
from shared.config import ServiceSettings
from shared.rpc.roles import ROLE
from tests.deploy.kubernetes.pods import NAMESPACE, Pod, Process, named, pods
from tests.deploy.kubernetes.rendering import Manifest
from worker_svc.settings import WorkerSettings

_ALL_PORTS = -1


def wrong_network(manifests: list[Manifest], found: list[Process]) -> Iterator[str]:
    yield from _wrong_services(manifests, found)
    yield from _wrong_policies(manifests, found)
    yield from _wrong_annotations(found)
    yield from _wrong_engines(manifests, found)
    yield from _wrong_ranks(found)
    yield from _wrong_certificates(manifests, found)


def _of(found: list[Process], pod: Pod) -> list[Process]:
    return [each for each in found if each.pod.name == pod.name]


def _running(found: list[Process], service: type[ServiceSettings]) -> list[Process]:
    return [each for each in found if each.service is service]


def _ports_of(found: list[Process], pod: Pod) -> set[int]:
    return {port for each in _of(found, pod) for port in each.ports}


def _wrong_services(manifests: list[Manifest], found: list[Process]) -> Iterator[str]:
    for name, service in named(manifests, "Service").items():
        selected = [p for p in pods(manifests) if p.selected_by(service["spec"]["selector"])]
        if not selected:
            yield f"Service {name}: selects no pod"
        for pod in selected:
            ports = [port for each in _of(found, pod) for port in each.container.get("ports", ())]
            targets = {port["name"]: port["containerPort"] for port in ports}
            for port in service["spec"]["ports"]:
                target = targets.get(port["targetPort"])
                # A headless Service cannot lead to another port.
                headless = service["spec"].get("clusterIP") == "None"
                if target is None or (headless and target != port["port"]):
                    yield f"Service {name}: nothing in {pod.name} listens on {port}"


def _wrong_policies(manifests: list[Manifest], found: list[Process]) -> Iterator[str]:
    """Ports that policies name and nobody has, and those that nobody can reach."""
    policies = named(manifests, "NetworkPolicy")
    reachable: dict[str, set[int]] = {pod.name: set() for pod in pods(manifests)}
    for name, policy in policies.items():
        spec = policy["spec"]
        subjects = [p for p in pods(manifests) if p.selected_by(spec["podSelector"]["matchLabels"])]
        if not subjects:
            yield f"NetworkPolicy {name}: selects no pod"
        for rule in spec.get("ingress", ()):
            allowed = _ports(rule)
            for pod in subjects:
                reachable[pod.name] |= allowed
            heard = set[int]().union(*(_ports_of(found, pod) for pod in subjects))
            if unused := allowed - heard - {_ALL_PORTS}:
                yield f"NetworkPolicy {name}: nobody listens on {sorted(unused)}"
        for rule in spec.get("egress", ()):
            yield from _wrong_egress(name, rule, manifests, found)
    for pod in pods(manifests):
        open_to = reachable[pod.name]
        if _ALL_PORTS not in open_to and (closed := _ports_of(found, pod) - open_to):
            yield f"{pod.name}: no NetworkPolicy lets anybody reach {sorted(closed)}"


def _ports(rule: Any) -> set[int]:
    return {each["port"] for each in rule["ports"]} if "ports" in rule else {_ALL_PORTS}


def _wrong_egress(
    name: str, rule: Any, manifests: list[Manifest], found: list[Process]
) -> Iterator[str]:
    for peer in rule["to"]:
        if "podSelector" not in peer:
            continue
        labels = peer["podSelector"]["matchLabels"]
        heard = [_ports_of(found, pod) for pod in pods(manifests) if pod.selected_by(labels)]
        if not heard or not all(_ports(rule) - {_ALL_PORTS} <= each for each in heard):
            yield f"NetworkPolicy {name}: leads to ports on which nobody listens: {rule}"


def _wrong_annotations(found: list[Process]) -> Iterator[str]:
    for process in found:
        annotated = process.pod.template["metadata"]["annotations"]["prometheus.io/port"]
        metrics = {str(each.ports[-1]) for each in _of(found, process.pod)}
        if annotated not in metrics:
            yield f"{process.pod.name}: no metrics at the port of its annotation, {annotated}"


def _wrong_engines(manifests: list[Manifest], found: list[Process]) -> Iterator[str]:
    """Frontends that would not find the schedulers."""
    schedulers = _running(found, SchedulerSettings)
    for frontend in _running(found, FrontendSettings):
        for address in frontend.settings.scheduler_addresses:
            kind, _, rest = address.partition(":")
            host, _, port = rest.partition(":")
            name = host.removesuffix(f".{NAMESPACE}.svc")
            service = named(manifests, "Service").get(name, {"spec": {"selector": {"": ""}}})
            selector = service["spec"]["selector"]
            reached = [each for each in schedulers if each.pod.selected_by(selector)]
            if kind != "dns" or service["spec"].get("clusterIP") != "None":
                yield f"{frontend}: {address} is not all pods of a headless Service"
            elif reached != schedulers or int(port) not in {each.ports[0] for each in reached}:
                yield f"{frontend}: no scheduler listens at {address}"


def _wrong_ranks(found: list[Process]) -> Iterator[str]:
    """Schedulers that would not find their ranks."""
    workers = {each.settings.rank: each for each in _running(found, WorkerSettings)}
    for scheduler in _running(found, SchedulerSettings):
        addresses = scheduler.settings.worker_addresses
        if sorted(workers) != list(range(len(addresses))):
            yield f"{scheduler}: calls {len(addresses)} ranks, and there are {sorted(workers)}"
            return
        for rank, address in enumerate(addresses):
            worker = workers[rank]
            own = worker.settings.worker_addresses[rank]
            if own.startswith("unix:"):
                socket, volume = own.removeprefix("unix:").rpartition("/")[0], worker.mounts
                shared = volume.get(socket) == scheduler.mounts.get(socket) is not None
                right = own if shared and worker.pod.name == scheduler.pod.name else "no socket"
            else:
                owner = worker.pod.owner["metadata"]["name"]
                right = f"{worker.pod.name}.{owner}.{NAMESPACE}.svc:{worker.ports[0]}"
            if address != right:
                yield f"{scheduler}: calls rank {rank} at {address}, and it listens at {right}"
            if worker.settings.tp != len(addresses):
                yield f"{worker}: is of {worker.settings.tp} ranks, not {len(addresses)}"


def _wrong_certificates(manifests: list[Manifest], found: list[Process]) -> Iterator[str]:
    """Certificates without a name by which their owner is called, or without its role."""
    certificates = named(manifests, "Certificate").values()
    issued = {each["spec"]["secretName"]: each["spec"] for each in certificates}
    if not issued:
        return
    for process, name in _called(manifests, found):
        if process.tls:
            names = issued[process.secret(process.tls.cert)]["dnsNames"]
            if not any(fnmatch(name, each) for each in names):
                yield f"{process}: is called {name}, and its certificate is for {names}"
    for service, role in ((FrontendSettings, "frontend"), (SchedulerSettings, "scheduler")):
        for process in _running(found, service):
            uris = issued[process.secret(process.settings.internal_tls_cert)].get("uris", ())
            if f"{ROLE}{role}" not in uris:
                yield f"{process}: calls others as {role}, and its certificate is for {uris}"


def _called(manifests: list[Manifest], found: list[Process]) -> Iterator[tuple[Process, str]]:
    """Yields processes and the names by which probes, Services' users and schedulers call them."""
    for process in found:
        if probe := ClientTls.from_environment(process.environment):
            yield process, probe.server_name or "localhost"
        ports = {each["name"] for each in process.container.get("ports", ())}
        for name, service in named(manifests, "Service").items():
            targets = {each["targetPort"] for each in service["spec"]["ports"]}
            if targets & ports and process.pod.selected_by(service["spec"]["selector"]):
                yield process, f"{name}.{NAMESPACE}.svc"
    for scheduler in _running(found, SchedulerSettings):
        for worker in _running(found, WorkerSettings):
            address = scheduler.settings.worker_addresses[worker.settings.rank]
            if not stays_on_host(address):
                yield worker, address.partition(":")[0]
