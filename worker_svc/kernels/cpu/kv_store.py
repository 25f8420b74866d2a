"""Normalizes and rotates queries and keys, and stores keys and values in a CPU's paged cache."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit, prange
from numpy.typing import NDArray

from worker_svc.kernels.cpu.compiled import kernel
from worker_svc.kernels.cpu.linear import PARALLEL_TOKENS
from worker_svc.kernels.cpu.simd import (
    FASTMATH,
    LANES,
    by_type,
    larger,
    narrow,
    num_threads,
    put,
    widen,
)

# The code of zero in int8 keys, which are stored as unsigned bytes.
KEY_ZERO = 128


def cache_row(block_size: int, head_dim: int, *, scaled: bool) -> int:
    """The size, in numbers, of a head's part of a block of the cache. See `rope_store`."""
    slots = -(-block_size // LANES) * LANES
    return slots * (-(-head_dim // LANES) * LANES + (4 if scaled else 0))


@njit(inline="always")
def padded(size: int, multiple: int) -> int:
    return (size + multiple - 1) // multiple * multiple


@njit(inline="always")
def _rotate(
    qkv: Any, row: int, head: int, weight: Any, eps: float, rotation: Any, x: Any, out: Any
) -> None:
    """Sets out [head_dim] to a head of qkv, normalized if there is a weight, and rotated.

    rotation [head_dim] holds cosines and then sines. x [head_dim] is overwritten. It is a separate
    array because LLVM then vectorizes the loops.
    """
    head_dim = len(out)
    half = head_dim // 2
    squares = np.float32(0)
    for i in range(head_dim):
        x[i] = qkv[row, head, i]
        squares += x[i] * x[i]
    if len(weight):
        scale = np.float32(1 / math.sqrt(squares / head_dim + eps))
        for i in range(head_dim):
            x[i] *= scale * widen(weight[i])
    for i in range(half):
        out[i] = x[i] * rotation[i] - x[half + i] * rotation[half + i]
        out[half + i] = x[half + i] * rotation[i] + x[i] * rotation[half + i]


@by_type
def _round(_numbers: Any, _zero: Any, codes: Any) -> Any:
    """Rounds numbers [head_dim] float32 to codes of the cache's dtype -> the scale of the codes.
    Integer codes have `zero` added."""
    return _round_to_int8 if codes.dtype.name == "int8" else _round_floats


def _round_floats(numbers: Any, zero: Any, codes: Any) -> Any:
    for i in range(len(numbers)):
        codes[i] = narrow(numbers[i], codes[i])
    return np.float32(1)


def _round_to_int8(numbers: Any, zero: Any, codes: Any) -> Any:
    top = np.float32(0)
    for i in range(len(numbers)):
        top = larger(top, abs(numbers[i]))
    factor = np.float32(127) / top if top > 0 else np.float32(0)
    for i in range(len(numbers)):
        codes[i] = np.int8(np.int32(np.rint(numbers[i] * factor)) + np.int32(zero))
    return top / np.float32(127)


@njit(nogil=True, error_model="numpy", fastmath=FASTMATH)
def _store_rows(first: int, end: int, step: Any) -> None:
    qkv, q_weight, k_weight, eps, cos_sin, positions, slot_mapping, block_size, cache, q = step
    heads, head_dim, kv_heads = q.shape[1], q.shape[2], cache.shape[2]
    depth = 4 // cache.itemsize
    key_size = padded(head_dim, depth)
    row_size = padded(head_dim, LANES)
    scales = cache.view(np.float32)
    first_scale = row_size * padded(block_size, LANES) // 4
    x, numbers, rotation = (
        np.empty(head_dim, np.float32),
        np.empty(head_dim, np.float32),
        np.empty(head_dim, np.float32),
    )
    codes = np.zeros(key_size, cache.dtype)
    packed, words = codes.view(np.uint32), cache.view(np.uint32)
    for row in range(first, end):
        position = positions[row]
        for i in range(head_dim // 2):
            rotation[i] = cos_sin[position, 0, i]
            rotation[head_dim // 2 + i] = cos_sin[position, 1, i]
        for head in range(heads):
            _rotate(qkv, row, head, q_weight, eps, rotation, x, q[row, head])
        block, slot = slot_mapping[row] // block_size, slot_mapping[row] % block_size
        for head in range(kv_heads):
            _rotate(qkv, row, heads + head, k_weight, eps, rotation, x, numbers)
            scale = _round(numbers, KEY_ZERO, codes)
            start = slot // LANES * key_size // depth * LANES + slot % LANES
            part = words[0, block, head]
            for step in range(len(packed)):
                put(part, start + step * LANES, packed[step])
            if cache.itemsize == 1:
                scales[0, block, head, first_scale + slot] = scale
            for d in range(head_dim):
                numbers[d] = qkv[row, heads + kv_heads + head, d]
            scale = _round(numbers, 0, codes)
            start = slot // depth * row_size * depth + slot % depth
            values = cache[1, block, head]
            for d in range(head_dim):
                put(values, start + d * depth, codes[d])
            if cache.itemsize == 1:
                scales[1, block, head, first_scale + slot] = scale


@kernel(parallel=True, nogil=True, error_model="numpy", fastmath=FASTMATH)
def rope_store(
    qkv: NDArray[np.float32],
    q_weight: NDArray[Any],
    k_weight: NDArray[Any],
    eps: float,
    cos_sin: NDArray[np.float32],
    positions: NDArray[np.int64],
    slot_mapping: NDArray[np.int64],
    block_size: int,
    cache: NDArray[Any],
    q: NDArray[np.float32],
) -> None:
    """Rotates the queries of qkv [T, heads + 2 · kv_heads, head_dim] into q [T, heads, head_dim].
    Rotates the keys and stores them, and the values, in their slots of the cache.

    Queries and keys are normalized first, with weights [head_dim], unless the weights are of size
    0.

    The cache is [2, blocks, kv_heads, size], keys before values. It is float32, bfloat16 as uint16,
    or int8. For each block and head it holds

        keys    [slots / 16, head_dim / depth, 16, depth]: a vector holds dimensions of 16 keys
        values  [slots / depth, row_size, depth]

    where depth is how many numbers fit into 32 bits, slots and row_size are multiples of 16, and
    head_dim is padded to a multiple of depth. int8 codes of keys are unsigned bytes, larger by 128.
    The scales float32 [slots] of int8 codes follow the codes.
    """
    tokens = len(qkv)
    norm = (q_weight, k_weight, eps)
    step = (qkv, *norm, cos_sin, positions, slot_mapping, block_size, cache, q)
    if tokens < PARALLEL_TOKENS:
        _store_rows(0, tokens, step)
    else:
        threads = num_threads()
        for thread in prange(threads):
            first, end = tokens * thread // threads, tokens * (thread + 1) // threads
            _store_rows(first, end, step)
