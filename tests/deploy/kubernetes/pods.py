"""The pods that rendered manifests describe, and what their containers are started with: commands
and environment as the kubelet and the LeaderWorkerSet's controller make them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from frontend.settings import FrontendSettings
from nano_vllm_grpc.channels import stays_on_host
from scheduler_svc.settings import SchedulerSettings
from shared.config import ServiceSettings, load_settings
from shared.tls import ServerTls
from tests.deploy.kubernetes.rendering import Manifest
from worker_svc.settings import WorkerSettings

NAMESPACE = "nano-vllm"
SERVICES: dict[str, type[ServiceSettings]] = {
    "nano-vllm-grpc/frontend": FrontendSettings,
    "nano-vllm-grpc/scheduler": SchedulerSettings,
    "nano-vllm-grpc/worker": WorkerSettings,
}


@dataclass(frozen=True)
class Pod:
    """The first pod that a template makes, or the first of its kind."""

    name: str
    owner: Manifest
    template: Manifest
    injected: Mapping[str, str] = field(default_factory=dict)  # before the containers' own

    @property
    def labels(self) -> dict[str, str]:
        labels = dict(self.template["metadata"]["labels"])
        if self.owner["kind"] == "LeaderWorkerSet":
            labels["leaderworkerset.sigs.k8s.io/name"] = self.owner["metadata"]["name"]
        return labels

    @property
    def spec(self) -> Any:
        return self.template["spec"]

    @property
    def containers(self) -> list[Any]:
        """All of its containers, those that start first in front."""
        return [*self.spec.get("initContainers", ()), *self.spec["containers"]]

    def selected_by(self, selector: Mapping[str, str]) -> bool:
        return selector.items() <= self.labels.items()


def named(manifests: list[Manifest], kind: str) -> dict[str, Manifest]:
    return {each["metadata"]["name"]: each for each in manifests if each["kind"] == kind}


def pods(manifests: list[Manifest]) -> Iterator[Pod]:
    for manifest in manifests:
        name, spec = manifest["metadata"]["name"], manifest.get("spec", {})
        match manifest["kind"]:
            case "Deployment":
                yield Pod(f"{name}-x", manifest, spec["template"])
            case "StatefulSet":
                yield Pod(f"{name}-0", manifest, spec["template"])
            case "LeaderWorkerSet":
                group = spec["leaderWorkerTemplate"]
                leader = {"LWS_LEADER_ADDRESS": f"{name}-0.{name}.{NAMESPACE}"}
                leader["LWS_GROUP_SIZE"] = str(group["size"])
                index = {"LWS_WORKER_INDEX": "0"}
                yield Pod(f"{name}-0", manifest, group["leaderTemplate"], leader | index)
                for rank in range(1, group["size"]):
                    index = {"LWS_WORKER_INDEX": str(rank)}
                    template = group["workerTemplate"]
                    yield Pod(f"{name}-0-{rank}", manifest, template, leader | index)


@dataclass(frozen=True)
class Process:
    """A container's process: the image, and what it is started with."""

    pod: Pod
    container: Any
    maps: Mapping[str, Manifest]

    def __str__(self) -> str:
        return f"{self.pod.owner['metadata']['name']}/{self.container['name']}"

    @property
    def service(self) -> type[ServiceSettings]:
        path = re.sub(":[^/]*$", "", self.container["image"])  # without its tag
        return SERVICES["/".join(path.split("/")[-2:])]

    @cached_property
    def environment(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for source in self.container.get("envFrom", ()):
            found |= self.maps[source["configMapRef"]["name"]]["data"]
        found |= self.pod.injected
        for entry in self.container.get("env", ()):
            if "value" in entry:
                found[entry["name"]] = _expanded(entry["value"], found)
            else:
                found[entry["name"]] = self._looked_up(entry["valueFrom"])
        return found

    @cached_property
    def settings(self) -> Any:
        """What the service reads.

        Raises:
            SettingsError, SystemExit: it does not accept them.
        """
        assert "command" not in self.container, f"{self} does not run the image's command"
        arguments = [_expanded(arg, self.environment) for arg in self.container.get("args", ())]
        return load_settings(self.service, arguments, self.environment)

    @property
    def mounts(self) -> dict[str, str]:
        """Volumes by the paths at which they are."""
        return {each["mountPath"]: each["name"] for each in self.container.get("volumeMounts", ())}

    @property
    def served(self) -> list[str]:
        """The addresses that it serves at, without that of its metrics; health is at the first."""
        match settings := self.settings:
            case FrontendSettings():
                return [f"{settings.host}:{port}" for port in (settings.port, settings.http_port)]
            case SchedulerSettings():
                return [settings.scheduler_address]
            case WorkerSettings():
                return [settings.worker_addresses[settings.rank]]
        raise TypeError(settings)

    @property
    def ports(self) -> list[int]:
        """The ports that other pods can reach: of its service first, of its metrics last."""
        addresses = [*self.served, self.settings.metrics_address]
        return [int(each.rpartition(":")[2]) for each in addresses if not stays_on_host(each)]

    @property
    def tls(self) -> ServerTls | None:
        """The TLS that it serves with."""
        tls: ServerTls | None = self.settings.server_tls
        return tls

    def secret(self, path: str) -> str:
        """The name of the Secret that holds this file."""
        volumes = {each["name"]: each for each in self.pod.spec["volumes"]}
        held = [name for at, name in self.mounts.items() if path.startswith(f"{at}/")]
        (found,) = (each for each in held if "secret" in volumes[each])
        return str(volumes[found]["secret"]["secretName"])

    def _looked_up(self, source: Any) -> str:
        match source:
            case {"fieldRef": {"fieldPath": "metadata.name"}}:
                return self.pod.name
            case {"configMapKeyRef": {"name": name, "key": key}}:
                return str(self.maps[name]["data"][key])
        raise ValueError(f"{self}: cannot look up {source}")


def _expanded(text: str, known: Mapping[str, str]) -> str:
    """Expands `$(NAME)` as the kubelet does, from the variables before it."""
    return re.sub(r"\$\((\w+)\)", lambda name: known[name[1]], text)


def processes(manifests: list[Manifest]) -> list[Process]:
    maps = named(manifests, "ConfigMap")
    return [Process(pod, each, maps) for pod in pods(manifests) for each in pod.containers]
