"""Renders the manifests in deploy/kubernetes with kubectl, which many developers have and CI may
not."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
KUBERNETES = ROOT / "deploy" / "kubernetes"
OVERLAYS = ("cpu", "gpu", "tp", "tp-nodes", "engines")
# An overlay with components, as docs/kubernetes.md has users combine them.
COMBINATIONS = (
    *((overlay, ()) for overlay in OVERLAYS),
    ("cpu", ("cert-manager", "http")),
    ("engines", ("cert-manager", "http", "autoscaling")),
    ("tp-nodes", ("cert-manager",)),
    ("tp", ("encrypted-network",)),
    ("tp-nodes", ("encrypted-network",)),
)
_MIN_KUSTOMIZE = (5, 0)  # in kubectl 1.27

Manifest = dict[str, Any]


@cache
def _why_not() -> str:
    """Why kubectl cannot render the manifests; empty: it can."""
    if not shutil.which("kubectl"):
        return "kubectl is not installed"
    command = ["kubectl", "version", "--client", "--output=json"]
    answer = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    version = json.loads(answer.stdout).get("kustomizeVersion", "v0.0")
    if tuple(int(part) for part in version.lstrip("v").split(".")[:2]) < _MIN_KUSTOMIZE:
        return f"kubectl has kustomize {version}: components and replicas need 5.0"
    return ""


def needs_kubectl() -> None:
    """Skips the test where kubectl is missing or too old."""
    if reason := _why_not():
        pytest.skip(reason)


def render(directory: Path) -> list[Manifest]:
    """The objects of the kustomization in `directory`."""
    needs_kubectl()
    command = ["kubectl", "kustomize", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr
    return list(yaml.safe_load_all(done.stdout))


@cache
def render_combination(overlay: str, components: tuple[str, ...] = ()) -> list[Manifest]:
    """An overlay with components, from a kustomization such as users write."""
    with tempfile.TemporaryDirectory() as directory:
        here = os.path.relpath(KUBERNETES.resolve(), Path(directory).resolve())
        kustomization = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "resources": [f"{here}/overlays/{overlay}"],
            "components": [f"{here}/components/{name}" for name in components],
        }
        Path(directory, "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
        return render(Path(directory))
