"""Stores keys and values in the paged cache by slot.

Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention" (2023).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from worker_svc.kernels.triton.launch import kernel, next_power_of_2


def store_kv(
    k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor, cache: torch.Tensor
) -> None:
    """Stores k and v [T, kv_heads, head_dim], whose tokens may be strided, in the slots
    slot_mapping [T] int32 (-1: nowhere) of cache [2, blocks, block_size, kv_heads, head_dim]."""
    if len(k):
        size = k[0].numel()
        block = next_power_of_2(size)
        _store_kv_kernel[(len(k),)](
            k,
            k.stride(0),
            v,
            v.stride(0),
            slot_mapping,
            cache,
            cache.stride(0),
            SIZE=size,
            BLOCK=block,
            num_warps=min(max(block // (32 * 8), 1), 4),  # 16 bytes of half precision per thread
        )


def store_kv_reference(
    k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor, cache: torch.Tensor
) -> None:
    kept = slot_mapping >= 0
    slots = slot_mapping[kept].long()
    for plane, new in zip(cache, (k, v), strict=True):
        plane.view(-1, *plane.shape[2:])[slots] = new[kept].to(cache.dtype)


@triton.jit
def store(
    cache: tl.tensor,
    slot: tl.tensor,
    offsets: tl.tensor,
    values: tl.tensor,
    mask: tl.tensor,
    SLOT_SIZE: tl.constexpr,
) -> None:
    """Stores values where mask holds at `offsets` of `slot` (-1: nowhere), of SLOT_SIZE
    elements."""
    # A cache may have more than 2³¹ elements.
    tl.store(cache + slot.to(tl.int64) * SLOT_SIZE + offsets, values, mask=mask & (slot >= 0))


@kernel()
def _store_kv_kernel(
    k: tl.tensor,
    k_stride: tl.tensor,
    v: tl.tensor,
    v_stride: tl.tensor,
    slot_mapping: tl.tensor,
    cache: tl.tensor,
    plane_size: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    mask = offsets < SIZE
    slot = tl.load(slot_mapping + row)
    keys = tl.load(k + row * k_stride + offsets, mask=mask, other=0)
    values = tl.load(v + row * v_stride + offsets, mask=mask, other=0)
    store(cache, slot, offsets, keys, mask, SIZE)
    store(cache + plane_size, slot, offsets, values, mask, SIZE)
