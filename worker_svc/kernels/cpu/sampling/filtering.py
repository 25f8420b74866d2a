"""The kernels of the searches of `sampling.filters`, in numba."""

from __future__ import annotations

import numpy as np
from numba import njit, prange
from numpy.typing import NDArray

from worker_svc.kernels.cpu.compiled import kernel
from worker_svc.kernels.cpu.sampling.tokens import PARALLEL_ROWS
from worker_svc.kernels.cpu.simd import exp, on_tensors
from worker_svc.kernels.logits import BIN_BITS, LARGEST_WEIGHT, SIGN

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Float32s = NDArray[np.float32]

MIN_EXPONENT = np.float32(-29)  # below it, every weight is 0
MIN_KEY = 0x00800000  # the key of the lowest finite logit
MAX_KEY = 0xFF800000  # the key of inf
PIECE = 64  # logits of a row that are checked at once


# No fastmath below: a logit must have equal weights in a loop's vectors and in its remainder.


@njit
def _key(logit: np.float32) -> int:
    """The key that `keys_of` gives."""
    bits = int(np.float32(logit).view(np.int32))
    if bits >= 0 or bits == -SIGN:
        return max(bits, 0) + SIGN
    return -1 - bits


@njit
def _logit(key: int) -> np.float32:
    """The logit that `logits_of` gives, after clamping the key to finite logits and infinity."""
    key = min(max(key, MIN_KEY), MAX_KEY)
    return np.int32(key - SIGN if key >= SIGN else -1 - key).view(np.float32)


@njit(inline="always")
def _any_between(piece: Float32s, min_logit: np.float32, max_logit: np.float32) -> bool:
    """Whether a piece has a logit to count. Most pieces have none. The loop is vectorized; with an
    iterator over the piece, LLVM would gather."""
    found = np.int32(0)
    for i in range(len(piece)):
        found |= np.int32(min_logit <= piece[i]) & np.int32(piece[i] <= max_logit)
    return bool(found)


@njit
def _count_row(row: Float32s, low: int, shift: int, bins: Int64s) -> None:
    min_logit, max_logit = _logit(low), _logit(low + (len(bins) << shift) - 1)
    for start in range(0, len(row), PIECE):
        piece = row[start : start + PIECE]
        if _any_between(piece, min_logit, max_logit):
            for logit in piece:
                if min_logit <= logit <= max_logit:
                    bins[(_key(logit) - low) >> shift] += 1


@on_tensors
@kernel(parallel=True, nogil=True)
def count_by_key(
    logits: Float32s, rows: Int32s, num_tokens: int, low: Int64s, shifts: Int64s, bins: Int64s
) -> None:
    if len(rows) < PARALLEL_ROWS:
        for g in range(len(rows)):
            if shifts[g] >= 0:
                _count_row(logits[rows[g], :num_tokens], low[g], shifts[g], bins[g])
    else:
        for g in prange(len(rows)):
            if shifts[g] >= 0:
                _count_row(logits[rows[g], :num_tokens], low[g], shifts[g], bins[g])


@njit
def _weigh_row(
    row: Float32s, largest_logit: np.float32, scale: np.float32, low: int, shift: int, bins: Int64s
) -> None:
    weights = np.empty(PIECE, np.float32)
    min_logit, max_logit = _logit(low), _logit(low + (len(bins) << shift) - 1)
    min_logit = max(min_logit, largest_logit + MIN_EXPONENT / scale)
    for start in range(0, len(row), PIECE):
        piece = row[start : start + PIECE]
        if _any_between(piece, min_logit, max_logit):
            for i in range(len(piece)):
                weights[i] = exp((piece[i] - largest_logit) * scale) * np.float32(LARGEST_WEIGHT)
            for i, logit in enumerate(piece):
                if min_logit <= logit <= max_logit:
                    bins[(_key(logit) - low) >> shift] += np.int64(weights[i])


@on_tensors
@kernel(parallel=True, nogil=True)
def weigh_by_key(
    logits: Float32s,
    rows: Int32s,
    num_tokens: int,
    maxima: Float32s,
    scales: Float32s,
    low: Int64s,
    shifts: Int64s,
    bins: Int64s,
) -> None:
    if len(rows) < PARALLEL_ROWS:
        for g in range(len(rows)):
            if shifts[g] >= 0:
                row = logits[rows[g], :num_tokens]
                _weigh_row(row, maxima[g], scales[g], low[g], shifts[g], bins[g])
    else:
        for g in prange(len(rows)):
            if shifts[g] >= 0:
                row = logits[rows[g], :num_tokens]
                _weigh_row(row, maxima[g], scales[g], low[g], shifts[g], bins[g])


@on_tensors
@kernel(nogil=True)
def pick_bins(bins: Int64s, targets: Int64s, low: Int64s, shifts: Int64s, above: Int64s) -> None:
    for g in range(len(bins)):
        shift = shifts[g]
        if shift < 0:
            continue
        number = bins.shape[1] - 1
        while number > 0 and above[g] + bins[g, number] < targets[g]:
            above[g] += bins[g, number]
            number -= 1
        low[g] += number << shift
        settled = shift == 0 or above[g] + bins[g, number] == targets[g]
        shifts[g] = -1 if settled else max(shift - BIN_BITS, 0)
