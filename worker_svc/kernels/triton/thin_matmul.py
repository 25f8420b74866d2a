"""Products of few rows of x with a weight that has few outputs.

Such a weight makes too few tiles to keep a GPU busy, so its columns are split among programs, too.
The last program of a tile to finish adds up the tile's parts, in order. cuBLAS does that in a
second kernel, and for one row it hardly splits at all.
"""

from __future__ import annotations

import torch
import triton.language as tl

from worker_svc.kernels.ops import Exchange
from worker_svc.kernels.triton.launch import kernel, next_power_of_2
from worker_svc.kernels.triton.paged_attention import dot_dtype
from worker_svc.kernels.triton.row_matmul import RowWeight

MAX_ROWS = 64  # of x, in one tile; with more, cuBLAS has enough tiles
MAX_TILES = 64  # of the weight's rows
TILE = 32  # rows of the weight per program
WIDTH = 128  # columns per iteration
PROGRAMS = 132  # one for each multiprocessor of an H100 or H200


class ThinWeight(RowWeight):
    """W [outs, columns], which `thin_matmul` multiplies by few rows and cuBLAS by more. One row is
    left to `row_matmul` if it can multiply it."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__(weight)
        self._min_rows = 2 if RowWeight.suits(weight) else 1
        tiles = len(weight) // TILE
        # How many programs of each tile have finished. The last program sets the number to 0.
        self._finished = torch.zeros(tiles, dtype=torch.int32, device=weight.device)

    @staticmethod
    def suits(weight: torch.Tensor) -> bool:
        outs, columns = weight.shape
        return (
            weight.dtype != torch.float32
            and outs % TILE == 0
            and columns % WIDTH == 0
            and outs // TILE <= MAX_TILES
        )

    def matmul(
        self, x: torch.Tensor, bias: torch.Tensor | None, exchange: Exchange | None = None
    ) -> torch.Tensor:
        if bias is None and self._min_rows <= len(x) <= MAX_ROWS:
            return thin_matmul(x, self.weight, self._finished)
        return super().matmul(x, bias, exchange)


def thin_matmul(x: torch.Tensor, weight: torch.Tensor, finished: torch.Tensor) -> torch.Tensor:
    """x [T, columns] · weightᵀ -> [T, outs], for up to MAX_ROWS rows of x.

    weight    [outs, columns], contiguous, in the dtype of x; multiples of TILE and WIDTH
    finished  int32 [outs / TILE], zeros before and after
    """
    rows, columns = x.shape
    outs = len(weight)
    tiles, splits = outs // TILE, choose_splits(outs, columns)
    height = min(max(next_power_of_2(rows), 16), MAX_ROWS)
    out = torch.empty(rows, outs, dtype=x.dtype, device=x.device)
    parts = out
    if splits > 1:
        size = (tiles, splits, height, TILE)
        parts = torch.empty(size, dtype=torch.float32, device=x.device)
    _thin_kernel[(tiles, splits)](
        x.contiguous(),
        weight,
        parts,
        finished,
        out,
        rows,
        COLUMNS=columns,
        OUTS=outs,
        SPLITS=splits,
        ROWS=height,
        TILE=TILE,
        WIDTH=WIDTH,
        DOT=dot_dtype(x.dtype),
        num_warps=4,
        num_stages=5,
    )
    return out


def choose_splits(outs: int, columns: int) -> int:
    """The number of parts of the columns, which are equal."""
    tiles, steps = outs // TILE, columns // WIDTH
    return max(n for n in (1, 2, 4, 8) if steps % n == 0 and (n == 1 or n * tiles <= PROGRAMS))


@kernel(do_not_specialize=["rows"])
def _thin_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    parts: tl.tensor,
    finished: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    COLUMNS: tl.constexpr,
    OUTS: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    DOT: tl.constexpr,
) -> None:
    """Multiplies all rows of x by a part of the columns of TILE outputs; grid (tiles, splits)."""
    tile, part = tl.program_id(0), tl.program_id(1)
    m = tl.arange(0, ROWS)
    n = tile * TILE + tl.arange(0, TILE)
    real = (m < rows)[:, None]
    share: tl.constexpr = COLUMNS // SPLITS
    sums = tl.zeros([ROWS, TILE], tl.float32)
    for start in range(0, share, WIDTH):
        k = part * share + start + tl.arange(0, WIDTH)
        left = tl.load(x + m[:, None] * COLUMNS + k[None, :], mask=real, other=0)
        right = tl.load(weight + n[None, :] * COLUMNS + k[:, None])
        sums = tl.dot(left.to(DOT), right.to(DOT), sums, input_precision="ieee")

    target = out + m[:, None] * OUTS + n[None, :]
    if SPLITS == 1:
        tl.store(target, sums.to(out.dtype.element_ty), mask=real)
        return
    places = tl.arange(0, ROWS)[:, None] * TILE + tl.arange(0, TILE)[None, :]
    parts += tile * SPLITS * ROWS * TILE
    tl.store(parts + part * ROWS * TILE + places, sums)
    # All threads' stores come before the one thread's count, which releases them.
    tl.debug_barrier()
    if tl.atomic_add(finished + tile, 1, sem="acq_rel") == SPLITS - 1:
        total = tl.zeros([ROWS, TILE], tl.float32)
        for each in tl.static_range(SPLITS):
            # From the L2 cache: a multiprocessor's own cache does not see other programs' stores.
            total += tl.load(parts + each * ROWS * TILE + places, cache_modifier=".cg")
        tl.store(target, total.to(out.dtype.element_ty), mask=real)
        tl.store(finished + tile, 0)
