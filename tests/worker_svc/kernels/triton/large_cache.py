"""Caches with more elements than 32 bits can count."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.worker_svc.device import DEVICE, ON_GPU


def large_cache(last_blocks: tuple[int, ...], dtype: torch.dtype, path: Path) -> torch.Tensor:
    """A cache [2, blocks, block_size, kv_heads, head_dim] whose `last_blocks` (their number, and
    the other sizes) lie beyond 2³¹ elements of the keys alone. On a CPU it is a sparse file: what
    is not touched takes no memory."""
    count, *block = last_blocks
    blocks = -(-(2**31) // torch.Size(block).numel()) + count
    shape = torch.Size((2, blocks, *block))
    if ON_GPU:
        return torch.empty(shape, dtype=dtype, device=DEVICE)
    file = torch.from_file(str(path), shared=True, size=shape.numel(), dtype=dtype)
    return file.view(shape)
