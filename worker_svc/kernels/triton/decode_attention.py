"""Attention of one query per sequence over the paged KV cache.

This is split-KV, or "flash-decoding" (Dao et al., "Flash-Decoding for long-context inference",
2023). Each sequence is divided into parts, and each part has its own online softmax. A second
kernel weighs the parts' results by their sums. The speed is bounded by the bandwidth at which keys
and values are read. The query heads that share a KV head are the rows of one tile, so each key and
value is read once.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import triton.language as tl

from worker_svc.kernels.triton.launch import kernel, next_power_of_2
from worker_svc.kernels.triton.paged_attention import (
    LOG2_E,
    UNALIGNED,
    Tiling,
    Tilings,
    block_of,
    dot_dtype,
    slots_of,
    tiling_of,
)
from worker_svc.kernels.triton.quantized_cache import (
    VALUE_FACTOR,
    block_scales,
    numbers_of,
    scale_offsets,
    skipped_scales,
)

_THREE_STAGES = Tiling(tile=64, num_warps=4, num_stages=3)
# For 16-bit caches. To saturate the memory of an H200, each multiprocessor needs some 40 KB in
# flight (4.3 TB/s x 1.2 us / 132). On sm_90, at head_dim 128, a program has one to two tiles of
# 2 x 16 KB in flight and three programs fit. On sm_80, tiles are half as large, so that two
# programs fit into 99 KiB. 8-bit caches use the same tiles, because half the bytes are enough.
TILINGS: Tilings = {
    90: (
        (64, Tiling(tile=128, num_warps=4, num_stages=3)),
        (128, _THREE_STAGES),
        (256, Tiling(tile=32, num_warps=4, num_stages=3)),
    ),
    80: (
        (32, Tiling(tile=128, num_warps=4, num_stages=3)),
        (64, Tiling(tile=64, num_warps=4, num_stages=3)),
        (128, Tiling(tile=32, num_warps=4, num_stages=3)),
        (256, Tiling(tile=16, num_warps=4, num_stages=3)),
    ),
}
# Tensor cores do not multiply float32, which only comparisons use. This tile does not spill.
FLOAT32_TILING = Tiling(tile=16, num_warps=4, num_stages=2)
_BUSY = 0.95  # programs per multiprocessor that are not split

# Floats after each partial result, of which the first is its log-sum. This number keeps the results
# aligned to 16 bytes.
SUM_COLUMNS = 4


@kernel(do_not_specialize_on_alignment=UNALIGNED)
def _decode_attention_kernel(
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    seqs: tl.tensor,
    query_starts: tl.tensor,
    context_lens: tl.tensor,
    block_table: tl.tensor,
    table_offsets: tl.tensor,
    scale: tl.tensor,
    out: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    PARTIAL_SIZE: tl.constexpr,
    DOT: tl.constexpr,
    WINDOW: tl.constexpr,
) -> None:
    """Attends to one part of one sequence with all query heads of one KV head; grid (kv_heads, N,
    splits). KV heads come first because their rows of a position are neighbours in memory. If
    SPLIT, `out` is the workspace."""
    kv_head, n, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    parts = tl.num_programs(2)
    seq = tl.load(seqs + n)
    context = tl.load(context_lens + seq)
    query = tl.load(query_starts + seq).to(tl.int64)
    table = block_table + tl.load(table_offsets + seq)
    first_seen = tl.maximum(context - WINDOW, 0) if WINDOW > 0 else 0
    first_tile = first_seen // TILE
    tiles = tl.cdiv(context, TILE) - first_tile
    begin = (first_tile + tiles * part // parts) * TILE
    end = tl.minimum((first_tile + tiles * (part + 1) // parts) * TILE, context)

    SCALED: tl.constexpr = keys.dtype.element_ty.primitive_bitwidth == 8
    FP8: tl.constexpr = SCALED and keys.dtype.element_ty != tl.int8
    if SCALED:
        key_scales = block_scales(keys, kv_head, KV_HEADS, HEAD_DIM, BLOCK_SIZE)
        value_scales = block_scales(values, kv_head, KV_HEADS, HEAD_DIM, BLOCK_SIZE)
    if keys.dtype.element_ty == tl.uint8:
        scale *= 256.0  # see `numbers_of`

    row = tl.arange(0, ROWS)
    dim = tl.arange(0, DIMS)
    head = kv_head * GROUP + row
    real_row = (row < GROUP)[:, None]
    real_dim = (dim < HEAD_DIM)[None, :]
    rows = (query * KV_HEADS * GROUP + head) * HEAD_DIM
    queries = tl.load(q + rows[:, None] + dim[None, :], mask=real_row & real_dim, other=0.0)
    queries = queries.to(DOT)

    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIMS], tl.float32)
    block = block_of(table, begin, end, BLOCK_SIZE, TILE)
    for start in range(begin, end, TILE):
        slots = slots_of(block, start, BLOCK_SIZE, TILE)
        offsets = (slots * KV_HEADS + kv_head) * HEAD_DIM
        position = start + tl.arange(0, TILE)
        seen = (position >= first_seen) & (position < end) if WINDOW > 0 else position < end
        if SCALED:
            offsets += skipped_scales(block, KV_HEADS, BLOCK_SIZE, TILE)
            scaling = scale_offsets(block, start, KV_HEADS, HEAD_DIM, BLOCK_SIZE, TILE)
            k_scales = tl.load(key_scales + scaling, mask=seen, other=0.0)
            v_scales = tl.load(value_scales + scaling, mask=seen, other=0.0)
        block = block_of(table, start + TILE, end, BLOCK_SIZE, TILE)
        loaded = seen[:, None] & real_dim
        offsets = offsets[:, None] + dim[None, :]
        k = tl.load(keys + offsets, mask=loaded, other=0.0)
        scores = tl.dot(queries, tl.trans(numbers_of(k, DOT)), input_precision="ieee") * scale
        if SCALED:
            scores *= k_scales[None, :]
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        decay = tl.exp2(top - new_top)
        total = total * decay + tl.sum(weights, 1)
        v = tl.load(values + offsets, mask=loaded, other=0.0)
        if SCALED:
            weights *= (v_scales * VALUE_FACTOR if FP8 else v_scales)[None, :]
        weights = weights.to(q.dtype.element_ty).to(DOT)
        acc = tl.dot(weights, numbers_of(v, DOT), acc * decay[:, None], input_precision="ieee")
        top = new_top

    # Without context, or in an empty part, `total` is 0. The result is then 0 and its log-sum -inf.
    total = tl.where(total == 0, 1, total)
    acc = acc / total[:, None]
    if keys.dtype.element_ty == tl.uint8:
        acc *= 256.0  # see `numbers_of`
    if FP8:
        acc /= VALUE_FACTOR
    if SPLIT:
        rows = ((n * KV_HEADS * GROUP + head).to(tl.int64) * parts + part) * PARTIAL_SIZE
        tl.store(out + rows + HEAD_DIM, top + tl.log2(total), mask=row < GROUP)
    result = acc.to(out.dtype.element_ty)
    tl.store(out + rows[:, None] + dim[None, :], result, mask=real_row & real_dim)


@kernel(do_not_specialize=["parts"], do_not_specialize_on_alignment=UNALIGNED)
def _combine_splits_kernel(
    partials: tl.tensor,
    seqs: tl.tensor,
    query_starts: tl.tensor,
    out: tl.tensor,
    parts: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    PARTIAL_SIZE: tl.constexpr,
) -> None:
    """Combines the parts of one head of one sequence, weighted by their sums; grid (heads, N)."""
    head, n = tl.program_id(0), tl.program_id(1)
    query = tl.load(query_starts + tl.load(seqs + n)).to(tl.int64)
    part = tl.arange(0, MAX_PARTS)
    dim = tl.arange(0, DIMS)
    rows = ((n * HEADS + head).to(tl.int64) * parts + part) * PARTIAL_SIZE
    log_sums = tl.load(partials + rows + HEAD_DIM, mask=part < parts, other=float("-inf"))
    top = tl.max(log_sums, 0)
    weights = tl.exp2(log_sums - tl.where(top == float("-inf"), 0, top))
    mask = (part < parts)[:, None] & (dim < HEAD_DIM)[None, :]
    results = tl.load(partials + rows[:, None] + dim[None, :], mask=mask, other=0.0)
    total = tl.sum(weights, 0)
    result = tl.sum(weights[:, None] * results, 0) / tl.where(total == 0, 1, total)
    address = out + (query * HEADS + head) * HEAD_DIM + dim
    tl.store(address, result.to(out.dtype.element_ty), mask=dim < HEAD_DIM)


def choose_splits(
    num_seqs: int, kv_heads: int, num_sms: int, head_dim: int, dtype: torch.dtype
) -> tuple[int, Tiling]:
    """Parts per sequence and the tiling, for `num_seqs` sequences of any lengths, because a CUDA
    graph fixes both.

    Sequences are split if they have fewer programs than there are multiprocessors, into four parts
    for each of these, at most 32. A lone sequence with 4 KV heads then has a program for nearly
    every multiprocessor of an H100, and 2,048 positions give every part a tile. Measured on an
    H200 with 8 KV heads and contexts of 600, in GB/s: 16 sequences 2,694 whole and 2,261 in parts,
    32 sequences 3,425 and 2,673; 64 sequences 3,818 with two stages and 3,346 with three. A
    sequence much longer than the others takes longer if it is whole.
    """
    tiling, programs = choose_tiling(head_dim, dtype), num_seqs * kv_heads
    if programs < _BUSY * num_sms:
        return min(32, math.ceil(4 * num_sms / programs)), tiling
    if tiling == _THREE_STAGES and 3 * num_sms < programs < 5 * num_sms:
        tiling = replace(tiling, num_stages=2)
    return 1, tiling


def decode_workspace(
    max_rows: int, heads: int, head_dim: int, max_splits: int, device: torch.device
) -> torch.Tensor:
    """Memory for the parts' results of any call with rows x splits <= max_rows x max_splits."""
    shape = (max_rows, heads, max_splits, head_dim + SUM_COLUMNS)
    return torch.empty(shape, dtype=torch.float32, device=device)


def decode_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    seqs: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    table_offsets: torch.Tensor,
    scale: float,
    splits: int,
    workspace: torch.Tensor,
    out: torch.Tensor,
    tiling: Tiling | None = None,
    window: int | None = None,
) -> None:
    """Sets out[query_starts[s]], for each s of `seqs`, to softmax(scale · q Kᵀ) V of sequence s, or
    to zeros if it has no context (padding).

        q, out        [T, heads, head_dim], contiguous
        cache         [2, blocks, block_size, kv_heads, head_dim], contiguous; in the dtype of q, or
                      in 8 bits, see `quantized_cache`
        seqs          int32 [N]
        query_starts  int32 [S + 1]
        context_lens  int32 [S]
        block_table   int32 [blocks of all sequences]
        table_offsets int32 [S + 1]
        splits        parts per sequence, see `choose_splits`
        workspace     see `decode_workspace`; untouched if splits is 1
        tiling        None: the one from `choose_tiling`
        window        how many of the last positions the query sees; None: all
    """
    num_seqs, heads, head_dim = len(seqs), q.shape[1], q.shape[2]
    block_size, kv_heads = cache.shape[2], cache.shape[3]
    tiling = tiling or choose_tiling(head_dim, q.dtype)
    sizes = {
        "HEAD_DIM": head_dim,
        "DIMS": next_power_of_2(head_dim),
        "PARTIAL_SIZE": head_dim + SUM_COLUMNS,
    }
    _decode_attention_kernel[(kv_heads, num_seqs, splits)](
        q,
        cache[0],
        cache[1],
        seqs,
        query_starts,
        context_lens,
        block_table,
        table_offsets,
        scale * LOG2_E,
        workspace if splits > 1 else out,
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        ROWS=max(16, next_power_of_2(heads // kv_heads)),
        BLOCK_SIZE=block_size,
        TILE=tiling.tile,
        SPLIT=splits > 1,
        DOT=dot_dtype(q.dtype, cache.dtype),
        WINDOW=window or 0,
        **sizes,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
    if splits > 1:
        _combine_splits_kernel[(heads, num_seqs)](
            workspace,
            seqs,
            query_starts,
            out,
            splits,
            HEADS=heads,
            MAX_PARTS=next_power_of_2(splits),
            **sizes,
            num_warps=4,
        )


def choose_tiling(head_dim: int, dtype: torch.dtype) -> Tiling:
    """This GPU's entry in TILINGS for heads of `head_dim` numbers of `dtype`."""
    return FLOAT32_TILING if dtype == torch.float32 else tiling_of(TILINGS, head_dim)
