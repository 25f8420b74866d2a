"""Checks that an attention backend computes correct results on this GPU.

A library that loads may still lack paged keys and values, a head size or a dtype. Some builds
report that only in the first call, others never.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from worker_svc.attention.base import AttentionShape
from worker_svc.attention.paged import PagedBackend
from worker_svc.errors import is_device_lost
from worker_svc.kernels.triton.paged_attention import attention_reference
from worker_svc.step.arrays import made_up_step
from worker_svc.step.tensors import upload_step

CONTEXTS = (3, 2)  # cached tokens of the two test sequences, one block each
WINDOW = 2
# Share of the largest value. A wrong block or head is off by all of it, rounding by a hundredth.
TOLERANCE = 0.05


def probed_shape(shape: AttentionShape) -> AttentionShape:
    """The shape of the backend to probe. Its windows are shorter than the test sequences."""
    windows = tuple(None if each is None else WINDOW for each in shape.windows)
    return replace(shape, windows=windows)


def find_obstacle(backend: PagedBackend[Any]) -> str:
    """Computes attention for a few tokens of two prompts -> the reason why a backend like this one
    cannot be used, empty if it can.

    Raises:
        RuntimeError: the device is lost.
    """
    try:
        errors = [_error(backend, window) for window in {*backend.shape.windows}]
    except Exception as failure:  # an extension may raise anything
        if is_device_lost(failure):
            raise
        return str(failure).strip().partition("\n")[0] or repr(failure)
    for error in errors:
        if not error <= TOLERANCE:  # also if NaN
            return f"its result is off by {error:.2g} of the largest value"
    return ""


def _error(backend: PagedBackend[Any], window: int | None) -> float:
    shape, size = backend.shape, backend.block_size
    contexts = np.array(CONTEXTS, np.int32)
    table = np.arange(len(CONTEXTS), 0, -1, dtype=np.int32)  # not in order, and not from the first
    step = made_up_step(np.full_like(contexts, 2), contexts, size, table)
    tensors = upload_step(step, backend.plan_column(step), shape.device)
    generator = torch.Generator(shape.device).manual_seed(0)

    def random(*sizes: int) -> torch.Tensor:
        numbers = torch.randn(sizes, generator=generator, device=shape.device)
        return numbers.to(shape.dtype)

    cache = random(2, len(CONTEXTS) + 1, size, shape.num_kv_heads, shape.head_dim)
    q = random(len(step.positions), shape.num_heads, shape.head_dim)
    metadata = backend.plan(step, tensors, max(CONTEXTS))
    out = backend.attend(q, cache, metadata, window).view(q.shape)
    exact = attention_reference(
        q,
        cache,
        tensors.query_starts.diff(),
        tensors.context_lens,
        tensors.block_table,
        tensors.table_offsets,
        shape.scale,
        window,
    )
    return float((out.float() - exact).abs().max() / exact.abs().max())
