"""Products of one row of x with a weight, on the ordinary units.

With one row there is nothing for tensor cores to share, and a product takes as long as reading the
weight. In a trial on an H200, the four products of a layer of Qwen3-0.6B took 17.0 us instead of
20.8.
"""

from __future__ import annotations

import torch
import triton.language as tl

from worker_svc.kernels.ops import Exchange, PlainWeight
from worker_svc.kernels.triton.launch import kernel

# A weight with so few rows has fewer rows per program, so that there are programs for all
# multiprocessors.
FEW_ROWS = 2048
# Rows of the weight per program, and columns per iteration.
FEW_TILE, TILE = (4, 1024), (8, 512)
MAX_SIZE = 1 << 23  # numbers of a weight: larger ones were not measured


class RowWeight(PlainWeight):
    """W [outs, columns], which `row_matmul` multiplies by one row and cuBLAS by more."""

    @staticmethod
    def suits(weight: torch.Tensor) -> bool:
        outs, columns = weight.shape
        tile, width = tile_of(outs)
        return (
            weight.dtype != torch.float32
            and outs % tile == 0
            and columns % width == 0
            and weight.numel() <= MAX_SIZE
        )

    def matmul(
        self, x: torch.Tensor, bias: torch.Tensor | None, exchange: Exchange | None = None
    ) -> torch.Tensor:
        if bias is None and len(x) == 1:
            return row_matmul(x, self.weight)
        return super().matmul(x, bias, exchange)


def tile_of(outs: int) -> tuple[int, int]:
    return FEW_TILE if outs <= FEW_ROWS else TILE


def row_matmul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [1, columns] · weightᵀ -> [1, outs].

    weight  [outs, columns], contiguous, in the dtype of x; multiples of `tile_of(outs)`
    """
    outs, columns = weight.shape
    tile, width = tile_of(outs)
    out = torch.empty(1, outs, dtype=x.dtype, device=x.device)
    _row_kernel[(outs // tile,)](
        x.contiguous(),
        weight,
        out,
        COLUMNS=columns,
        TILE=tile,
        WIDTH=width,
        num_warps=4,
        num_stages=2,
    )
    return out


@kernel()
def _row_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Makes TILE outputs."""
    n = tl.program_id(0) * TILE + tl.arange(0, TILE)
    sums = tl.zeros([TILE, WIDTH], tl.float32)
    for start in range(0, COLUMNS, WIDTH):
        k = start + tl.arange(0, WIDTH)
        numbers = tl.load(weight + n[:, None] * COLUMNS + k[None, :]).to(tl.float32)
        sums += numbers * tl.load(x + k).to(tl.float32)[None, :]
    tl.store(out + n, tl.sum(sums, 1).to(out.dtype.element_ty))
