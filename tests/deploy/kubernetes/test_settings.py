"""The manifests of deploy/kubernetes fit the services' settings, and what no longer would is found:
a renamed flag, variable or port cannot leave a manifest behind."""

from __future__ import annotations

import copy
import dataclasses
import json

import pytest

from scheduler_svc.core.admission import Limits
from scheduler_svc.core.block_manager import BlockManager
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.metrics import EngineMetrics
from tests.deploy.kubernetes.checks import complaints
from tests.deploy.kubernetes.pods import NAMESPACE, named, processes
from tests.deploy.kubernetes.rendering import (
    COMBINATIONS,
    Manifest,
    render_combination,
)

ALL = ("cert-manager", "http", "autoscaling")


@pytest.fixture(scope="module")
def manifests() -> list[Manifest]:
    return render_combination("tp", ALL)


@pytest.mark.parametrize(("overlay", "components"), COMBINATIONS)
def test_manifests_fit_the_settings(overlay: str, components: tuple[str, ...]) -> None:
    assert complaints(render_combination(overlay, components)) == []


# What somebody may rename or forget in one place, and what is said about it.
PLANTS: dict[str, tuple[str, str, str]] = {
    "a flag": ('"--rank"', '"--rang"', "--rang"),
    "the gateway's door": (
        '"127.0.0.1:9001", "NANO_H',
        '"10.0.0.1:9001", "NANO_H',
        "10.0.0.1:9001",
    ),
    "a variable": ('"NANO_ENGINE_NAME"', '"NANO_ENGINE_TITLE"', "NANO_ENGINE_TITLE"),
    "a value": ('"NANO_TP": "2"', '"NANO_TP": "two"', "tp: "),
    "a listening port": ("0.0.0.0:50052", "0.0.0.0:50062", "it listens on [9464, 50062]"),
    "a called port": ("svc:50052", "svc:50062", "no scheduler listens at"),
    "a policy's port": ('[{"port": 8443}]', '[{"port": 8444}]', "nobody listens on [8444]"),
    "a port that stays closed": ('{"port": 9466}', '{"port": 9465}', "reach [9466]"),
    "a Service's port": ('"targetPort": "https"', '"targetPort": "http"', "Service http"),
    "an annotation": ('prometheus.io/port": "9464"', 'prometheus.io/port": "9465"', "annotation"),
    "a probe's address": ('health", "localhost:50052"', 'health", "localhost:52"', "served at"),
    "a probe without TLS": ('"NANO_TLS_CA": "/etc/nano/public/tls.crt", ', "", "the probe trusts"),
    "a directory of sockets": ('"mountPath": "/run/nano"', '"mountPath": "/run"', "no socket"),
    "a mount": ('"mountPath": "/etc/nano/tokens"', '"mountPath": "/tokens"', "auth_tokens_file"),
    "a drain": (
        '"NANO_DRAIN_TIMEOUT_S": "120"',
        '"NANO_DRAIN_TIMEOUT_S": "140"',
        "frontend-x: has",
    ),
    "a Service's name": ('"engines.nano-vllm.svc"', '"engine.nano-vllm.svc"', "is called engines."),
    "a probe's name": ('["frontend.nano-vllm.svc"', '["other"', "is called frontend.nano-vllm"),
    "a role": ("role:frontend", "role:scheduler", "calls others as frontend"),
}


# What somebody may rename or forget where a group of pods is an engine.
GROUP_PLANTS: dict[str, tuple[str, str, str]] = {
    "a rank's pod": ("$(NANO_ENGINE_NAME)-1.", "$(NANO_ENGINE_NAME)-2.", "calls rank 1 at"),
    "a variable of the controller": ("$(LWS_WORKER_INDEX)", "$(LWS_INDEX)", "$(LWS_INDEX)"),
    "a rank's name": ('"*.engine.nano-vllm.svc"', '"engine.nano-vllm.svc"', "is called engine-0"),
}


@pytest.mark.parametrize(
    ("overlay", "components", "plant"),
    [
        *(("tp", ALL, plant) for plant in PLANTS.values()),
        *(("tp-nodes", ("cert-manager",), plant) for plant in GROUP_PLANTS.values()),
    ],
    ids=[*PLANTS, *GROUP_PLANTS],
)
def test_what_does_not_fit_is_found(
    overlay: str, components: tuple[str, ...], plant: tuple[str, str, str]
) -> None:
    old, new, said = plant
    text = json.dumps(render_combination(overlay, components))
    assert old in text
    assert said in "\n".join(complaints(json.loads(text.replace(old, new))))


def test_autoscaling_asks_for_metrics_that_there_are(manifests: list[Manifest]) -> None:
    metrics = EngineMetrics()
    metrics.scheduler = Scheduler(Limits(4, 64, 32, 8, 100), BlockManager(8, 4))
    names = {family.name for family in metrics.collect()}
    (scaled,) = named(manifests, "ScaledObject").values()
    for trigger in scaled["spec"]["triggers"]:
        query = trigger["metadata"]["query"]
        assert query.removeprefix("sum(").partition("{")[0] in names
        assert f'namespace="{NAMESPACE}"' in query


def test_the_number_of_engines_is_the_autoscalers_alone(manifests: list[Manifest]) -> None:
    (scaled,) = named(manifests, "ScaledObject").values()
    target = scaled["spec"]["scaleTargetRef"]
    assert "replicas" not in named(manifests, target["kind"])[target["name"]]["spec"]


def test_several_engines_are_told_apart() -> None:
    rendered = render_combination("engines")
    assert named(rendered, "StatefulSet")["engine"]["spec"]["replicas"] == 3
    (scheduler,) = [each for each in processes(rendered) if str(each) == "engine/scheduler"]
    assert scheduler.settings.engine_name == "engine-0"
    second = dataclasses.replace(copy.copy(scheduler.pod), name="engine-1")
    assert dataclasses.replace(scheduler, pod=second).settings.engine_name == "engine-1"
