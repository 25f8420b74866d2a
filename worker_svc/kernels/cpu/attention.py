"""Decoding on a CPU: attention of single queries over a paged KV cache.

`scaled_dot_product_attention` needs a sequence's blocks gathered first and runs one sequence at a
time; here they are read where they lie, sequences and heads in parallel.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange
from numpy.typing import NDArray

from worker_svc.kernels.cpu.simd import FASTMATH, exp, widen


# Sums may be reordered into vector lanes, in a way that depends only on the head's size, so that a
# sequence's result does not depend on the others in its step.
@njit(parallel=True, cache=True, nogil=True, error_model="numpy", fastmath=FASTMATH)
def decode_attention(
    q: NDArray[Any],
    keys: NDArray[Any],
    values: NDArray[Any],
    rows: NDArray[np.int64],
    context_lens: NDArray[np.int64],
    block_table: NDArray[np.int64],
    first_blocks: NDArray[np.int64],
    scale: float,
    out: NDArray[np.float32],
) -> None:
    """Sets out[rows] to softmax(scale · q Kᵀ) V.

    q, keys and values are float32, or bfloat16 as uint16:

        q             [T, heads, head_dim]
        keys, values  [blocks, kv_heads, block_size, head_dim]
        rows          [N] rows of q and out, one query each
        context_lens  [N]
        first_blocks  [N] where each query's blocks begin in block_table
        out           [T, heads, head_dim] float32
    """
    kv_heads, block_size, head_dim = keys.shape[1], keys.shape[2], keys.shape[3]
    group = q.shape[1] // kv_heads
    for task in prange(len(rows) * kv_heads):
        n, kv_head = task // kv_heads, task % kv_heads
        row, length = rows[n], context_lens[n]
        query = np.empty((group, head_dim), np.float32)
        total = np.zeros((group, head_dim), np.float32)
        scores = np.empty((group, length), np.float32)
        for g in range(group):
            for d in range(head_dim):
                query[g, d] = widen(q[row, kv_head * group + g, d]) * np.float32(scale)
        # Elements are indexed one by one: a slice would cost two atomic reference counts.
        for start in range(0, length, block_size):
            block = block_table[first_blocks[n] + start // block_size]
            for slot in range(min(block_size, length - start)):
                for g in range(group):
                    score = np.float32(0)
                    for d in range(head_dim):
                        score += query[g, d] * widen(keys[block, kv_head, slot, d])
                    scores[g, start + slot] = score
        for g in range(group):
            top = scores[g, 0]
            for position in range(length):
                top = max(top, scores[g, position])
            weight_sum = np.float32(0)
            for position in range(length):
                weight = exp(scores[g, position] - top)
                scores[g, position] = weight
                weight_sum += weight
            for position in range(length):
                scores[g, position] /= weight_sum
        for start in range(0, length, block_size):
            block = block_table[first_blocks[n] + start // block_size]
            for slot in range(min(block_size, length - start)):
                for g in range(group):
                    weight = scores[g, start + slot]
                    for d in range(head_dim):
                        total[g, d] += weight * widen(values[block, kv_head, slot, d])
        for g in range(group):
            for d in range(head_dim):
                out[row, kv_head * group + g, d] = total[g, d]


@njit(cache=True, nogil=True)
def write_cache(
    k: NDArray[Any],
    v: NDArray[Any],
    slot_mapping: NDArray[np.int64],
    keys: NDArray[Any],
    values: NDArray[Any],
) -> None:
    """Copies k and v [T, kv_heads, head_dim] to their slots of the cache."""
    block_size = keys.shape[2]
    for row in range(len(slot_mapping)):
        block, offset = slot_mapping[row] // block_size, slot_mapping[row] % block_size
        for head in range(keys.shape[1]):
            for d in range(keys.shape[3]):
                keys[block, head, offset, d] = k[row, head, d]
                values[block, head, offset, d] = v[row, head, d]
