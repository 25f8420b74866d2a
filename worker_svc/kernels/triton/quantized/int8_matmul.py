"""Products of 8-bit integers with 8-bit integers (W8A8)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from worker_svc.kernels.triton.launch import kernel
from worker_svc.kernels.triton.quantized.products import (
    Grouped,
    choose_splits,
    choose_tiles,
    combine,
    room_for_parts,
    store_part,
    store_sums,
)

TILE_COLUMNS = 128


def int8_matmul(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    grouped: Grouped | None = None,
) -> torch.Tensor:
    """(x · x_scales) (weight · weight_scales)ᵀ + bias [out] -> [T, out] in dtype, for x int8
    [T, in] and weight int8 [out, in], both contiguous, with a float32 scale per row. Sums are
    exact, so a row's result does not depend on the other rows. If rows are `grouped`, weight and
    weight_scales have one more dimension, of matrices."""
    rows, columns = x.shape
    outs = weight.shape[-2]
    out = torch.empty(rows, outs, dtype=dtype, device=x.device)
    tiles = grouped.tiles if grouped else choose_tiles(rows, torch.int8)
    splits = 1 if grouped else choose_splits(rows, outs, triton.cdiv(columns, TILE_COLUMNS))
    parts = room_for_parts(out, splits, torch.int32)
    _int8_kernel[(triton.cdiv(outs, tiles.outs), triton.cdiv(rows, tiles.rows), splits)](
        x,
        weight,
        x_scales,
        weight_scales,
        bias,
        parts,
        grouped.matrices if grouped else None,
        rows,
        COLUMNS=columns,
        ALL_OUTS=outs,
        ROWS=tiles.rows,
        OUTS=tiles.outs,
        TILE=TILE_COLUMNS,
        SPLITS=splits,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    if splits > 1:
        combine(parts, x_scales, weight_scales, bias, out)
    return out


@kernel(do_not_specialize=["rows"])
def _int8_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    x_scales: tl.tensor,
    weight_scales: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    matrices: tl.tensor,
    rows: tl.tensor,
    COLUMNS: tl.constexpr,
    ALL_OUTS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:
    """Grid (tiles of outputs, tiles of rows, splits)."""
    n = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(2)
    tiles: tl.constexpr = (COLUMNS + TILE - 1) // TILE
    first, last = tiles * part // SPLITS, tiles * (part + 1) // SPLITS
    if matrices is not None:
        matrix = tl.load(matrices + tl.program_id(1)).to(tl.int64)
        last = tl.where(matrix < 0, first, last)
        matrix = tl.maximum(matrix, 0)
        weight += matrix * ALL_OUTS * COLUMNS
        weight_scales += matrix * ALL_OUTS
    # Rows beyond the last are computed from the last row and not stored.
    weights = weight + tl.minimum(n, ALL_OUTS - 1).to(tl.int64)[:, None] * COLUMNS
    numbers = x + tl.minimum(m, rows - 1).to(tl.int64)[None, :] * COLUMNS
    sums = tl.zeros([OUTS, ROWS], tl.int32)
    for tile in range(first, last):
        k = tile * TILE + tl.arange(0, TILE)
        if COLUMNS % TILE == 0:
            w = tl.load(weights + k[None, :])
            numbers_t = tl.load(numbers + k[:, None])
        else:
            w = tl.load(weights + k[None, :], mask=(k < COLUMNS)[None, :], other=0)
            numbers_t = tl.load(numbers + k[:, None], mask=(k < COLUMNS)[:, None], other=0)
        sums = tl.dot(w, numbers_t, sums, out_dtype=tl.int32)
    if SPLITS == 1:
        store_sums(sums, x_scales, weight_scales, bias, out, m, n, rows, ALL_OUTS)
    else:
        store_part(sums, out, part, m, n, rows, ALL_OUTS)
