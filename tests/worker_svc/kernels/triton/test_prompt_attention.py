from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.gpu.heads import QWEN_0_6B, Heads
from tests.worker_svc.device import by_device
from tests.worker_svc.kernels.triton.attention_cases import (
    LONGEST,
    MODELS,
    Batch,
    assert_close,
    in_a_large_cache,
    random_batch,
)
from worker_svc.kernels.triton.paged_attention import Tiling
from worker_svc.kernels.triton.prompt_attention import prompt_attention, query_tiles, tile_tokens

# Used where a GPU's tiling would be a single tile; None: the GPU's tiling.
TILE = by_device(cpu=16, gpu=None)


def run(batch: Batch, seqs: list[int], tile: int | None = TILE) -> torch.Tensor:
    """Leaves NaN in the rows that were not written."""
    heads, head_dim = batch.q.shape[1:]
    out = torch.full_like(batch.q, torch.nan)
    tiles = query_tiles(
        batch.query_lens.cpu().numpy(),
        np.array(seqs, np.int32),
        tile_tokens(
            head_dim,
            heads // batch.cache.shape[3],
            batch.q.dtype,
            in_8_bits=batch.cache.dtype.itemsize == 1,
        ),
        batch.context_lens.cpu().numpy(),
    )
    prompt_attention(
        batch.q,
        batch.cache,
        torch.from_numpy(tiles).to(out.device),
        batch.query_starts,
        batch.context_lens,
        batch.block_table,
        batch.table_offsets,
        batch.scale,
        out,
        Tiling(tile, num_warps=4, num_stages=2) if tile else None,
    )
    return out


def check(
    query_lens: list[int],
    contexts: list[int],
    *,
    seed: int,
    tile: int | None = TILE,
    **kwargs: Any,
) -> None:
    batch = random_batch(query_lens, contexts, seed=seed, **kwargs)
    assert_close(run(batch, list(range(len(contexts))), tile), batch.reference())


@pytest.mark.parametrize(
    ("heads", "block_size", "dtype"),
    MODELS + by_device(cpu=[(Heads(4, 2, 256), 16, torch.bfloat16)], gpu=[]),
    ids=str,
)
def test_equals_the_reference(heads: Heads, block_size: int, dtype: torch.dtype) -> None:
    """With the tiling of a GPU: whole prompts, chunks after a cached prefix, single queries."""
    queries, cached = by_device(
        cpu=([1, 80, 1, 5], [0, 0, 89, 255]),
        gpu=([1, 1, 64, 65, 511, LONGEST // 4], [0, 1000, 0, block_size, 700, 3 * LONGEST // 4]),
    )
    contexts = [sum(pair) for pair in zip(queries, cached, strict=True)]
    shape = {**heads._asdict(), "block_size": block_size, "dtype": dtype}
    check(queries, contexts, seed=0, tile=None, **shape)


@pytest.mark.parametrize(
    ("heads", "block_size", "tile"),
    by_device(
        cpu=[
            (Heads(2, 2, 16), 16, 32),
            (Heads(6, 2, 18), 20, 16),
            (Heads(8, 1, 80), 112, 16),
            (Heads(17, 1, 40), 256, 128),
        ],
        gpu=[
            (Heads(2, 2, 64), 20, None),
            (Heads(10, 2, 256), 112, None),
            (Heads(16, 2, 64), 256, None),
        ],
    ),
    ids=str,
)
def test_any_shape(heads: Heads, block_size: int, tile: int | None) -> None:
    shape = {**heads._asdict(), "block_size": block_size, "tile": tile}
    check([1, 9, 20, 33], [8, 9, 30, 120], seed=heads.head_dim, **shape)


@pytest.mark.parametrize(
    ("block_size", "tile"),
    by_device(cpu=[(16, 16), (48, 16), (16, 64), (48, 64)], gpu=[(48, None), (64, None)]),
)
def test_contexts_at_the_bounds_of_blocks_and_tiles(block_size: int, tile: int | None) -> None:
    tiles = [tile] if tile else [32, 64, 128]  # whichever a GPU uses
    bounds = {bound for each in tiles for bound in (each, block_size, each + block_size)}
    contexts = sorted({bound + d for bound in bounds for d in (-1, 0, 1)})
    queries = [min(15 + n, context) for n, context in enumerate(contexts)]
    check(queries, contexts, seed=0, block_size=block_size, tile=tile, head_dim=16)


@pytest.mark.parametrize(
    "tokens", by_device(cpu=[15, 16, 17, 31, 32, 33], gpu=[63, 64, 65, 127, 128, 129])
)
def test_chunks_at_the_bounds_of_a_tile_of_queries(tokens: int) -> None:
    """Two query heads per KV head: 16 tokens per tile of float32, 64 of half precision."""
    check([tokens] * 4, [tokens, tokens + 1, tokens + 15, tokens + 16], seed=tokens, head_dim=16)


def test_leaves_the_other_rows_alone() -> None:
    """The chunks of a step whose single queries another kernel serves."""
    batch = random_batch([1, 20, 1, 3], [20, 30, 40, 3], seed=0, head_dim=16)
    out = run(batch, [3, 1])
    rows = [*range(1, 21), 22, 23, 24]
    assert_close(out[rows], batch.reference()[rows])
    assert out[[0, 21]].isnan().all()


@pytest.mark.launches_nothing
def test_no_sequences() -> None:
    batch = random_batch([2], [2], seed=0)
    assert run(batch, []).isnan().all()


def test_large_scores_do_not_overflow() -> None:
    batch = random_batch([5, 20], [20, 20], seed=0, head_dim=16)
    batch.q.mul_(1e4)
    assert_close(run(batch, [0, 1], tile=None), batch.reference())


def test_caches_beyond_32_bit_offsets(tmp_path: Path) -> None:
    heads, queries, context = by_device(cpu=(Heads(2, 2, 256), 9, 16), gpu=(QWEN_0_6B, 30, 100))
    dtype, size = by_device(cpu=(torch.float16, 16), gpu=(torch.bfloat16, 64))
    shape = {**heads._asdict(), "block_size": size, "dtype": dtype}
    small = random_batch([queries], [context], seed=0, **shape)
    batch = in_a_large_cache(small, tmp_path / "cache")
    assert_close(run(batch, [0], tile=None), small.reference())


@pytest.mark.launches_nothing
def test_tiles_cover_every_query_once() -> None:
    query_lens = np.array([1, 16, 33, 50, 7], np.int32)
    seqs = np.array([0, 1, 2, 4], np.int32)
    tiles = query_tiles(query_lens, seqs, 16, query_lens)
    assert tiles.dtype == np.int32
    assert sorted(tiles.tolist()) == [[0, 0], [1, 0], [2, 0], [2, 16], [2, 32], [4, 0]]


@pytest.mark.launches_nothing
def test_tiles_that_see_most_come_first() -> None:
    query_lens, contexts = np.array([40, 20, 1], np.int32), np.array([40, 1000, 30], np.int32)
    tiles = query_tiles(query_lens, np.arange(3, dtype=np.int32), 16, contexts)
    assert tiles.tolist() == [[1, 16], [1, 0], [0, 32], [2, 0], [0, 16], [0, 0]]


@pytest.mark.launches_nothing
def test_no_tiles() -> None:
    nothing = np.zeros(0, np.int32)
    assert query_tiles(np.array([1], np.int32), nothing, 16, np.array([1], np.int32)).shape == (
        0,
        2,
    )
