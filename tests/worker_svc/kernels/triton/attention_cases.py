"""Random sequences in a paged cache, with everything poisoned that no kernel may read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.gpu.steps import QWEN_0_6B, QWEN_8B, Heads
from tests.worker_svc.device import ODD, by_device, generator
from tests.worker_svc.kernels.triton.caches import large_cache
from tests.worker_svc.kernels.triton.precision import (
    assert_rows_close,
    poisoned_memory,
    row_bound,
)
from worker_svc.kernels.triton.decode_attention import decode_attention, decode_workspace
from worker_svc.kernels.triton.paged_attention import Tiling, attention_reference
from worker_svc.kernels.triton.prompt_attention import prompt_attention, query_tiles, tile_tokens

DTYPE = by_device(cpu=torch.float32, gpu=torch.bfloat16)
# Models' heads, a block size and a dtype. A GPU compiles each, so not every combination is here.
MODELS = by_device(
    cpu=[(Heads(4, 2, 64), 16, each) for each in (torch.float32, torch.bfloat16, torch.float16)],
    gpu=[
        (QWEN_0_6B, 64, torch.bfloat16),
        (QWEN_0_6B, 128, torch.bfloat16),
        (QWEN_8B, 256, torch.bfloat16),
        (ODD, 16, torch.bfloat16),
        (QWEN_0_6B, 16, torch.float16),
    ],
)
LONGEST = 4096  # contexts on a GPU
# Used where a GPU's tiling would be a single tile; None: the GPU's tiling.
TILE = by_device(cpu=16, gpu=None)


@dataclass(frozen=True)
class Batch:
    """Arguments of the attention launchers, see there, and the results expected."""

    q: torch.Tensor
    cache: torch.Tensor
    query_lens: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    block_table: torch.Tensor
    table_offsets: torch.Tensor
    scale: float
    window: int | None = None

    @property
    def sequences(self) -> tuple[Any, ...]:
        """The arguments that both launchers take after the sequences or tiles."""
        columns = self.query_starts, self.context_lens, self.block_table, self.table_offsets
        return *columns, self.scale

    def decoded(
        self, seqs: Sequence[int], splits: int = 1, tile: int | None = TILE
    ) -> torch.Tensor:
        """The results of `decode_attention`, NaN in the rows that were not written."""
        heads, head_dim = self.q.shape[1:]
        out = torch.full_like(self.q, torch.nan)
        with poisoned_memory():
            decode_attention(
                self.q,
                self.cache,
                torch.tensor(seqs, dtype=torch.int32, device=out.device),
                *self.sequences,
                splits,
                decode_workspace(len(seqs), heads, head_dim, splits, out.device),
                out,
                _tiling(tile),
                self.window,
            )
        return out

    def prompted(self, seqs: Sequence[int], tile: int | None = TILE) -> torch.Tensor:
        """The results of `prompt_attention`, NaN in the rows that were not written."""
        heads, head_dim = self.q.shape[1:]
        out = torch.full_like(self.q, torch.nan)
        small = self.cache.dtype.itemsize == 1
        group = heads // self.cache.shape[3]
        tiles = query_tiles(
            self.query_lens.cpu().numpy(),
            np.array(seqs, np.int32),
            tile_tokens(head_dim, group, self.q.dtype, small=small),
            self.context_lens.cpu().numpy(),
        )
        tiles = torch.from_numpy(tiles).to(out.device)
        prompt_attention(
            self.q, self.cache, tiles, *self.sequences, out, _tiling(tile), self.window
        )
        return out

    def reference(self) -> torch.Tensor:
        return attention_reference(
            self.q,
            self.cache,
            self.query_lens,
            self.context_lens,
            self.block_table,
            self.table_offsets,
            self.scale,
            self.window,
        )


def _tiling(tile: int | None) -> Tiling | None:
    return Tiling(tile, num_warps=4, num_stages=2) if tile else None


def random_batch(
    query_lens: list[int],
    context_lens: list[int],
    *,
    seed: int,
    heads: int = 2,
    kv_heads: int = 1,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = DTYPE,
    window: int | None = None,
) -> Batch:
    """Blocks are scattered over a cache with spare ones; slots that no sequence has reached hold
    NaN in both keys and values."""
    random = generator(seed)
    device = random.device

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=random, device=device)

    blocks_of = [-(-context // block_size) for context in context_lens]
    num_blocks = sum(blocks_of) + 3
    table = torch.randperm(num_blocks, generator=random, device=device)[: sum(blocks_of)]
    size = 2, num_blocks * block_size, kv_heads, head_dim
    cache = torch.full(size, torch.nan, dtype=dtype, device=device)
    first, in_block = 0, torch.arange(block_size, device=device)
    for blocks, context in zip(blocks_of, context_lens, strict=True):
        slots = (table[first : first + blocks, None] * block_size + in_block).flatten()[:context]
        cache[:, slots] = normal(2, context, kv_heads, head_dim).to(dtype)
        first += blocks

    def int32(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return Batch(
        # Twice as large as usual: widely differing weights make a wrong maximum visible.
        q=(2 * normal(sum(query_lens), heads, head_dim)).to(dtype),
        cache=cache.view(2, num_blocks, block_size, kv_heads, head_dim),
        query_lens=int32(query_lens),
        query_starts=int32([0, *query_lens]).cumsum(0, dtype=torch.int32),
        context_lens=int32(context_lens),
        block_table=table.int(),
        table_offsets=int32([0, *blocks_of]).cumsum(0, dtype=torch.int32),
        scale=head_dim**-0.5,
        window=window,
    )


def in_a_large_cache(batch: Batch, path: Path) -> Batch:
    """Puts the batch's blocks at the end of a cache with offsets beyond 32 bits."""
    small = batch.cache
    cache = large_cache(tuple(small.shape[1:]), small.dtype, path)
    cache[:, -small.shape[1] :] = small
    return replace(
        batch, cache=cache, block_table=batch.block_table + (cache.shape[1] - small.shape[1])
    )


def assert_close(actual: torch.Tensor, exact: torch.Tensor) -> None:
    """Allows for weights rounded to the type of the values, and results to that of `actual`."""
    assert_rows_close(actual, exact, 2 * row_bound(actual.dtype))
    tolerance = {torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[actual.dtype]
    torch.testing.assert_close(actual.float(), exact, atol=tolerance, rtol=tolerance)
