"""Containers start with settings that their services accept. The ports, files and variables that
manifests name are those of the settings."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
from pathlib import PurePosixPath

from nano_vllm_grpc.tls import ClientTls
from scheduler_svc.core.admission import Limits
from scheduler_svc.core.blocks.block_manager import BlockManager
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.metrics import EngineMetrics
from shared.config import PREFIX
from shared.paging import Paging
from tests.deploy.kubernetes.pods import NAMESPACE, Process, named, processes
from tests.deploy.kubernetes.rendering import Manifest, render_combination

# What deploy.health reads.
PROBE_NAMES = ("tls_ca", "tls_server_name", "client_cert", "client_key")
PROBE = ["python", "-m", "deploy.health"]
FILES = (
    *("model", "tls_cert", "tls_key", "auth_tokens_file", "internal_tls_cert"),
    "responses_directory",
)


def known(process: Process) -> set[str]:
    """The variables that a service and its probe read."""
    return {PREFIX + name.upper() for name in (*process.service.model_fields, *PROBE_NAMES)}


def test_variables_are_settings_of_their_readers(
    manifests: list[Manifest], started: list[Process]
) -> None:
    for process in started:
        own = {each["name"] for each in process.container.get("env", ())}
        assert {name for name in own if name.startswith(PREFIX)} <= known(process), process
    for name, manifest in named(manifests, "ConfigMap").items():
        source = {"configMapRef": {"name": name}}
        readers = [each for each in started if source in each.container.get("envFrom", ())]
        assert manifest["data"].keys() <= set[str]().union(*map(known, readers)), name


def test_containers_have_the_ports_on_which_services_listen(started: list[Process]) -> None:
    for process in started:
        ports = {each["containerPort"] for each in process.container.get("ports", ())}
        assert ports == set(process.ports), process


def test_volumes_hold_the_files_of_settings(started: list[Process]) -> None:
    for process in started:
        paths = [getattr(process.settings, name, "") for name in FILES]
        if tls := ClientTls.from_environment(process.environment):
            paths += [tls.ca, tls.cert, tls.key]
        for path in filter(None, paths):
            assert any(PurePosixPath(path).is_relative_to(at) for at in process.mounts), path


def test_probes_ask_for_health_where_it_is_served(started: list[Process]) -> None:
    for process in started:
        # They would kill a process that waits for others.
        assert not {"livenessProbe", "startupProbe"} & process.container.keys()
        probe = process.container["readinessProbe"]
        *command, address = probe["exec"]["command"]
        assert command == PROBE
        assert importlib.util.find_spec(PROBE[-1])
        at = process.served[0]
        assert address in (at.replace("0.0.0.0", host) for host in ("localhost", "127.0.0.1"))
        client = ClientTls.from_environment(process.environment)
        assert bool(client and client.ca) == bool(process.tls), process
        if process.tls and process.tls.client_ca:
            assert client
            assert client.cert


def test_pods_end_after_their_containers_and_then_their_sidecars_have_drained(
    started: list[Process],
) -> None:
    for pod in {each.pod.name: each.pod for each in started}.values():
        stages = {False: 0.0, True: 0.0}  # by whether it is a sidecar
        for process in (each for each in started if each.pod.name == pod.name):
            hook = process.container.get("lifecycle", {}).get("preStop", {})
            pause = hook.get("sleep", {}).get("seconds", 0)
            end_s = pause + process.settings.drain_timeout_s + 1
            is_sidecar = "restartPolicy" in process.container
            stages[is_sidecar] = max(stages[is_sidecar], end_s)
        assert pod.spec["terminationGracePeriodSeconds"] > sum(stages.values()), pod.name


def test_autoscaling_queries_metrics_that_exist_and_owns_the_number_of_engines() -> None:
    manifests = render_combination("engines", ("cert-manager", "autoscaling"))
    metrics = EngineMetrics()
    metrics.scheduler = Scheduler(Limits(4, 64, 32, 8, 100), BlockManager(8, Paging(4)))
    names = {family.name for family in metrics.collect()}
    (scaled,) = named(manifests, "ScaledObject").values()
    for trigger in scaled["spec"]["triggers"]:
        query = trigger["metadata"]["query"]
        assert query.removeprefix("sum(").partition("{")[0] in names
        assert f'namespace="{NAMESPACE}"' in query
    target = scaled["spec"]["scaleTargetRef"]
    assert "replicas" not in named(manifests, target["kind"])[target["name"]]["spec"]


def test_several_engines_have_different_names() -> None:
    rendered = render_combination("engines")
    assert named(rendered, "StatefulSet")["engine"]["spec"]["replicas"] == 3
    (scheduler,) = [each for each in processes(rendered) if str(each) == "engine/scheduler"]
    assert scheduler.settings.engine_name == "engine-0"
    second = dataclasses.replace(copy.copy(scheduler.pod), name="engine-1")
    assert dataclasses.replace(scheduler, pod=second).settings.engine_name == "engine-1"
