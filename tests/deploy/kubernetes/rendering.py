"""Renders the manifests in deploy/kubernetes with kubectl."""

from __future__ import annotations

import os
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.others import others_python

ROOT = Path(__file__).parents[3]
KUBERNETES = ROOT / "deploy" / "kubernetes"
OVERLAYS = ("cpu", "gpu", "tp", "tp-nodes", "pp-nodes", "engines")
# An overlay with components, as docs/deploy/kubernetes.md has users combine them.
COMBINATIONS = (
    *((overlay, ()) for overlay in OVERLAYS),
    ("cpu", ("cert-manager",)),
    ("engines", ("cert-manager", "autoscaling")),
    ("tp-nodes", ("cert-manager",)),
    ("tp", ("encrypted-network",)),
    ("tp-nodes", ("encrypted-network",)),
)

Manifest = dict[str, Any]


def render(directory: Path) -> list[Manifest]:
    """The objects of the kustomization in `directory`."""
    command = [others_python().with_name("kubectl"), "kustomize", directory]
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
