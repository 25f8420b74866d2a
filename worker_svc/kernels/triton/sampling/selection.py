"""Selection in two kernels; `kernels.cpu.sampling.selection` explains it.

The first kernel makes one pass over all logits in their own dtype. The second kernel reads one
chunk per sequence. A chunk's statistics have equal bits on every rank and in every batch, because
the tile that a program reduces depends only on the chunk size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from worker_svc.kernels import logits as definitions
from worker_svc.kernels.triton.launch import kernel, next_power_of_2

MIN_TEMPERATURE = tl.constexpr(definitions.MIN_TEMPERATURE)
MAX_TEMPERATURE = tl.constexpr(definitions.MAX_TEMPERATURE)

# Logits per program of the first kernel: 128 threads with four 16-byte loads of half precision
# each. A multiprocessor holds some 10 such programs with 80 KB in flight, and about 25 KB hide the
# latency of memory. One of Qwen3's chunks (512) is two loads of one warp, so that its reduction
# needs no exchange between warps.
TILE = 4096
NUM_WARPS = 4


def chunk_statistics(
    logits: torch.Tensor, chunk_size: int, num_tokens: int, temperatures: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the CPU's result; logits are bfloat16, float16 or float32, and chunk_size is a power
    of two. Rows of logits may be strided."""
    num_rows, num_chunks = len(logits), logits.shape[1] // chunk_size
    maxima = torch.empty(num_rows, num_chunks, dtype=torch.float32, device=logits.device)
    sums = torch.empty_like(maxima)
    chunks = max(TILE // chunk_size, 1)
    _chunk_statistics_kernel[(triton.cdiv(num_chunks, chunks), num_rows)](
        logits,
        logits.stride(0),
        num_tokens,
        temperatures,
        maxima,
        sums,
        NUM_CHUNKS=num_chunks,
        CHUNK_SIZE=chunk_size,
        CHUNKS=chunks,
        num_warps=NUM_WARPS,
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
    """Computes the CPU's result; maxima and sums must be contiguous."""
    num_rows, all_chunks = maxima.shape
    tokens = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    _select_tokens_kernel[(num_rows,)](
        logits,
        logits.stride(0),
        num_tokens,
        maxima,
        sums,
        first_chunk,
        temperatures,
        uniforms,
        tokens,
        NUM_CHUNKS=logits.shape[1] // chunk_size,
        ALL_CHUNKS=all_chunks,
        CHUNK_SIZE=chunk_size,
        BLOCK=next_power_of_2(all_chunks),
        num_warps=NUM_WARPS,
    )
    return tokens


@kernel(do_not_specialize=["num_tokens"])
def _chunk_statistics_kernel(
    logits: tl.tensor,
    logits_stride: tl.tensor,
    num_tokens: tl.tensor,
    temperatures: tl.tensor,
    maxima: tl.tensor,
    sums: tl.tensor,
    NUM_CHUNKS: tl.constexpr,
    CHUNK_SIZE: tl.constexpr,
    CHUNKS: tl.constexpr,
) -> None:
    row = tl.program_id(1).to(tl.int64)
    chunk = tl.program_id(0) * CHUNKS + tl.arange(0, CHUNKS)
    columns = chunk[:, None] * CHUNK_SIZE + tl.arange(0, CHUNK_SIZE)[None, :]
    # Chunks are loaded with their padding, so that loads are 16 bytes wide for any vocabulary.
    values = tl.load(logits + row * logits_stride + columns, mask=chunk[:, None] < NUM_CHUNKS)
    values = values.to(tl.float32)
    # NaN counts as impossible. Otherwise it would hide that padding is smaller than all tokens.
    values = tl.where((columns < num_tokens) & (values == values), values, float("-inf"))
    largest = tl.max(values, axis=1)
    temperature = tl.load(temperatures + row)
    weights = tl.exp((values - _finite(largest)[:, None]) * _inverse(temperature))
    total = tl.where(temperature == 0, 0.0, tl.sum(weights, axis=1))
    places = row * NUM_CHUNKS + chunk
    tl.store(maxima + places, largest, mask=chunk < NUM_CHUNKS)
    tl.store(sums + places, total, mask=chunk < NUM_CHUNKS)


@kernel(do_not_specialize=["num_tokens", "first_chunk"])
def _select_tokens_kernel(
    logits: tl.tensor,
    logits_stride: tl.tensor,
    num_tokens: tl.tensor,
    maxima: tl.tensor,
    sums: tl.tensor,
    first_chunk: tl.tensor,
    temperatures: tl.tensor,
    uniforms: tl.tensor,
    tokens: tl.tensor,
    NUM_CHUNKS: tl.constexpr,
    ALL_CHUNKS: tl.constexpr,
    CHUNK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    greedy = temperature == 0
    inverse = _inverse(temperature)
    uniform = tl.where(greedy, 0.0, tl.load(uniforms + row))

    chunks = tl.arange(0, BLOCK)
    inside = chunks < ALL_CHUNKS
    places = row * ALL_CHUNKS + chunks
    largest = tl.load(maxima + places, mask=inside, other=float("-inf"))
    masses = tl.load(sums + places, mask=inside, other=0).to(tl.float64)
    top = tl.max(largest, axis=0)
    scale = tl.exp((largest - _finite(top)) * inverse).to(tl.float64)
    is_top = (largest == top).to(tl.float64)
    chunk, fraction = _invert(tl.where(greedy, is_top, masses * scale), uniform, chunks)

    local = chunk - first_chunk
    here = (local >= 0) & (local < NUM_CHUNKS)
    in_chunk = tl.arange(0, CHUNK_SIZE)
    columns = local * CHUNK_SIZE + in_chunk
    valid = here & (columns < num_tokens)
    source = logits + row * logits_stride + columns
    values = tl.load(source, mask=valid, other=float("-inf")).to(tl.float32)
    top = tl.load(maxima + row * ALL_CHUNKS + chunk)
    weights = tl.exp((values - _finite(top)) * inverse).to(tl.float64)
    is_top = (values == top).to(tl.float64)
    token, _ = _invert(tl.where(greedy, is_top, weights), fraction, in_chunk)
    tl.store(tokens + row, tl.where(here, chunk * CHUNK_SIZE + token, -1))


@triton.jit
def _invert(
    weights: tl.tensor, uniform: tl.tensor, indices: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """weights [K] float64 >= 0, indices 0..K-1 -> index and fraction, equal to the CPU's."""
    cumulative = tl.cumsum(weights, axis=0)
    target = uniform * tl.max(cumulative, axis=0)
    possible = weights > 0
    last = tl.max(tl.where(possible, indices, 0), axis=0)
    index = tl.min(tl.where(possible & (cumulative > target), indices, last), axis=0)
    chosen = indices == index
    weight = tl.sum(tl.where(chosen, weights, 0.0), axis=0)
    before = tl.sum(tl.where(chosen, cumulative - weights, 0.0), axis=0)
    fraction = (target - before) / tl.maximum(weight, 1e-300)
    return index, tl.minimum(tl.maximum(fraction, 0.0), 1.0)


@triton.jit
def _inverse(temperature: tl.tensor) -> tl.tensor:
    temperature = tl.where(temperature == 0, 1.0, temperature)
    return 1.0 / tl.minimum(tl.maximum(temperature, MIN_TEMPERATURE), MAX_TEMPERATURE)


@triton.jit
def _finite(largest: tl.tensor) -> tl.tensor:
    return tl.where(largest == float("-inf"), 0.0, largest)
