"""Attention over a paged KV cache on a CPU. One pass computes prompts, parts of prompts and
decodes, without copying keys or values.

A task is a tile of up to `TILE_ROWS` queries of a key-value head. They are of one token in a decode
and of several tokens in a prompt. A task goes through the context `CHUNK` keys at a time. It keeps,
per query, the largest score and the sum of the weights so far (online softmax: Milakov and
Gimelshein, 2018, and Dao et al., "FlashAttention", 2022).

The order of a query's sums does not depend on the rest of its tile or its step, and chunks begin at
multiples of `CHUNK`. So a result depends only on the query's own context.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange
from numpy.typing import NDArray

from worker_svc.kernels.cpu.attention_factors import pack_query, weigh_row
from worker_svc.kernels.cpu.attention_loops import (
    CHUNK,
    FACTORS,
    SCORES,
    WEIGHTS,
    WIDTHS,
    score,
    weigh,
)
from worker_svc.kernels.cpu.compiled import kernel
from worker_svc.kernels.cpu.kv_store import padded
from worker_svc.kernels.cpu.linear import PARALLEL_PRODUCTS
from worker_svc.kernels.cpu.simd import FASTMATH, LANES, exp, larger, largest, num_threads, take

TILE_ROWS = 12

_MAX_ROWS = max(WIDTHS)
_score_6, _score_4, _score_2, _score_1 = (score(min(rows, _MAX_ROWS)) for rows in (6, 4, 2, 1))
_weigh_6, _weigh_4, _weigh_2, _weigh_1 = (weigh(min(rows, _MAX_ROWS)) for rows in (6, 4, 2, 1))


@njit(inline="always")
def _next_rows(left: int) -> int:
    """The number of rows that the next loop takes when `left` rows are left."""
    if left >= _MAX_ROWS:
        return _MAX_ROWS
    return 4 if left >= 4 else 2 if left >= 2 else 1


@njit(inline="always")
def _score_rows(cache: Any, chunk: Any, query: Any, scores: Any, row: int, rows: int) -> None:
    keys, columns, vectors, key_scales = chunk
    queries, steps, starts, scales = query
    k, c, v = keys.ctypes.data, columns.ctypes.data, key_scales.ctypes.data
    q = queries.ctypes.data + queries.itemsize * queries.shape[1] * row
    z, f = starts.ctypes.data + 8 * row, scales.ctypes.data + 4 * row
    s = scores.ctypes.data + 4 * SCORES * row
    if rows == _MAX_ROWS:
        _score_6(cache, k, c, vectors, q, steps, z, f, v, s)
    elif rows == 4:
        _score_4(cache, k, c, vectors, q, steps, z, f, v, s)
    elif rows == 2:
        _score_2(cache, k, c, vectors, q, steps, z, f, v, s)
    else:
        _score_1(cache, k, c, vectors, q, steps, z, f, v, s)


@njit(inline="always")
def _weigh_rows(
    cache: Any, values: Any, steps: int, weights: Any, scales: Any, totals: Any, row: int, rows: int
) -> None:
    size = totals.shape[1]
    v, vectors = values.ctypes.data, size // LANES
    w, f = weights.ctypes.data + WEIGHTS * row, scales.ctypes.data + 4 * row
    t = totals.ctypes.data + 4 * size * row
    if rows == _MAX_ROWS:
        _weigh_6(cache, v, vectors, w, steps, f, t, size)
    elif rows == 4:
        _weigh_4(cache, v, vectors, w, steps, f, t, size)
    elif rows == 2:
        _weigh_2(cache, v, vectors, w, steps, f, t, size)
    else:
        _weigh_1(cache, v, vectors, w, steps, f, t, size)


@njit(nogil=True, error_model="numpy", fastmath=FASTMATH)
def _soften(
    cache: Any, scores: Any, part: Any, visible: Any, value_scales: Any, out: Any, state: Any
) -> None:
    """Turns rows of scores of a chunk into weights. A key that a row does not see has weight 0."""
    (first_row, rows, columns), (tops, sums, totals) = part, state
    for row in range(first_row, first_row + rows):
        for i in range(max(visible[row], 0), columns):
            scores[row, i] = -np.inf
        top = larger(tops[row], largest(scores, row, 0, columns))
        if tops[row] != top:
            fading = exp(tops[row] - top)
            sums[row] *= fading
            for d in range(totals.shape[1]):
                totals[row, d] *= fading
            tops[row] = top
        seen = row, visible[row], columns
        sums[row] += weigh_row(cache, scores, seen, top, value_scales, out)


@njit(nogil=True, error_model="numpy", fastmath=FASTMATH)
def _attend_tiles(counter: Any, step: Any) -> None:
    """Takes one tile of a key-value head after another from `counter`, until none is left."""
    q, cache, block_size, tiles = step[:4]
    query_starts, context_lens, block_table, first_blocks = step[4:8]
    scale, out = step[8:]
    head_dim, kv_heads = q.shape[2], cache.shape[2]
    group = q.shape[1] // kv_heads
    depth = 4 // cache.itemsize
    steps = (head_dim + depth - 1) // depth
    row_size, slots = padded(head_dim, LANES), padded(block_size, LANES)
    chunk_size = CHUNK // block_size * block_size if block_size < CHUNK else CHUNK
    head_bytes = cache.shape[3] * cache.itemsize
    block_bytes = kv_heads * head_bytes
    words, cache_scales = cache.view(np.uint32), cache.view(np.float32)
    first_scale = row_size * slots // 4
    queries = np.empty((TILE_ROWS, steps * FACTORS), np.uint32)
    packed = np.zeros((FACTORS, steps), np.uint32)
    starts = np.empty((TILE_ROWS, 2), np.int32)
    query_scales = np.empty(TILE_ROWS, np.float32)
    scores = np.empty((TILE_ROWS, SCORES), np.float32)
    weights = np.empty((TILE_ROWS, WEIGHTS), np.uint8)
    weight_scales = np.empty(TILE_ROWS, np.float32)
    visible = np.empty(TILE_ROWS, np.int64)
    totals = np.empty((TILE_ROWS, row_size), np.float32)
    tops = np.empty(TILE_ROWS, np.float32)
    sums = np.empty(TILE_ROWS, np.float32)
    keys = np.empty(CHUNK, np.int64)
    columns = np.empty(CHUNK, np.int64)
    values = np.empty(CHUNK, np.int64)
    key_scales = np.empty(SCORES, np.float32)
    value_scales = np.empty((1, SCORES), np.float32)
    last_values = np.empty(row_size, np.uint32)
    while True:
        task = take(counter)
        if task >= len(tiles) * kv_heads:
            break
        kv_head, tile = task // len(tiles), task % len(tiles)
        n, first_row = tiles[tile, 0], tiles[tile, 1]
        start = query_starts[n]
        tokens = query_starts[n + 1] - start
        before = context_lens[n] - tokens
        tile_rows = min(tokens * group - first_row, TILE_ROWS)
        head_start = cache.ctypes.data + kv_head * head_bytes
        row = 0
        while row < tile_rows:
            rows = _next_rows(tile_rows - row)
            for i in range(row, row + rows):
                token, head = divmod(first_row + i, group)
                query = q[start + token, kv_head * group + head]
                buffers = packed, starts, query_scales
                pack_query(cache, query, scale, (row, rows, i), queries, buffers)
            row += rows
        totals[:tile_rows] = 0
        tops[:tile_rows] = -np.inf
        sums[:tile_rows] = 0
        seen = before + (first_row + tile_rows - 1) // group + 1
        for first in range(0, seen, chunk_size):
            size = min(chunk_size, seen - first)
            done, vectors, groups = 0, 0, 0
            while done < size:
                slot = (first + done) % block_size
                block = block_table[first_blocks[n] + (first + done) // block_size]
                run = min(block_size - slot, size - done)
                block_keys = head_start + block * block_bytes
                block_values = block_keys + cache.shape[1] * block_bytes
                for lane in range(0, run, LANES):
                    keys[vectors] = block_keys + (slot + lane) // LANES * steps * (4 * LANES)
                    columns[vectors] = done + lane
                    vectors += 1
                for i in range(0, run, depth):
                    values[groups] = block_values + (slot + i) // depth * row_size * 4
                    groups += 1
                if cache.itemsize == 1:
                    for i in range(run):
                        place = first_scale + slot + i
                        key_scales[done + i] = cache_scales[0, block, kv_head, place]
                        value_scales[0, done + i] = cache_scales[1, block, kv_head, place]
                elif run % depth:
                    # The last word also holds an unused slot, whose value might be NaN.
                    place = (slot + run) // depth * row_size
                    for i in range(row_size):
                        word = words[1, block, kv_head, place + i]
                        last_values[i] = word & np.uint32(0xFFFF)
                    values[groups - 1] = last_values.ctypes.data
                done += run
            width = padded(size, LANES)
            for i in range(size, width):
                value_scales[0, i] = 0
            row = 0
            while row < tile_rows:
                rows = _next_rows(tile_rows - row)
                keys_of_chunk = keys, columns, vectors, key_scales
                packed_queries = queries, steps, starts, query_scales
                _score_rows(cache, keys_of_chunk, packed_queries, scores, row, rows)
                for i in range(row, row + rows):
                    visible[i] = min(before + (first_row + i) // group + 1 - first, size)
                part, state = (row, rows, width), (tops, sums, totals)
                packed_weights = weights, weight_scales
                _soften(cache, scores, part, visible, value_scales, packed_weights, state)
                _weigh_rows(cache, values, groups, weights, weight_scales, totals, row, rows)
                row += rows
        for i in range(tile_rows):
            token, head = divmod(first_row + i, group)
            for d in range(head_dim):
                out[start + token, kv_head * group + head, d] = totals[i, d] / sums[i]


@kernel(parallel=True, nogil=True, error_model="numpy", fastmath=FASTMATH)
def attend(
    q: NDArray[np.float32],
    cache: NDArray[Any],
    block_size: int,
    tiles: NDArray[np.int64],
    query_starts: NDArray[np.int64],
    context_lens: NDArray[np.int64],
    block_table: NDArray[np.int64],
    first_blocks: NDArray[np.int64],
    scale: float,
    out: NDArray[np.float32],
) -> None:
    """Sets out to softmax(scale · q Kᵀ) V. Each query sees its sequence up to itself.

    q, out        [T, heads, head_dim]
    cache         [2, blocks, kv_heads, size], see `kv_store.rope_store`
    tiles         [N, 2] the number of a sequence, and the first row of a tile. Row r of a key-value
                  head is the head r % group of its group, for the query r // group
    query_starts  [S + 1] tokens
    context_lens  [S]
    first_blocks  [S] where a sequence's blocks begin in block_table
    """
    counter = np.zeros(1, np.int64)
    columns = (query_starts, context_lens, block_table, first_blocks)
    # Numba passes only tuples without tuples in them to the threads.
    step = (q, cache, block_size, tiles, *columns, scale, out)
    keys = np.sum(context_lens * (query_starts[1:] - query_starts[:-1]))
    if keys * q.shape[1] * q.shape[2] < PARALLEL_PRODUCTS:
        _attend_tiles(counter, step)
    else:
        for _thread in prange(num_threads()):
            _attend_tiles(counter, step)
