"""Tilings, the look-up of a tile's blocks and a reference, for all paged attention kernels.

A sequence's keys and values lie in blocks of `cache [2, blocks, block_size, kv_heads, head_dim]`
(keys, then values). Position p is in row p % block_size of the sequence's block p // block_size.
Block tables are ragged: `block_table[table_offsets[s] : table_offsets[s + 1]]` is sequence s's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime.driver import driver

from worker_svc.kernels.triton.launch import INTERPRETED

LOG2_E = 1.4426950408889634

# Arguments whose alignment does not matter to a kernel. They may be views of one buffer with any
# alignment, and Triton would compile a kernel for each combination.
UNALIGNED = ["tiles", "seqs", "query_starts", "context_lens", "block_table", "table_offsets"]


@dataclass(frozen=True)
class Tiling:
    """The sizes of an attention program: it attends to `tile` positions at a time, while the loads
    of the next `num_stages - 1` tiles are in flight."""

    tile: int
    num_warps: int
    num_stages: int


# By architecture, the largest head_dim of each tiling, ascending. 90 stands for GPUs on which a
# program may have 227 KiB of shared memory (Hopper, datacentre Blackwell), 80 for GPUs on which it
# may have as little as 99 KiB.
Tilings = dict[int, tuple[tuple[int, Tiling], ...]]


def tiling_of(tilings: Tilings, head_dim: int) -> Tiling:
    """This GPU's tiling. Asks the driver, which is too slow for every launch."""
    large = INTERPRETED or driver.active.get_current_target().arch in (90, 100, 103)
    return next(each for limit, each in tilings[90 if large else 80] if head_dim <= limit)


def converts_e4m3() -> bool:
    """Whether this GPU has an instruction that converts float8_e4m3fn to float16."""
    return not INTERPRETED and driver.active.get_current_target().arch >= 89


def dot_dtype(dtype: torch.dtype, cache_dtype: torch.dtype | None = None) -> Any:
    """The Triton type of a product's operands. The interpreter multiplies bfloat16 wrongly, so its
    operands are widened first. float8_e4m3fn is exact in float16, and quickly converted to it."""
    if INTERPRETED:
        return tl.float32
    if cache_dtype == torch.float8_e4m3fn and dtype != torch.float32:
        return tl.float16
    return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}.get(dtype, tl.float32)


@triton.jit
def block_of(
    table: tl.tensor, start: tl.tensor, end: tl.tensor, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr
) -> tl.tensor:
    """Blocks of the positions [start, start + TILE), of which none exists from `end` on. Returns
    int32 [TILE], or one number if BLOCK_SIZE is a multiple of TILE, as `start` must then be.
    Kernels look up a tile's blocks one iteration before they load the tile. Otherwise the load
    would have to wait for the look-up, or halve the pipeline."""
    if BLOCK_SIZE % TILE == 0:
        return tl.load(table + start // BLOCK_SIZE, mask=start < end, other=0)
    else:
        positions = start + tl.arange(0, TILE)
        return tl.load(table + positions // BLOCK_SIZE, mask=positions < end, other=0)


@triton.jit
def slots_of(
    block: tl.tensor, start: tl.tensor, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr
) -> tl.tensor:
    """The result of `block_of` for the tile at `start` -> the tile's slots, int64 [TILE]."""
    if BLOCK_SIZE % TILE == 0:
        return (block.to(tl.int64) * BLOCK_SIZE + start % BLOCK_SIZE) + tl.arange(0, TILE)
    else:
        return block.to(tl.int64) * BLOCK_SIZE + (start + tl.arange(0, TILE)) % BLOCK_SIZE


def attention_reference(
    q: torch.Tensor,
    cache: torch.Tensor,
    query_lens: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    table_offsets: torch.Tensor,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Causal attention of the last query_lens[s] positions of each sequence of context_lens[s]
    positions: q [T, heads, head_dim], sequence after sequence -> float32, of the same shape. The
    queries of a sequence without context (padding) give zeros. A query sees the last `window`
    positions up to its own; None: all.

        cache                     [2, blocks, block_size, kv_heads, head_dim]
        query_lens, context_lens  int32 [S]
        block_table               int32 [blocks of all sequences]
        table_offsets             int32 [S + 1]
    """
    block_size, kv_heads = cache.shape[2:4]
    out = torch.zeros(q.shape, device=q.device)
    first = 0
    offsets = table_offsets.tolist()
    for s, (queries, context) in enumerate(
        zip(query_lens.tolist(), context_lens.tolist(), strict=True)
    ):
        rows = slice(first, first + queries)
        first += queries
        if context == 0:
            continue
        positions = torch.arange(context, device=q.device)
        blocks = block_table[offsets[s] : offsets[s + 1]].long()
        slots = blocks[positions // block_size] * block_size + positions % block_size
        # keys, values: [kv_heads, 1, context, head_dim]
        keys, values = cache.flatten(1, 2)[:, slots].float().transpose(1, 2).unsqueeze(2)
        # query: [kv_heads, group, queries, head_dim]
        query = q[rows].float().transpose(0, 1).unflatten(0, (kv_heads, -1))
        scores = query @ keys.transpose(2, 3) * scale
        own = positions[context - queries :, None]
        hidden = (positions > own) | (positions <= own - (window or context))
        weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=3)
        out[rows] = (weights @ values).flatten(0, 1).transpose(0, 1)
    return out
