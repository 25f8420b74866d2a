"""Stores the tokens of sequences, and applies penalties and masks to logits, in numba."""

from __future__ import annotations

import numpy as np
from numba import njit, prange
from numpy.typing import NDArray

from worker_svc.kernels.cpu.compiled import kernel
from worker_svc.kernels.cpu.simd import on_tensors

Int32s = NDArray[np.int32]
Float32s = NDArray[np.float32]

IMPOSSIBLE = np.float32(-np.inf)
# For a single row, waking another thread costs more than it saves.
PARALLEL_ROWS = 2


@on_tensors
@kernel(nogil=True)
def store_tokens(
    cache: Int32s, slot_mapping: Int32s, input_ids: Int32s, last_tokens: Int32s
) -> None:
    for i in range(len(slot_mapping)):
        if slot_mapping[i] >= 0:
            token = input_ids[i]
            cache[slot_mapping[i]] = token if token >= 0 else last_tokens[-1 - token]


@on_tensors
@kernel(nogil=True, error_model="numpy")
def penalize(
    logits: Float32s,
    start: int,
    count: int,
    tokens: Int32s,
    block_size: int,
    block_table: Int32s,
    table_offsets: Int32s,
    rows: Int32s,
    context_lens: Int32s,
    prompt_lens: Int32s,
    repetition: Float32s,
    presence: Float32s,
    frequency: Float32s,
) -> None:
    # The loop is not parallel, because each thread would need an array of its own. Clearing these
    # arrays costs more than the rest of the loop.
    generated = np.zeros(count, np.int32)
    for f in range(len(rows)):
        table = block_table[table_offsets[rows[f]] :]
        history = np.empty(context_lens[rows[f]], np.int32)
        for position in range(len(history)):
            slot = table[position // block_size] * block_size + position % block_size
            history[position] = tokens[slot] - start
        for column in history[prompt_lens[f] :]:
            if 0 <= column < count:
                generated[column] += 1
        for column in history:
            if 0 <= column < count and generated[column] >= 0:
                logit, times = logits[f, column], generated[column]
                logit = logit / repetition[f] if logit > 0 else logit * repetition[f]
                if times > 0:
                    logit -= frequency[f] * np.float32(times) + presence[f]
                logits[f, column] = logit
                generated[column] = -1  # done
        for column in history:
            if 0 <= column < count:
                generated[column] = 0


@njit
def _mask_row(logits: Float32s, start: int, mask: Int32s) -> None:
    end = start + len(logits)
    for word in range(start // 32, (end + 31) // 32):
        bits, first = mask[word], 32 * word
        for token in range(max(first, start), min(first + 32, end)):
            if not (bits >> (token - first)) & 1:
                logits[token - start] = IMPOSSIBLE


@on_tensors
@kernel(parallel=True, nogil=True, error_model="numpy")
def apply_masks(logits: Float32s, start: int, count: int, masked: Int32s, masks: Int32s) -> None:
    if len(masked) < PARALLEL_ROWS:
        for m in range(len(masked)):
            _mask_row(logits[masked[m], :count], start, masks[m])
    else:
        for m in prange(len(masked)):
            _mask_row(logits[masked[m], :count], start, masks[m])
