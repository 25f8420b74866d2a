"""Checkpoints of several files: which file holds a tensor, and which are not read at all."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shared.model_directory import MAX_JSON_BYTES
from tests.worker_svc.harness import save_model
from worker_svc.errors import ModelError
from worker_svc.weights.files import WeightReader
from worker_svc.weights.fingerprint import ModelFiles
from worker_svc.weights.shards import INDEX, check_shards

A, B = "a.safetensors", "b.safetensors"
ONES = torch.ones(2, 3)


def write(directory: Path, **files: dict[str, torch.Tensor]) -> None:
    for name, tensors in files.items():
        copies = {key: each.clone() for key, each in tensors.items()}
        save_file(copies, directory / f"{name}.safetensors")


def write_index(directory: Path, **files: str) -> None:
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))


def read(directory: Path) -> dict[str, float]:
    """The first number of each tensor that a worker reads."""
    check_shards(directory)
    with WeightReader(directory, torch.float32, torch.device("cpu")) as reader:
        names = [name for name in "xyz" if reader.has(name)]
        found = {name: float(reader.read(name)[0, 0]) for name in names}
        reader.check_all_read()
    return found


def assert_rejected(directory: Path, reason: str) -> None:
    """By the launcher, which only reads headers, and by a worker."""
    with pytest.raises(ModelError, match=re.escape(reason)):
        check_shards(directory)
    with pytest.raises(ModelError, match=re.escape(reason)):
        WeightReader(directory, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("right", ["a", "b"])
def test_the_index_decides_between_two_files(tmp_path: Path, right: str) -> None:
    write(tmp_path, a={"x": ONES, "y": ONES}, b={"x": 2 * ONES, "z": 2 * ONES})
    write_index(tmp_path, x=f"{right}.safetensors", y=A, z=B)
    assert read(tmp_path) == {"x": {"a": 1, "b": 2}[right], "y": 1, "z": 2}


def test_an_outdated_copy_may_have_another_shape(tmp_path: Path) -> None:
    write(tmp_path, a={"x": ONES}, b={"x": torch.zeros(7), "y": ONES})
    write_index(tmp_path, x=A, y=B)
    assert read(tmp_path) == {"x": 1, "y": 1}


def test_without_an_index_a_name_in_two_files_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, a={"x": ONES, "y": ONES}, b={"y": ONES, "z": ONES})
    assert_rejected(tmp_path, f"y: both {A} and {B} hold it, and no {INDEX} says which")
    write_index(tmp_path, x=A, z=B)  # it says nothing about y
    assert_rejected(tmp_path, f"y: both {A} and {B} hold it")


def test_tensors_that_an_index_leaves_out_are_read(tmp_path: Path) -> None:
    """Transformers does this, too, and nothing is lost silently."""
    write(tmp_path, a={"x": ONES, "y": 2 * ONES})
    write_index(tmp_path, x=A)
    assert read(tmp_path) == {"x": 1, "y": 2}


@pytest.mark.parametrize("elsewhere", [{}, {"z": ONES}])
def test_a_file_without_a_tensor_of_the_index_is_named(
    tmp_path: Path, elsewhere: dict[str, torch.Tensor]
) -> None:
    write(tmp_path, a={"x": ONES}, b={"y": ONES, **elsewhere})
    write_index(tmp_path, x=A, y=B, z=A)
    assert_rejected(tmp_path, f"{INDEX}: z is not in {A}")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    write(tmp_path, a={"x": ONES})
    write_index(tmp_path, x=A, y=B)
    assert_rejected(tmp_path, f"{INDEX}: names {B}, which does not exist")


@pytest.mark.parametrize(
    "name",
    ["../other/model.safetensors", "/tmp/model.safetensors", "part/model.safetensors", "..", "", 7],
)
def test_an_index_names_only_files_beside_it(tmp_path: Path, name: Any) -> None:
    write(tmp_path, a={"x": ONES})
    write_index(tmp_path, x=A, y=name)
    assert_rejected(
        tmp_path, f"{INDEX}: weight_map: y: {name!r} is not the name of a file beside it"
    )


def test_an_index_that_is_too_large(tmp_path: Path) -> None:
    with (tmp_path / INDEX).open("wb") as file:
        file.truncate(MAX_JSON_BYTES + 1)
    with pytest.raises(ModelError, match=r"index\.json: cannot be read: .* the limit is 16777216"):
        check_shards(tmp_path)


def test_files_that_the_index_leaves_out_are_not_read(tmp_path: Path) -> None:
    save_model(tmp_path, max_shard_size="60KB")
    expected = ModelFiles(tmp_path).fingerprint
    shard = sorted(tmp_path.glob("*.safetensors"))[0]
    save_file({name: -each for name, each in load_file(shard).items()}, tmp_path / B)
    (tmp_path / "c.safetensors").write_bytes(b"not a safetensors file")
    assert ModelFiles(tmp_path).fingerprint == expected
    check_shards(tmp_path)
    with WeightReader(tmp_path, torch.float32, torch.device("cpu")) as reader:
        for name, tensor in load_file(shard).items():
            assert torch.equal(reader.read(name), tensor)


def test_the_fingerprint_tells_which_copy_is_read(tmp_path: Path) -> None:
    save_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    write(tmp_path, a={"x": ONES, "y": ONES}, b={"x": 2 * ONES, "z": ONES})
    write_index(tmp_path, x=A, y=A, z=B)
    first = ModelFiles(tmp_path)
    write_index(tmp_path, x=B, y=A, z=B)
    assert ModelFiles(tmp_path).fingerprint != first.fingerprint
    with pytest.raises(ModelError, match="changed while it was loaded"):
        first.check_unchanged()


@pytest.mark.parametrize("module", ["deploy.model", "worker_svc.gguf.unpack"])
def test_the_launcher_does_not_import_torch(module: str) -> None:
    program = f"import sys, {module}\nprint('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    assert ran.stdout == b"False\n"
