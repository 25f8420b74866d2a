"""Steps under NVIDIA's compute-sanitizer: no kernel reads or writes outside its tensors."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from tests.stack import ROOT
from tests.worker_svc.device import gpu_only

LIMIT_S = 200
FOUND = 99
# Prompts and decodes in graphs, padded and not, on the smallest model, by Triton's kernels.
TEST = (
    "tests/worker_svc/gpu_path/test_graphs.py"
    "::test_a_new_epoch_keeps_the_graphs_of_a_cache_of_the_same_size"
)


@gpu_only
@pytest.mark.timeout(LIMIT_S + 30)
def test_no_access_is_out_of_bounds() -> None:
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("there is no compute-sanitizer")
    command = [sanitizer, "--tool=memcheck", f"--error-exitcode={FOUND}", "--print-limit=5"]
    command += [sys.executable, "-m", "pytest", "-q", "-c", "bench/gpu/pytest.ini"]
    command += [f"--rootdir={ROOT}", TEST]
    done = subprocess.run(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
    )
    # It may refuse the device, as in some virtual machines: it then finds nothing, right or wrong.
    if "Device not supported" in done.stdout:
        pytest.skip("compute-sanitizer does not support this device")
    assert done.returncode == 0, done.stdout[-4000:]
    assert "ERROR SUMMARY: 0 errors" in done.stdout
