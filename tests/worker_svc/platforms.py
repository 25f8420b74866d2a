"""A worker's GPU path on DEVICE: on a GPU itself, or on CPU tensors in the interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu.steps import Heads
from tests.worker_svc.device import DEVICE, ON_GPU
from tests.worker_svc.harness import worker_settings
from tests.worker_svc.kernels.triton.precision import poisoned_memory
from worker_svc.attention.base import AttentionShape, KvDtype
from worker_svc.attention.paged import PagedBackend
from worker_svc.errors import StartError

if ON_GPU:
    from worker_svc.devices.cuda import CudaPlatform as GpuPlatform
else:
    from tests.worker_svc.interpreted import InterpretedPlatform as GpuPlatform


class Uncaptured(GpuPlatform):
    """Pads steps to static buffers as for graphs, and launches them kernel by kernel."""

    def capture(self, run: Callable[[], None], *_: object) -> Callable[[], None]:
        return run if ON_GPU else poisoned_memory()(run)


def make_backend(
    name: str,
    heads: Heads,
    dtype: torch.dtype,
    kv_dtype: KvDtype = "auto",
    windows: Iterable[int | None] = (None,),
) -> PagedBackend[Any]:
    """Makes a backend, or skips the test if a library is not installed, not for this GPU, or not
    built for these heads or this dtype."""
    settings = worker_settings(Path(), attention=name)
    shape = AttentionShape(tuple(windows), *heads, dtype, DEVICE, kv_dtype)
    try:
        backend = GpuPlatform(settings).attention_backend(settings, shape)
    except StartError as error:
        if name == "triton":
            raise
        pytest.skip(str(error))
    assert backend.name == name
    assert isinstance(backend, PagedBackend)
    return backend
