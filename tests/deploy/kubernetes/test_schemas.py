"""Kubernetes' schemas allow what kubectl renders, strictly, by kubernetes-validate, which
does not know custom resources, but the pods in them. Nothing is applied: there is no cluster."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.deploy.kubernetes.pods import NAMESPACE, named, processes
from tests.deploy.kubernetes.rendering import (
    COMBINATIONS,
    KUBERNETES,
    ROOT,
    Manifest,
    render,
    render_combination,
)
from tests.others import others_python

CUSTOM = ("Certificate", "Issuer", "LeaderWorkerSet", "ScaledObject")
# The first with everything that is used here, and the newest.
VERSIONS = ("1.30", "1.37")


def refusals(manifests: list[Manifest], version: str, scratch: Path) -> list[str]:
    """Validates manifests -> the errors that the schemas find."""
    core = [each for each in manifests if each["kind"] not in CUSTOM]
    core += [pod for each in manifests for pod in pod_templates(each)]
    file = scratch / f"{version}.yaml"
    file.write_text(yaml.safe_dump_all(core))
    command = ["-m", "kubernetes_validate", "--strict", "-k", version, str(file)]
    done = subprocess.run([others_python(), *command], capture_output=True, text=True, timeout=120)
    lines = done.stdout.splitlines()
    passed = [line for line in lines if re.match(r"INFO .* passed for resource ", line)]
    found = [line for line in lines if line not in passed]
    assert len(passed) == len(core) or found, done.stderr
    return found


def pod_templates(manifest: Manifest) -> list[Manifest]:
    """Those of a LeaderWorkerSet."""
    group = manifest.get("spec", {}).get("leaderWorkerTemplate", {})
    return [
        {
            "apiVersion": "v1",
            "kind": "PodTemplate",
            "metadata": {"name": name},
            "template": group[name],
        }
        for name in ("leaderTemplate", "workerTemplate")
        if name in group
    ]


@pytest.fixture(scope="module")
def different() -> list[Manifest]:
    """All different manifests of all combinations."""
    rendered = [each for pair in COMBINATIONS for each in render_combination(*pair)]
    return list({json.dumps(each): each for each in rendered}.values())


@pytest.mark.system
@pytest.mark.parametrize("version", VERSIONS)
def test_manifests_fit_the_schemas(version: str, different: list[Manifest], tmp_path: Path) -> None:
    assert refusals(different, version, tmp_path) == []


def test_everything_is_in_one_namespace(different: list[Manifest]) -> None:
    for each in different:
        own = each["metadata"]
        assert own.get("namespace", own["name"]) == NAMESPACE


@pytest.mark.system
def test_the_volume_of_models_fits_the_schemas(tmp_path: Path) -> None:
    manifests = render(KUBERNETES / "model")
    assert refusals(manifests, VERSIONS[0], tmp_path) == []
    (claim,) = named(manifests, "PersistentVolumeClaim")
    for pod in render_combination("cpu"):
        if pod["kind"] in ("Deployment", "StatefulSet"):
            volumes = {each["name"]: each for each in pod["spec"]["template"]["spec"]["volumes"]}
            assert volumes["models"]["persistentVolumeClaim"]["claimName"] == claim


def test_the_manifests_of_the_documentation_exist() -> None:
    text = (ROOT / "docs" / "deploy" / "kubernetes.md").read_text()
    for path in re.findall(r"deploy/kubernetes/([\w/-]+)", text):
        assert (KUBERNETES / path).exists(), path
    for name in (
        each.name for kind in ("overlays", "components") for each in (KUBERNETES / kind).iterdir()
    ):
        assert f"`{name}`" in text, name


def test_the_kustomization_of_the_documentation_fits(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "deploy" / "kubernetes.md").read_text()
    (block,) = re.findall(r"```yaml\n(apiVersion: kustomize.*?)```", text, re.DOTALL)
    (tmp_path / "nano-vllm-grpc").mkdir()
    shutil.copytree(KUBERNETES, tmp_path / "nano-vllm-grpc" / "deploy" / "kubernetes")
    (tmp_path / "kustomization.yaml").write_text(block)
    rendered = render(tmp_path)
    found = {str(each): each for each in processes(rendered)}
    assert found["engine/worker-0"].settings.model == "/models/Qwen3-0.6B"
    assert found["engine/scheduler"].settings.max_num_seqs == 512
    image = found["frontend/frontend"].container["image"]
    assert image == "registry.example/nano-vllm-grpc/frontend:1"
    image = found["engine/worker-0"].container["image"]
    assert image == "registry.example/nano-vllm-grpc/worker:1-gpu"
