from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.worker_svc.kernels.attention_cases import (
    Batch,
    assert_close,
    in_a_large_cache,
    random_batch,
)
from worker_svc.kernels.paged_attention import Tiling
from worker_svc.kernels.prompt_attention import prompt_attention, query_tiles, tile_tokens


def run(batch: Batch, seqs: list[int], tiling: Tiling | None) -> torch.Tensor:
    """NaN in the rows that were not written."""
    heads, head_dim = batch.q.shape[1:]
    out = torch.full_like(batch.q, torch.nan)
    tiles = query_tiles(
        batch.query_lens.numpy(),
        np.array(seqs, np.int32),
        tile_tokens(head_dim, heads // batch.cache.shape[3], batch.q.dtype),
        batch.context_lens.numpy(),
    )
    prompt_attention(
        batch.q,
        batch.cache,
        torch.from_numpy(tiles),
        batch.query_starts,
        batch.context_lens,
        batch.block_table,
        batch.table_offsets,
        batch.scale,
        out,
        tiling,
    )
    return out


def check(
    query_lens: list[int], contexts: list[int], *, seed: int, tile: int = 16, **kwargs: Any
) -> None:
    batch = random_batch(query_lens, contexts, seed=seed, **kwargs)
    out = run(batch, list(range(len(contexts))), Tiling(tile, num_warps=4, num_stages=2))
    assert_close(out, batch.reference())


@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    [(torch.float32, 64), (torch.float16, 64), (torch.bfloat16, 64), (torch.bfloat16, 256)],
    ids=str,
)
def test_equals_the_reference(dtype: torch.dtype, head_dim: int) -> None:
    """With the tiling of a GPU: whole prompts, a chunk after a cached prefix, a single query."""
    batch = random_batch(
        [1, 80, 1, 5],
        [1, 80, 90, 260],
        seed=0,
        heads=4,
        kv_heads=2,
        head_dim=head_dim,
        dtype=dtype,
    )
    assert_close(run(batch, [0, 1, 2, 3], tiling=None), batch.reference())


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 8, 17])
def test_any_number_of_query_heads_per_kv_head(group: int) -> None:
    check([9, 20], [9, 30], seed=group, heads=2 * group, kv_heads=2, head_dim=16)


@pytest.mark.parametrize("head_dim", [16, 18, 24, 80, 128])
def test_any_head_dim(head_dim: int) -> None:
    check([19, 33], [19, 40], seed=head_dim, head_dim=head_dim)


@pytest.mark.parametrize("tile", [16, 64])
@pytest.mark.parametrize("block_size", [16, 48, 256])
def test_contexts_at_the_bounds_of_blocks_and_tiles(block_size: int, tile: int) -> None:
    bounds = {tile, block_size, tile + block_size}
    contexts = sorted({bound + d for bound in bounds for d in (-1, 0, 1)})
    queries = [min(15 + n, context) for n, context in enumerate(contexts)]
    check(queries, contexts, seed=0, block_size=block_size, tile=tile, head_dim=16)


@pytest.mark.parametrize("tokens", [15, 16, 17, 31, 32, 33])
def test_chunks_at_the_bounds_of_a_tile_of_queries(tokens: int) -> None:
    """float32 with two query heads per KV head: 16 tokens per tile."""
    check([tokens] * 4, [tokens, tokens + 1, tokens + 15, tokens + 16], seed=tokens, head_dim=16)


def test_leaves_the_other_rows_alone() -> None:
    """The chunks of a step whose single queries another kernel serves."""
    batch = random_batch([1, 20, 1, 3], [20, 30, 40, 3], seed=0, head_dim=16)
    out = run(batch, [3, 1], Tiling(16, num_warps=4, num_stages=2))
    rows = [*range(1, 21), 22, 23, 24]
    assert_close(out[rows], batch.reference()[rows])
    assert out[[0, 21]].isnan().all()


def test_no_sequences() -> None:
    batch = random_batch([2], [2], seed=0)
    assert run(batch, [], tiling=None).isnan().all()


def test_large_scores_do_not_overflow() -> None:
    batch = random_batch([5, 20], [20, 20], seed=0, head_dim=16)
    batch.q.mul_(1e4)
    assert_close(run(batch, [0, 1], tiling=None), batch.reference())


def test_caches_beyond_32_bit_offsets(tmp_path: Path) -> None:
    small = random_batch([9], [16], seed=0, kv_heads=2, heads=2, head_dim=256, dtype=torch.float16)
    batch = in_a_large_cache(small, tmp_path / "cache")
    assert_close(run(batch, [0], tiling=None), small.reference())


def test_random_batches() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(3):
        kv_heads = rng.choice([1, 2])
        contexts = [rng.randint(1, rng.choice([8, 120])) for _ in range(3)]
        check(
            [rng.randint(1, context) for context in contexts],
            contexts,
            seed=rng.randrange(2**32),
            tile=rng.choice([16, 32, 128]),
            kv_heads=kv_heads,
            heads=kv_heads * rng.randint(1, 8),
            head_dim=2 * rng.randint(8, 40),
            block_size=rng.choice([16, 20, 32, 112, 256]),
        )


def test_tiles_cover_every_query_once() -> None:
    query_lens = np.array([1, 16, 33, 50, 7], np.int32)
    seqs = np.array([0, 1, 2, 4], np.int32)
    tiles = query_tiles(query_lens, seqs, 16, query_lens)
    assert tiles.dtype == np.int32
    assert sorted(tiles.tolist()) == [[0, 0], [1, 0], [2, 0], [2, 16], [2, 32], [4, 0]]


def test_tiles_that_see_most_come_first() -> None:
    query_lens, contexts = np.array([40, 20, 1], np.int32), np.array([40, 1000, 30], np.int32)
    tiles = query_tiles(query_lens, np.arange(3, dtype=np.int32), 16, contexts)
    assert tiles.tolist() == [[1, 16], [1, 0], [0, 32], [2, 0], [0, 16], [0, 0]]


def test_no_tiles() -> None:
    nothing = np.zeros(0, np.int32)
    assert query_tiles(np.array([1], np.int32), nothing, 16, np.array([1], np.int32)).shape == (
        0,
        2,
    )
