"""Samples in two levels, first a chunk of the vocabulary and then a token in it, in numba.

Greedy sampling draws with the number 0 from weights that are 1 for the largest logit and 0
elsewhere. So it takes the path of other sampling: inverse transform sampling (Devroye, "Non-Uniform
Random Variate Generation", 1986) with a two-level search.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit, prange
from numpy.typing import NDArray

from worker_svc.kernels.cpu.compiled import kernel
from worker_svc.kernels.cpu.simd import FASTMATH, exp, largest, num_threads, take
from worker_svc.kernels.logits import MAX_TEMPERATURE, MIN_TEMPERATURE

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]

# A smaller exponent, or NaN, gives weight 0.
MIN_EXPONENT = np.float32(-87)
# With fewer logits than this, one thread is done before a second thread wakes.
PARALLEL_LOGITS = 1 << 15


def chunk_statistics(
    logits: torch.Tensor, chunk_size: int, num_tokens: int, temperatures: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kernels.ops.Ops`. The sum is 0 in a greedy row."""
    maxima = torch.empty(len(logits), logits.shape[1] // chunk_size)
    sums = torch.empty_like(maxima)
    _chunk_statistics(
        logits.float().contiguous().numpy(),
        chunk_size,
        num_tokens,
        temperatures.numpy(),
        maxima.numpy(),
        sums.numpy(),
    )
    return maxima, sums


def select_tokens(
    logits: torch.Tensor,
    chunk_size: int,
    num_tokens: int,
    maxima: torch.Tensor,
    sums: torch.Tensor,
    first_chunk: int,
    temperatures: torch.Tensor,
    uniforms: torch.Tensor,
) -> torch.Tensor:
    """See `kernels.ops.Ops`. Where the temperature is 0, a token is the first of the largest
    logits. Elsewhere it is the inverse of the cumulative distribution at the uniform number. That
    is computed in float64, so that rounding moves next to no mass between tokens."""
    tokens = torch.empty(len(logits), dtype=torch.int32)
    _select_tokens(
        logits.float().contiguous().numpy(),
        chunk_size,
        num_tokens,
        maxima.contiguous().numpy(),
        sums.contiguous().numpy(),
        first_chunk,
        temperatures.numpy(),
        uniforms.numpy(),
        tokens.numpy(),
    )
    return tokens


@njit(inline="always")
def _inverse(temperature: Any) -> Any:
    """The factor by which to multiply logits, 1 if the temperature is 0."""
    bounded = min(max(temperature, np.float32(MIN_TEMPERATURE)), np.float32(MAX_TEMPERATURE))
    return np.float32(1) / (bounded if temperature != 0 else np.float32(1))


@njit(inline="always")
def _exp_or_zero(exponent: Any) -> Any:
    return exp(exponent) if exponent > MIN_EXPONENT else np.float32(0)


@njit(nogil=True, error_model="numpy", fastmath=FASTMATH)
def _take_chunks(counter: Any, rows: Any) -> None:
    """Takes chunks of any row from `counter` until none is left."""
    logits, chunk_size, num_tokens, temperatures, maxima, sums = rows
    chunks = maxima.shape[1]
    while True:
        unit = take(counter)
        if unit >= maxima.size:
            break
        row, chunk = unit // chunks, unit % chunks
        start = chunk * chunk_size
        end = min(start + chunk_size, num_tokens)
        top = largest(logits, row, start, end)
        maxima[row, chunk] = top
        total = np.float32(0)
        if temperatures[row] != 0 and top > -np.inf:
            # A loop over logits[row, i] from start on would be slow. Numba would have to assume
            # that i may be negative, and LLVM would gather.
            numbers = logits[row, start:end]
            inverse = _inverse(temperatures[row])
            for i in range(len(numbers)):
                total += _exp_or_zero((numbers[i] - top) * inverse)
        sums[row, chunk] = total


@kernel(parallel=True, nogil=True, error_model="numpy", fastmath=FASTMATH)
def _chunk_statistics(
    logits: Floats,
    chunk_size: int,
    num_tokens: int,
    temperatures: Floats,
    maxima: Floats,
    sums: Floats,
) -> None:
    counter = np.zeros(1, np.int64)
    rows = (logits, chunk_size, num_tokens, temperatures, maxima, sums)
    if maxima.size * chunk_size < PARALLEL_LOGITS:
        _take_chunks(counter, rows)
    else:
        for _thread in prange(num_threads()):
            _take_chunks(counter, rows)


@njit(inline="always")
def _invert(weights: Doubles, uniform: float) -> tuple[int, float]:
    """The first index at which the cumulative sum of weights exceeds `uniform` times the total, and
    the target's position within that index's weight, in [0, 1].

    The index never has weight 0, unless all weights are 0. Then it is 0. This also holds if
    rounding puts the target past the end, or makes a sum grow that should not grow.
    """
    total = 0.0
    for weight in weights:
        total += weight
    target = uniform * total
    chosen, before, cumulative = 0, 0.0, 0.0
    for i in range(len(weights)):
        if weights[i] > 0:
            chosen, before = i, cumulative
            cumulative += weights[i]
            if cumulative > target:
                break
    fraction = (target - before) / max(weights[chosen], 1e-300)
    return chosen, min(max(fraction, 0.0), 1.0)


# This kernel is not parallel, because it reads only two numbers per chunk and one chunk per row.
@kernel(nogil=True, error_model="numpy")
def _select_tokens(
    logits: Floats,
    chunk_size: int,
    num_tokens: int,
    maxima: Floats,
    sums: Floats,
    first_chunk: int,
    temperatures: Floats,
    uniforms: Doubles,
    tokens: NDArray[np.int32],
) -> None:
    chunks = maxima.shape[1]
    of_chunks = np.empty(chunks)
    of_tokens = np.empty(chunk_size)
    for row in range(len(tokens)):
        greedy, inverse = temperatures[row] == 0, _inverse(temperatures[row])
        uniform = 0.0 if greedy else uniforms[row]
        top = largest(maxima, row, 0, chunks)
        for i in range(chunks):
            if greedy:
                of_chunks[i] = maxima[row, i] == top
            elif maxima[row, i] > -np.inf:
                scale = _exp_or_zero((maxima[row, i] - top) * inverse)
                of_chunks[i] = np.float64(sums[row, i]) * np.float64(scale)
            else:
                of_chunks[i] = 0
        chunk, fraction = _invert(of_chunks, uniform)
        start = (chunk - first_chunk) * chunk_size
        if start < 0 or start >= logits.shape[1]:
            tokens[row] = -1
            continue
        top = maxima[row, chunk]
        for i in range(chunk_size):
            if start + i >= num_tokens:
                of_tokens[i] = 0
            elif greedy:
                of_tokens[i] = logits[row, start + i] == top
            else:
                of_tokens[i] = _exp_or_zero((logits[row, start + i] - top) * inverse)
        token, _ = _invert(of_tokens, fraction)
        tokens[row] = chunk * chunk_size + token
