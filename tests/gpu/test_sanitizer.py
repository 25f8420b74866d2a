"""Steps under NVIDIA's compute-sanitizer: no kernel reads or writes outside its tensors."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.stack import ROOT
from tests.worker_svc.device import gpu_only

LIMIT_S = 200
FOUND = 99
# Prompts and decodes in bfloat16 on the smallest model, with Triton's kernels. Every tensor is an
# allocation of its own: otherwise an access beyond one tensor's bounds would hit another and go
# unnoticed. CUDA cannot capture such allocations, so there are no graphs.
TEST = "tests/worker_svc/gpu_path/test_model.py::test_half_precision[bfloat16]"
OWN_ALLOCATIONS = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


@gpu_only
@pytest.mark.timeout(LIMIT_S + 30)
def test_no_access_is_out_of_bounds() -> None:
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("there is no compute-sanitizer")
    command = [sanitizer, "--tool=memcheck", f"--error-exitcode={FOUND}", "--print-limit=5"]
    command += ["--report-api-errors=no"]  # torch makes calls that may fail
    command += [sys.executable, "-m", "pytest", "-q", "-c", "bench/gpu/pytest.ini"]
    command += [f"--rootdir={ROOT}", TEST]
    done = subprocess.run(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        env={**os.environ, **OWN_ALLOCATIONS},
    )
    # It may refuse the device, as in some virtual machines, and then checks nothing.
    if "Device not supported" in done.stdout:
        pytest.skip("compute-sanitizer does not support this device")
    assert done.returncode == 0, done.stdout[-4000:]
    assert "ERROR SUMMARY: 0 errors" in done.stdout
    assert re.search(r"\b1 passed\b", done.stdout), "no kernel ran: " + done.stdout
