"""Random sequences in a paged cache, all that no kernel may read poisoned."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from worker_svc.kernels.paged_attention import attention_reference


@dataclass(frozen=True)
class Batch:
    """Arguments of the attention launchers, see there, and what they have to give."""

    q: torch.Tensor
    cache: torch.Tensor
    query_lens: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    block_table: torch.Tensor
    table_offsets: torch.Tensor
    scale: float

    def reference(self) -> torch.Tensor:
        return attention_reference(
            self.q,
            self.cache,
            self.query_lens,
            self.context_lens,
            self.block_table,
            self.table_offsets,
            self.scale,
        )


def random_batch(
    query_lens: list[int],
    context_lens: list[int],
    *,
    seed: int,
    heads: int = 2,
    kv_heads: int = 1,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Batch:
    """Blocks are scattered over a cache with spare ones; slots that no sequence has reached hold
    NaN in both keys and values."""
    generator = torch.Generator().manual_seed(seed)
    blocks_of = [-(-context // block_size) for context in context_lens]
    num_blocks = sum(blocks_of) + 3
    table = torch.randperm(num_blocks, generator=generator)[: sum(blocks_of)]
    cache = torch.full((2, num_blocks * block_size, kv_heads, head_dim), torch.nan)
    first = 0
    for blocks, context in zip(blocks_of, context_lens, strict=True):
        slots = table[first : first + blocks, None] * block_size + torch.arange(block_size)
        size = (2, context, kv_heads, head_dim)
        cache[:, slots.flatten()[:context]] = torch.randn(size, generator=generator)
        first += blocks
    q = torch.randn(sum(query_lens), heads, head_dim, generator=generator)
    lengths, starts = torch.tensor(query_lens), torch.tensor([0, *query_lens]).cumsum(0)
    integers = lengths, starts, torch.tensor(context_lens), table, torch.tensor([0, *blocks_of])
    query_lens_, query_starts, contexts, table, counts = (
        x.to(device, torch.int32) for x in integers
    )
    return Batch(
        # Twice as large as usual: weights that differ much make a wrong maximum visible.
        q=(2 * q).to(device, dtype),
        cache=cache.view(2, num_blocks, block_size, kv_heads, head_dim).to(device, dtype),
        query_lens=query_lens_,
        query_starts=query_starts,
        context_lens=contexts,
        block_table=table,
        table_offsets=counts.cumsum(0, dtype=torch.int32),
        scale=head_dim**-0.5,
    )


def in_a_large_cache(batch: Batch, path: Path) -> Batch:
    """The batch's only block at the end of a cache with offsets beyond 32 bits, a sparse file."""
    block = batch.cache[:, batch.block_table[0]]
    blocks = 2**31 // block[0].numel() + 1
    shape = (2, blocks, *block.shape[1:])
    size = torch.Size(shape).numel()
    cache = torch.from_file(str(path), shared=True, size=size, dtype=block.dtype).view(shape)
    cache[:, -1] = block
    return replace(batch, cache=cache, block_table=torch.full_like(batch.block_table, blocks - 1))


def assert_close(actual: torch.Tensor, exact: torch.Tensor) -> None:
    """Weights are rounded to the type of the values, results to that of `actual`."""
    tolerance = {torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[actual.dtype]
    torch.testing.assert_close(actual.float(), exact, atol=tolerance, rtol=tolerance)
