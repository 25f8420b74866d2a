from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shared.model_directory import MAX_JSON_BYTES
from tests.worker_svc.harness import save_model, worker_settings
from worker_svc.errors import ModelError
from worker_svc.model_runner import ModelRunner
from worker_svc.weights.fingerprint import ModelFiles
from worker_svc.weights.shards import INDEX


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    save_model(tmp_path)
    return tmp_path


def edit(model_dir: Path, name: str, tensor: torch.Tensor | None) -> None:
    """Replaces a tensor, or removes it if None is given."""
    path = model_dir / "model.safetensors"
    tensors = load_file(path)
    tensors.pop(name, None)
    save_file(tensors if tensor is None else tensors | {name: tensor}, path)


@pytest.mark.parametrize(
    ("name", "tensor", "reason"),
    [
        ("model.layers.1.mlp.up_proj.weight", None, r"missing weight: .*\.1\.mlp\.up_proj\.weight"),
        ("model.layers.3.extra", torch.zeros(2), r"unknown weight: model\.layers\.3\.extra"),
        ("model.norm.weight", torch.zeros(63), r"model\.norm\.weight: shape \[63\].*\[64\]"),
        (
            "model.layers.0.mlp.gate_proj.weight",
            torch.zeros(111, 64),
            r"gate_proj\.weight: shape \[111, 64\]",
        ),
        ("lm_head.weight", torch.zeros(299, 64), r"lm_head\.weight: shape \[299, 64\]"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    model_dir: Path, name: str, tensor: torch.Tensor | None, reason: str
) -> None:
    edit(model_dir, name, tensor)
    with pytest.raises(ModelError, match=reason):
        ModelRunner(worker_settings(model_dir))


@pytest.mark.parametrize(
    "name",
    ["../other/model.safetensors", "/tmp/model.safetensors", "part/model.safetensors", "..", "", 7],
)
def test_an_index_names_only_files_beside_it(name: object, model_dir: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "model.safetensors", "lm_head.weight": name}}
    (model_dir / INDEX).write_text(json.dumps(index))
    named = f"weight_map: lm_head.weight: {name!r} is not the name of a file beside it"
    with pytest.raises(ModelError, match=re.escape(f"{INDEX}: {named}")):
        ModelFiles(model_dir)


def test_an_index_that_is_too_large(model_dir: Path) -> None:
    with (model_dir / INDEX).open("wb") as file:
        file.truncate(MAX_JSON_BYTES + 1)
    with pytest.raises(ModelError, match=r"index\.json: cannot be read: .* the limit is 16777216"):
        ModelFiles(model_dir)
