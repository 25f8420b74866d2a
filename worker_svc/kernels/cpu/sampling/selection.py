"""Samples in two levels, first a chunk of the vocabulary and then a token in it, in C++
(`native/selection.cpp`)."""

from __future__ import annotations

from ctypes import byref

import torch

from worker_svc.kernels.cpu.library import library, team
from worker_svc.kernels.cpu.structs import (
    INT,
    POINTER,
    Step,
    float32s,
    float64s,
    int32s,
    rows_of,
    structure,
)

_ChunkStatisticsArgs = structure(
    "ChunkStatisticsArgs",
    ("logits", POINTER),
    ("row_size chunk_size chunks num_tokens", INT),
    ("maxima sums", POINTER),
)
_SelectTokensArgs = structure(
    "SelectTokensArgs",
    ("logits", POINTER),
    ("row_size chunk_size chunks num_tokens", INT),
    ("maxima sums", POINTER),
    ("all_chunks first_chunk", INT),
    ("tokens", POINTER),
)


def chunk_statistics(
    logits: torch.Tensor, chunk_size: int, num_tokens: int, temperatures: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kernels.ops.Ops`. The sum is 0 in a greedy row."""
    logits = logits.float()
    size, columns = logits.shape
    chunks = columns // chunk_size
    maxima, sums = torch.empty(size, chunks), torch.empty(size, chunks)
    arguments = _ChunkStatisticsArgs(
        *rows_of(logits), chunk_size, chunks, num_tokens, float32s(maxima), float32s(sums)
    )
    step = Step(sequences=size, temperatures=float32s(temperatures))
    library().nano_chunk_statistics(*team(), byref(arguments), byref(step))
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
    logits, maxima, sums = logits.float(), maxima.contiguous(), sums.contiguous()
    size, columns = logits.shape
    tokens = torch.empty(size, dtype=torch.int32)
    arguments = _SelectTokensArgs(
        *rows_of(logits),
        chunk_size,
        columns // chunk_size,
        num_tokens,
        float32s(maxima),
        float32s(sums),
        maxima.shape[1],
        first_chunk,
        int32s(tokens),
    )
    step = Step(sequences=size, temperatures=float32s(temperatures), uniforms=float64s(uniforms))
    library().nano_select_tokens(*team(), byref(arguments), byref(step))
    return tokens
