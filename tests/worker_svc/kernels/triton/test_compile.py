"""Every kernel compiles for GPUs that are not here, into code that they can run well."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.worker_svc.kernels.triton.compiled import Binary

# It takes two to three minutes, unless Triton's cache has the binaries.
pytestmark = pytest.mark.timeout(900)

# Bytes a program may have: 99 KiB on the smaller GPUs that run sm_80 code, 227 KiB on sm_90.
SHARED_MEMORY = {80: 99 * 1024, 90: 227 * 1024}


@pytest.fixture(scope="module")
def binaries() -> list[Binary]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.worker_svc.kernels.triton.compile_all"]
    root = Path(__file__).parents[4]
    done = subprocess.run(command, env=environment, cwd=root, stdout=subprocess.PIPE, check=True)
    return [Binary(**fields) for fields in json.loads(done.stdout)]


def test_nothing_spills(binaries: list[Binary]) -> None:
    """Segments have two sums, so a few bytes may."""
    assert [b for b in binaries if b.spills > (32 if "segment" in b.case else 0)] == []


def test_shared_memory_fits(binaries: list[Binary]) -> None:
    assert [b for b in binaries if b.shared > SHARED_MEMORY[b.target]] == []


def test_products_use_wgmma(binaries: list[Binary]) -> None:
    assert any(b.needs_wgmma for b in binaries)
    assert [b for b in binaries if b.needs_wgmma and not b.wgmma] == []


def test_sizes_and_alignments_of_a_step_share_a_binary(binaries: list[Binary]) -> None:
    """A step must not wait for a compiler. Each case is launched with several."""
    seen = [(b.kernel, b.case, b.target) for b in binaries]
    assert sorted(set(seen)) == sorted(seen)
