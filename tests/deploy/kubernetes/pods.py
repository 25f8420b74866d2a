"""The pods that rendered manifests describe, and what their containers are started with: commands
and environment as the kubelet and the LeaderWorkerSet's controller make them."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from deploy.gateway import GatewaySettings
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
    "nano-vllm-grpc/gateway": GatewaySettings,
}


class Impossible(Exception):
    """A manifest that could not run; the message says why."""


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
    """A container's process: the image, and what it is started with.

    Raises:
        Impossible: by its properties, if the kubelet or the service would not start it.
    """

    pod: Pod
    container: Any
    maps: Mapping[str, Manifest]

    def __str__(self) -> str:
        return f"{self.pod.owner['metadata']['name']}/{self.container['name']}"

    @property
    def image(self) -> str:
        """Without its tag and registry."""
        path = re.sub(":[^/]*$", "", self.container["image"])
        return "/".join(path.split("/")[-2:])

    @property
    def service(self) -> type[ServiceSettings]:
        if self.image not in SERVICES:
            raise Impossible(f"{self}: an image of no service, {self.image}")
        return SERVICES[self.image]

    @cached_property
    def environment(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for source in self.container.get("envFrom", ()):
            found |= self._map(source["configMapRef"]["name"])
        found |= self.pod.injected
        for entry in self.container.get("env", ()):
            if "value" in entry:
                found[entry["name"]] = self._expanded(entry["value"], found)
            else:
                found[entry["name"]] = self._looked_up(entry["valueFrom"])
        return found

    @property
    def arguments(self) -> list[str]:
        if "command" in self.container:
            raise Impossible(f"{self}: a command of its own instead of the image's")
        return [self._expanded(arg, self.environment) for arg in self.container.get("args", ())]

    @cached_property
    def settings(self) -> Any:
        """What the service reads.

        Raises:
            Impossible: it refuses.
        """
        with self._refusals():
            return load_settings(self.service, self.arguments, self.environment)

    @property
    def mounts(self) -> dict[str, str]:
        """Volumes by the paths at which they are."""
        return {each["mountPath"]: each["name"] for each in self.container.get("volumeMounts", ())}

    @property
    def served(self) -> list[str]:
        """The addresses that it serves at, without that of its metrics; health is at the first."""
        match settings := self.settings:
            case GatewaySettings():
                return [f"{settings.host}:{settings.http_port}"]
            case FrontendSettings():
                engine = [settings.gateway_address] if settings.gateway_address else []
                return [f"{settings.host}:{settings.port}", *engine]
            case SchedulerSettings():
                return [settings.scheduler_address]
            case WorkerSettings():
                return [settings.worker_addresses[settings.rank]]
        raise TypeError(settings)

    @property
    def ports(self) -> list[int]:
        """The ports that other pods can reach: of its service first, of its metrics last."""
        metrics = f"{self.settings.metrics_host}:{self.settings.metrics_port}"
        addresses = [*self.served, metrics]
        return [int(each.rpartition(":")[2]) for each in addresses if not stays_on_host(each)]

    @property
    def tls(self) -> ServerTls | None:
        """The TLS that it serves with."""
        tls: ServerTls | None = self.settings.server_tls
        return tls

    def secret(self, path: str) -> str:
        """The name of the Secret that holds this file."""
        volumes = {each["name"]: each for each in self.pod.spec["volumes"]}
        for at, name in self.mounts.items():
            if path.startswith(f"{at}/") and "secret" in volumes[name]:
                return str(volumes[name]["secret"]["secretName"])
        raise Impossible(f"{self}: no Secret holds {path}")

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        said = io.StringIO()
        try:
            with redirect_stderr(said):
                yield
        except (ValueError, SystemExit) as error:
            raise Impossible(f"{self}: {error} {said.getvalue()}") from error

    def _map(self, name: str) -> dict[str, str]:
        if name not in self.maps:
            raise Impossible(f"{self}: there is no ConfigMap {name}")
        return dict(self.maps[name]["data"])

    def _looked_up(self, source: Any) -> str:
        match source:
            case {"fieldRef": {"fieldPath": "metadata.name"}}:
                return self.pod.name
            case {"configMapKeyRef": {"name": name, "key": key}}:
                if key in self._map(name):
                    return self._map(name)[key]
        raise Impossible(f"{self}: cannot look up {source}")

    def _expanded(self, text: str, known: Mapping[str, str]) -> str:
        """Expands `$(NAME)`, of which the kubelet leaves alone what has not been set before."""
        result = re.sub(r"\$\((\w+)\)", lambda name: known.get(name[1], name[0]), text)
        if "$(" in result:
            raise Impossible(f"{self}: nothing sets what {result} names")
        return result


def processes(manifests: list[Manifest]) -> list[Process]:
    maps = named(manifests, "ConfigMap")
    return [Process(pod, each, maps) for pod in pods(manifests) for each in pod.containers]
