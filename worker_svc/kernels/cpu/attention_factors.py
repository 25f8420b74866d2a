"""Packs queries and weights for the loops of `attention_loops`, depending on the cache's dtype."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from worker_svc.kernels.cpu.attention_loops import CHUNK, KINDS
from worker_svc.kernels.cpu.kv_store import KEY_ZERO, padded
from worker_svc.kernels.cpu.simd import LANES, by_type, exp, larger, largest, narrow, put

# The largest codes of 16 bits. The upper bytes of a query's codes stay within ±127.
_QUERY_CODE, _WEIGHT_CODE = 127 * 256 + 127, 65535


@by_type
def pack_query(cache: Any, *_: Any) -> Any:
    """Packs a query [head_dim] float32, times `scale`.

    place    first, rows, row: a loop takes `rows` rows from row `first` on; `row` is the query's
    factors  [tile rows, steps · factors of a word] of 32 bits. The rows that a loop takes are
             [steps, rows, factors of a word]
    buffers  packed [2, steps] of 32 bits, which is overwritten and must begin as zeros; starts
             int32 [tile rows, 2] and scales float32 [tile rows], see `attention_loops.score`
    """
    if cache.dtype == types.int8:
        return _pack_codes
    return _pack_pairs if _multiplies_pairs(cache) else _pack_floats


def _multiplies_pairs(cache: Any) -> bool:
    return cache.dtype == types.uint16 and len(KINDS["uint16"].parts) == 1


def _pack_floats(cache: Any, query: Any, scale: Any, place: Any, factors: Any, buffers: Any) -> Any:
    first, rows, row = place
    numbers = factors.view(np.float32).reshape(-1)
    depth = 4 // cache.itemsize
    start = first * factors.shape[1] + (row - first) * depth
    for d in range(len(query)):
        numbers[start + d // depth * rows * depth + d % depth] = query[d] * np.float32(scale)


def _pack_pairs(cache: Any, query: Any, scale: Any, place: Any, factors: Any, buffers: Any) -> Any:
    first, rows, row = place
    packed, _, _ = buffers
    numbers, words = packed[0].view(np.uint16), factors.reshape(-1)
    for d in range(len(query)):
        numbers[d] = narrow(query[d] * np.float32(scale), numbers[d])
    start = first * factors.shape[1] + row - first
    for step in range(packed.shape[1]):
        put(words, start + step * rows, packed[0, step])


def _pack_codes(cache: Any, query: Any, scale: Any, place: Any, factors: Any, buffers: Any) -> Any:
    first, rows, row = place
    packed, starts, scales = buffers
    upper, lower, words = packed[0].view(np.int8), packed[1].view(np.int8), factors.reshape(-1)
    top = np.float32(0)
    for d in range(len(query)):
        top = larger(top, abs(query[d]))
    factor = np.float32(_QUERY_CODE) / top if top > 0 else np.float32(0)
    scales[row] = top / np.float32(_QUERY_CODE) * np.float32(scale)
    uppers, lowers = np.int32(0), np.int32(0)
    for d in range(len(query)):
        code = np.int32(np.rint(query[d] * factor))
        high = (code + np.int32(128)) >> np.int32(8)
        low = code - np.int32(256) * high
        upper[d], lower[d] = np.int8(high), np.int8(low)
        uppers += high
        lowers += low
    starts[row, 0], starts[row, 1] = -KEY_ZERO * uppers, -KEY_ZERO * lowers
    start = first * factors.shape[1] + 2 * (row - first)
    for step in range(packed.shape[1]):
        put(words, start + 2 * step * rows, packed[0, step])
        put(words, start + 2 * step * rows + 1, packed[1, step])


@by_type
def weigh_row(cache: Any, *_: Any) -> Any:
    """Sets a row of weights to the factors of exp(scores − top) -> the sum of the weights, which
    depends only on the `visible` keys.

    part          row, visible, columns: columns is a multiple of 16; scores from column `visible`
                  on are −inf
    value_scales  [1, columns], the scales of the codes of values
    out           weights [tile rows, WEIGHTS] of bytes, and scales [tile rows], see
                  `attention_loops.weigh`
    """
    if cache.dtype == types.int8:
        return _weights_as_codes
    return _weights_in(np.uint16 if _multiplies_pairs(cache) else np.float32)


def _weights_in(dtype: type[np.generic]) -> Any:
    def weights_as_numbers(
        cache: Any, scores: Any, part: Any, top: Any, value_scales: Any, out: Any
    ) -> Any:
        (row, visible, columns), (weights, _) = part, out
        factors = weights.view(dtype)
        total = np.float32(0)
        seen = padded(max(visible, 0), LANES)
        for i in range(seen):
            weight = exp(scores[row, i] - top)
            factors[row, i] = narrow(weight, factors[row, i])
            total += weight
        factors[row, seen:columns] = 0
        return total

    return weights_as_numbers


def _weights_as_codes(
    cache: Any, scores: Any, part: Any, top: Any, value_scales: Any, out: Any
) -> Any:
    (row, visible, columns), (weights, scales) = part, out
    # `bound` is at least the largest weight times its scale, and does not depend on other rows.
    largest_scale = max(largest(value_scales, 0, 0, visible), np.float32(0))
    bound = exp(largest(scores, row, 0, columns) - top) * largest_scale
    factor = np.float32(_WEIGHT_CODE) / bound if bound > 0 else np.float32(0)
    scales[row] = bound / np.float32(_WEIGHT_CODE)
    total = np.float32(0)
    seen = padded(max(visible, 0), LANES)
    for i in range(seen):
        weight = exp(scores[row, i] - top)
        total += weight
        code = np.int32(weight * value_scales[0, i] * factor + np.float32(0.5))
        weights[row, i] = np.uint8(code >> np.int32(8))
        weights[row, CHUNK + i] = np.uint8(code & np.int32(255))
    weights[row, seen:columns] = 0
    weights[row, CHUNK + seen : CHUNK + columns] = 0
    return total
