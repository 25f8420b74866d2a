"""The attention kernels' launches, as the attention backend makes them: see `compiled.Case`."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch

from tests.worker_svc.kernels.triton.compiled import Case
from worker_svc.kernels.triton.batch_invariance import SEGMENT
from worker_svc.kernels.triton.decode_attention import decode_attention, decode_workspace
from worker_svc.kernels.triton.prompt_attention import prompt_attention
from worker_svc.kernels.triton.quantized_cache import SCALE_BYTES

KV_HEADS = 8
BLOCKS = 4
# Rows of steps that have to share a binary.
ROWS = (1, 15, 16)


def _integers(*shape: int, offset: int) -> torch.Tensor:
    """A view of a buffer of many columns, `offset` numbers after its beginning."""
    return torch.zeros(math.prod(shape) + offset, dtype=torch.int32)[offset:].view(shape)


def _cache(dtype: torch.dtype, block_size: int, head_dim: int) -> torch.Tensor:
    columns = head_dim + (SCALE_BYTES if dtype.itemsize == 1 else 0)
    return torch.empty(2, BLOCKS, block_size, KV_HEADS, columns, dtype=dtype)


def _decode(
    dtype: torch.dtype,
    group: int,
    head_dim: int,
    block_size: int,
    splits: int,
    cache_dtype: torch.dtype | None = None,
    window: int | None = None,
) -> None:
    for n in ROWS:
        q = torch.empty(n, KV_HEADS * group, head_dim, dtype=dtype)
        cache = _cache(cache_dtype or dtype, block_size, head_dim)
        workspace = decode_workspace(n, q.shape[1], head_dim, splits, q.device)
        columns = [_integers(size, offset=n) for size in (n, n + 1, n, n, n + 1)]
        scale = head_dim**-0.5
        rest = scale, splits, workspace, torch.empty_like(q)
        decode_attention(q, cache, *columns, *rest, window=window)


def _prompt(
    dtype: torch.dtype,
    group: int,
    head_dim: int,
    block_size: int,
    cache_dtype: torch.dtype | None = None,
    window: int | None = None,
    segment: int = 0,
    parts: int = 0,
) -> None:
    for n in ROWS:
        q = torch.empty(n, KV_HEADS * group, head_dim, dtype=dtype)
        cache = _cache(cache_dtype or dtype, block_size, head_dim)
        partials = decode_workspace(n, q.shape[1], head_dim, parts, q.device) if parts else None
        tiles = _integers(n, 2, offset=n)
        columns = [_integers(size, offset=n) for size in (n + 1, n, n, n + 1)]
        rest = head_dim**-0.5, torch.empty_like(q)
        invariant = {"segment": segment, "partials": partials}
        prompt_attention(q, cache, tiles, *columns, *rest, window=window, **invariant)


_invariant = partial(_prompt, segment=SEGMENT)
_invariant_decode = partial(_prompt, segment=SEGMENT, parts=3)


def _case(
    launch: Callable[..., None],
    dtype: torch.dtype,
    group: int,
    head_dim: int,
    block_size: int,
    *splits: int,
    cache_dtype: torch.dtype | None = None,
    window: int | None = None,
) -> Case:
    name = f"{str(dtype)[6:]}, group {group}, head_dim {head_dim}, blocks of {block_size}"
    name += "".join(f", {n} splits" for n in splits)
    if isinstance(launch, partial):
        name += f", {launch.keywords}"
    if cache_dtype is not None:
        name += f", cache {str(cache_dtype)[6:]}"
    if window is not None:
        name += f", window {window}"
    options: dict[str, Any] = {"cache_dtype": cache_dtype, "window": window}
    call = partial(launch, dtype, group, head_dim, block_size, *splits, **options)
    return Case(
        name,
        call,
        uses_wgmma=launch is not _decode and dtype != torch.float32,
        first_target=90 if cache_dtype == torch.float8_e4m3fn else 80,
    )


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

# Qwen3: head_dim 128; 2, 4, 5 or 8 query heads per KV head.
CASES = [
    _case(_decode, BF16, 2, 128, 256, 1),
    _case(_decode, BF16, 2, 128, 256, 32),
    _case(_decode, BF16, 5, 128, 16, 1),
    _case(_decode, FP16, 8, 128, 64, 4),
    _case(_decode, BF16, 32, 256, 256, 1),
    _case(_decode, BF16, 3, 80, 48, 2),
    _case(_decode, FP32, 2, 128, 256, 2),
    *(_case(_decode, dtype, 4, 64, block, 1) for dtype, block in product((BF16, FP16), (16, 256))),
    _case(_prompt, BF16, 2, 128, 256),
    _case(_prompt, BF16, 5, 128, 16),
    _case(_prompt, FP16, 8, 128, 256),
    _case(_prompt, BF16, 2, 256, 256),
    _case(_prompt, BF16, 3, 80, 48),
    _case(_prompt, FP32, 2, 128, 256),
    _case(_decode, BF16, 4, 256, 64, 2, window=512),  # Gemma 3
    _case(_prompt, BF16, 4, 256, 64, window=512),
    _case(_prompt, BF16, 2, 256, 64, cache_dtype=torch.int8, window=1024),
    *(_case(_prompt, dtype, 4, 64, block) for dtype, block in product((BF16, FP16), (16, 256))),
    _case(_decode, BF16, 2, 128, 64, 1, cache_dtype=torch.int8),
    _case(_decode, FP16, 5, 80, 48, 4, cache_dtype=torch.uint8),
    _case(_decode, BF16, 2, 128, 64, 1, cache_dtype=torch.float8_e4m3fn),
    _case(_decode, BF16, 2, 256, 64, 1, cache_dtype=torch.int8),
    _case(_prompt, BF16, 2, 128, 64, cache_dtype=torch.int8),
    _case(_prompt, BF16, 2, 128, 64, cache_dtype=torch.uint8),
    _case(_prompt, BF16, 2, 128, 64, cache_dtype=torch.float8_e4m3fn),
    _case(_prompt, FP16, 5, 80, 48, cache_dtype=torch.int8),
    _case(_prompt, BF16, 2, 256, 64, cache_dtype=torch.int8),
    *(
        _case(launch, *shape, cache_dtype=cache_dtype, window=window)
        for launch in (_invariant, _invariant_decode)
        for shape, cache_dtype, window in (
            ((BF16, 2, 128, 64), None, None),
            ((BF16, 4, 256, 64), None, 512),
            ((BF16, 4, 128, 64), torch.int8, None),
            ((FP16, 5, 80, 48), torch.uint8, None),
        )
    ),
]
