"""`layers.ops.Ops` on a GPU: Triton kernels, and cuBLAS for the matrix products."""

from __future__ import annotations

import torch

from worker_svc.kernels.embedding import embed
from worker_svc.kernels.rms_norm import add_rms_norm, rms_norm
from worker_svc.kernels.sampling import chunk_statistics, select_tokens
from worker_svc.kernels.silu_mul import silu_and_multiply
from worker_svc.layers.ops import PackedWeight, PlainWeight

__all__ = [
    "add_rms_norm",
    "chunk_statistics",
    "embed",
    "pack",
    "rms_norm",
    "select_tokens",
    "silu_and_multiply",
]


def pack(weight: torch.Tensor) -> PackedWeight:
    return PlainWeight(weight)
