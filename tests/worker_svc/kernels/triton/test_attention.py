from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.gpu.steps import QWEN_0_6B, Heads
from tests.worker_svc.device import ROWS, by_device
from tests.worker_svc.kernels.triton.attention_cases import (
    DTYPE,
    LONGEST,
    MODELS,
    TILE,
    assert_close,
    in_a_large_cache,
    random_batch,
)
from tests.worker_svc.kernels.triton.precision import relative_error
from worker_svc.kernels.triton.decode_attention import choose_splits
from worker_svc.kernels.triton.prompt_attention import query_tiles


def check_decodes(
    contexts: list[int], *, seed: int, splits: int = 1, tile: int | None = TILE, **kwargs: Any
) -> None:
    batch = random_batch([1] * len(contexts), contexts, seed=seed, **kwargs)
    assert_close(batch.decoded(range(len(contexts)), splits, tile), batch.reference())


def check_prompts(
    query_lens: list[int],
    contexts: list[int],
    *,
    seed: int,
    tile: int | None = TILE,
    **kwargs: Any,
) -> None:
    batch = random_batch(query_lens, contexts, seed=seed, **kwargs)
    assert_close(batch.prompted(range(len(contexts)), tile), batch.reference())


@pytest.mark.parametrize("splits", by_device(cpu=[1, 3], gpu=[1, 3, 16]))
@pytest.mark.parametrize("rows", by_device(cpu=[3], gpu=ROWS))
@pytest.mark.parametrize(("heads", "block_size", "dtype"), MODELS, ids=str)
def test_decodes_equal_the_reference(
    heads: Heads, block_size: int, dtype: torch.dtype, rows: int, splits: int
) -> None:
    """With the tiling of a GPU: any contexts, the bounds of blocks, the longest, and padding."""
    edges = [LONGEST, 1, block_size - 1, block_size, block_size + 1]
    contexts = by_device(
        cpu=[1, 64, 200],
        gpu=(edges + random.Random(rows).choices(range(1, LONGEST // 2), k=rows))[:rows],
    )
    shape = {**heads._asdict(), "block_size": block_size, "dtype": dtype}
    check_decodes([*contexts, 0], seed=rows, splits=splits, tile=None, **shape)


@pytest.mark.parametrize(
    ("heads", "block_size", "dtype"),
    MODELS + by_device(cpu=[(Heads(4, 2, 256), 16, torch.bfloat16)], gpu=[]),
    ids=str,
)
def test_prompts_equal_the_reference(heads: Heads, block_size: int, dtype: torch.dtype) -> None:
    """With the tiling of a GPU: whole prompts, chunks after a cached prefix, single queries."""
    queries, cached = by_device(
        cpu=([1, 80, 1, 5], [0, 0, 89, 255]),
        gpu=([1, 1, 64, 65, 511, LONGEST // 4], [0, 1000, 0, block_size, 700, 3 * LONGEST // 4]),
    )
    contexts = [sum(pair) for pair in zip(queries, cached, strict=True)]
    shape = {**heads._asdict(), "block_size": block_size, "dtype": dtype}
    check_prompts(queries, contexts, seed=0, tile=None, **shape)


@pytest.mark.parametrize(
    ("heads", "block_size", "splits", "tile"),
    by_device(
        cpu=[
            (Heads(2, 2, 16), 16, 1, 32),
            (Heads(6, 2, 18), 20, 3, 16),
            (Heads(8, 1, 80), 112, 8, 16),
            (Heads(17, 1, 256), 256, 2, 128),
        ],
        gpu=[
            (Heads(2, 2, 64), 20, 2, None),
            (Heads(10, 2, 256), 112, 7, None),
            (Heads(16, 2, 64), 256, 32, None),
        ],
    ),
    ids=str,
)
def test_any_shape(heads: Heads, block_size: int, splits: int, tile: int | None) -> None:
    """Even more splits than a sequence has tiles, or positions."""
    shape = {**heads._asdict(), "block_size": block_size, "tile": tile, "seed": heads.head_dim}
    check_decodes([1, 3, 0, 17, 65, 150], splits=splits, **shape)
    check_prompts([1, 9, 20, 33], [8, 9, 30, 120], **shape)


@pytest.mark.parametrize(
    ("block_size", "tile"),
    by_device(cpu=[(16, 16), (48, 16), (16, 64), (48, 64)], gpu=[(48, None), (64, None)]),
)
def test_contexts_at_the_bounds_of_blocks_and_tiles(block_size: int, tile: int | None) -> None:
    tiles = [tile] if tile else [16, 32, 64, 128]  # whichever a GPU uses
    bounds = {bound for each in tiles for bound in (each, block_size, each + block_size)}
    contexts = sorted({bound + d for bound in bounds for d in (-1, 0, 1)})
    queries = [min(15 + n, context) for n, context in enumerate(contexts)]
    shape = {"block_size": block_size, "tile": tile, "head_dim": 16, "seed": 0}
    check_decodes([1, *contexts], heads=1, splits=2, **shape)
    check_prompts(queries, contexts, **shape)


@pytest.mark.parametrize(
    "tokens", by_device(cpu=[15, 16, 17, 31, 32, 33], gpu=[63, 64, 65, 127, 128, 129])
)
def test_chunks_at_the_bounds_of_a_tile_of_queries(tokens: int) -> None:
    """Two query heads per KV head: 16 tokens per tile of float32, 64 of half precision."""
    contexts = [tokens, tokens + 1, tokens + 15, tokens + 16]
    check_prompts([tokens] * 4, contexts, seed=tokens, head_dim=16)


@pytest.mark.parametrize("window", [1, 7, 16, 40, 100, 1000])
def test_windows(window: int) -> None:
    shape: dict[str, Any] = {"block_size": 48, "head_dim": 16, "seed": window, "window": window}
    for splits in (1, 3):
        check_decodes([1, window, window + 1, 130, 0, 17], splits=splits, **shape)
    check_prompts([1, 40, 33, 64, 5], [130, 40, 150, 64, window + 5], **shape)
    check_prompts([70], [200], kv_heads=2, heads=2, **shape)


@pytest.mark.parametrize("level", [20, 120])
@pytest.mark.parametrize("dtype", [DTYPE, torch.float16])
def test_windows_of_low_scores(level: int, dtype: torch.dtype) -> None:
    """Some rows see nothing in their tile's first tile of positions. Such large scores round more
    than others."""
    batch = random_batch([40], [60], seed=0, head_dim=16, dtype=dtype, window=8)
    batch.q.mul_(0.1)[..., 0] = level
    batch.cache[0, ..., 0] = -4.0  # times a scale of 1 / 4
    assert relative_error(batch.prompted([0]), batch.reference()) < 0.01


def test_a_kernel_leaves_the_rows_of_the_other_alone() -> None:
    batch = random_batch([1, 20, 1, 3, 1], [20, 30, 40, 3, 50], seed=0, head_dim=16)
    decodes, prompts = [0, 21, 25], [*range(1, 21), 22, 23, 24]
    exact = batch.reference()
    for splits in (1, 2):
        out = batch.decoded([4, 0, 2], splits)
        assert_close(out[decodes], exact[decodes])
        assert out[prompts].isnan().all()
    out = batch.prompted([3, 1])
    assert_close(out[prompts], exact[prompts])
    assert out[decodes].isnan().all()


def test_large_scores_do_not_overflow() -> None:
    batch = random_batch([1, 20], [70, 20], seed=0, head_dim=16)
    # Scores are exact in any order of summation, and equal or 128 apart, so that no rounding shows.
    batch.q.round_().mul_(8192)
    batch.cache[0].mul_(16).round_().div_(16)
    exact = batch.reference()
    assert_close(batch.decoded([0], splits=3)[:1], exact[:1])
    assert_close(batch.prompted([1], tile=None)[1:], exact[1:])


def test_caches_beyond_32_bit_offsets(tmp_path: Path) -> None:
    heads, size = by_device(cpu=(Heads(2, 2, 256), 16), gpu=(QWEN_0_6B, 64))
    dtype = by_device(cpu=torch.float16, gpu=torch.bfloat16)
    shape = {**heads._asdict(), "block_size": size, "dtype": dtype}
    small = random_batch([1, size - 7], [size, size], seed=0, **shape)
    batch, exact = in_a_large_cache(small, tmp_path / "cache"), small.reference()
    assert_close(batch.decoded([0])[:1], exact[:1])
    assert_close(batch.prompted([1], tile=None)[1:], exact[1:])


@pytest.mark.parametrize(
    ("num_seqs", "kv_heads", "splits", "num_stages"),
    [(1, 8, 32, 3), (1, 1, 32, 3), (8, 8, 9, 3), (16, 8, 1, 3), (64, 8, 1, 2), (256, 8, 1, 3)],
)
def test_splits_fill_an_h200(num_seqs: int, kv_heads: int, splits: int, num_stages: int) -> None:
    found, tiling = choose_splits(num_seqs, kv_heads, 132, 128, torch.bfloat16)
    assert (found, tiling.num_stages) == (splits, num_stages)


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
