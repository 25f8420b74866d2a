"""Rotates queries and keys and stores keys and values in the cache, in one launch.

Some models normalize each head of queries and keys first. Nothing else happens to a token between
the projection to heads and attention.

Sources: Su et al., "RoFormer" (2021), in the half-split layout of Hugging Face checkpoints; Henry
et al., "Query-Key Normalization for Transformers" (2020), with RMSNorm; Kwon et al., "Efficient
Memory Management for Large Language Model Serving with PagedAttention" (2023).
"""

from __future__ import annotations

import torch
import triton.language as tl

from worker_svc.kernels.triton.launch import kernel, next_power_of_2
from worker_svc.kernels.triton.quantized_cache import head_size, store_codes

# Heads of one token per program. Each of 128 threads then has 16 bytes of both halves of a head in
# flight. The 32 heads of Qwen3-0.6B make two programs, and the larger models' 48 and 80 heads also
# divide evenly.
MAX_HEADS = 16


def rope_store(
    qkv: torch.Tensor,
    num_heads: int,
    norm: tuple[torch.Tensor, torch.Tensor, float] | None,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    cache: torch.Tensor,
) -> torch.Tensor:
    """qkv [T, (num_heads + 2 · kv_heads) · head_dim], whose rows may be strided -> queries
    [T, num_heads, head_dim].

    norm: the weights [head_dim] of queries and keys, and epsilon, as in `attention.base.QKNorm`;
    cos_sin [max_len, 2, head_dim / 2] float32 is indexed by positions [T] int32; slot_mapping [T]
    int32 (-1: keys and values are written nowhere) into cache [2, blocks, block_size, kv_heads,
    head_dim], in the dtype of qkv or in 8 bits, see `quantized_cache`.
    """
    tokens = len(qkv)
    kv_heads, head_dim = cache.shape[3], head_size(cache)
    q = qkv.new_empty(tokens, num_heads, head_dim)
    all_heads = num_heads + 2 * kv_heads
    heads = min(next_power_of_2(all_heads), MAX_HEADS)
    half = next_power_of_2(head_dim // 2)
    _rope_store_kernel[(tokens, -(-all_heads // heads))](
        qkv,
        qkv.stride(0),
        *(norm or (None, None, 0.0)),
        cos_sin,
        positions,
        slot_mapping,
        q,
        cache,
        cache.stride(0),
        Q_HEADS=num_heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=cache.shape[2],
        HEADS=heads,
        HALF=half,
        num_warps=min(max(heads * half // (32 * 8), 1), 4),
    )
    return q


@kernel(do_not_specialize_on_alignment=["slot_mapping"])  # of a second table
def _rope_store_kernel(
    qkv: tl.tensor,
    qkv_stride: tl.tensor,
    q_weight: tl.tensor,
    k_weight: tl.tensor,
    eps: tl.tensor,
    cos_sin: tl.tensor,
    positions: tl.tensor,
    slot_mapping: tl.tensor,
    q: tl.tensor,
    cache: tl.tensor,
    plane_size: tl.tensor,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
) -> None:
    """Processes HEADS heads of a token as two tiles [HEADS, HALF], which rotate together."""
    half: tl.constexpr = HEAD_DIM // 2
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    columns = tl.arange(0, HALF)[None, :]
    inside = columns < half
    mask = inside & (head < Q_HEADS + 2 * KV_HEADS)
    is_query = head < Q_HEADS
    is_value = head >= Q_HEADS + KV_HEADS

    source = qkv + row * qkv_stride + head * HEAD_DIM + columns
    first = tl.load(source, mask=mask, other=0).to(tl.float32)
    second = tl.load(source + half, mask=mask, other=0).to(tl.float32)

    first_normed, second_normed = first, second
    if q_weight is not None:
        squares = tl.sum(first * first + second * second, axis=1)[:, None]
        scale = tl.rsqrt(squares / HEAD_DIM + eps)
        weights = tl.where(is_query, q_weight + columns, k_weight + columns)
        first_normed = first * scale * tl.load(weights, mask=inside, other=0).to(tl.float32)
        second_normed = (
            second * scale * tl.load(weights + half, mask=inside, other=0).to(tl.float32)
        )

    angle = cos_sin + tl.load(positions + row) * HEAD_DIM + columns
    cos = tl.load(angle, mask=inside, other=0)
    sin = tl.load(angle + half, mask=inside, other=0)
    first = tl.where(is_value, first, first_normed * cos - second_normed * sin)
    second = tl.where(is_value, second, second_normed * cos + first_normed * sin)

    out = q + (row * Q_HEADS + head) * HEAD_DIM + columns
    tl.store(out, first, mask=mask & is_query)
    tl.store(out + half, second, mask=mask & is_query)

    slot = tl.load(slot_mapping + row)
    plane = tl.where(is_value, cache + plane_size, cache)
    kv_head = head - Q_HEADS - tl.where(is_value, KV_HEADS, 0)
    kept = mask & ~is_query
    if cache.dtype.element_ty == tl.int8 or cache.dtype.element_ty == tl.uint8:
        store_codes(
            plane, slot, kv_head, columns, first, second, kept, KV_HEADS, HEAD_DIM, BLOCK_SIZE
        )
    else:
        # A cache may have more than 2³¹ elements.
        target = plane + (slot.to(tl.int64) * KV_HEADS + kv_head) * HEAD_DIM + columns
        tl.store(target, first, mask=kept & (slot >= 0))
        tl.store(target + half, second, mask=kept & (slot >= 0))
