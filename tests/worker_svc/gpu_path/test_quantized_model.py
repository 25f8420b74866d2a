"""Whole steps of models whose weights and cache are quantized."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.worker_svc.device import by_device
from tests.worker_svc.gpu_path.small_model import LARGER, decode, make_runner
from tests.worker_svc.harness import save_model
from tests.worker_svc.platforms import GpuPlatform, Uncaptured
from worker_svc import model_runner


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With sizes that groups of 4-bit weights divide."""
    path = tmp_path_factory.mktemp("groups")
    save_model(path, **by_device(cpu={**LARGER, "intermediate_size": 64}, gpu=LARGER))
    return path


@pytest.mark.parametrize(
    ("quantization", "kv_dtype"), [("int8", "int8"), ("int4", "fp8"), ("fp8", "auto")]
)
def test_graphs_sample_what_single_launches_do(
    model: Path,
    quantization: str,
    kv_dtype: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Padded, on static buffers, with weights that were just quantized; and launched one by one,
    with those that were kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shape = model_runner.attention_shape

    def with_cache(*args: Any) -> Any:
        return replace(shape(*args), kv_dtype=kv_dtype)

    monkeypatch.setattr(model_runner, "attention_shape", with_cache)
    first = decode(*make_runner(model, GpuPlatform, quantization=quantization))
    assert list(tmp_path.rglob("*.safetensors"))
    padded = by_device(cpu=False, gpu=True)  # a GPU rounds differently for another batch
    single = make_runner(model, Uncaptured, quantization=quantization, captures=padded)
    assert decode(*single) == first
