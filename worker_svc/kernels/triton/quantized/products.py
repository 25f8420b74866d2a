"""Tiles, splits, and the scaling and storing of sums, for all products with quantized weights.

The weight is the left operand, and x, transposed, is the right operand. Only the left operand of
the tensor cores may come from registers. It is 64 rows high, whereas steps that decode have few
rows of x.

With few rows of x, the speed is bounded by the bandwidth at which the weight is read, once. If the
weight's rows make too few tiles to keep a GPU busy, its columns are split, too. A second kernel
then adds up the parts in order. With `batch_invariance`, columns are split for any number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from worker_svc.kernels.triton import batch_invariance
from worker_svc.kernels.triton.launch import INTERPRETED, kernel

SPLIT_ROWS = 64  # maximum rows of x; with more, there are many tiles and the parts' sums are large
# Maximum rows of x for which parts run in parallel. With more, a program adds up all parts itself.
PARALLEL_ROWS = 256
# Two for each multiprocessor of an H100 or H200. Every GPU uses this number, so that sums are made
# of equal parts on all of them.
PROGRAMS = 264
MAX_SPLITS = 16
COMBINED = 512  # numbers that a program of the second kernel adds up


@dataclass(frozen=True)
class Tiles:
    """The sizes of a program, which multiplies `outs` rows of the weight by `rows` rows of x."""

    rows: int
    outs: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Grouped:
    """Which of several equal matrices each tile of rows is multiplied with.

    Args:
        matrices: int32 [tiles of rows]; the results of a tile with −1 are zeros.
    """

    matrices: torch.Tensor
    tiles: Tiles


# The maximum rows of x for each entry, and its tiles. The columns of a tile do not depend on the
# number of rows. So the order in which a row's products are added up depends only on the splits.
TILES = (
    (16, Tiles(rows=16, outs=64, num_warps=4, num_stages=5)),
    (256, Tiles(rows=64, outs=64, num_warps=4, num_stages=4)),
)
LARGE_TILES = Tiles(rows=128, outs=128, num_warps=8, num_stages=3)
INVARIANT_TILES = Tiles(rows=64, outs=64, num_warps=4, num_stages=4)  # see `batch_invariance`
# Tensor cores do not multiply float32, which only comparisons use.
FLOAT32_TILES = Tiles(rows=16, outs=16, num_warps=4, num_stages=2)


def choose_tiles(rows: int, dtype: torch.dtype) -> Tiles:
    """The tiles for `rows` rows of x, where `dtype` is the type that is multiplied."""
    if dtype == torch.float32 and not INTERPRETED:
        return FLOAT32_TILES
    if batch_invariance.is_on():
        return INVARIANT_TILES
    return next((tiles for limit, tiles in TILES if rows <= limit), LARGE_TILES)


def choose_splits(rows: int, out_features: int, column_tiles: int) -> int:
    """The number of parts of the columns, each of two tiles or more. It is equal for all numbers of
    rows up to SPLIT_ROWS, and 1 beyond."""
    if rows > SPLIT_ROWS:
        return 1
    wanted = PROGRAMS // -(-out_features // TILES[0][1].outs)
    return max(min(wanted, column_tiles // 2, MAX_SPLITS), 1)


def room_for_parts(out: torch.Tensor, splits: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory for a product's sums: `out` itself, or a matrix for each part of the columns."""
    if splits == 1:
        return out
    return torch.empty((splits, *out.shape), dtype=dtype, device=out.device)


def combine(
    parts: torch.Tensor,
    x_scales: torch.Tensor | None,
    weight_scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Sets `out` to the sum of `parts`, with scales and bias as in `store_sums`."""
    splits, rows, outs = parts.shape
    _combine_kernel[(triton.cdiv(outs, COMBINED), rows)](
        parts,
        x_scales,
        weight_scales,
        bias,
        out,
        ALL_OUTS=outs,
        OUTS=COMBINED,
        SPLITS=splits,
        num_warps=4,
    )


@triton.jit
def store_sums(
    sums: tl.tensor,
    x_scales: tl.tensor,
    weight_scales: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    rows: tl.tensor,
    ALL_OUTS: tl.constexpr,
) -> None:
    """Scales sums [len(n), len(m)] if there are scales, adds the bias, and stores the results at
    out[m, n]."""
    real_m, real_n = m < rows, n < ALL_OUTS
    result = sums.to(tl.float32)
    if x_scales is not None:
        by_row = tl.load(x_scales + m, mask=real_m, other=0)[None, :]
        result = result * by_row * tl.load(weight_scales + n, mask=real_n, other=0)[:, None]
    if bias is not None:
        result += tl.load(bias + n, mask=real_n, other=0).to(tl.float32)[:, None]
    address = out + m.to(tl.int64)[None, :] * ALL_OUTS + n[:, None]
    tl.store(address, result.to(out.dtype.element_ty), mask=real_n[:, None] & real_m[None, :])


@triton.jit
def store_part(
    sums: tl.tensor,
    parts: tl.tensor,
    part: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    rows: tl.tensor,
    ALL_OUTS: tl.constexpr,
) -> None:
    row = part.to(tl.int64) * rows + m
    mask = (n < ALL_OUTS)[:, None] & (m < rows)[None, :]
    tl.store(parts + row[None, :] * ALL_OUTS + n[:, None], sums, mask=mask)


@kernel()
def _combine_kernel(
    parts: tl.tensor,
    x_scales: tl.tensor,
    weight_scales: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    ALL_OUTS: tl.constexpr,
    OUTS: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:
    """Adds up the parts of some outputs of a row; grid (tiles of outputs, rows)."""
    n = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    m = tl.program_id(1)
    rows = tl.num_programs(1)
    address = parts + m.to(tl.int64) * ALL_OUTS + n
    sums = tl.zeros([OUTS], parts.dtype.element_ty)
    for part in tl.static_range(SPLITS):
        step = part * rows.to(tl.int64) * ALL_OUTS
        sums += tl.load(address + step, mask=n < ALL_OUTS, other=0)
    store_sums(
        sums[:, None], x_scales, weight_scales, bias, out, m + tl.arange(0, 1), n, rows, ALL_OUTS
    )
