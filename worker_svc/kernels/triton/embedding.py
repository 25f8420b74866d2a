"""Looks up token ids in a rank's part of the embedding matrix."""

from __future__ import annotations

import torch
import triton.language as tl

from worker_svc.errors import ModelError
from worker_svc.kernels.ops import PackedWeight, PlainWeight
from worker_svc.kernels.triton.launch import kernel, next_power_of_2
from worker_svc.kernels.triton.quantized.weights import Int8Weight


def embed(
    input_ids: torch.Tensor,
    last_tokens: torch.Tensor,
    weight: PackedWeight,
    start: int,
    count: int,
    scale: float = 1.0,
) -> torch.Tensor:
    """See `kernels.ops.Ops`."""
    if isinstance(weight, PlainWeight):
        table, scales, dtype = weight.weight, None, weight.weight.dtype
    elif isinstance(weight, Int8Weight):
        table, scales, dtype = weight.codes, weight.scales, weight.dtype
    else:
        raise ModelError("quantization: embeddings are served in int8 with a scale per row on cuda")
    size = table.shape[1]
    out = torch.empty(len(input_ids), size, dtype=dtype, device=table.device)
    block = next_power_of_2(size)
    _embed_kernel[(len(input_ids),)](
        input_ids,
        last_tokens,
        table,
        scales,
        start,
        count,
        out,
        SIZE=size,
        SCALE=scale,
        BLOCK=block,
        num_warps=min(max(block // (32 * 8), 1), 8),  # 16 bytes of half precision per thread
    )
    return out


@kernel(do_not_specialize=["start", "count"])
def _embed_kernel(
    input_ids: tl.tensor,
    last_tokens: tl.tensor,
    table: tl.tensor,
    scales: tl.tensor,
    start: tl.tensor,
    count: tl.tensor,
    out: tl.tensor,
    SIZE: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    given = tl.load(input_ids + row)
    sampled = tl.load(last_tokens - 1 - given, mask=given < 0, other=0)
    local = tl.where(given < 0, sampled, given) - start
    here = (local >= 0) & (local < count)
    source = table + local.to(tl.int64) * SIZE + columns
    numbers = tl.load(source, mask=mask & here, other=0)
    if scales is not None:
        numbers = numbers.to(tl.float32) * tl.load(scales + local, mask=here, other=0)
    if SCALE != 1:
        numbers = numbers.to(tl.float32) * SCALE
    tl.store(out + row * SIZE + columns, numbers.to(out.dtype.element_ty), mask=mask)
