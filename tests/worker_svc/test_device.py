"""A run that was meant to prove something on a GPU must not pass without one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.worker_svc.device import cpu_only

pytestmark = cpu_only

ROOT = Path(__file__).parents[2]
USAGE_ERROR, TESTS_FAILED = 4, 1
TESTS = """
import pytest
import torch

from worker_svc.kernels.triton.rms_norm import rms_norm


def launch():
    rms_norm(torch.ones(1, 4), torch.ones(4), 1e-6)


def test_launches():
    launch()


def test_forgets():
    pass


@pytest.mark.launches_nothing
def test_says_so():
    pass


@pytest.mark.launches_nothing
def test_says_so_and_launches():
    launch()
"""


def run_pytest(path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-c",
        ROOT / "pyproject.toml",
        "-p",
        "no:cacheprovider",
    ]
    return subprocess.run(
        [*command, f"--rootdir={ROOT}", path],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"TEST_DEVICE": "cuda", "TRITON_INTERPRET": "1"}, "TRITON_INTERPRET is set"),
        ({"TEST_DEVICE": "cuda", "TRITON_INTERPRET": "0"}, "torch finds no CUDA device"),
        ({"TEST_DEVICE": "gpu"}, "TEST_DEVICE: gpu; must be cpu or cuda"),
    ],
)
def test_without_a_gpu_nothing_passes(environment: dict[str, str], reason: str) -> None:
    if "no CUDA" in reason and torch.cuda.is_available():
        pytest.skip("there is one")
    done = run_pytest(ROOT / "tests/worker_svc/kernels/triton/test_silu_mul.py", **environment)
    assert done.returncode == USAGE_ERROR
    assert reason in done.stderr


def test_kernel_tests_without_kernels_fail(tmp_path: Path) -> None:
    hook = "from tests.worker_svc.kernels.triton.conftest import pytest_pyfunc_call\n"
    (tmp_path / "conftest.py").write_text(hook)
    (tmp_path / "test_kernels.py").write_text(TESTS)
    done = run_pytest(tmp_path, TRITON_INTERPRET="1", COLUMNS="200")
    assert done.returncode == TESTS_FAILED, done.stdout
    assert "2 failed, 2 passed" in done.stdout
    assert "test_forgets - AssertionError: no kernel was launched" in done.stdout
    assert "test_says_so_and_launches - AssertionError: marked launches_nothing" in done.stdout
