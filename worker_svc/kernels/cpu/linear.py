"""Matrix products on all threads, with weights of any format in panels."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange
from numpy.typing import NDArray

from worker_svc.kernels.cpu.compiled import kernel
from worker_svc.kernels.cpu.panels import MAX_ROWS, PANEL, product, store_scaled
from worker_svc.kernels.cpu.simd import FASTMATH, by_type, float_of, narrow, num_threads, put, take

# The rows that are left after whole tiles go through smaller tiles.
_rows_12, _rows_8, _rows_4, _rows_2, _rows_1 = (
    product(min(rows, MAX_ROWS)) for rows in (12, 8, 4, 2, 1)
)
# In bytes, the rows of x that are multiplied with a panel while both are in the L2 cache.
X_BLOCK_BYTES = 512 << 10
# With fewer tokens than this, waking another thread costs more than it saves.
PARALLEL_TOKENS = 8
# One thread does fewer multiplications than this in some 20 us. It need not wait for other threads,
# which the system may have suspended.
PARALLEL_PRODUCTS = 1 << 19


@njit(inline="always")
def next_rows(left: int) -> int:
    """The number of rows of the next tile when `left` rows are left."""
    if left >= MAX_ROWS:
        return MAX_ROWS
    return 8 if left >= 8 else 4 if left >= 4 else 2 if left >= 2 else 1


@njit(inline="always")
def _largest_magnitude(x: Any, row: int) -> Any:
    """The largest magnitude in a row of x float32, or NaN if the row has one. LLVM vectorizes
    maxima of integers."""
    bits = x[row].view(np.int32)
    largest = np.int32(0)
    for k in range(len(bits)):
        magnitude = np.int32(bits[k] & np.int32(0x7FFFFFFF))
        largest = magnitude if magnitude > largest else largest
    return float_of(np.uint32(largest))


@by_type
def _pack_tile(codes: Any, *_: Any) -> Any:
    """Packs rows [first, first + rows) of x for the loops that multiply `codes`, and quantizes them
    if the codes are integers.

    tile  first, rows, groups
    out   packed, where the result begins at number first * elements; sums and scales
    """
    kind = codes.dtype.name
    if kind == "uint16":
        return _pack_pairs
    return _quantize if kind in ("int8", "int32") else _pack_floats


def _pack_floats(codes: Any, x: Any, maxima: Any, tile: Any, out: Any) -> Any:
    (first, rows, _), (packed, _, scales) = tile, out
    depth = x.shape[1]
    floats = packed.view(np.float32)
    for i in range(rows):
        scales[first + i] = np.float32(1)
        for k in range(depth):
            floats[first * depth + k * rows + i] = x[first + i, k]


def _pack_pairs(codes: Any, x: Any, maxima: Any, tile: Any, out: Any) -> Any:
    (first, rows, _), (packed, _, scales) = tile, out
    depth = x.shape[1]
    pairs = (depth + 1) // 2
    nearest = np.empty(2 * pairs, np.uint16)
    nearest[2 * pairs - 1] = 0
    both = nearest.view(np.uint32)
    for i in range(rows):
        scales[first + i] = np.float32(1)
        for k in range(depth):
            nearest[k] = narrow(x[first + i, k], nearest[k])
        for k in range(pairs):
            put(packed, first * pairs + k * rows + i, both[k])


def _quantize(codes: Any, x: Any, maxima: Any, tile: Any, out: Any) -> Any:
    """Rounds to the codes and scales that `quantization.formats.quantize_rows` gives."""
    (first, rows, groups), (packed, sums, scales) = tile, out
    depth = x.shape[1]
    words = len(packed) // len(x)
    size = depth // groups
    row_codes = np.zeros(4 * words, np.int8)
    fours = row_codes.view(np.uint32)
    for i in range(rows):
        largest = maxima[first + i] if len(maxima) else _largest_magnitude(x, first + i)
        factor = np.float32(127) / largest if largest > 0 else np.float32(0)
        scales[first + i] = largest / np.float32(127)
        for group in range(groups):
            numbers = x[first + i, group * size : (group + 1) * size]
            codes_of_group = row_codes[group * size : (group + 1) * size]
            total = np.int32(0)
            for k in range(len(numbers)):
                code = np.int32(np.rint(numbers[k] * factor))
                codes_of_group[k] = np.int8(code)
                total += code
            sums[first * groups + group * rows + i] = total
        for k in range(words):
            put(packed, first * words + k * rows + i, fours[k])


@njit(nogil=True, error_model="numpy", fastmath=FASTMATH)
def _pack_rows(
    codes: Any, x: Any, maxima: Any, first: int, end: int, groups: int, out: Any
) -> None:
    while first < end:
        rows = next_rows(end - first)
        _pack_tile(codes, x, maxima, (first, rows, groups), out)
        first += rows


@njit(nogil=True, error_model="numpy", fastmath=FASTMATH)
def _multiply_panels(counter: Any, weight: Any, rows_of_x: Any, bias: Any, out: Any) -> None:
    """Takes panels, each with all rows of x that fit the cache, from `counter` until none is left.

    Multiplies the rows with the panel, and writes the scaled products to `out`.
    """
    (codes, scales, zeros), (packed, sums, x_scales) = weight, rows_of_x
    tokens, out_features = out.shape
    panels = len(codes)
    words, groups = len(packed) // tokens, len(sums) // tokens
    steps = codes.shape[1] // groups
    panel_bytes = codes.itemsize * (codes.size // panels)
    x_block = max(X_BLOCK_BYTES // (4 * words) // MAX_ROWS, 1) * MAX_ROWS
    blocks = (tokens + x_block - 1) // x_block
    tile = np.empty((MAX_ROWS, PANEL), np.float32)
    unit = take(counter)
    while unit < panels * blocks:
        following = take(counter)
        panel = unit % panels
        row = unit // panels * x_block
        end = min(tokens, row + x_block)
        column = panel * PANEL
        columns = min(PANEL, out_features - column)
        w = codes.ctypes.data + panel * panel_bytes
        s = scales.ctypes.data + panel * groups * PANEL * 4
        z = zeros.ctypes.data + panel * groups * PANEL * 4
        t = tile.ctypes.data
        # The next panel is fetched while all rows are multiplied. Without that, the CPU would read
        # memory only during the first tile.
        fetched = following if following < panels * blocks else unit
        ahead, left = codes.ctypes.data + fetched % panels * panel_bytes, panel_bytes
        while row < end:
            rows = next_rows(end - row)
            pace = left * rows // ((end - row) * steps * groups)
            a = packed.ctypes.data + row * words * 4
            b = sums.ctypes.data + row * groups * 4
            if rows == MAX_ROWS:
                _rows_12(codes, w, s, z, a, b, groups, steps, t, ahead, pace)
            elif rows == 8:
                _rows_8(codes, w, s, z, a, b, groups, steps, t, ahead, pace)
            elif rows == 4:
                _rows_4(codes, w, s, z, a, b, groups, steps, t, ahead, pace)
            elif rows == 2:
                _rows_2(codes, w, s, z, a, b, groups, steps, t, ahead, pace)
            else:
                _rows_1(codes, w, s, z, a, b, groups, steps, t, ahead, pace)
            for i in range(rows):
                scale = x_scales[row + i]
                if columns == PANEL and len(bias) == 0:
                    place = out.ctypes.data + 4 * ((row + i) * out_features + column)
                    store_scaled(t + 4 * PANEL * i, scale, place)
                else:
                    for j in range(columns):
                        value = tile[i, j] * scale
                        if len(bias):
                            value += bias[column + j]
                        out[row + i, column + j] = value
            ahead += pace * steps * groups
            left -= pace * steps * groups
            row += rows
        unit = following


@kernel(parallel=True, nogil=True, error_model="numpy", fastmath=FASTMATH)
def linear(
    x: NDArray[np.float32],
    codes: NDArray[Any],
    scales: NDArray[np.float32],
    zeros: NDArray[np.int32],
    maxima: NDArray[np.float32],
    bias: NDArray[np.float32],
    words: int,
    out: NDArray[np.float32],
) -> None:
    """out [T, out_features] = x [T, in] Wᵀ + bias.

    codes   W, as in `panels.KINDS`
    scales  [panels, groups, PANEL], of size 0 if the codes have no scales
    zeros   [panels, groups, PANEL], of size 0 if the codes have no zeros
    maxima  [T] the magnitudes that become 127, or of size 0 to take each row's largest magnitude
    bias    [out_features], or of size 0
    words   the number of 32-bit words of a packed row of x
    """
    tokens, depth = x.shape
    groups = max(scales.shape[1], 1)
    packed = np.empty(tokens * words, np.uint32)
    sums = np.empty(tokens * groups, np.int32)
    x_scales = np.empty(tokens, np.float32)
    rows = (packed, sums, x_scales)
    if tokens < PARALLEL_TOKENS:
        _pack_rows(codes, x, maxima, 0, tokens, groups, rows)
    else:
        for tile in prange((tokens + MAX_ROWS - 1) // MAX_ROWS):
            first = tile * MAX_ROWS
            end = min(tokens, first + MAX_ROWS)
            _pack_rows(codes, x, maxima, first, end, groups, rows)
    counter = np.zeros(1, np.int64)
    weight = (codes, scales, zeros)
    if tokens * depth * out.shape[1] < PARALLEL_PRODUCTS:
        _multiply_panels(counter, weight, rows, bias, out)
    else:
        for _thread in prange(num_threads()):
            _multiply_panels(counter, weight, rows, bias, out)
