from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu.heads import QWEN_0_6B, Heads
from tests.worker_svc.device import ROWS, by_device
from tests.worker_svc.kernels.triton.attention_cases import (
    LONGEST,
    MODELS,
    Batch,
    assert_close,
    in_a_large_cache,
    random_batch,
)
from tests.worker_svc.kernels.triton.precision import poisoned_memory
from worker_svc.kernels.triton.decode_attention import (
    choose_splits,
    decode_attention,
    decode_workspace,
)
from worker_svc.kernels.triton.paged_attention import Tiling

# Used where a GPU's tiling would be a single tile; None: the GPU's tiling.
TILE = by_device(cpu=16, gpu=None)


def run(batch: Batch, seqs: list[int], splits: int, tile: int | None = TILE) -> torch.Tensor:
    """Leaves NaN in the rows that were not written."""
    heads, head_dim = batch.q.shape[1:]
    out = torch.full_like(batch.q, torch.nan)
    with poisoned_memory():
        workspace = decode_workspace(len(seqs), heads, head_dim, splits, out.device)
        decode_attention(
            batch.q,
            batch.cache,
            torch.tensor(seqs, dtype=torch.int32, device=out.device),
            batch.query_starts,
            batch.context_lens,
            batch.block_table,
            batch.table_offsets,
            batch.scale,
            splits,
            workspace,
            out,
            Tiling(tile, num_warps=4, num_stages=2) if tile else None,
        )
    return out


def check(
    contexts: list[int], *, seed: int, splits: int = 1, tile: int | None = TILE, **kwargs: Any
) -> None:
    batch = random_batch([1] * len(contexts), contexts, seed=seed, **kwargs)
    assert_close(run(batch, list(range(len(contexts))), splits, tile), batch.reference())


@pytest.mark.parametrize("splits", by_device(cpu=[1, 3], gpu=[1, 3, 16]))
@pytest.mark.parametrize("rows", by_device(cpu=[3], gpu=ROWS))
@pytest.mark.parametrize(("heads", "block_size", "dtype"), MODELS, ids=str)
def test_equals_the_reference(
    heads: Heads, block_size: int, dtype: torch.dtype, rows: int, splits: int
) -> None:
    """With the tiling of a GPU: any contexts, the bounds of blocks, the longest, and padding."""
    edges = [LONGEST, 1, block_size - 1, block_size, block_size + 1]
    contexts = by_device(
        cpu=[1, 64, 200],
        gpu=(edges + random.Random(rows).choices(range(1, LONGEST // 2), k=rows))[:rows],
    )
    shape = {**heads._asdict(), "block_size": block_size, "dtype": dtype}
    check([*contexts, 0], seed=rows, splits=splits, tile=None, **shape)


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
    shape = {**heads._asdict(), "block_size": block_size, "splits": splits, "tile": tile}
    check([1, 3, 0, 17, 65, 150], seed=heads.head_dim, **shape)


@pytest.mark.parametrize(
    ("block_size", "tile"),
    by_device(cpu=[(16, 16), (48, 16), (16, 32), (48, 64)], gpu=[(48, None), (64, None)]),
)
def test_contexts_at_the_bounds_of_blocks_and_tiles(block_size: int, tile: int | None) -> None:
    tiles = [tile] if tile else [16, 32, 64, 128]  # whichever a GPU uses
    bounds = {bound for each in tiles for bound in (each, block_size, each + block_size)}
    contexts = sorted({1} | {bound + d for bound in bounds for d in (-1, 0, 1)})
    check(contexts, seed=0, block_size=block_size, tile=tile, heads=1, head_dim=16, splits=2)


@pytest.mark.parametrize("splits", [1, 2])
def test_leaves_the_other_rows_alone(splits: int) -> None:
    """The decoding sequences of a step in which others have a chunk of their prompt."""
    batch = random_batch([1, 5, 1, 3, 1], [20, 30, 40, 3, 50], seed=0, head_dim=16)
    out = run(batch, [4, 0, 2], splits)
    rows = [0, 6, 10]
    assert_close(out[rows], batch.reference()[rows])
    others = [row for row in range(len(out)) if row not in rows]
    assert out[others].isnan().all()


@pytest.mark.launches_nothing
def test_no_sequences() -> None:
    batch = random_batch([2], [2], seed=0)
    assert run(batch, [], splits=2).isnan().all()


def test_large_scores_do_not_overflow() -> None:
    batch = random_batch([1, 1], [20, 70], seed=0, head_dim=16)
    batch.q.mul_(1e4)
    assert_close(run(batch, [0, 1], splits=3), batch.reference())


def test_caches_beyond_32_bit_offsets(tmp_path: Path) -> None:
    heads, contexts = by_device(cpu=(Heads(2, 2, 256), [16]), gpu=(QWEN_0_6B, [1, 64, 130]))
    dtype, size = by_device(cpu=(torch.float16, 16), gpu=(torch.bfloat16, 64))
    shape = {**heads._asdict(), "block_size": size, "dtype": dtype}
    small = random_batch([1] * len(contexts), contexts, seed=0, **shape)
    batch = in_a_large_cache(small, tmp_path / "cache")
    assert_close(run(batch, list(range(len(contexts))), splits=1), small.reference())


@pytest.mark.launches_nothing
def test_workspace_too_small() -> None:
    batch = random_batch([1, 1], [20, 30], seed=0)
    integers = batch.query_starts, batch.context_lens, batch.block_table, batch.table_offsets
    workspace = decode_workspace(2, 2, 64, 3, batch.q.device)
    seqs = batch.context_lens.new_tensor([0, 1])
    with pytest.raises(ValueError, match="workspace"):
        decode_attention(
            batch.q, batch.cache, seqs, *integers, batch.scale, 4, workspace, batch.q.clone()
        )


@pytest.mark.launches_nothing
@pytest.mark.parametrize(
    ("num_seqs", "kv_heads", "splits"), [(1, 8, 32), (1, 1, 32), (64, 8, 2), (256, 8, 1)]
)
def test_splits_fill_an_h200(num_seqs: int, kv_heads: int, splits: int) -> None:
    assert choose_splits(num_seqs, kv_heads, num_sms=132) == splits
