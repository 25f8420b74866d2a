"""Causal attention of prompt chunks, and of any mix of chunks and single queries, over the paged KV
cache.

The algorithm is FlashAttention-2 (Dao, "FlashAttention-2: Faster Attention with Better Parallelism
and Work Partitioning", 2023). A program has a tile of queries and takes the positions that they see
tile by tile, with an online softmax. Only the tiles of positions that the diagonal or the window's
end crosses are masked. A tile's rows are the query heads of one KV head for some tokens, so that
keys and values are loaded once for the whole group.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from worker_svc.kernels.triton.batch_invariance import merge, merge_parts_kernel, result_of
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

# For 16-bit inputs. Each tile is as large as fits into the registers (128 x 128 sums and 128 x 128
# scores need 128 of a thread's 255) and, in stages, into the shared memory.
TILINGS: Tilings = {
    90: (
        (128, Tiling(tile=128, num_warps=8, num_stages=3)),
        (256, Tiling(tile=64, num_warps=8, num_stages=2)),
    ),
    80: (
        (128, Tiling(tile=64, num_warps=8, num_stages=3)),
        (256, Tiling(tile=32, num_warps=8, num_stages=2)),
    ),
}
# For 8-bit caches, whose numbers are widened in registers, and for segments, which have two sums.
SMALL_TILINGS: Tilings = {
    90: (
        (128, Tiling(tile=64, num_warps=4, num_stages=3)),
        (256, Tiling(tile=32, num_warps=8, num_stages=2)),
    ),
    80: (
        (64, Tiling(tile=64, num_warps=8, num_stages=3)),
        (128, Tiling(tile=64, num_warps=8, num_stages=2)),
        (256, Tiling(tile=16, num_warps=8, num_stages=2)),
    ),
}
# Tensor cores do not multiply float32, which only comparisons use. This tile does not spill.
FLOAT32_TILING = Tiling(tile=16, num_warps=16, num_stages=2)


@triton.jit
def _attend_tiles(
    queries: tl.tensor,
    top: tl.tensor,
    total: tl.tensor,
    acc: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    key_scales: tl.tensor,
    value_scales: tl.tensor,
    table: tl.tensor,
    scale: tl.tensor,
    last: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
    WEIGHT: tl.constexpr,
    DOT: tl.constexpr,
    WINDOW: tl.constexpr,
) -> tl.tensor:
    """Continues the online softmax over the positions [begin, end). If MASKED, row r sees no
    position after last[r], and of those up to it the last WINDOW, or all if WINDOW is 0. Otherwise
    every row sees every position, and end - begin is a multiple of TILE."""
    SCALED: tl.constexpr = keys.dtype.element_ty.primitive_bitwidth == 8
    FP8: tl.constexpr = SCALED and keys.dtype.element_ty != tl.int8
    dim = tl.arange(0, DIMS)[None, :]
    block = block_of(table, begin, end, BLOCK_SIZE, TILE)
    for start in range(begin, end, TILE):
        slots = slots_of(block, start, BLOCK_SIZE, TILE)
        rows = slots * KV_HEADS * HEAD_DIM
        position = start + tl.arange(0, TILE)
        # Values beyond the end have weight 0, but memory that was never written may hold NaN.
        loaded = (dim < HEAD_DIM) & ((position < end)[:, None] if MASKED else True)
        if SCALED:
            rows += skipped_scales(block, KV_HEADS, BLOCK_SIZE, TILE)
            scaling = scale_offsets(block, start, KV_HEADS, HEAD_DIM, BLOCK_SIZE, TILE)
            k_scales = tl.load(key_scales + scaling, mask=position < end, other=0.0)
        block = block_of(table, start + TILE, end, BLOCK_SIZE, TILE)
        offsets = rows[:, None] + dim
        k = tl.load(keys + offsets, mask=loaded, other=0.0)
        scores = tl.dot(queries, tl.trans(numbers_of(k, DOT)), input_precision="ieee")
        if SCALED:
            scores *= k_scales[None, :]
        if MASKED:
            visible = position[None, :] <= last[:, None]
            if WINDOW > 0:
                visible &= position[None, :] > last[:, None] - WINDOW
            scores = tl.where(visible, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * scale)
        finite = new_top
        if MASKED:  # a row may have seen nothing yet
            finite = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores * scale - finite[:, None])
        decay = tl.exp2(top - finite)
        total = total * decay + tl.sum(weights, 1)
        v = tl.load(values + offsets, mask=loaded, other=0.0)
        if SCALED:
            v_scales = tl.load(value_scales + scaling, mask=position < end, other=0.0)
            weights *= (v_scales * VALUE_FACTOR if FP8 else v_scales)[None, :]
        weights = weights.to(WEIGHT).to(DOT)
        acc = tl.dot(weights, numbers_of(v, DOT), acc * decay[:, None], input_precision="ieee")
        top = new_top
    return top, total, acc


@kernel(do_not_specialize_on_alignment=UNALIGNED)
def _prompt_attention_kernel(
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    tiles: tl.tensor,
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
    DOT: tl.constexpr,
    WINDOW: tl.constexpr,
    SEGMENT: tl.constexpr,
    SPLIT: tl.constexpr,
    PARTIAL_SIZE: tl.constexpr,
) -> None:
    """Attends with one tile of queries, the query heads of one KV head. The grid is (kv_heads,
    tiles), so that programs start in the order of the tiles.

    With a SEGMENT, each part of so many positions has an online softmax of its own. If SPLIT, tiles
    have one token, the grid is (kv_heads, tiles, parts), and `out` is the workspace.
    """
    TOKENS: tl.constexpr = ROWS // GROUP
    kv_head, tile = tl.program_id(0), tl.program_id(1)
    seq, first = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    query_start = tl.load(query_starts + seq)
    query_len = tl.load(query_starts + seq + 1) - query_start
    cached = tl.load(context_lens + seq) - query_len
    table = block_table + tl.load(table_offsets + seq)
    stop = tl.minimum(first + TOKENS, query_len)

    # The last rows may have no query. They compute with zeros and are not stored.
    row = tl.arange(0, ROWS)
    token = first + row // GROUP
    dim = tl.arange(0, DIMS)[None, :]
    head = (query_start + token).to(tl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP + row % GROUP
    offsets = head[:, None] * HEAD_DIM + dim
    mask = (token < stop)[:, None] & (dim < HEAD_DIM)
    queries = tl.load(q + offsets, mask=mask, other=0.0).to(DOT)

    last = cached + token
    seen_by_all = (cached + first + 1) // TILE * TILE
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIMS], tl.float32)
    key_scales, value_scales = keys, values  # used if they are in 8 bits
    if keys.dtype.element_ty.primitive_bitwidth == 8:
        key_scales = block_scales(keys, kv_head, KV_HEADS, HEAD_DIM, BLOCK_SIZE)
        value_scales = block_scales(values, kv_head, KV_HEADS, HEAD_DIM, BLOCK_SIZE)
    if keys.dtype.element_ty == tl.uint8:
        scale *= 256.0  # see `numbers_of`
    keys += kv_head * HEAD_DIM
    values += kv_head * HEAD_DIM
    if SEGMENT > 0:
        first_seen = 0
        if WINDOW > 0:
            first_seen = tl.maximum(cached + first + 1 - WINDOW, 0) // TILE * TILE
        segment, end = first_seen // SEGMENT, cached + stop
        if SPLIT:
            segment += tl.program_id(2)
            end = tl.minimum(end, (segment + 1) * SEGMENT)
        for part in range(segment, tl.cdiv(end, SEGMENT)):
            part_top, part_total, part_acc = _attend_tiles(
                queries, tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32),
                tl.zeros([ROWS, DIMS], tl.float32), keys, values, key_scales, value_scales,
                table, scale, last, tl.maximum(part * SEGMENT, first_seen),
                tl.minimum((part + 1) * SEGMENT, end),
                KV_HEADS, HEAD_DIM, DIMS, BLOCK_SIZE, TILE, True, q.dtype.element_ty, DOT, WINDOW,
            )  # fmt: skip
            if SPLIT:
                top, total, acc = part_top, part_total, part_acc
            else:
                top, total, acc = merge(top, total, acc, part_top, part_total, part_acc)
        if SPLIT:
            rows = (tile * KV_HEADS * GROUP + kv_head * GROUP + row).to(tl.int64)
            rows = (rows * tl.num_programs(2) + tl.program_id(2)) * PARTIAL_SIZE
            exists = segment * SEGMENT < end
            tl.store(out + rows[:, None] + dim, acc, mask=mask & exists)
            tl.store(out + rows + HEAD_DIM, top, mask=(token < stop) & exists)
            tl.store(out + rows + HEAD_DIM + 1, total, mask=(token < stop) & exists)
        else:
            result = result_of(total, acc, keys.dtype.element_ty)
            tl.store(out + offsets, result.to(out.dtype.element_ty), mask=mask)
    else:
        begin = 0
        if WINDOW > 0:
            # The tiles that the windows of the first rows begin in are masked for the others.
            end_of_begins = tl.cdiv(tl.maximum(cached + stop - WINDOW, 0), TILE) * TILE
            begin = tl.minimum(end_of_begins, seen_by_all)
            top, total, acc = _attend_tiles(
                queries, top, total, acc, keys, values, key_scales, value_scales, table, scale,
                last, tl.maximum(cached + first + 1 - WINDOW, 0) // TILE * TILE, begin,
                KV_HEADS, HEAD_DIM, DIMS, BLOCK_SIZE, TILE, True, q.dtype.element_ty, DOT, WINDOW,
            )  # fmt: skip
        top, total, acc = _attend_tiles(
            queries, top, total, acc, keys, values, key_scales, value_scales, table, scale, last,
            begin, seen_by_all,
            KV_HEADS, HEAD_DIM, DIMS, BLOCK_SIZE, TILE, False, q.dtype.element_ty, DOT, WINDOW,
        )  # fmt: skip
        top, total, acc = _attend_tiles(
            queries, top, total, acc, keys, values, key_scales, value_scales, table, scale, last,
            seen_by_all, cached + stop,
            KV_HEADS, HEAD_DIM, DIMS, BLOCK_SIZE, TILE, True, q.dtype.element_ty, DOT, WINDOW,
        )  # fmt: skip
        result = result_of(total, acc, keys.dtype.element_ty)
        tl.store(out + offsets, result.to(out.dtype.element_ty), mask=mask)


def tile_tokens(head_dim: int, group: int, dtype: torch.dtype, *, small: bool = False) -> int:
    """Tokens per tile of queries, for `group` query heads per KV head."""
    return _rows(head_dim, dtype, small) // group


def query_tiles(
    query_lens: NDArray[np.int32],
    seqs: NDArray[np.int32],
    tile_tokens: int,
    context_lens: NDArray[np.int32],
) -> NDArray[np.int32]:
    """Cuts the queries of sequences `seqs` [n] into tiles, given query_lens [S] and context_lens
    [S] -> [tiles, 2]: a sequence, and the tile's first query among its queries. The tiles that see
    the most positions come first. Otherwise one might start when all others have ended."""
    counts = -(-query_lens[seqs] // tile_tokens)
    seq = np.repeat(seqs, counts)
    first = (np.arange(len(seq)) - np.repeat(np.cumsum(counts) - counts, counts)) * tile_tokens
    seen = context_lens[seq] - query_lens[seq] + first
    order = np.argsort(-seen, kind="stable")
    return np.stack([seq, first], axis=1)[order].astype(np.int32)


def prompt_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    tiles: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    table_offsets: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    tiling: Tiling | None = None,
    window: int | None = None,
    segment: int = 0,
    partials: torch.Tensor | None = None,
) -> None:
    """Sets the rows of `out` that `tiles` cover to softmax(scale · q Kᵀ) V. In a sequence with Q
    queries and C positions, 1 <= Q <= C, query i sees the positions up to C - Q + i.

        q, out        [T, heads, head_dim], contiguous
        cache         [2, blocks, block_size, kv_heads, head_dim], contiguous; in the dtype of q, or
                      in 8 bits, see `quantized_cache`
        tiles         int32 [n, 2], see `query_tiles`
        query_starts  int32 [S + 1]
        context_lens  int32 [S]
        block_table   int32 [blocks of all sequences]
        table_offsets int32 [S + 1]
        tiling        None: the one from `choose_tiling`
        window        how many of the last positions up to its own a query sees; None: all
        segment       positions of a part, a multiple of the tiling's tile, if a query's bits must
                      not depend on the others (`batch_invariance`); 0: the sequence is not divided
        partials      if each tile has one token, memory for parts, which are computed in parallel:
                      float32 [n, heads, parts, head_dim + 2 or more], with as many parts as a
                      query sees
    """
    heads, head_dim = q.shape[1:]
    block_size, kv_heads = cache.shape[2:4]
    small = cache.dtype.itemsize == 1 or segment > 0
    tiling = tiling or choose_tiling(head_dim, q.dtype, small=small)
    parts = 1 if partials is None else partials.shape[2]
    sizes = {
        "HEAD_DIM": head_dim,
        "DIMS": next_power_of_2(head_dim),
        "PARTIAL_SIZE": 0 if partials is None else partials.shape[3],
    }
    _prompt_attention_kernel[(kv_heads, len(tiles), parts)](
        q,
        cache[0],
        cache[1],
        tiles,
        query_starts,
        context_lens,
        block_table,
        table_offsets,
        scale * LOG2_E,
        out if partials is None else partials,
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        ROWS=_rows(head_dim, q.dtype, small),
        BLOCK_SIZE=block_size,
        TILE=tiling.tile,
        DOT=dot_dtype(q.dtype, cache.dtype),
        WINDOW=window or 0,
        SEGMENT=segment,
        SPLIT=partials is not None,
        **sizes,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
    if partials is not None:
        merge_parts_kernel[(heads, len(tiles))](
            partials,
            tiles,
            query_starts,
            context_lens,
            cache,
            out,
            parts,
            HEADS=heads,
            WINDOW=window or 0,
            SEGMENT=segment,
            **sizes,
            num_warps=4,
        )


def _rows(head_dim: int, dtype: torch.dtype, small: bool) -> int:
    """Rows in a tile of queries. Hopper's wgmma multiplies 64 rows per group of 4 warps."""
    if dtype == torch.float32:
        return 32
    return 128 if head_dim <= 128 and not small else 64


def choose_tiling(head_dim: int, dtype: torch.dtype, *, small: bool = False) -> Tiling:
    """This GPU's tiling for heads of `head_dim` numbers.

    Args:
        small: with an 8-bit cache, or in segments.
    """
    if dtype == torch.float32:
        return FLOAT32_TILING
    return tiling_of(SMALL_TILINGS if small else TILINGS, head_dim)
