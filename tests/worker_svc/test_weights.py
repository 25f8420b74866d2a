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
from worker_svc.weights.files import INDEX, WeightReader
from worker_svc.weights.fingerprint import ModelFiles

CPU = torch.device("cpu")


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    save_model(tmp_path)
    return tmp_path


def edit(model_dir: Path, **changes: torch.Tensor | None) -> None:
    """Replaces tensors, or removes those given as None; `__` stands for a dot."""
    path = model_dir / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in changes.items():
        name = name.replace("__", ".")
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, path)


def test_missing_weight_is_named(model_dir: Path) -> None:
    edit(model_dir, model__layers__1__mlp__up_proj__weight=None)
    with pytest.raises(ModelError, match=r"missing weight: model\.layers\.1\.mlp\.up_proj\.weight"):
        ModelRunner(worker_settings(model_dir))


def test_unknown_weight_is_named(model_dir: Path) -> None:
    edit(model_dir, model__layers__3__extra=torch.zeros(2))
    with pytest.raises(ModelError, match=r"unknown weight: model\.layers\.3\.extra"):
        ModelRunner(worker_settings(model_dir))


def test_wrong_shape_is_named(model_dir: Path) -> None:
    edit(model_dir, model__norm__weight=torch.zeros(63))
    with pytest.raises(ModelError, match=r"model\.norm\.weight: shape \[63\].*\[64\]"):
        ModelRunner(worker_settings(model_dir))


def test_wrong_shape_of_a_sharded_weight_is_named(model_dir: Path) -> None:
    edit(model_dir, model__layers__0__mlp__gate_proj__weight=torch.zeros(111, 64))
    with pytest.raises(ModelError, match=r"gate_proj\.weight: shape \[111, 64\]"):
        ModelRunner(worker_settings(model_dir))


def test_tied_model_may_carry_its_head(model_dir: Path) -> None:
    edit(model_dir, lm_head__weight=torch.zeros(301, 64))
    ModelRunner(worker_settings(model_dir))


def test_missing_files_are_named(tmp_path: Path) -> None:
    save_model(tmp_path, max_shard_size="50KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelError, match=shard.name):
        ModelRunner(worker_settings(tmp_path))


def test_file_that_is_no_safetensors_is_named(model_dir: Path) -> None:
    (model_dir / "model.safetensors").write_bytes(b"\x80\x04" * 20)
    with pytest.raises(ModelError, match=r"model\.safetensors: not a safetensors file"):
        ModelRunner(worker_settings(model_dir))


def test_reads_only_the_slice(model_dir: Path) -> None:
    name = "model.layers.0.self_attn.o_proj.weight"
    whole = load_file(model_dir / "model.safetensors")[name]
    with WeightReader(model_dir, torch.float32, CPU) as reader:
        rows, columns = torch.empty(5, 64), torch.empty(64, 7)
        reader.read_into(rows, name, start=3)
        reader.read_into(columns, name, dim=1, start=20)
    assert torch.equal(rows, whole[3:8])
    assert torch.equal(columns, whole[:, 20:27])


def test_fingerprint_tells_models_apart(model_dir: Path, tmp_path_factory: object) -> None:
    first = ModelFiles(model_dir).fingerprint
    assert ModelFiles(model_dir).fingerprint == first
    norm = load_file(model_dir / "model.safetensors")["model.norm.weight"]
    edit(model_dir, model__norm__weight=norm + 0.5)
    trained_further = ModelFiles(model_dir).fingerprint
    edit(model_dir, model__layers__3__extra=torch.zeros(2))
    assert len({first, trained_further, ModelFiles(model_dir).fingerprint}) == 3


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


def test_files_may_be_links(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """As in Hugging Face's cache."""
    expected = ModelFiles(model_dir).fingerprint
    blob = tmp_path_factory.mktemp("blobs") / "0123"
    (model_dir / "model.safetensors").rename(blob)
    (model_dir / "model.safetensors").symlink_to(blob)
    assert ModelFiles(model_dir).fingerprint == expected


def test_an_index_that_is_too_large(model_dir: Path) -> None:
    with (model_dir / INDEX).open("wb") as file:
        file.truncate(MAX_JSON_BYTES + 1)
    with pytest.raises(ModelError, match=r"index\.json: cannot be read: .* the limit is 16777216"):
        ModelFiles(model_dir)
