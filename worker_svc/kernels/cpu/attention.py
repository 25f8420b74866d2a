"""Attention over a paged KV cache on a CPU: prompts, parts of prompts and decodes in one pass, read
where they lie.

A task is a tile of up to `MAX_ROWS` queries of a key-value head: of one token in a decode, of
several in a prompt. Tasks go through the context `CHUNK` keys at a time and keep, per query, the
largest score and the sum of the weights so far. (Online softmax: Milakov and Gimelshein, 2018, and
Dao et al., "FlashAttention", 2022.)

A query's sums run over its keys in the same order whatever else is in its tile or its step, and
chunks begin at multiples of `CHUNK`: its result depends on nothing but its own context.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, prange, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from worker_svc.kernels.cpu.kv_store import ROW, VECTORS, padded
from worker_svc.kernels.cpu.linear import PARALLEL_PRODUCTS, next_rows
from worker_svc.kernels.cpu.panels import MAX_ROWS
from worker_svc.kernels.cpu.simd import (
    F32,
    F32S,
    FASTMATH,
    I8,
    I16,
    I32S,
    I64,
    LANES,
    constant,
    exp,
    fma,
    largest,
    loop,
    pointer,
    splat,
    take,
)

CHUNK = 256
# Floats between rows of scores: a power of two would put all rows into the same lines of the cache.
_STRIDE = CHUNK + LANES


def _vector(builder: Any, place: Any, dtype: str) -> Any:
    """16 numbers of a cache of `dtype` at a pointer to bytes, as float32."""
    element = {"float32": F32, "uint16": I16, "int8": I8}[dtype]
    stored = ir.VectorType(element, LANES)
    numbers = builder.load(builder.bitcast(place, ir.PointerType(stored)), align=1)
    if dtype == "float32":
        return numbers
    if dtype == "int8":
        return builder.sitofp(numbers, F32S)
    bits = builder.shl(builder.zext(numbers, I32S), constant(16, I32S))
    return builder.bitcast(bits, F32S)


def _score(rows: int) -> Any:
    """Makes (cache, keys, query, head_dim, scores) -> None: the scores of 16 keys. `cache` is any
    array of the cache's dtype, the others are addresses but for the size:

        keys    [head_dim, 16] in the cache's dtype
        query   [head_dim, rows] float32
        scores  16 float32 in each of `rows` rows, `_STRIDE` floats apart
    """

    @intrinsic
    def score(_context: Any, cache: Any, keys: Any, query: Any, head_dim: Any, scores: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _, keys, query, head_dim, scores = args
            dtype = signature.args[0].dtype
            size = I64(LANES * dtype.bitwidth // 8)
            keys, query = pointer(builder, keys, I8), pointer(builder, query, F32)

            def step(d: Any, sums: list[Any]) -> list[Any]:
                key = _vector(builder, builder.gep(keys, [builder.mul(d, size)]), dtype.name)
                place = builder.gep(query, [builder.mul(d, I64(rows))])
                factors = (builder.load(builder.gep(place, [I64(row)])) for row in range(rows))
                return [
                    fma(builder, splat(builder, factor, F32S), key, total)
                    for factor, total in zip(factors, sums, strict=True)
                ]

            zero = ir.Constant(F32S, [0.0] * LANES)
            start = pointer(builder, scores, F32)
            for row, total in enumerate(loop(builder, head_dim, [zero] * rows, step)):
                place = builder.gep(start, [I64(row * _STRIDE)])
                builder.store(total, builder.bitcast(place, ir.PointerType(F32S)), align=4)
            return context.get_dummy_value()

        return types.void(cache, *[types.int64] * 4), codegen

    return score


def _weigh(rows: int, width: int) -> Any:
    """Makes (cache, addresses, offset, weights, keys, totals, row_size) -> None, which adds the
    weighted values of `keys` keys, `width` vectors of them, to `totals`. Addresses and numbers but
    for `cache`:

        addresses  int64 [keys], each of a value [head_dim] in the cache's dtype
        offset     of the vectors in it, in bytes
        weights    float32 [rows, keys], rows `_STRIDE` floats apart
        totals     float32 [rows, row_size], from the vectors on
    """

    @intrinsic
    def weigh(
        _context: Any,
        cache: Any,
        addresses: Any,
        offset: Any,
        weights: Any,
        keys: Any,
        totals: Any,
        row_size: Any,
    ) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _, addresses, offset, weights, keys, totals, row_size = args
            dtype = signature.args[0].dtype
            size = LANES * dtype.bitwidth // 8
            addresses, weights = pointer(builder, addresses, I64), pointer(builder, weights, F32)
            totals = pointer(builder, totals, F32)
            places = []
            for row in range(rows):
                start = builder.gep(totals, [builder.mul(row_size, I64(row))])
                vectors = builder.bitcast(start, ir.PointerType(F32S))
                places += [builder.gep(vectors, [I64(i)]) for i in range(width)]

            def step(key: Any, sums: list[Any]) -> list[Any]:
                address = builder.add(builder.load(builder.gep(addresses, [key])), offset)
                value = pointer(builder, address, I8)
                vectors = [
                    _vector(builder, builder.gep(value, [I64(i * size)]), dtype.name)
                    for i in range(width)
                ]
                place = builder.gep(weights, [key])
                added = []
                for row in range(rows):
                    factor = builder.load(builder.gep(place, [I64(row * _STRIDE)]))
                    factors = splat(builder, factor, F32S)
                    for i in range(width):
                        added.append(fma(builder, factors, vectors[i], sums[row * width + i]))
                return added

            start = [builder.load(place, align=4) for place in places]
            for place, total in zip(places, loop(builder, keys, start, step), strict=True):
                builder.store(total, place, align=4)
            return context.get_dummy_value()

        return types.void(cache, *[types.int64] * 6), codegen

    return weigh


_TILES = [min(rows, MAX_ROWS) for rows in (12, 8, 4, 2, 1)]
_score_12, _score_8, _score_4, _score_2, _score_1 = map(_score, _TILES)
_weigh_12, _weigh_8, _weigh_4, _weigh_2, _weigh_1 = (_weigh(rows, VECTORS) for rows in _TILES)


@njit(inline="always")
def _score_tile(
    cache: Any, keys: int, query: Any, head_dim: int, scores: Any, column: int, rows: int
) -> None:
    q, s = query.ctypes.data, scores.ctypes.data + 4 * column
    if rows == MAX_ROWS:
        _score_12(cache, keys, q, head_dim, s)
    elif rows == 8:
        _score_8(cache, keys, q, head_dim, s)
    elif rows == 4:
        _score_4(cache, keys, q, head_dim, s)
    elif rows == 2:
        _score_2(cache, keys, q, head_dim, s)
    else:
        _score_1(cache, keys, q, head_dim, s)


@njit(inline="always")
def _weigh_tile(
    cache: Any, addresses: Any, scores: Any, keys: int, totals: Any, d: int, rows: int
) -> None:
    a, w, t = addresses.ctypes.data, scores.ctypes.data, totals.ctypes.data + 4 * d
    offset, size = d * cache.itemsize, totals.shape[1]
    if rows == MAX_ROWS:
        _weigh_12(cache, a, offset, w, keys, t, size)
    elif rows == 8:
        _weigh_8(cache, a, offset, w, keys, t, size)
    elif rows == 4:
        _weigh_4(cache, a, offset, w, keys, t, size)
    elif rows == 2:
        _weigh_2(cache, a, offset, w, keys, t, size)
    else:
        _weigh_1(cache, a, offset, w, keys, t, size)


@njit(nogil=True, error_model="numpy", fastmath=FASTMATH)
def _soften(
    scores: Any, row: int, visible: int, keys: int, tops: Any, sums: Any, totals: Any
) -> None:
    """Turns a row's scores of a chunk into weights, 0 for keys that it does not see."""
    if visible > 0:
        top = max(tops[row], largest(scores, row, 0, visible))
        total = np.float32(0)
        for i in range(visible):
            weight = exp(scores[row, i] - top)
            scores[row, i] = weight
            total += weight
        if tops[row] != top:
            fading = exp(tops[row] - top) if sums[row] > 0 else np.float32(0)
            sums[row] *= fading
            for d in range(totals.shape[1]):
                totals[row, d] *= fading
            tops[row] = top
        sums[row] += total
    for i in range(max(visible, 0), keys):
        scores[row, i] = 0


@njit(nogil=True, error_model="numpy", fastmath=FASTMATH)
def _attend_tiles(
    counter: Any,
    q: Any,
    cache: Any,
    block_size: int,
    tiles: Any,
    query_starts: Any,
    context_lens: Any,
    block_table: Any,
    first_blocks: Any,
    scale: float,
    out: Any,
) -> None:
    """Takes a tile of a key-value head at a time from `counter` until there are none."""
    head_dim, kv_heads = q.shape[2], cache.shape[2]
    group = q.shape[1] // kv_heads
    row_size = padded(head_dim, ROW)
    slots = padded(block_size, LANES)
    chunk_size = CHUNK // block_size * block_size if block_size < CHUNK else CHUNK
    head_bytes = cache.shape[3] * cache.itemsize
    block_bytes = kv_heads * head_bytes
    quantized = cache.itemsize == 1
    scales = cache.view(np.float32)
    first_scale = row_size * slots // 4
    query = np.empty(MAX_ROWS * head_dim, np.float32)
    scores = np.empty((MAX_ROWS, _STRIDE), np.float32)
    totals = np.empty((MAX_ROWS, row_size), np.float32)
    tops = np.empty(MAX_ROWS, np.float32)
    sums = np.empty(MAX_ROWS, np.float32)
    value_scales = np.empty(CHUNK, np.float32)
    addresses = np.empty(CHUNK, np.int64)
    while True:
        task = take(counter)
        if task >= len(tiles) * kv_heads:
            break
        kv_head, tile = task // len(tiles), task % len(tiles)
        n, row = tiles[tile, 0], tiles[tile, 1]
        start = query_starts[n]
        tokens = query_starts[n + 1] - start
        before = context_lens[n] - tokens
        tile_end = min(tokens * group, row + MAX_ROWS)
        head_start = cache.ctypes.data + kv_head * head_bytes
        while row < tile_end:
            rows = next_rows(tile_end - row)
            for i in range(rows):
                token, head = start + (row + i) // group, kv_head * group + (row + i) % group
                for d in range(head_dim):
                    query[d * rows + i] = q[token, head, d] * np.float32(scale)
                for d in range(row_size):
                    totals[i, d] = 0
                tops[i] = -np.inf
                sums[i] = 0
            seen = before + (row + rows - 1) // group + 1
            for first in range(0, seen, chunk_size):
                keys = min(chunk_size, seen - first)
                done = 0
                while done < keys:
                    slot = (first + done) % block_size
                    block = block_table[first_blocks[n] + (first + done) // block_size]
                    run = min(block_size - slot, keys - done)
                    key_codes = head_start + block * block_bytes
                    value_codes = key_codes + cache.shape[1] * block_bytes
                    for lane in range(0, run, LANES):
                        codes = key_codes + (slot + lane) * head_dim * cache.itemsize
                        _score_tile(cache, codes, query, head_dim, scores, done + lane, rows)
                    for i in range(run):
                        addresses[done + i] = value_codes + (slot + i) * row_size * cache.itemsize
                    if quantized:
                        for i in range(run):
                            place = first_scale + slot + i
                            value_scales[done + i] = scales[1, block, kv_head, place]
                            factor = scales[0, block, kv_head, place]
                            for r in range(rows):
                                scores[r, done + i] *= factor
                    done += run
                for i in range(rows):
                    visible = before + (row + i) // group + 1 - first
                    _soften(scores, i, min(visible, keys), keys, tops, sums, totals)
                    if quantized:
                        for k in range(keys):
                            scores[i, k] *= value_scales[k]
                for d in range(0, row_size, ROW):
                    _weigh_tile(cache, addresses, scores, keys, totals, d, rows)
            for i in range(rows):
                token, head = start + (row + i) // group, kv_head * group + (row + i) % group
                for d in range(head_dim):
                    out[token, head, d] = totals[i, d] / sums[i]
            row += rows


@njit(parallel=True, cache=True, nogil=True, error_model="numpy", fastmath=FASTMATH)
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
    threads: int,
) -> None:
    """Sets out to softmax(scale · q Kᵀ) V, each query seeing its sequence up to itself.

    q, out        [T, heads, head_dim]
    cache         [2, blocks, kv_heads, size], see `kv_store.normalize_and_store`
    tiles         [N, 2] the number of a sequence, and the first row of a tile: row r of a
                  key-value head is its head r % group of the query r // group
    query_starts  [S + 1] tokens
    context_lens  [S]
    first_blocks  [S] where a sequence's blocks begin in block_table
    """
    counter = np.zeros(1, np.int64)
    keys = np.sum(context_lens * (query_starts[1:] - query_starts[:-1]))
    if keys * q.shape[1] * q.shape[2] < PARALLEL_PRODUCTS:
        _attend_tiles(
            counter,
            q,
            cache,
            block_size,
            tiles,
            query_starts,
            context_lens,
            block_table,
            first_blocks,
            scale,
            out,
        )
    else:
        for _thread in prange(threads):
            _attend_tiles(
                counter,
                q,
                cache,
                block_size,
                tiles,
                query_starts,
                context_lens,
                block_table,
                first_blocks,
                scale,
                out,
            )
