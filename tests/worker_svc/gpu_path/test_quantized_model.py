"""Whole steps of models whose weights and cache are quantized."""

from __future__ import annotations

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tests.worker_svc.device import by_device
from tests.worker_svc.gpu_path.small_model import LARGER, decode, make_runner
from tests.worker_svc.harness import save_model
from tests.worker_svc.platforms import GpuPlatform, Uncaptured


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With sizes that groups of 4-bit weights divide."""
    path = tmp_path_factory.mktemp("groups")
    save_model(path, **by_device(cpu={**LARGER, "intermediate_size": 64}, gpu=LARGER))
    return path


@pytest.mark.parametrize(
    ("quantization", "kv_dtype"),
    [("int8", "int8"), ("int4", "fp8"), *by_device(cpu=[], gpu=[("fp8", "auto")])],
)
def test_graphs_sample_what_single_launches_do(
    model: Path,
    quantization: str,
    kv_dtype: str,
) -> None:
    """Padded, on static buffers, with weights that were just quantized; and launched one by one,
    with those that were kept."""
    formats = {"quantization": quantization, "kv_dtype": kv_dtype}
    runner, batch = make_runner(model, GpuPlatform, **formats)
    assert runner._backend.shape.kv_dtype == kv_dtype
    first = decode(runner, batch)
    padded = by_device(cpu=False, gpu=True)  # a GPU rounds differently for another batch
    with capture_logs() as logs:
        again = make_runner(model, Uncaptured, captures=padded, **formats)
    assert "packed weights are read" in [each["event"] for each in logs]
    assert decode(*again) == first
