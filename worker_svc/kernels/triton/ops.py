"""`kernels.ops.Ops` on a GPU: Triton kernels, and cuBLAS for most products of plain weights."""

from __future__ import annotations

import torch

from worker_svc.kernels.ops import PackedWeight, PlainWeight
from worker_svc.kernels.triton import batch_invariance
from worker_svc.kernels.triton.embedding import embed
from worker_svc.kernels.triton.gated_activation import activate_and_multiply
from worker_svc.kernels.triton.quantized.experts import mix_experts, pack_experts
from worker_svc.kernels.triton.quantized.weights import (
    InvariantWeight,
    pack_quantized,
    unpack_quantized,
)
from worker_svc.kernels.triton.rms_norm import rms_norm, scale_parts, sum_rows, sum_squares
from worker_svc.kernels.triton.row_matmul import RowWeight
from worker_svc.kernels.triton.sampling.filtering import pick_bins, weigh_by_key
from worker_svc.kernels.triton.sampling.selection import chunk_statistics, select_tokens
from worker_svc.kernels.triton.sampling.token_history import penalize, store_tokens
from worker_svc.kernels.triton.sampling.token_masks import apply_masks
from worker_svc.kernels.triton.thin_matmul import ThinWeight
from worker_svc.weights.quantization.formats import Format, QuantizedWeight
from worker_svc.weights.quantization.quantize import quantize

layout = "triton"


def new_rows(input_ids: torch.Tensor, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(len(input_ids), columns, dtype=dtype, device=input_ids.device)


def last_rows(x: torch.Tensor, query_starts: torch.Tensor) -> torch.Tensor:
    if len(query_starts) - 1 == len(x):
        return x
    return x[query_starts[1:] - 1]


def table_format(format: Format) -> Format:
    return "int8"


def pack(weight: torch.Tensor | QuantizedWeight, dtype: torch.dtype) -> PackedWeight:
    if isinstance(weight, QuantizedWeight):
        return pack_quantized(weight, dtype)
    return _pack_plain(weight)


def unpack(state: dict[str, torch.Tensor]) -> PackedWeight:
    return _pack_plain(**state) if "weight" in state else unpack_quantized(state)


def _pack_plain(weight: torch.Tensor) -> PackedWeight:
    if batch_invariance.is_on():
        return InvariantWeight(weight)
    kinds = [each for each in (ThinWeight, RowWeight) if each.suits(weight)]
    return [*kinds, PlainWeight][0](weight)
