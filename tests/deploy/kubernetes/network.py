"""Holds what connects pods against where processes listen: Services, policies, annotations, and the
addresses by which services call each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.deploy.kubernetes.addresses import frontend_of, listens, scheduler_of, worker_of
from tests.deploy.kubernetes.pods import NAMESPACE, Pod, Process, named, pods
from tests.deploy.kubernetes.rendering import Manifest

_ALL_PORTS = -1


def wrong_network(manifests: list[Manifest], found: list[Process]) -> Iterator[str]:
    yield from _wrong_services(manifests, found)
    yield from _wrong_policies(manifests, found)
    yield from _wrong_annotations(found)
    yield from _wrong_engines(manifests, found)
    yield from _wrong_ranks(found)


def _of(found: list[Process], pod: Pod) -> list[Process]:
    return [each for each in found if each.pod.name == pod.name]


def _heard(found: list[Process], pod: Pod) -> set[int]:
    return {port for each in _of(found, pod) for port in listens(each)}


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
            heard = set[int]().union(*(_heard(found, pod) for pod in subjects))
            if unused := allowed - heard - {_ALL_PORTS}:
                yield f"NetworkPolicy {name}: nobody listens on {sorted(unused)}"
        for rule in spec.get("egress", ()):
            yield from _wrong_egress(name, rule, manifests, found)
    for pod in pods(manifests):
        open_to = reachable[pod.name]
        if _ALL_PORTS not in open_to and (closed := _heard(found, pod) - open_to):
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
        heard = [_heard(found, pod) for pod in pods(manifests) if pod.selected_by(labels)]
        if not heard or not all(_ports(rule) - {_ALL_PORTS} <= each for each in heard):
            yield f"NetworkPolicy {name}: leads to ports on which nobody listens: {rule}"


def _wrong_annotations(found: list[Process]) -> Iterator[str]:
    for process in found:
        annotated = process.pod.template["metadata"]["annotations"]["prometheus.io/port"]
        metrics = {str(listens(each)[-1]) for each in _of(found, process.pod)}
        if annotated not in metrics:
            yield f"{process.pod.name}: no metrics at the port of its annotation, {annotated}"


def _wrong_engines(manifests: list[Manifest], found: list[Process]) -> Iterator[str]:
    """Frontends that would not find the schedulers."""
    schedulers = [each for each in found if scheduler_of(each)]
    for frontend in filter(frontend_of, found):
        for address in frontend.settings.scheduler_addresses:
            kind, _, rest = address.partition(":")
            host, _, port = rest.partition(":")
            name = host.removesuffix(f".{NAMESPACE}.svc")
            service = named(manifests, "Service").get(name, {"spec": {"selector": {"": ""}}})
            selector = service["spec"]["selector"]
            reached = [each for each in schedulers if each.pod.selected_by(selector)]
            if kind != "dns" or service["spec"].get("clusterIP") != "None":
                yield f"{frontend}: {address} is not all pods of a headless Service"
            elif reached != schedulers or int(port) not in {listens(each)[0] for each in reached}:
                yield f"{frontend}: no scheduler listens at {address}"


def _wrong_ranks(found: list[Process]) -> Iterator[str]:
    """Schedulers that would not find their ranks."""
    workers = {each.settings.rank: each for each in found if worker_of(each)}
    for scheduler in filter(scheduler_of, found):
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
                right = f"{worker.pod.name}.{owner}.{NAMESPACE}.svc:{listens(worker)[0]}"
            if address != right:
                yield f"{scheduler}: calls rank {rank} at {address}, and it listens at {right}"
            if worker.settings.tp != len(addresses):
                yield f"{worker}: is of {worker.settings.tp} ranks, not {len(addresses)}"
