"""Runs Triton's kernels in its interpreter, on CPU tensors, unless TEST_DEVICE is cuda: then
`tests.worker_svc.device` puts tensors on a GPU, and the kernels are compiled."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.certificates import Authority

ON_GPU = os.environ.get("TEST_DEVICE") == "cuda"

if not ON_GPU:
    # Before any other import: Triton reads this when it is imported, by torch for one.
    os.environ.setdefault("TRITON_INTERPRET", "1")

    from triton.runtime import interpreter

    _patch_tensor = interpreter._patch_lang_tensor

    def _patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        """Lets the bounds of a `range` come from memory: Triton 3.6 calls `int` on an array of one
        element, which NumPy 2.4 refuses (triton-lang/triton#9171, fixed in later releases)."""
        _patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = _patch_tensor_and_index


def pytest_configure() -> None:
    """Stops a run meant for a GPU from passing without one."""
    device = os.environ.get("TEST_DEVICE", "cpu")
    if device not in ("cpu", "cuda"):
        raise pytest.UsageError(f"TEST_DEVICE: {device}; must be cpu or cuda")
    if not ON_GPU:
        return
    import torch
    import triton

    if triton.knobs.runtime.interpret:
        raise pytest.UsageError("TEST_DEVICE is cuda, but TRITON_INTERPRET is set")
    if not torch.cuda.is_available():
        raise pytest.UsageError("TEST_DEVICE is cuda, but torch finds no CUDA device")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for a module's certificates."""
    return tmp_path_factory.mktemp("certificates")


@pytest.fixture(scope="module")
def authority(certificates: Path) -> Authority:
    return Authority(certificates, "ours")


@pytest.hookimpl(optionalhook=True)  # a GPU machine may lack pytest-xdist
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Turns `-n auto`, which `make test` passes, into a worker per processor, but none if tests are
    named: workers take longer to start than most tests to run."""
    if number := os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS"):
        return int(number)
    named = config.option.keyword or not all(Path(each).is_dir() for each in config.args)
    return 0 if named else len(os.sched_getaffinity(0))


# With `--dist loadgroup` these run one after another, alongside the others: they harm stacks of
# processes, and have time limits of their own.
_HARMED = [Path(__file__).parent / name for name in ("abuse", "chaos", "faults", "fuzz")]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(item.path.is_relative_to(folder) for folder in _HARMED):
            item.add_marker(pytest.mark.xdist_group("harmed"))
