"""Services, policies, annotations, addresses and certificates fit the ports on which processes
listen, and the names by which they are called."""

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

ALL_PORTS = -1


def running(started: list[Process], service: type[ServiceSettings]) -> list[Process]:
    return [each for each in started if each.service is service]


def ports_of(started: list[Process], pod: Pod) -> set[int]:
    return {port for each in started if each.pod.name == pod.name for port in each.ports}


def ports_in(rule: Any) -> set[int]:
    return {each["port"] for each in rule["ports"]} if "ports" in rule else {ALL_PORTS}


def test_services_lead_to_ports_on_which_pods_listen(manifests: list[Manifest]) -> None:
    for service in named(manifests, "Service").values():
        selected = [p for p in pods(manifests) if p.selected_by(service["spec"]["selector"])]
        assert selected, service
        for pod in selected:
            ports = [port for each in pod.containers for port in each.get("ports", ())]
            targets = {port["name"]: port["containerPort"] for port in ports}
            for port in service["spec"]["ports"]:
                target = targets[port["targetPort"]]
                # A headless Service cannot lead to another port.
                assert service["spec"].get("clusterIP") != "None" or target == port["port"]


def test_policies_open_the_ports_on_which_pods_listen(
    manifests: list[Manifest], started: list[Process]
) -> None:
    reachable: dict[str, set[int]] = {pod.name: set() for pod in pods(manifests)}
    for name, policy in named(manifests, "NetworkPolicy").items():
        spec = policy["spec"]
        subjects = [p for p in pods(manifests) if p.selected_by(spec["podSelector"]["matchLabels"])]
        assert subjects, name
        heard = set[int]().union(*(ports_of(started, pod) for pod in subjects))
        for rule in spec.get("ingress", ()):
            assert ports_in(rule) <= heard | {ALL_PORTS}, name
            for pod in subjects:
                reachable[pod.name] |= ports_in(rule)
        for rule in spec.get("egress", ()):
            selectors = [each["podSelector"] for each in rule["to"] if "podSelector" in each]
            for labels in (each["matchLabels"] for each in selectors):
                reached = [pod for pod in pods(manifests) if pod.selected_by(labels)]
                assert reached, name
                for pod in reached:
                    assert ports_in(rule) <= ports_of(started, pod) | {ALL_PORTS}, name
    for pod in pods(manifests):
        if ALL_PORTS not in reachable[pod.name]:
            assert ports_of(started, pod) <= reachable[pod.name], pod.name


def test_metrics_are_at_the_annotated_port(started: list[Process]) -> None:
    for pod in {each.pod.name: each.pod for each in started}.values():
        metrics = {str(each.ports[-1]) for each in started if each.pod.name == pod.name}
        assert pod.template["metadata"]["annotations"]["prometheus.io/port"] in metrics


def test_frontends_find_all_schedulers(manifests: list[Manifest], started: list[Process]) -> None:
    schedulers = running(started, SchedulerSettings)
    for frontend in running(started, FrontendSettings):
        for address in frontend.settings.scheduler_addresses:
            kind, host, port = address.split(":")
            service = named(manifests, "Service")[host.removesuffix(f".{NAMESPACE}.svc")]["spec"]
            # Only a headless Service has the addresses of all pods.
            assert (kind, service["clusterIP"]) == ("dns", "None")
            reached = [each for each in schedulers if each.pod.selected_by(service["selector"])]
            assert reached == schedulers
            assert int(port) in {each.ports[0] for each in reached}


def test_schedulers_find_their_ranks(started: list[Process]) -> None:
    workers = {each.settings.rank: each for each in running(started, WorkerSettings)}
    for scheduler in running(started, SchedulerSettings):
        addresses = scheduler.settings.worker_addresses
        assert sorted(workers) == list(range(len(addresses)))
        for rank, address in enumerate(addresses):
            worker = workers[rank]
            assert worker.settings.num_ranks == len(addresses)
            own = worker.settings.worker_addresses[rank]
            if own.startswith("unix:"):
                socket = own.removeprefix("unix:").rpartition("/")[0]
                assert worker.mounts[socket] == scheduler.mounts[socket]
                assert (address, worker.pod.name) == (own, scheduler.pod.name)
            else:
                owner = worker.pod.owner["metadata"]["name"]
                host = f"{worker.pod.name}.{owner}.{NAMESPACE}.svc"
                assert address == f"{host}:{worker.ports[0]}"


def test_certificates_have_the_names_and_roles_of_their_owners(
    manifests: list[Manifest], started: list[Process]
) -> None:
    certificates = named(manifests, "Certificate").values()
    issued = {each["spec"]["secretName"]: each["spec"] for each in certificates}
    if not issued:  # the user brings them
        return
    for process, name in called(manifests, started):
        if process.tls:
            names = issued[process.secret(process.tls.cert)]["dnsNames"]
            assert any(fnmatch(name, each) for each in names), (process, name, names)
    for service, role in ((FrontendSettings, "frontend"), (SchedulerSettings, "scheduler")):
        for process in running(started, service):
            uris = issued[process.secret(process.settings.internal_tls_cert)]["uris"]
            assert f"{ROLE}{role}" in uris, process


def called(manifests: list[Manifest], started: list[Process]) -> Iterator[tuple[Process, str]]:
    """Yields processes and the names by which probes, Services' users and schedulers call them."""
    for process in started:
        if probe := ClientTls.from_environment(process.environment):
            yield process, probe.server_name or "localhost"
        ports = {each["name"] for each in process.container.get("ports", ())}
        for name, service in named(manifests, "Service").items():
            targets = {each["targetPort"] for each in service["spec"]["ports"]}
            if targets & ports and process.pod.selected_by(service["spec"]["selector"]):
                yield process, f"{name}.{NAMESPACE}.svc"
    for scheduler in running(started, SchedulerSettings):
        for worker in running(started, WorkerSettings):
            address = scheduler.settings.worker_addresses[worker.settings.rank]
            if not stays_on_host(address):
                yield worker, address.partition(":")[0]
