"""Matrix products with bfloat16 weights in float32 arithmetic, for CPUs that have AVX-512 but no
bfloat16 instructions (Intel Skylake to Ice Lake).

There oneDNN converts so much that its products reach a fifth of the speed of float32 ones, while
weights in float32 would double the memory and its traffic, which bounds decoding. Here weights are
read as bfloat16 and widened in registers.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit, prange
from numpy.typing import NDArray

from worker_svc.kernels import cpu_features
from worker_svc.kernels.cpu.simd import LANES, PANEL, narrow, panel_product, widen

# As many rows as fit the 32 vector registers beside a pair of weight vectors, then the remainder.
_rows_12, _rows_8, _rows_4, _rows_2, _rows_1 = map(panel_product, (12, 8, 4, 2, 1))
MAX_ROWS = 12
# Rows of x that are multiplied with a panel while it is in the L2 cache, as bytes of float32.
X_BLOCK_BYTES = 512 << 10
# More pieces than threads, so that a delayed thread delays the others less.
PIECES_PER_THREAD = 4


def is_best_for_this_cpu() -> bool:
    return cpu_features.has_avx512() and not cpu_features.has_bfloat16_instructions()


def pack_panels(weight: torch.Tensor) -> NDArray[np.uint32]:
    """weight [out, in] bfloat16 -> [panels, in, LANES] uint32, as `panel_product` reads it, the
    last panel padded with zeros."""
    out_features, in_features = weight.shape
    panels = -(-out_features // PANEL)
    packed = torch.zeros(panels, in_features, LANES, 2, dtype=torch.int16)
    whole = out_features // PANEL
    bits = weight.view(torch.int16)
    packed[:whole] = bits[: whole * PANEL].view(whole, 2, LANES, in_features).permute(0, 3, 2, 1)
    for row in range(whole * PANEL, out_features):
        half, lane = divmod(row - whole * PANEL, LANES)
        packed[whole, :, lane, half] = bits[row]
    return packed.numpy().view(np.uint32).reshape(panels, in_features, LANES)


@njit(inline="always")
def _next_rows(left: int) -> int:
    return 12 if left >= 12 else 8 if left >= 8 else 4 if left >= 4 else 2 if left >= 2 else 1


@njit(parallel=True, cache=True, nogil=True)
def linear(
    x: NDArray[np.uint16],
    packed: NDArray[np.uint32],
    bias: NDArray[np.uint16],
    out: NDArray[np.uint16],
    pieces: int,
    x_block: int,
) -> None:
    """out [T, out_features] = x [T, in] Wᵀ + bias, all bfloat16, rounded once.

    An empty `bias` is none. `x_block` is a multiple of MAX_ROWS.
    """
    tokens, depth = x.shape
    out_features = out.shape[1]
    panels = packed.shape[0]
    transposed = np.empty(tokens * depth, np.float32)
    for block in prange((tokens + MAX_ROWS - 1) // MAX_ROWS):
        row = block * MAX_ROWS
        end = min(tokens, row + MAX_ROWS)
        while row < end:
            rows = _next_rows(end - row)
            for i in range(rows):
                for k in range(depth):
                    transposed[row * depth + k * rows + i] = widen(x[row + i, k])
            row += rows
    for piece in prange(pieces):
        tile = np.empty((MAX_ROWS, PANEL), np.float32)
        for start in range(0, tokens, x_block):
            end = min(tokens, start + x_block)
            for panel in range(panels * piece // pieces, panels * (piece + 1) // pieces):
                column = panel * PANEL
                columns = min(PANEL, out_features - column)
                row = start
                while row < end:
                    rows = _next_rows(end - row)
                    if rows == 12:
                        _rows_12(packed, panel, transposed, row, tile)
                    elif rows == 8:
                        _rows_8(packed, panel, transposed, row, tile)
                    elif rows == 4:
                        _rows_4(packed, panel, transposed, row, tile)
                    elif rows == 2:
                        _rows_2(packed, panel, transposed, row, tile)
                    else:
                        _rows_1(packed, panel, transposed, row, tile)
                    if len(bias):
                        for i in range(rows):
                            for j in range(columns):
                                tile[i, j] += widen(bias[column + j])
                    for i in range(rows):
                        for j in range(columns):
                            out[row + i, column + j] = narrow(tile[i, j], out[row + i, column + j])
                    row += rows
